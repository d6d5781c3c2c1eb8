"""Waits of a world's members for each other, outside of its process group, and what they need for them."""

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
"""between two looks, for each member of a world: all of them ask rank 0, which answers some 20,000 times a second"""
LOOK_SECONDS = 0.05
"""between two looks for nodes that are ready to join"""
SPARE_POLL_SECONDS = 0.01
"""between two looks of a spare; it adds to the recovery that needs the spare"""


@dataclass(frozen=True)
class Waits:
    """Timeouts in seconds, each by the flag of its name."""

    formation_timeout: float
    peer_timeout: float
    wait_timeout: float
    stall_timeout: float | None = None


@dataclass(frozen=True)
class Surroundings:
    """What a member needs of the machine; the simulator replaces it."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw_uid: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    start: Callable[[str, Callable[[], None]], None] = lambda name, task: threading.Thread(
        target=task, name=name, daemon=True
    ).start()
    finish: Callable[[float], None] = lambda _seconds: None
    """waits until all that was started has ended, for so many seconds at most"""
    poll_seconds: float = 0.001
    """between two looks at a store"""
    reach: Reach = lambda _point, _world: None
    """called at the points of an agreement and a join at which a drill may inject a fault, on any thread"""
    require_unfinished: Callable[[], None] = lambda: None
    """raises JobFinished where the run is known to have ended; called now and then while too few members are found"""


class Barriers:
    """Waits of a world's members for each other: before its process group, as spares, at the end of training; and their
    wait for other nodes. For the training thread alone; nothing is kept between two waits.

    Args:
        check: raises Stopped where this worker was told to stop.
    """

    def __init__(
        self, job: PeerJob, watcher: Watcher, limits: Waits, around: Surroundings, check: Callable[[], None]
    ) -> None:
        self._job, self._watcher, self._limits = job, watcher, limits
        self._around, self._check = around, check

    def wait_for_workers(self, world: World) -> None:
        """Wait until all members that train are about to make the process group, so that making it takes milliseconds.
        Wait also until the workers that this world has left out have stopped.

        Between the agreement and this point a member may have to wait for a disk. A death is noticed at once here;
        while the group is made, it would cost gloo's timeout.

        Raises:
            FormationFailed: a member died, or has not come within twice the peer timeout.
        """
        self.wait_for_left_out(world)
        try:
            self._wait_at_rank_0(world)
        except StoreUnreachable as error:
            raise no_answer(world) from error

    def _wait_at_rank_0(self, world: World) -> None:
        """Raises: as `wait_for_workers`; StoreUnreachable where rank 0 does not answer."""
        clock, peer_timeout = self._around.monotonic, self._limits.peer_timeout
        self._job.announcements.announce_ready(world)
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
        """Wait until the workers that this world has left out have stopped."""
        while (seconds := self._job.seconds_to_wait(world, self._watcher.links.answered())) > 0:
            require_whole(self._watcher)
            self._around.sleep(min(seconds, 0.05))

    def wait_for_nodes(self, world: World, until: float, is_end_due: Callable[[], bool]) -> bool:
        """Wait, without training, while `world` has fewer nodes than --min-nodes. Returns True where `is_end_due`, as
        nodes can be admitted, or a member is lost or elsewhere; False where this world begins as it is: a member that
        is ahead by the last step has begun it.

        Raises:
            Stopped: told to stop. The error that ended the watcher thread.
            FormationFailed: no node came until then, by the monotonic clock.
        """
        self._watcher.expect(world)  # the end of the previous world is past; this one's rank 0 can be found
        while True:
            self._check()
            self._watcher.thread.check()
            if is_end_due() or self._watcher.reason is not None:
                return True
            if self._is_begun(world):
                return False
            if self._around.monotonic() >= until:
                break
            self._around.sleep(LOOK_SECONDS)
        raise FormationFailed(
            f"only {world.num_nodes} of at least {world.min_nodes} nodes after {self._limits.wait_timeout:.0f} s "
            "(--min-nodes, --wait-timeout)"
        )

    def _is_begun(self, world: World) -> bool:
        """Whether a member whose training is finished, and which needs no more nodes, has begun `world`; or the others
        have ended, and this one lacks the last step."""
        with suppress(StoreUnreachable):  # liveness is the watcher's business
            return self._job.is_over() or len(self._job.announcements.not_ready(world)) < world.world_size
        return False

    def stand_by(self, world: World) -> str | None:
        """Wait, as a spare of `world`, until it ends. Returns the argument of `finish`; None where a member was lost or
        left, and the members agree on the next world.

        Raises:
            Stopped: this worker was told to stop.
            StoreUnreachable: the store is gone, and the job with it.
        """
        while True:
            self._watcher.thread.check()
            is_broken = self._watcher.reason is not None
            result = self._job.told("over")  # read second: a member that has finished and left looks lost
            if result is not None or is_broken:
                return result
            self._check()
            self._around.sleep(SPARE_POLL_SECONDS)

    def end_together(self, world: World) -> None:
        """Wait until all members that train have ended their last collective: a member whose peer closes its sockets
        earlier would take that peer for dead. Blocks for --peer-timeout at most.
        """
        deadline = self._around.monotonic() + self._limits.peer_timeout

        def is_over(missing: Sequence[int]) -> bool:
            gone = (self._watcher.contacts.is_refused(world.members[rank]) for rank in missing)
            return self._around.monotonic() >= deadline or (world.rank == 0 and all(gone))

        with suppress(StoreUnreachable):  # rank 0 leaves when it has seen all members
            self._meet_at_rank_0(world, "through", is_over)

    def return_together(self, world: World, step: int, *, is_end: bool) -> None:
        """Wait, after the return of the training function here, until it has returned on all ranks. Else a collective
        of ours would meet one of the function's own. Blocks while other ranks are busy in the function; at the end of
        training no member is expelled for that.

        Raises:
            ReturnedAlone: another rank is in a step that this one has left for good.
            FormationFailed: a member is lost.
        """
        watcher, since, has_returned = self._watcher, self._around.monotonic(), False

        def is_over(_missing: Sequence[int]) -> bool:
            nonlocal has_returned
            if not has_returned:  # once its key is stored: a rank in a collective without a key has not returned
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
        """Wait until all members that train have come here, or `is_over` returns true between two looks.

        Args:
            is_over: called with the ranks that have not come; on other ranks than 0 with rank 0 alone, for all of them.

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
        """Return the ranks that have been inside a collective for long, and entered it while this one waited outside.
        Only those whose pings arrive now count, so that none is frozen in a collective that has ended."""
        limit = self._limits.peer_timeout / 2  # before the collective is aborted
        waited, contacts = self._around.monotonic() - since, self._watcher.contacts
        found = {rank: contacts.activity_of(world, rank) for rank in contacts.training_neighbours(world)}
        return [
            rank
            for rank, one in found.items()
            if one is not None and one.generation == world.generation and one.activity.is_inside
            if limit < one.seconds <= waited and contacts.is_heard(world.members[rank])
        ]

    def finish(self, world: World, result: str) -> None:
        """Tell that training has ended, and its result: the members that this one pings, as they may be spares, or lack
        the last step, in whose collective another one died; as rank 0 also those that wait to be admitted."""
        neighbours = self._watcher.contacts.neighbours(world, world.rank)
        with suppress(StoreUnreachable):
            self._job.finish(world, result, [world.members[rank] for rank in neighbours])


def require_whole(watcher: Watcher, before: str = "the process group was made") -> None:
    """Raise FormationFailed where a member is lost."""
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
    """Return the error of a worker that gets no answer from rank 0."""
    return FormationFailed(f"{world.members[0].name} (rank 0) does not answer")
