"""The sides of a run find each other, and one of them stops.

Each member publishes the position of its side in its own store. Rank 0 of a branch reads, on a thread of its own, the
stores of the members left behind and those at the endpoints. When two sides find each other, only the side with the
larger id judges, so that never both stop: the main line has the id "", and never judges. A member of the side that
stops finds the result in its store and tells the members of its world; then their rank 0 votes for the world's end.

Two jobs of one run id overwrite each other's signs at an endpoint, and so find each other. Rank 0 of the job with the
larger token reads the other rank 0's store, and judges. A side that waits for silent members is left alone: it may
never go on, and so must not end a side that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from elastic_train.branches import POSITION, Branch, Position
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.finder import Finder
from elastic_train.protocol.join_queue import address_of
from elastic_train.protocol.store import Clients, KeyValueStore
from elastic_train.world import Address, World, from_json, to_json

SUPERSEDED = "superseded"
"""key in a member's own store: the position of the side for which it stops"""


class OtherSides:
    """One member's knowledge of other sides, and its messages to its own side.

    Args:
        own: this member's own store; several threads may call it.
        finder: of this member.
        reach: returns a client of the store at an address, for the thread that looks. Raises: StoreUnreachable.
        may_branch: whether a side may go on as a branch in this job (branches.py).
        in_background: runs a task on a thread of its own.
    """

    def __init__(
        self,
        own: KeyValueStore,
        reach: Callable[[Address], KeyValueStore],
        finder: Finder,
        *,
        uid: str,
        run_id: str,
        may_branch: bool,
        in_background: Callable[[Callable[[], None]], None],
    ) -> None:
        self.own, self._clients = own, Clients(own, uid, reach)
        self.finder, self._run_id, self._in_background = finder, run_id, in_background
        self.may_branch = may_branch
        self._is_busy = False
        self._notified_in: str | None = None
        """uid of the world whose members this one has told that this side stops"""

    def has_notified(self, world: World) -> bool:
        """Return whether this member has told the members of `world` that this side stops. The members of an earlier
        world are not enough: newcomers may have joined since."""
        return self._notified_in == world.uid

    def winner(self, mine: Position | None) -> Position | None:
        """Return the position of the side for which this one stops; None if it does not stop. The message may have come
        before the two sides parted: then this member may be on the winning side itself by now."""
        text = self.own.get(SUPERSEDED)
        found = None if text is None else from_json(Position, text)
        return None if found is not None and mine is not None and found.is_of(mine) else found

    def tend(
        self,
        world: World,
        position: Callable[[], Position | None],
        branch: Branch | None,
        other_jobs: Sequence[Address],
    ) -> None:
        """Publish the position, and start the next task in the background. On the watcher thread; does not block.

        Args:
            position: returns the position of this member; None while it has no state of its world.
            other_jobs: stores of members of another job of this run id, whose sign was found.
        """
        mine = position()
        if mine is not None:
            self.own.put(POSITION, to_json(mine))
        if self._is_busy or self.has_notified(world):
            return
        winner = self.winner(mine)
        if winner is not None:
            self._begin(lambda: self._notify(world, mine, to_json(winner)))
        elif other_jobs and world.rank == 0:
            self._begin(lambda: self._judge_jobs(position, other_jobs))
        elif self.may_branch and branch is not None and world.rank == 0:
            self._begin(lambda: self._judge_branches(world, position, branch))

    def _begin(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            finally:
                self._is_busy = False

        self._is_busy = True
        self._in_background(run)

    def _notify(self, world: World, mine: Position | None, winner: str) -> None:
        def tell(store: KeyValueStore) -> bool:
            theirs = store.get(POSITION)
            # A member that has gone on to another side while this one was frozen does not stop with this one.
            is_of_mine = theirs is None or (mine is not None and from_json(Position, theirs).is_of(mine))
            if is_of_mine:
                store.create(SUPERSEDED, winner)
            return is_of_mine  # else it may also be about to publish that it is on this branch

        told = self._clients.ask_each(world, range(len(world.members)), tell)
        if all(map(told.get, range(world.world_size))):  # a silent spare ends no world
            self._notified_in = world.uid  # else `tend` tries again, in the next world if a worker is lost

    def _judge_branches(self, world: World, position: Callable[[], Position | None], branch: Branch) -> None:
        """Judge between this side and each other side that answers."""
        inside = {member.store for member in world.members}
        places = list(branch.others)
        with suppress(StoreUnreachable):
            places += self.finder.addresses()
        for place in dict.fromkeys(places):
            if place in inside:
                continue
            try:
                text, run_id = self._clients.at(place).get_many([POSITION, "run_id"])
                mine = position()
                if text is None or mine is None or run_id != self._run_id:
                    continue
                theirs = from_json(Position, text)
                if theirs.run != mine.run or theirs.id >= mine.id:  # the side with the larger id judges
                    continue
                if not self._outdoes(mine, theirs, self._clients.at(place)):
                    return
            except StoreUnreachable:
                self._clients.keep_only(())  # a client that got no answer gives none again

    def _judge_jobs(self, position: Callable[[], Position | None], places: Sequence[Address]) -> None:
        """Judge between this job and another one, by the store of its rank 0, to which any member's store leads."""
        for place in places:
            try:
                host = self._clients.at(place).get("host")
                if not host:
                    continue
                store = self._clients.at(address_of(host))
                text, run_id, winner = store.get_many([POSITION, "run_id", SUPERSEDED])
                mine = position()
                if text is None or mine is None or run_id != self._run_id or winner is not None:
                    continue
                theirs = from_json(Position, text)
                if theirs.job == mine.job or not (theirs.stands and mine.stands):
                    continue
                if self.may_branch and theirs.is_beside(mine):
                    continue  # `_judge_branches` judges these
                if (theirs.job or "") < (mine.job or ""):  # else the other job judges
                    self._outdoes(mine, theirs, store)
                return
            except StoreUnreachable:
                self._clients.keep_only(())

    def _outdoes(self, mine: Position, theirs: Position, store: KeyValueStore) -> bool:
        """Tell the side that stops. Return whether that is the other side; `store` is of one of its members."""
        if theirs.goes_before(mine):
            self.own.create(SUPERSEDED, to_json(theirs))
            return False
        store.create(SUPERSEDED, to_json(mine))
        return True
