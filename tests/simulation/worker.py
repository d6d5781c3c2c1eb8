"""One simulated worker: the real membership code, and around it what recovery.py and the loop do, in short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_train.branches import Branches, id_of
from elastic_train.elastic.membership import Membership, Surroundings
from elastic_train.errors import FormationFailed, JobFinished, LeftOut, Superseded
from elastic_train.protocol.encounters import Encounters
from elastic_train.protocol.liveness import Watcher, ping_interval
from elastic_train.protocol.pace import Pace
from elastic_train.protocol.peers import PeerJob
from elastic_train.rules import NOW, Activity
from elastic_train.world import Member, World
from tests.simulation.finder import SimFinder
from tests.simulation.group import Group, GroupBroken
from tests.simulation.links import SimLinks
from tests.simulation.process import Address, Process, SimStore

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

PROBE_SECONDS = 0.5
AHEAD_SECONDS = 10.0
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
            uid=self.uid,
            node_id=host,
        )
        self.commit: Commit | None = None
        self.num_commits = 0
        self.num_fruitless = 0 if was is None else was.num_fruitless_after
        self.kept = None if was is None else was.commit or was.kept
        """of the member that this process was before"""
        self.met: tuple[Address, ...] = ()
        """of the side for which it stops"""
        self.known: tuple[Address, ...] = ()
        """stores of the members that it was in a world with"""
        if was is not None and was.world is not None:
            self.known = (*was.met, *(one.address for one in was.world.members if one is not was.world.me))
        self.world: World | None = None
        self.group: Group | None = None
        self.began_at = machines.kernel.now
        self.formed: list[Group] = []
        """ahead of a world that this worker is not in yet"""
        self.is_by_vote = self.is_planned = False
        self.activity = "starts"
        self.committed_at = -1e9
        self.error: str | None = None
        self.wants_to_leave = False
        self.waits_for_votes: str | None = None
        """since its last agreement began: why it may not go on"""
        self._interval = 2 * ping_interval(peer_timeout)  # fewer events
        links = SimLinks(process, self._interval)
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
            form=self._form_ahead,  # type: ignore[arg-type]
            encounters=self._encounters() if plan.goes_on else None,
            surroundings=Surroundings(process.clock, process.sleep, machines.draw_uid, process.start),
        )
        self.membership.may_not_go_on = self._note_votes
        self.membership.progress = lambda: (self.branches, self.commit.step) if self.commit is not None else None
        self.branches: Branches = ()
        process.start("training", self._run)
        process.start("watcher", self._watch)
        process.training_task, process.watcher_task = process.tasks  # type: ignore[attr-defined]

    @property
    def num_fruitless_after(self) -> int:
        """As connect.Return's, if it is left out now."""
        return 0 if self.kept is None or self.membership.has_settled else self.num_fruitless + 1

    @property
    def last_step(self) -> int:
        return self.commit.step if self.commit else 0

    def __repr__(self) -> str:
        return f"{self.uid}@{self.process.host}"

    def _encounters(self) -> Encounters:
        process, posts = self.process, self.simulation.posts
        return Encounters(
            SimStore(process, process),
            lambda address: SimStore.connect(process, address),
            SimFinder(process, posts, self.known),
            uid=self.uid,
            run_id="run",
            in_background=lambda task: process.start("encounters", task),
        )

    # --- what it is given ---------------------------------------------------------------------------------------------

    def _form_ahead(self, world: World) -> Group:
        """Raises: FormationFailed."""
        group = Group(self.process, world, is_ahead=True)
        self.formed.append(group)
        group.form(AHEAD_SECONDS)
        return group

    def _cut(self) -> None:
        if self.group is not None:
            self.group.shut()

    def _tend(self, world: World | None, is_spokesman: bool) -> None:
        self.membership.tend(world, is_spokesman)

    def _note_votes(self, why: str) -> None:
        self.waits_for_votes = why

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
            if isinstance(error, Superseded):
                self.met = (error.winner.store,)
            self._end("left_out", str(error))
            self.simulation.come_back(self)
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
            self.is_by_vote = self.is_planned = False
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
            world, _ = membership.next_world(
                world, has_formed=has_formed, is_by_vote=self.is_by_vote, is_planned=self.is_planned
            )
            simulation.note_world(self, world, before)

    def _train(self, world: World) -> bool:
        membership, watcher, process, simulation = self.membership, self.watcher, self.process, self.simulation
        self.group, self.activity = None, "forms"
        watcher.expect(world)
        formed: Any = membership.take_formed(world)
        for unused in self.formed:
            if unused is not formed:
                unused.close()
        self.formed = []
        if formed is not None:
            self.group = group = formed
            simulation.num_prepared += 1
            state = self._take_over(world, group)
            self.activity = "trains"
        else:
            if world.rank == 0:
                membership.job.show_place(world)
            membership.wait_for_workers(world)
            self.group = group = Group(process, world)
            group.form()
            self.activity = "trains"
            watcher.enter(world)
            state = self.commit = self._synchronise(world, group)
            branch = membership.branch
            if branch is not None and branch.id != id_of(self.branches):
                self.branches = (*self.branches, (branch.id, self.last_step))
        while self.commit is None or self.commit.step < simulation.plan.max_steps:
            started = process.clock()
            watcher.do(Activity.COMPUTE)
            step = 0 if state is None else state.step
            is_first = not self.num_commits
            process.sleep(simulation.plan.work.seconds(simulation.machines.random, world.rank, step, is_first=is_first))
            if self.wants_to_leave and self.activity != "leaves":
                self.activity = "leaves"
            vote = (self.activity == "leaves", membership.join_vote())
            membership.note_reduction()
            watcher.do(Activity.REDUCE)
            votes: list[tuple[bool, int]] = group.exchange(vote)
            watcher.do(Activity.COMPUTE)
            state = self.commit = simulation.note_commit(self, world, state)
            self.num_commits += 1
            watcher.pace.note_step(process.clock() - started)
            joining = sum(vote for _, vote in votes)
            membership.follow_join_vote(world, joining)
            if joining == NOW:
                self.is_by_vote = self.is_planned = True
                watcher.do(Activity.FORM)
                return True
            if self.activity == "leaves":
                membership.leave(world, "stopped")
                self.activity = "left"
                return True
            if any(leaves for leaves, _ in votes):
                self.is_by_vote = True
                watcher.do(Activity.FORM)
                return True
        if world.rank == 0:
            membership.announce_finished(world, "finished")
        membership.finish(world)
        self.activity = "finished"
        return True

    def _take_over(self, world: World, group: Group) -> Commit:
        """In a world that was formed ahead: what all who trained have, and newcomers get with their first step."""
        membership = self.membership
        membership.wait_for_left_out(world)
        self.watcher.enter(world)
        if self.commit is None:
            membership.is_ready_for(world)
        try:
            found: list[tuple[Commit | None, Branches]] = group.exchange((self.commit, self.branches))
        except GroupBroken:
            if membership.job.is_over():
                raise JobFinished("the others have reached the end") from None
            raise
        if self.simulation.plan.directories:
            self.simulation.note(f"{self} was told who sees the directory in generation {world.generation}")
        held = {(commit, branches) for commit, branches in found if commit is not None}
        assert len(held) == 1, f"those who trained differ: {found}"
        commit, self.branches = held.pop()
        assert commit is not None, "held by one who trained"
        return commit

    def _synchronise(self, world: World, group: Group) -> Commit | None:
        if self.simulation.plan.directories:
            told = group.exchange(self.membership.job.sees_place(world))
            self.membership.job.note_place(world, is_shared=all(told))
            self.simulation.note(f"{self} knows who sees the directory in generation {world.generation}: {told}")
        found: list[Any] = group.exchange((self.commit, self.branches))
        held = [(commit, branches) for commit, branches in found if commit is not None]
        if not held:
            self.simulation.note_start(self, world)
            return None
        newest, self.branches = max(held, key=lambda one: (one[0].generation, one[0].step))
        return newest  # type: ignore[no-any-return]


def make_peer_job(worker: Worker) -> PeerJob:
    process, simulation = worker.process, worker.simulation
    machines = simulation.machines
    reach: Callable[[Any], SimStore] = lambda address: SimStore.connect(process, address)  # noqa: E731
    return PeerJob(
        SimStore(process, process),
        process.address,
        reach,
        SimFinder(process, simulation.posts, worker.known),
        simulation.plan.size(),
        uid=worker.uid,
        run_id="run",
        peer_timeout=simulation.plan.peer_timeout,
        max_world_size=simulation.plan.max_world_size,
        refused=worker.refused,
        draw_uid=machines.draw_uid,
        clock=process.clock,
        arbiter=simulation.arbiter_of(process),
        goes_on=simulation.plan.goes_on,
    )
