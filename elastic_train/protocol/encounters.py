"""How the branches of a run find each other, and which of them stops.

Each member says in its own store how far its side has come. Rank 0 of a branch looks, on a thread of its own, at the
members that it has gone on without and at the endpoints. Of two sides that meet one judges, that of the larger id, so
that never both stop: the main line has none, and never judges. A member of the side that stops finds that in its store,
and tells the others of its world; then their rank 0 votes for the world's end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from elastic_train.branches import POSITION, Branch, Position
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.join_queue import Finder
from elastic_train.protocol.store import Address, Clients, KeyValueStore
from elastic_train.world import World

SUPERSEDED = "superseded"
"""key in a member's own store: the position of the side for which it stops"""


class Encounters:
    """Of one member.

    Args:
        own: its own store; it answers several threads.
        reach: a client of the store at an address, for the thread that looks. Raises: StoreUnreachable.
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
        in_background: Callable[[Callable[[], None]], None],
    ) -> None:
        self._own, self._clients = own, Clients(own, uid, reach)
        self._finder, self._run_id, self._in_background = finder, run_id, in_background
        self._is_busy = False
        self._told_in: str | None = None
        """uid of the world whose members know from this one that this side stops"""

    def has_told(self, world: World) -> bool:
        """Whether this side stops, and the members of `world` know it from this one: those of the one before it do not
        include who has joined."""
        return self._told_in == world.uid

    def winner(self) -> Position | None:
        """The side for which this member's stops, where it does."""
        text = self._own.get(SUPERSEDED)
        return None if text is None else Position.from_json(text)

    def tend(self, world: World, position: Callable[[], Position | None], branch: Branch | None) -> None:
        """On the watcher's thread, which waits for nobody.

        Args:
            position: of this member; None while it has no state of its world.
        """
        mine = position()
        if mine is not None:
            self._own.put(POSITION, mine.to_json())
        if self._is_busy or self.has_told(world):
            return
        word = self._own.get(SUPERSEDED)
        if word is not None:
            self._begin(lambda: self._tell(world, word))
        elif branch is not None and world.rank == 0:
            self._begin(lambda: self._meet(world, position, branch))

    def _begin(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            finally:
                self._is_busy = False

        self._is_busy = True
        self._in_background(run)

    def _tell(self, world: World, word: str) -> None:
        try:
            for member in world.members:
                self._clients.of(member).create(SUPERSEDED, word)
            self._told_in = world.uid
        except StoreUnreachable:  # it is tried again, or that member is lost and another world told
            self._clients.keep_only(())

    def _meet(self, world: World, position: Callable[[], Position | None], branch: Branch) -> None:
        """Judge between this side and each other one that answers."""
        inside = {member.store for member in world.members}
        places = list(branch.others)
        with suppress(StoreUnreachable):
            places += self._finder.addresses()
        for place in dict.fromkeys(places):
            if place in inside:
                continue
            try:
                text, run_id = self._clients.at(place).get_many([POSITION, "run_id"])
                mine = position()
                if text is None or mine is None or run_id != self._run_id:
                    continue
                theirs = Position.from_json(text)
                if theirs.run != mine.run or theirs.id >= mine.id:  # it judges
                    continue
                if theirs.goes_before(mine):
                    self._own.create(SUPERSEDED, text)
                    return
                self._clients.at(place).create(SUPERSEDED, mine.to_json())
            except StoreUnreachable:
                self._clients.keep_only(())  # a client that got no answer gives none again
