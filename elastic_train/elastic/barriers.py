"""Where the members of a world wait for each other, beside its process group, and what they need for it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastic_train.errors import FormationFailed, ReturnedAlone, StoreUnreachable
from elastic_train.protocol.liveness import Watcher
from elastic_train.protocol.peers import PeerJob
from elastic_train.rules import Activity
from elastic_train.world import Reach, World

READY_POLL_SECONDS = 0.00005
"""the same for each member of a world while all of them ask rank 0, which answers some 20,000 times a second"""
SPARE_POLL_SECONDS = 0.01
"""between two looks of a spare; a part of what a recovery takes that waits for it"""


@dataclass(frozen=True)
class Waits:
    """Seconds, by the flags of these names."""

    formation_timeout: float
    peer_timeout: float
    wait_timeout: float
    stall_timeout: float | None = None


@dataclass(frozen=True)
class Surroundings:
    """Everything that a member needs of the machine; the simulator has its own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw_uid: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    start: Callable[[str, Callable[[], None]], None] = lambda name, task: threading.Thread(
        target=task, name=name, daemon=True
    ).start()
    finish: Callable[[float], None] = lambda _seconds: None
    """waits so long at most for all that was started to end"""
    poll_seconds: float = 0.001
    """between two looks at a store"""
    reach: Reach = lambda _point, _world: None
    """told at the points of an agreement and a join at which a drill may inject a fault, on any thread"""
    require_unfinished: Callable[[], None] = lambda: None
    """raises JobFinished where the run is seen to have reached its end; asked while nobody is found, now and then"""


class Barriers:
    """Where the members of a world wait for each other: before its process group, as spares, at the end of training.
    For the training thread alone; it keeps nothing between two waits.

    Args:
        check: raises Stopped where this worker was told to stop.
    """

    def __init__(
        self, job: PeerJob, watcher: Watcher, limits: Waits, around: Surroundings, check: Callable[[], None]
    ) -> None:
        self._job, self._watcher, self._limits = job, watcher, limits
        self._around, self._check = around, check

    def wait_for_workers(self, world: World) -> None:
        """Wait until all who train are about to make the process group, so that making it takes milliseconds, and
        until those whom this world has left out have stopped.

        Between the agreed list and this point a member may have to wait for a disk. A death here is seen at once; while
        the group is made it would cost gloo's timeout.

        Raises:
            FormationFailed: one died, or has not come within the peer timeout.
        """
        self.wait_for_left_out(world)
        try:
            self._wait_at_rank_0(world)
        except StoreUnreachable as error:
            raise no_answer(world) from error

    def _wait_at_rank_0(self, world: World) -> None:
        """Raises: as `wait_for_workers`; StoreUnreachable where rank 0 does not answer."""
        clock, peer_timeout = self._around.monotonic, self._limits.peer_timeout
        self._job.announcements.say_ready(world)
        deadline = clock() + 2 * peer_timeout
        while not self._job.announcements.are_ready(world):
            require_whole(self._watcher)
            if clock() > deadline:
                ranks = ", ".join(map(str, self._job.announcements.not_ready(world)))
                raise FormationFailed(f"rank {ranks} did not come to the process group in {2 * peer_timeout:.0f} s")
            self._pause(world)

    def _pause(self, world: World) -> None:
        self._around.sleep(max(self._around.poll_seconds, world.world_size * READY_POLL_SECONDS))

    def wait_for_left_out(self, world: World) -> None:
        """Until those whom this world has left out have stopped (law 2)."""
        while (seconds := self._job.seconds_to_wait(world, self._watcher.links.answered())) > 0:
            require_whole(self._watcher)
            self._around.sleep(min(seconds, 0.05))

    def is_begun(self, world: World) -> bool:
        """Whether a member that needs no more nodes, for its training is through, goes on in `world`, or has."""
        with suppress(StoreUnreachable):  # who lives is for the watcher to tell
            is_over = self._job.heard(world, "finished") is not None
            return is_over or len(self._job.announcements.not_ready(world)) < world.world_size
        return False

    def stand_by(self, world: World) -> str | None:
        """Wait, as a spare of `world`, until it ends. Returns what `announce_finished` was given; None where a member
        was lost or left and the others agree on the next world.

        Raises:
            Stopped: this worker was told to stop.
            StoreUnreachable: the store is gone, and the job with it.
        """
        while True:
            self._watcher.thread.check()
            is_broken = self._watcher.reason is not None
            finished = self._job.heard(world, "finished")  # after it: who finished and went looks lost
            if finished is not None or is_broken:
                return finished
            self._check()
            self._around.sleep(SPARE_POLL_SECONDS)

    def announce_finished(self, world: World, result: str) -> None:
        """Tell the spares of the present world that the run is through, and with what."""
        with suppress(StoreUnreachable):
            self._job.announcements.announce(world, "finished", result)

    def end_together(self, world: World) -> None:
        """Until all who train are through with their last collective: one whose peer closes its sockets meanwhile would
        take it for dead. Blocks for as long as --peer-timeout at most.
        """
        deadline = self._around.monotonic() + self._limits.peer_timeout

        def is_over(missing: Sequence[int]) -> bool:
            gone = (self._watcher.contacts.is_refused(world.members[rank]) for rank in missing)
            return self._around.monotonic() >= deadline or (world.rank == 0 and all(gone))

        with suppress(StoreUnreachable):  # then rank 0 has seen all, and is gone
            self._meet_at_rank_0(world, "through", is_over)

    def return_together(self, world: World, step: int, *, is_end: bool) -> None:
        """The training function has returned here: wait until it has on all ranks, before any collective of ours would
        meet one of its own. Blocks for as long as they are busy in it; at the end of training nobody is expelled for
        that.

        Raises:
            ReturnedAlone: another rank is in a step in which this one will never take part.
            FormationFailed: a member is lost.
        """
        watcher, since, has_returned = self._watcher, self._around.monotonic(), False

        def is_over(_missing: Sequence[int]) -> bool:
            nonlocal has_returned
            if not has_returned:  # not before it has said so: in a collective and not returned is who goes on
                has_returned = True
                if is_end:
                    watcher.do(Activity.COMPUTE, watcher.pace.between_steps)
                else:
                    watcher.do(Activity.REDUCE)
            require_whole(watcher, "the training function has returned on all ranks")
            for rank in self._long_in_collective(world, since):
                if store.get(f"{key}/{rank}") is None:
                    raise _returned_alone(world, rank, step)
            return False

        try:
            store, key = self._job.world_store(world), f"{world.key}/returned"
            self._meet_at_rank_0(world, "returned", is_over)
        except StoreUnreachable as error:
            raise no_answer(world) from error

    def _meet_at_rank_0(self, world: World, name: str, is_over: Callable[[Sequence[int]], bool]) -> None:
        """Until all who train have come here, or `is_over` says so, which is asked between two looks.

        Args:
            is_over: given the ranks that have not come; rank 0 for all of them, where this is another one.

        Raises: StoreUnreachable. What `is_over` raises.
        """
        store, key = self._job.world_store(world), f"{world.key}/{name}"
        store.put(f"{key}/{world.rank}", "")
        others = {f"{key}/{rank}": rank for rank in range(world.world_size) if rank != world.rank}
        missing = others if world.rank == 0 else {f"{key}/all": 0}
        while True:
            found = store.get_many(list(missing))
            missing = {one: rank for (one, rank), text in zip(missing.items(), found, strict=True) if text is None}
            if not missing or is_over(list(missing.values())):
                break
            self._pause(world)
        if world.rank == 0:
            store.put(f"{key}/all", "")

    def _long_in_collective(self, world: World, since: float) -> list[int]:
        """Ranks that have been inside a collective for some time, and began it while this one waited: it does not take
        part. They are heard just now, and not frozen in one that has ended."""
        limit = self._limits.peer_timeout / 2  # before that one is given up
        waited, contacts = self._around.monotonic() - since, self._watcher.contacts
        found = {rank: contacts.activity_of(world, rank) for rank in contacts.training_neighbours(world)}
        return [
            rank
            for rank, one in found.items()
            if one is not None and one.generation == world.generation and one.activity.is_inside
            if limit < one.seconds <= waited and contacts.is_heard(world.members[rank])
        ]

    def finish(self, world: World) -> None:
        """At the end of training: tell those in the join queue."""
        if world.rank == 0:
            with suppress(StoreUnreachable):
                self._job.finish(world)


def require_whole(watcher: Watcher, before: str = "the process group was made") -> None:
    """Raises: FormationFailed where a member is lost."""
    watcher.thread.check()
    if watcher.reason is not None:
        raise FormationFailed(f"a member was lost before {before}: {watcher.reason}")


def _returned_alone(world: World, other: int, step: int) -> ReturnedAlone:
    return ReturnedAlone(
        f"the training function returned at step {step} on rank {world.rank} ({world.me.name}) and goes on on rank "
        f"{other} ({world.members[other].name}), which waits for it in a collective: it must return on all ranks at "
        "the same step, and call each collective, keep() too, on all of them; decide by what all know, such as a sum, "
        "and by what is in `extras`: a newcomer has no other state"
    )


def no_answer(world: World) -> FormationFailed:
    """The error of who gets no answer from rank 0."""
    return FormationFailed(f"{world.members[0].name} (rank 0) does not answer")
