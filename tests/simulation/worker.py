"""One simulated worker: the real membership and the real ring, around steps that are integers."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from elastic_train.elastic.barriers import Surroundings, Waits
from elastic_train.elastic.membership import Membership
from elastic_train.elastic.quarantined import admissible
from elastic_train.errors import JobFinished, LeftOut, SecondJob, Stopped, StoreUnreachable, Superseded
from elastic_train.protocol.heartbeat import Pace
from elastic_train.protocol.liveness import Watcher, ping_interval
from elastic_train.protocol.other_sides import OtherSides
from elastic_train.protocol.probes import PROBE_SECONDS, Probe
from elastic_train.world import Member, World
from tests.simulation.group import Group
from tests.simulation.links import SimLinks
from tests.simulation.process import Address, Process, SimStore
from tests.simulation.ring_parts import Commit, State, make_ring

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

AHEAD_SECONDS = 10.0
POLL_SECONDS = 0.02
"""longer ones make fewer events"""


class Worker:
    """A process that trains, or waits to; or what it is after it was left out: another member, with all its connections
    and addresses new."""

    def __init__(
        self, simulation: Simulation, host: str, local_rank: int, port: int, was: Worker | None = None
    ) -> None:
        machines = simulation.machines
        self.simulation = simulation
        self.uid = machines.draw_uid()
        self.process = process = Process(machines, host, port, self.uid)
        process.worker, process.groups, process.early_contributions = self, {}, []  # type: ignore[attr-defined]
        process.early_closings = set()  # type: ignore[attr-defined]
        plan, peer_timeout = simulation.plan, simulation.plan.peer_timeout
        self.member = Member(
            host="same" if plan.has_equal_names else host,
            local_rank=local_rank,
            pid=was.member.pid if was is not None else 1 if plan.has_equal_names else port,
            agent_pid=1,
            address=process.address,
            directory_id="run",
            backend="gloo",
            max_generation=None,
            store=process.address,
            min_nodes=plan.trains_with,
            uid=self.uid,
            node_id=host,
            forms_ahead=True,
        )
        if was is not None:
            before = () if was.membership.has_settled else was.member.was
            self.member = replace(self.member, was=before if was.left_by is None else (*before, (was.uid, was.left_by)))
        self.left_by: str | None = None
        """as `LeftOut.by`, once it was left out"""
        self.state = State(plan.max_steps, lambda: machines.kernel.now)
        self.num_commits = 0
        self.is_back, self.num_fruitless = was is not None, 0 if was is None else was.num_fruitless_after
        self.kept = None if was is None else was.commit or was.kept
        """of the member that this process was before"""
        self.gave_up_at = 0.0
        """when it ceased to train on from that"""
        if was is not None:
            self.gave_up_at = was.gave_up_at if was.commit is None else was.process.ended_at
        self.met: tuple[Address, ...] = ()
        """of the side for which it stops"""
        self.known: tuple[Address, ...] = ()
        """stores of the members that it was in a world with"""
        if was is not None and was.world is not None:
            self.known = (*was.met, *(one.address for one in was.world.members if one is not was.world.me))
        self.group: Group | None = None
        self.began_at = machines.kernel.now
        self.formed: list[Group] = []
        """ahead of a world that this worker is not in yet"""
        self.activity = "queues"
        self.committed_at = -1e9
        self.error: str | None = None
        self.wants_to_leave = False
        self.waits_for_votes: str | None = None
        """since its last agreement began: why it may not go on"""
        self._interval = 2 * ping_interval(peer_timeout)  # fewer events
        links = SimLinks(process, self._interval, 4 * ping_interval(peer_timeout) + 0.5)
        self.watcher = Watcher(
            links,
            peer_timeout,
            self._cut,
            self._tend,
            process.clock,
            give_up=self._give_up,
            topology=plan.topology,
            pace=Pace(peer_timeout, plan.stall_timeout),
        )
        self.finder = simulation.form.finder(self)
        self.job = simulation.form.job(self)
        self.membership = Membership(
            self.job,
            self.watcher,
            Waits(60.0, peer_timeout, plan.wait_timeout),
            uid=self.uid,
            address=process.address,
            store_address=process.address,
            local_world_size=simulation.plan.workers_of(host),
            max_nodes=plan.max_nodes,
            check=self._check,
            log=lambda text: simulation.note(f"{self} is told: {text}"),
            answering=self._answering,
            sockets=None,  # type: ignore[arg-type]
            group_store=None,  # type: ignore[arg-type]
            form=self._form_ahead,  # type: ignore[arg-type]
            other_sides=self._other_sides(),
            surroundings=Surroundings(
                process.clock, process.sleep, machines.draw_uid, process.start, poll_seconds=POLL_SECONDS
            ),
        )
        self.membership.survivors.may_not_go_on = self._note_votes
        self.membership.side.progress = lambda: (
            (self.state.branches, self.state.step) if self.commit is not None else None
        )
        if plan.quarantine:
            joins, state = self.membership.joins, self.state
            joins.admissible = partial(
                admissible,
                lambda: state if self.commit is not None else None,  # type: ignore[arg-type,return-value]
                lambda why: simulation.note(f"{self} warns: {why}"),
                joins.news.send_once,
            )
        self.stop = SimpleNamespace(
            votes=lambda: 2 * (int(self.wants_to_leave),), check=self._check, is_requested=False
        )
        """as StopSignal"""
        self.ring = make_ring(self)
        process.start("training", self._run)
        process.start("watcher", self._watch)
        process.training_task, process.watcher_task = process.tasks[-2:]  # type: ignore[attr-defined]

    @property
    def num_fruitless_after(self) -> int:
        """As connect.Return's, if it is left out now."""
        return 0 if not self.is_back or self.membership.has_settled else self.num_fruitless + 1

    @property
    def world(self) -> World | None:
        """The one it is in, or the one before while the next is agreed on."""
        return self.ring.world

    @property
    def commit(self) -> Commit | None:
        """The newest one that it holds."""
        return self.state.commit

    @property
    def last_step(self) -> int:
        return self.state.step

    def __repr__(self) -> str:
        return f"{self.uid}@{self.process.host}"

    def _other_sides(self) -> OtherSides:
        process = self.process
        return OtherSides(
            SimStore(process, process),
            lambda address: SimStore.connect(process, address),
            self.finder,
            uid=self.uid,
            run_id="run",
            may_branch=self.simulation.plan.goes_on,
            in_background=lambda task: process.start("other-sides", task),
        )

    # --- what it is given ---------------------------------------------------------------------------------------------

    def _form_ahead(self, world: World) -> Group:
        """Raises: FormationFailed."""
        assert self.member.forms_ahead, "it is in no plan"
        group = Group(self.process, world, is_ahead=True)
        self.formed.append(group)
        group.form(AHEAD_SECONDS)
        return group

    def _cut(self) -> None:
        if self.group is not None:
            self.group.shut()

    def _tend(self, world: World | None) -> None:
        self.membership.tend(world)

    def _check(self) -> None:
        if self.wants_to_leave:
            raise Stopped(signal.SIGTERM)

    def _note_votes(self, why: str | None) -> None:
        self.waits_for_votes = why or self.waits_for_votes

    def _give_up(self, why: str) -> None:
        if not self.process.training_task.is_stuck:  # type: ignore[attr-defined]
            self.simulation.fail(f"ends with an error: {self} gives its training thread up: {why}")
        self._end("error", why)

    def probe(self, members: Sequence[Member]) -> list[str]:
        """`accepted`, `refused` or `silent`, for each."""
        process = self.process
        process.sleep(0.004)
        found = [self._probe_one(member) for member in members]
        if "silent" in found:
            process.sleep(PROBE_SECONDS)
        return found

    def _probe_one(self, member: Member) -> str:
        process, network = self.process, self.process.network
        target = process.machines.at[member.address]
        if not (network.is_open(process.host, target.host) and network.is_open(target.host, process.host)):
            return "silent"
        return "accepted" if target.is_alive else "refused"

    def _answering(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        found = self.probe(members)
        return tuple(member for member, one in zip(members, found, strict=True) if one == "accepted")

    def refused(self, members: Sequence[Member]) -> list[Member]:
        found = self.probe(members)
        return [member for member, one in zip(members, found, strict=True) if one == "refused"]

    def probe_stores(self, addresses: Sequence[Address]) -> list[Probe]:
        """What a connection to the store at each address tells."""
        found = [self._probe_store(address) for address in addresses]
        self.process.sleep(PROBE_SECONDS if Probe.SILENT in found else 0.002)
        return found

    def _probe_store(self, address: Address) -> Probe:
        process, network = self.process, self.process.network
        target = process.machines.at[address]
        if not (network.is_open(process.host, target.host) and network.is_open(target.host, process.host)):
            return Probe.SILENT
        return Probe.ACCEPTED if target.newest.is_alive else Probe.REFUSED

    # --- its threads --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while self.process.is_alive:
                self.watcher.turn()
                self.watcher.links.turn(self._interval)
        except LeftOut as error:  # as WatcherThread has it
            self.watcher.thread._crash = error
        except Exception as error:
            self.simulation.fail_of(self, error)
            self._end("error", repr(error))

    def _run(self) -> None:
        try:
            self.ring.run()
            self._end(self.activity, "")
        except JobFinished:
            self._end("finished", "")
        except Stopped:
            self._end("left", "")
        except SecondJob as error:
            if not (self.simulation.plan.begins_twice or self.simulation.is_second_excused):
                self.simulation.fail(f"ends with an error: {self} {error}")
            self._end("second job", str(error))
        except LeftOut as error:
            self.left_by = error.by
            if isinstance(error, Superseded):
                self.met = (error.winner.store,)
            with suppress(StoreUnreachable):
                self.job.close()
            self._end("left_out", str(error))
            self.simulation.come_back(self)
        except Exception as error:
            self.simulation.fail_of(self, error)
            self._end("error", repr(error))

    def _end(self, ending: str, why: str) -> None:
        self.error = why
        self.simulation.note(f"{self} ends: {ending} {why}")
        self.simulation.end(self, ending)
