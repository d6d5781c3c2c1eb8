"""A place outside of the members that says which side goes on: whose decision stands there first.

Where a job has an arbiter, every decision about what follows a world is claimed there. A side that has lost the others
may then go on by its claim alone, without their votes (laws.py). This is for members that have proven that they see the
same place, for a directory that was copied looks the same on every node: rank 0 shows a fresh name there as a world
forms, and in the first collective each member says whether it sees that name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from elastic_train.protocol.laws import Voters
from elastic_train.world import from_json, to_json


class ArbiterSilent(Exception):
    """It does not answer, or cannot keep what it is given. What was asked may be done all the same."""


class ArbiterLost(ArbiterSilent):
    """With all that was claimed there: nobody can claim anything any more, nor be told what stood."""


class Arbiter(Protocol):
    """Each call blocks for some seconds at most. Raises: ArbiterSilent."""

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        """The decision that stands for what follows a world of `generation`: the first that was claimed. Claims
        `decision` where there is none yet; None only reads."""

    def show(self, name: str) -> None:
        """Leave a fresh name there, for others to see."""

    def sees(self, name: str) -> bool:
        """Whether somebody has shown it."""

    def tidy(self) -> None:
        """Remove what nobody looks for any more. Nobody waits for it."""


class Folder(Protocol):
    """What claims take of a file system; it may be shared, and lose replies. Raises: OSError."""

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        """A file that comes with all of its content; FileExistsError where there is one. It may be made though this
        raises: a client of NFS that repeats a call is told EEXIST by its own."""

    def read(self, name: str) -> str | None:
        """Of a whole file; None where there is none."""

    def remove(self, name: str) -> None: ...

    def names(self) -> Sequence[str]:
        """Of all its files."""

    def written_at(self, name: str) -> float:
        """When a file was written, in seconds of the folder's own clock."""


OUTDATED = 50
"""newer claims of a job with which one of its claims counts for nothing; twice as many are kept"""
OLD_SECONDS = 3600.0
"""after which a shown name or a draft is removed: the members of a world have looked, and a claim was linked"""
MOST_REMOVED = 6
"""files as a world forms, which makes two or three"""


class Claims:
    """As Arbiter, in a folder: one file for each job and generation.

    Who is not told that its claim was made reads what stands there.

    Old files are removed as worlds form. A claim that has OUTDATED newer ones of its job is void, whether its file is
    still there or not: a member that asks for it gets the newest one, and so learns that the job has gone on. A file is
    removed only when twice as many newer ones stand, and from then on there are never fewer.

    Newer ones are counted after the name was read or made. So a member that was frozen for hours may find its name
    free again, and will see the newer ones then. The margin is for lists that miss a file that comes or goes meanwhile,
    or that are a minute old, as on NFS.
    """

    def __init__(self, folder: Folder, draw_name: Callable[[], str]) -> None:
        self._folder, self._draw_name = folder, draw_name
        self._shown: list[str] = []
        """names, the newest last"""

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        folder, name = self._folder, f"claim-{job}-{generation}"
        try:
            standing = (
                folder.read(name) if decision is None else self._put(name, json.dumps([self._draw_name(), decision]))
            )
            newest = self._outdated_by(job, generation)
            if newest is not None:
                standing = folder.read(newest)
                if standing is None:
                    raise ArbiterSilent(f"{newest} cannot be read")
            return None if standing is None else str(json.loads(standing)[1])
        except OSError as error:
            raise ArbiterSilent(str(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ArbiterSilent(f"what stands as {name} is no claim") from error

    def _outdated_by(self, job: str, generation: int) -> str | None:
        """The newest claim, where that of `generation` counts for nothing."""
        newer = [one for one in claims_among(self._folder.names()).get(job, ()) if one > generation]
        return f"claim-{job}-{max(newer)}" if len(newer) >= OUTDATED else None

    def _put(self, name: str, text: str) -> str:
        """What stands there afterwards."""
        try:
            self._folder.create(name, text, is_durable=True)
        except OSError as error:
            standing = self._folder.read(name)
            if standing is None:
                raise ArbiterSilent(str(error)) from error
            return standing
        return text

    def show(self, name: str) -> None:
        try:
            self._folder.create(f"seen-{name}", "", is_durable=False)
        except OSError as error:
            raise ArbiterSilent(str(error)) from error
        self._shown.append(f"seen-{name}")

    def tidy(self) -> None:
        with suppress(OSError):  # it is in nobody's way
            while len(self._shown) > 2:  # members of the world before may be about to look
                self._remove(self._shown.pop(0))
            if self._shown:
                self._remove_old(self._folder.written_at(self._shown[-1]))

    def _remove_old(self, now: float) -> None:
        """Some files, by the folder's clock."""
        folder, names = self._folder, self._folder.names()
        outdated = (
            f"claim-{job}-{generation}"
            for job, generations in claims_among(names).items()
            for generation in sorted(generations)[: -2 * OUTDATED]
        )
        aside = (name for name in names if name.startswith(("seen-", "draft-")))
        old = (name for name in aside if now - folder.written_at(name) > OLD_SECONDS)
        for name in islice(chain(outdated, old), MOST_REMOVED):
            self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(OSError):  # it is in nobody's way, and another member may have removed it
            self._folder.remove(name)

    def sees(self, name: str) -> bool:
        try:
            return self._folder.read(f"seen-{name}") is not None
        except OSError as error:
            raise ArbiterSilent(str(error)) from error


def claims_among(names: Iterable[str]) -> dict[str, list[int]]:
    """The generations of the claims of each job."""
    found: dict[str, list[int]] = {}
    for name in names:
        if match := re.fullmatch(r"claim-(.+)-(\d+)", name):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


@dataclass(frozen=True)
class Claim:
    """What is claimed: a decision with all that who finds it must know."""

    parent: str
    """uid of the world that it follows"""
    decision: str
    settled: str
    """uid of the last world that its writer knows to be settled"""


MOVED_SECONDS = 60.0
"""in which all members that reach a new place have found it"""
KEPT_PLACES = 100
"""worlds of which it is known where their names were seen"""


class Arbitration:
    """What one member knows of the place that it shares with the others of its worlds.

    Args:
        find_place: the place as it is now. Where that is another one than before, nothing can be claimed in the old
            one any more, by anybody; but something may have been, which is not known in the new one. So what follows a
            world is claimed where its name was seen; and its name is shown in a place that was there before the world
            was decided, so that no claim of what follows it lies in an older one.

    A world in which this member has not told whether it sees the place can be settled for nobody, and counts for
    nothing. In one in which it has, and was told nothing, others may know more: then it takes votes and claim.
    `show`, `sees` and `claim` block for some seconds at most.
    """

    def __init__(self, find_place: Callable[[], Arbiter] | None, timeout: float, clock: Callable[[], float]) -> None:
        self._find_place, self._timeout, self._clock = find_place, timeout, clock
        self._is_shared: dict[str, bool | None] = {}
        """by uid of a world: whether all its members see the place; None where this one does and was told nothing"""
        self._places: dict[str, Arbiter] = {}
        """by uid of a world: where this member has seen its name"""
        self._before: tuple[str, Arbiter] | None = None
        """uid of a world that ends, and the place as it was before anything could follow it"""
        self._shown: dict[str, tuple[Arbiter, float]] = {}
        """by uid of a world: where this member has left its name as rank 0, and when"""
        self._newest: tuple[Arbiter, float] | None = None
        """the place as it was found last, and since when; all times for the first"""
        self._silent_at = -math.inf
        """when it did not answer a call, the last one"""
        self._few_since: tuple[str, float] | None = None

    @property
    def has_place(self) -> bool:
        """Whether there is one at all."""
        return self._find_place is not None

    def note_end(self, world: str) -> None:
        """This member is about to take part in the choice of what follows a world."""
        if self._find_place is not None and (self._before is None or self._before[0] != world):
            self._before = world, self._place_now(self._find_place)

    def show(self, world: str, *, is_decided: bool) -> None:
        """Rank 0 of a world that is about to form leaves its name there, for the others to see, before the world's
        first collective. Blocks for some seconds at most.

        Args:
            is_decided: whether claims about that world may have been made.
        """
        if self._find_place is not None:
            place = self._place_now(self._find_place)
            if is_decided and self._before is not None:
                place = self._before[1]
            self._shown[world] = place, self._clock()
            with suppress(ArbiterSilent):  # then nobody sees it
                place.show(world)
                place.tidy()

    def sees(self, world: str) -> bool:
        """What this member tells the others of a world in its first collective. Blocks likewise."""
        sees = False
        if self._find_place is not None:
            place = self._place_now(self._find_place)
            with suppress(ArbiterSilent):
                sees = place.sees(world)
            if sees:
                self._places[world] = place
        self._is_shared[world] = None if sees else False
        return sees

    def note(self, world: str, *, is_shared: bool | None) -> None:
        """What all have told; None where this member sees the place and was told nothing."""
        self._is_shared[world] = is_shared

    def take_over(self, known: dict[str, bool | None]) -> None:
        """What a newcomer is told of worlds before it."""
        self._is_shared = dict(known)

    def known(self, worlds: Sequence[Voters]) -> dict[str, bool | None]:
        return {one.world: self._is_shared[one.world] for one in worlds if one.world in self._is_shared}

    def forget_all_but(self, worlds: Sequence[Voters]) -> None:
        self._is_shared = self.known(worlds)
        for world in list(self._places)[:-KEPT_PLACES]:
            del self._places[world]
        for world in list(self._shown)[:-KEPT_PLACES]:
            del self._shown[world]

    def has_moved(self, world: str) -> bool:
        """Whether the place has moved, and all have had the time to find the new one, but the name of this world could
        not be seen there: this member, as rank 0, has left it in an older place, or before all had found this one."""
        if self._find_place is None or world not in self._shown:
            return False
        (place, shown_at), now = self._shown[world], self._clock()
        newest = self._place_now(self._find_place)
        found_at = -math.inf if self._newest is None else self._newest[1]
        # The next world is shown later than that: so a place that some cannot see ends one world, and no second one.
        is_early = shown_at - found_at <= MOVED_SECONDS and self._is_shared.get(world) is False
        return (place is not newest or is_early) and now - found_at > MOVED_SECONDS

    def _place_now(self, find_place: Callable[[], Arbiter]) -> Arbiter:
        place = find_place()
        if self._newest is None or self._newest[0] is not place:
            self._newest = place, -math.inf if self._newest is None else self._clock()
        return place

    def is_needed(self, worlds: Sequence[Voters]) -> bool:
        """Whether some of the others might go on by a claim."""
        return self._find_place is not None and any(found is not False for found in self.known(worlds).values())

    def is_enough(self, worlds: Sequence[Voters]) -> bool:
        """Whether a claim makes up for votes."""
        found = self.known(worlds).values()
        return bool(found) and all(one is True for one in found)

    def ended_holders(self, worlds: Sequence[Voters], gone: Collection[str]) -> frozenset[str]:
        """All who had the state after the first of these worlds, where each is among those that are gone for sure and
        the place tells whether one of them went on before it died; else nobody."""
        holders = frozenset(worlds[0].members) - worlds[0].dead
        return holders if holders <= set(gone) and self.is_enough(worlds) else frozenset()

    def claim(self, job: str, generation: int, claim: Claim | None, worlds: Sequence[Voters]) -> Claim | None:
        """As Arbiter.claim, of what follows the last of `worlds`. Raises: ArbiterSilent; ArbiterLost where nobody has
        seen that one's name in another place."""
        place = next((self._places[one.world] for one in reversed(worlds) if one.world in self._places), None)
        try:
            if place is None:
                raise ArbiterSilent("this member has not seen it")
            text = place.claim(job, generation, None if claim is None else to_json(claim))
        except ArbiterSilent as error:
            if isinstance(error, ArbiterLost) and worlds[-1].world in self._places:
                raise
            self._silent_at = self._clock()
            raise ArbiterSilent(str(error)) from error
        self._silent_at = -math.inf
        return None if text is None else from_json(Claim, text)

    @property
    def is_silent(self) -> bool:
        """Whether it gave this member no answer of late."""
        return self._clock() - self._silent_at < 2 * self._timeout

    def has_given_way(self, world: str) -> bool:
        """Whether a side that has not the votes has given those that may have them the time to claim."""
        now = self._clock()
        if self._few_since is None or self._few_since[0] != world:
            self._few_since = (world, now)
        return now - self._few_since[1] > self._timeout


def silent_members(worlds: Sequence[Voters], side: Collection[str]) -> tuple[str, ...]:
    """Members of the worlds since the last settled one that are neither in the side nor proven dead."""
    everybody = dict.fromkeys(uid for voters in worlds for uid in voters.members)
    dead = {uid for voters in worlds for uid in voters.dead}
    return tuple(uid for uid in everybody if uid not in side and uid not in dead)
