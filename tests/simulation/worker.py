"""One simulated worker: the real membership code, and around it what recovery.py and the loop do, in short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_train.errors import FormationFailed, JobFinished, LeftOut
from elastic_train.liveness import Watcher, ping_interval
from elastic_train.membership import Membership, Surroundings
from elastic_train.protocol.peers import PeerJob
from elastic_train.rules import Activity
from elastic_train.world import Member, World
from tests.simulation.finder import SimFinder
from tests.simulation.group import Group, GroupBroken
from tests.simulation.links import SimLinks
from tests.simulation.process import Process, SimStore

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

PROBE_SECONDS = 0.5
MAX_NODES = 16


@dataclass(frozen=True)
class Commit:
    """A step that was committed in a world, and the one that it was computed from."""

    step: int
    world: str
    generation: int
    parent: Commit | None


@dataclass(frozen=True)
class _Limits:
    peer_timeout: float
    formation_timeout: float = 60.0
    wait_timeout: float = 1e9


class Worker:
    """A process that trains, or waits to."""

    def __init__(self, simulation: Simulation, host: str, local_rank: int, port: int) -> None:
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
            pid=1 if plan.has_equal_names else port,
            agent_pid=1,
            address=process.address,
            directory_id="run",
            backend="gloo",
            max_generation=None,
            store=process.address,
            uid=self.uid,
            node_id=host,
        )
        self.commit: Commit | None = None
        self.kept: Commit | None = None
        """of the member that this process was before"""
        self.world: World | None = None
        self.group: Group | None = None
        self.activity = "starts"
        self.committed_at = -1e9
        self.error: str | None = None
        self.wants_to_leave = False
        self.waits_for_votes: str | None = None
        """since its last agreement began: why it may not go on"""
        self._interval = 2 * ping_interval(peer_timeout)  # fewer events
        links = SimLinks(process, self._interval)
        self.watcher = Watcher(links, peer_timeout, self._cut, self._tend, process.clock, give_up=self._give_up)
        self.job = simulation.make_job(self)
        self.membership = Membership(
            self.job,
            self.watcher,
            _Limits(peer_timeout),
            uid=self.uid,
            address=process.address,
            store_address=process.address,
            local_world_size=simulation.plan.workers_of(host),
            max_nodes=MAX_NODES,
            max_world_size=plan.max_world_size,
            check=lambda: None,
            say=lambda _text: None,
            answering=self._answering,
            sockets=None,  # type: ignore[arg-type]
            group_store=None,  # type: ignore[arg-type]
            surroundings=Surroundings(process.clock, process.sleep, machines.draw_uid),
        )
        self.membership.may_not_go_on = self._note_votes
        process.start("training", self._run)
        process.start("watcher", self._watch)
        process.training_task, process.watcher_task = process.tasks  # type: ignore[attr-defined]

    @property
    def last_step(self) -> int:
        return self.commit.step if self.commit else 0

    def __repr__(self) -> str:
        return f"{self.uid}@{self.process.host}"

    # --- what it is given ---------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        if self.group is not None:
            self.group.shut()

    def _tend(self, world: World | None, is_spokesman: bool) -> None:
        self.membership.tend(world, is_spokesman)

    def _note_votes(self, why: str) -> None:
        self.waits_for_votes = why

    def _give_up(self, why: str) -> None:
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

    # --- its threads --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while self.process.is_alive:
                self.watcher.turn()
                self.watcher.links.turn(self._interval)
        except Exception as error:
            self.simulation.fail_of(self, error)
            self._end("error", repr(error))

    def _run(self) -> None:
        try:
            self._through_worlds()
        except JobFinished:
            self._end("finished", "")
        except LeftOut as error:
            self._end("left_out", str(error))
            self.simulation.rejoin(self)
        except Exception as error:
            self.simulation.fail_of(self, error)
            self._end("error", repr(error))

    def _end(self, ending: str, why: str) -> None:
        self.error = why
        self.simulation.note(f"{self} ends: {ending} {why}")
        self.simulation.end(self, ending)

    def _through_worlds(self) -> None:
        membership, simulation = self.membership, self.simulation
        self.activity = "queues"
        if "admitted" not in self.process.memory.values:
            membership.find()
            membership.agreed_once("job_token", self.uid)
        world = membership.first_world(self.member)
        simulation.note_world(self, world, None)
        while True:
            self.world, has_formed = world, False
            try:
                if world.is_spare:
                    self.activity = "stands by"
                    self.watcher.expect(world)
                    self.watcher.enter(world)
                    if membership.stand_by(world) is not None:
                        self._end("finished", "as a spare")
                        return
                    has_formed = True
                else:
                    has_formed = self._train(world)
                    if self.activity == "finished":
                        self._end("finished", "")
                        return
                    if self.activity == "left":
                        self._end("left", "")
                        return
            except (GroupBroken, FormationFailed) as error:
                has_formed = self.activity == "trains"
                simulation.note(f"{self} lost generation {world.generation}: {error}")
            if self.group is not None:
                self.group.close()
            self.activity = "agrees"
            self.waits_for_votes = None
            before = world
            world, _ = membership.next_world(world, has_formed=has_formed)
            simulation.note_world(self, world, before)

    def _train(self, world: World) -> bool:
        membership, watcher, process, simulation = self.membership, self.watcher, self.process, self.simulation
        self.group, self.activity = None, "forms"
        watcher.expect(world)
        membership.wait_for_workers(world)
        self.group = group = Group(process, world)
        group.form()
        self.activity = "trains"
        watcher.enter(world)
        self._synchronise(world, group)
        while self.commit is None or self.commit.step < simulation.plan.max_steps:
            started = process.clock()
            watcher.do(Activity.COMPUTE)
            process.sleep(simulation.step_seconds())
            if self.wants_to_leave and self.activity != "leaves":
                self.activity = "leaves"
            vote = self.activity == "leaves" or membership.is_join_due
            membership.note_reduction()
            watcher.do(Activity.REDUCE)
            votes = group.exchange(vote)
            watcher.do(Activity.COMPUTE)
            self.commit = simulation.note_commit(self, world, self.commit)
            watcher.slowest_step = max(0.99 * watcher.slowest_step, process.clock() - started)
            if self.activity == "leaves":
                membership.leave(world, "stopped")
                self.activity = "left"
                return True
            if any(votes):
                watcher.do(Activity.FORM)
                return True
        if world.rank == 0:
            membership.announce_finished(world, "finished")
        membership.finish(world)
        self.activity = "finished"
        return True

    def _synchronise(self, world: World, group: Group) -> None:
        found: list[Any] = group.exchange(self.commit)
        held = [commit for commit in found if commit is not None]
        newest = max(held, key=lambda commit: (commit.generation, commit.step), default=None)
        if newest is None:
            self.simulation.note_start(self, world)
        self.commit = newest


def make_peer_job(worker: Worker) -> PeerJob:
    process, simulation = worker.process, worker.simulation
    machines = simulation.machines
    reach: Callable[[Any], SimStore] = lambda address: SimStore.connect(process, address)  # noqa: E731
    return PeerJob(
        SimStore(process, process),
        process.address,
        reach,
        SimFinder(process, simulation.posts),
        simulation.plan.size(),
        uid=worker.uid,
        run_id="run",
        peer_timeout=simulation.plan.peer_timeout,
        max_world_size=simulation.plan.max_world_size,
        refused=worker.refused,
        draw_uid=machines.draw_uid,
        clock=process.clock,
    )
