"""The parts of the real ring in a simulation: integer steps, a simulated group, and no files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from elastic_train.branches import Branches, id_of
from elastic_train.elastic.membership import Change
from elastic_train.elastic.resume import Resumed
from elastic_train.elastic.ring import Ring, RingParts
from elastic_train.elastic.whole_steps import ALONE
from elastic_train.errors import JobFinished, StoreUnreachable
from elastic_train.protocol.quarantine import Deaths
from elastic_train.rules import NOW, Activity, Failure
from elastic_train.training.step import NO_VOTES, Outcome, Votes
from elastic_train.world import World
from tests.simulation.group import Group, GroupBroken

if TYPE_CHECKING:
    from tests.simulation.worker import Worker


@dataclass(frozen=True)
class Commit:
    """A step that was committed in a world, and the one that it was computed from."""

    step: int
    world: str
    generation: int
    parent: Commit | None
    at: float = field(default=0.0, compare=False)
    """when the first member had it"""


class State:
    """As TrainState, as far as the ring asks."""

    def __init__(self, max_steps: int, now: Callable[[], float]) -> None:
        self.commit: Commit | None = None
        """the newest one of this worker"""
        self.taken: Commit | None = None
        """of others, for the first step of a world"""
        self.branches: Branches = ()
        self.generation, self.generations = -1, 0
        self.incidents: list[dict[str, Any]] = []
        self.lock = SimpleNamespace(released=nullcontext)
        self.clock = SimpleNamespace(
            enter=lambda _phase: None, count_nodes=lambda _number: None, totals=lambda: {"train": now()}
        )
        self._max_steps = max_steps

    @property
    def step(self) -> int:
        return 0 if self.commit is None else self.commit.step

    @property
    def is_finished(self) -> bool:
        return self.step >= self._max_steps


def make_ring(worker: Worker) -> Ring:
    """The ring of one simulated worker."""
    part = SimParts(worker)
    parts: Any = RingParts(
        find=part.find,
        open_group=part.open_group,
        batches=lambda _world, _first_ranks: (),
        trainer=part,  # type: ignore[arg-type]
        resume=part,  # type: ignore[arg-type]
        files=part,  # type: ignore[arg-type]
        saver=part,  # type: ignore[arg-type]
        report=part,  # type: ignore[arg-type]
        exits=part,  # type: ignore[arg-type]
    )
    process = worker.process
    real_worker: Any = SimpleNamespace(
        state=worker.state,
        device=torch.device("cpu"),
        config=SimpleNamespace(wait_timeout=1e9),
        stop=worker.stop,
        reporter=SimpleNamespace(debug=lambda _text: None, log=lambda _text: None),
        reach=part.reach,
        set_environment=lambda _world: None,
        share_cores=lambda _world: None,
    )
    return Ring(real_worker, worker.membership, parts, process.clock)


class SimParts:
    """All of a ring's parts in one: each of the methods below is one that the ring calls."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._membership, self._watcher = worker.membership, worker.membership.watcher
        self._state, self._simulation = worker.state, worker.simulation
        self._before: World | None = None
        self._deaths = Deaths() if worker.simulation.plan.quarantine else None
        self._dead_hosts: list[str] = []
        """as `WorldReport.interrupted` has them"""
        self.step_started = 0.0
        self.last_votes: Votes = NO_VOTES
        self.was_applied = False

    # --- ways in and out ----------------------------------------------------------------------------------------------

    def find(self) -> World:
        worker, membership = self._worker, self._membership
        if "admitted" not in worker.process.memory.values:
            membership.arrival.find()
            plan = self._simulation.plan
            # Founders whose world has formed before a history begins have none: those who come later, perhaps to two
            # branches of theirs, are to have one.
            is_one = plan.is_formed and not plan.begins_twice
            membership.agreed_once("job_token", "formed" if is_one else worker.uid)
        return membership.first_world(worker.member)

    def finish(self, world: World, _outcome: str, *, is_saved: bool) -> int:
        self._watcher.leave()
        self._membership.barriers.finish(world, "finished")
        self._membership.barriers.end_together(world)
        return self._end("finished")

    def finish_as_spare(self, _world: World, _result: str) -> int:
        return self._end("finished")

    def leave(self, world: World) -> int:
        with suppress(StoreUnreachable):  # then the others lose it as a peer
            self._membership.leave(world)
        return self._end("left")

    def stop(self, world: World) -> int:
        self._watcher.leave()
        self._membership.joins.announce_leaving()
        self._membership.barriers.end_together(world)
        return self._end("left")

    def stop_between_worlds(self, _world: World) -> int:
        return self._end("left")

    def fail(self, error: Exception, _verdict: Failure, _world: World, *, has_state: bool) -> NoReturn:
        raise error

    def _end(self, ending: str) -> int:
        self._worker.activity = ending
        return 0

    # --- a world begins -----------------------------------------------------------------------------------------------

    def reach(self, point: str, _world: World) -> None:
        if point == "meet":
            self._worker.activity = "agrees"
            self._worker.waits_for_votes = None

    def enter(self, world: World) -> None:
        """As Saver: a world stands."""
        self._note_world(world, "forms")

    def _note_world(self, world: World, activity: str) -> None:
        self._worker.activity = activity
        if self._before is not world:
            self._simulation.note_world(self._worker, world, self._before)
            self._before = world

    def begin(self, _state: Any) -> None:
        """As Saver: a world is about to train."""

    def claim(self, _world: World, *, has_state: bool) -> None:
        pass

    def hold_bucket(self, world: World, *, has_state: bool) -> None:
        """It waits for nodes."""
        self._note_world(world, "waits")

    def finish_claim(self) -> None:
        pass

    @contextmanager
    def open_group(self, world: World, formed: Group | None) -> Iterator[None]:
        worker = self._worker
        for unused in worker.formed:
            if unused is not formed:
                unused.close()
        worker.formed = []
        if formed is None:
            worker.group = group = Group(worker.process, world)
        else:
            worker.group = group = formed
            self._simulation.num_prepared += 1
        try:
            if formed is None:
                group.form(self._membership.forming_timeout.total_seconds())
            worker.activity = "trains"
            yield
        finally:
            group.close()

    @property
    def has_state(self) -> bool:
        return self._state.commit is not None

    def into(self, world: World, _change: Change, *, is_formed_ahead: bool) -> Resumed:
        group = self._worker.group
        assert group is not None, "it was opened"
        if is_formed_ahead:
            self._state.taken = self._take_over(world, group)
        else:
            self._state.taken = self._state.commit = self._synchronise(world, group)
            branch = self._membership.side.branch
            if branch is not None and branch.id != id_of(self._state.branches):
                self._state.branches = (*self._state.branches, (branch.id, self._state.step))
        return Resumed(None, ALONE)

    def _take_over(self, world: World, group: Group) -> Commit:
        """In a world that was formed ahead: what all who trained have, and newcomers get with their first step."""
        membership, state = self._membership, self._state
        if not self.has_state:
            membership.arrival.report_ready(world)
        try:
            found = self._exchange_states(group)
        except GroupBroken:
            if membership.job.is_over():
                raise JobFinished("the others have reached the end") from None
            raise
        if self._simulation.plan.has_place:
            self._simulation.note(f"{self._worker} was told who sees the directory in generation {world.generation}")
        held = {(commit, branches) for commit, branches, *_ in found if commit is not None}
        assert len(held) == 1, f"those who trained differ: {found}"
        commit, state.branches = held.pop()
        assert commit is not None, "held by one who trained"
        return commit

    def _synchronise(self, world: World, group: Group) -> Commit | None:
        state, job = self._state, self._membership.job
        if self._simulation.plan.has_place:
            told = group.exchange(job.place.sees(world.uid))
            job.place.note(world.uid, is_shared=all(told))
            self._simulation.note(
                f"{self._worker} knows who sees the directory in generation {world.generation}: {told}"
            )
        found = self._exchange_states(group)
        held = [(commit, branches) for commit, branches, *_ in found if commit is not None]
        if not held:
            kept = self._newest_of([one[-1] for one in found])
            self._simulation.note_start(self._worker, world, kept)
            return kept
        newest, state.branches = max(held, key=lambda one: (one[0].generation, one[0].step))
        return newest

    def _newest_of(self, kept: list[Commit | None]) -> Commit | None:
        """The newest snapshot of those in this world who came back; they have saved what they had. Of two branches, or
        two jobs, it would have to be told which is continued: that is left out here."""
        plan = self._simulation.plan
        found = [] if plan.goes_on or plan.begins_twice else [commit for commit in kept if commit is not None]
        return max(found, key=lambda one: (one.step, one.generation), default=None)

    def _exchange_states(
        self, group: Group
    ) -> list[tuple[Commit | None, Branches, list[dict[str, Any]], list[str], Commit | None]]:
        """(newest commit, branches, incidents, hosts that have died since, what it kept) of each rank; who has no state
        takes over what is known of deaths."""
        state = self._state
        found: list[Any] = group.exchange(
            (state.commit, state.branches, list(state.incidents), self._dead_hosts, self._worker.kept)
        )
        if not self.has_state:
            theirs = next((known for commit, _, *known in found if commit is not None), ([], self._dead_hosts))
            state.incidents, self._dead_hosts = list(theirs[0]), list(theirs[1])
        return found

    def begins(self, world: World, change: Change, _interruption: Any) -> None:
        if change.reason is not None:
            self._simulation.note(f"{self._worker} goes on, since {change.reason}")
        if self._deaths is not None:
            going_on = [one for one in world.members if one not in change.joined]
            self._dead_hosts = [*self._dead_hosts, *self._deaths.note(change.lost, going_on)]

    def stands(self, _world: World, *_what: Any) -> None:
        hosts, self._dead_hosts = self._dead_hosts, []
        if hosts:
            now = self._simulation.kernel.now
            self._state.incidents.append({"cause": "peer_lost", "dead_hosts": hosts, "run_seconds": now})

    def lost(self, failure: str, _change: Change) -> None:
        self._simulation.note(f"{self._worker} lost generation {self._before and self._before.generation}: {failure}")

    def stand_by(self) -> None:
        self._worker.activity = "stands by"

    def stands_by(self, world: World) -> None:
        self._note_world(world, "stands by")

    # --- it trains ----------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        pass

    def evaluate_if_missed(self, _world: World) -> None:
        pass

    def run(self, world: World, _steps: Any, _begin: Any) -> Outcome:
        while True:
            outcome = self._step(world)
            if outcome is not None:
                return outcome

    def _step(self, world: World) -> Outcome | None:
        worker, state, simulation, watcher = self._worker, self._state, self._simulation, self._watcher
        process, group = worker.process, worker.group
        assert group is not None, "it was opened"
        self.step_started = process.clock()
        watcher.do(simulation.plan.work.activity)
        step = 0 if state.taken is None else state.taken.step
        is_first = not worker.num_commits
        process.sleep(simulation.plan.work.seconds(simulation.machines.random, world.rank, step, is_first=is_first))
        told_to_stop, leaving = worker.stop.votes()
        self.last_votes = Votes(told_to_stop, leaving, self._membership.vote())
        watcher.do(Activity.REDUCE)
        votes: list[Votes] = group.exchange(self.last_votes)
        watcher.do(Activity.COMPUTE)
        state.commit = state.taken = simulation.note_commit(worker, world, state.taken)
        worker.num_commits += 1
        watcher.pace.note_step(process.clock() - self.step_started)
        told_to_stop, leaving, joining, _ = (sum(each) for each in zip(*votes, strict=True))
        self._membership.joins.follow_vote(world, joining)
        if state.is_finished:
            return Outcome.FINISHED  # any other request came too late (WorldEnd.call_off)
        if told_to_stop == world.world_size:
            return Outcome.STOPPED
        if joining == NOW:
            return Outcome.SOME_JOIN
        return Outcome.SOME_LEAVE if leaving else None

    def lose_step(self, _seconds: float) -> None:
        """Nothing of it was noted."""
