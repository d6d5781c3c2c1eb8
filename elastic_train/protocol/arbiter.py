"""The arbiter: a place outside of the members that keeps the first decision claimed there, and so picks the side.

If a job has an arbiter, every decision on the successor of a world is claimed there. A side that has lost other members
may then go on by its claim alone, without their votes (laws.py). This needs members that have proven that they see the
same place, since a copied directory looks the same on every node: rank 0 writes a fresh name there as a world forms,
and in the first collective each member reports whether it sees that name.
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
    """The place does not answer, or cannot keep what it is given. The call may have taken effect all the same."""


class ArbiterLost(ArbiterSilent):
    """The place is lost with all its claims: no member can claim there any more, or learn what stood there."""


class Arbiter(Protocol):
    """Each call blocks for some seconds at most. Raises: ArbiterSilent."""

    def claim(self, job: str, generation: int, decision: str | None) -> str | None:
        """Claim `decision` for the successor of the world of `generation` if no decision is claimed yet; None only
        reads. Return the decision that stands: the first that was claimed."""

    def show(self, name: str) -> None:
        """Write a fresh name there, for other members to see."""

    def sees(self, name: str) -> bool:
        """Return whether a member has shown the name."""

    def tidy(self) -> None:
        """Delete what is not needed any more. No caller waits for it."""


class Folder(Protocol):
    """The file operations that claims need; the folder may be shared, and replies may be lost. Raises: OSError."""

    def create(self, name: str, text: str, *, is_durable: bool) -> None:
        """Create a file with all of its content at once. Raises: FileExistsError if the file exists. It may be created
        even if this raises: an NFS client that repeats a call may get EEXIST because of its own first call."""

    def read(self, name: str) -> str | None:
        """Return the text of a whole file; None if there is none."""

    def remove(self, name: str) -> None: ...

    def names(self) -> Sequence[str]:
        """Return the names of all its files."""

    def written_at(self, name: str) -> float:
        """Return the time when a file was written, in seconds of the folder's own clock."""


OUTDATED = 50
"""number of newer claims of its job that makes a claim void; twice as many are kept"""
OLD_SECONDS = 3600.0
"""age at which a shown name or a draft is deleted: by then the members have looked, and the claim was linked"""
MOST_REMOVED = 6
"""files deleted as a world forms; forming makes two or three"""


class Claims:
    """An Arbiter in a folder: one file for each job and generation.

    A member that gets no reply to its claim reads the file.

    Old files are deleted as worlds form. A claim with OUTDATED newer claims of its job is void, whether its file is
    still there or not: a member that asks for it gets the newest claim, and so learns that the job has gone on. A file
    is deleted only when twice as many newer claims stand, and from then on there are never fewer.

    Newer claims are counted after the file was read or made. So a member that was frozen for hours may find its file
    name free again, but it then sees the newer claims. The margin is for listings that miss a file that comes or goes
    meanwhile, or that are a minute old, as on NFS.
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
        """Return the file name of the newest claim if the claim of `generation` is void, else None."""
        newer = [one for one in claims_among(self._folder.names()).get(job, ()) if one > generation]
        return f"claim-{job}-{max(newer)}" if len(newer) >= OUTDATED else None

    def _put(self, name: str, text: str) -> str:
        """Create a claim's file and return the text that stands there afterwards."""
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
        with suppress(OSError):  # old files do no harm
            while len(self._shown) > 2:  # members of the world before may still have to look
                self._remove(self._shown.pop(0))
            if self._shown:
                self._remove_old(self._folder.written_at(self._shown[-1]))

    def _remove_old(self, now: float) -> None:
        """Delete up to MOST_REMOVED old files; `now` is of the folder's clock."""
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
        with suppress(OSError):  # an old file does no harm, and another member may have deleted it
            self._folder.remove(name)

    def sees(self, name: str) -> bool:
        try:
            return self._folder.read(f"seen-{name}") is not None
        except OSError as error:
            raise ArbiterSilent(str(error)) from error


def claims_among(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the generations of the claims of each job."""
    found: dict[str, list[int]] = {}
    for name in names:
        if match := re.fullmatch(r"claim-(.+)-(\d+)", name):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


@dataclass(frozen=True)
class Claim:
    """A claimed decision, with all that a member that reads it must know."""

    parent: str
    """uid of the world that it follows"""
    decision: str
    settled: str
    """uid of the last world that its writer knows to be settled"""


MOVED_SECONDS = 60.0
"""time in which all members that reach a new place have found it"""
KEPT_PLACES = 100
"""number of worlds for which this member remembers where it saw their names"""


class Arbitration:
    """One member's knowledge of the place for claims that it shares with the members of its worlds.

    Args:
        find_place: returns the present place. If that is not the place of before, no member can claim in the old one
            any more. But a claim may have been made there, which the new one does not know. So the successor of a world
            is claimed where the world's name was seen. And the name is shown in a place that existed before the world
            was decided, so that no claim of its successor is in an older one.

    A world in which this member has not reported whether it sees the place can be settled for no member, and does not
    count. If it has reported but has not learned the reports of the others, they may know more: then it takes both
    votes and claim. `show`, `sees` and `claim` block for some seconds at most.
    """

    def __init__(self, find_place: Callable[[], Arbiter] | None, timeout: float, clock: Callable[[], float]) -> None:
        self._find_place, self._timeout, self._clock = find_place, timeout, clock
        self._is_shared: dict[str, bool | None] = {}
        """by uid of a world: whether all its members see the place; None if this one does, and knows no more"""
        self._places: dict[str, Arbiter] = {}
        """by uid of a world: the place where this member has seen its name"""
        self._before: tuple[str, Arbiter] | None = None
        """uid of a world that ends, and the place that was found before its successor could be decided"""
        self._shown: dict[str, tuple[Arbiter, float]] = {}
        """by uid of a world: the place where this member, as rank 0, has written its name, and the time"""
        self._newest: tuple[Arbiter, float] | None = None
        """the place that was found last, and the time since when; -inf for the first place"""
        self._silent_at = -math.inf
        """time of the last call if the place did not answer it"""
        self._few_since: tuple[str, float] | None = None

    @property
    def has_place(self) -> bool:
        """Whether the job has a place for claims."""
        return self._find_place is not None

    def note_end(self, world: str) -> None:
        """Remember the present place: this member is about to take part in the decision on the successor of a world."""
        if self._find_place is not None and (self._before is None or self._before[0] != world):
            self._before = world, self._place_now(self._find_place)

    def show(self, world: str, *, is_decided: bool) -> None:
        """Write the name of a world that is about to form into the place, for its members to see. Rank 0 does this
        before the world's first collective. Blocks for some seconds at most.

        Args:
            is_decided: whether the world is decided already, so that claims of its successor may exist.
        """
        if self._find_place is not None:
            place = self._place_now(self._find_place)
            if is_decided and self._before is not None:
                place = self._before[1]
            self._shown[world] = place, self._clock()
            with suppress(ArbiterSilent):  # then no member sees the name
                place.show(world)
                place.tidy()

    def sees(self, world: str) -> bool:
        """Return whether this member sees a world's name, for its report in the first collective. Blocks as `show`."""
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
        """Note whether all members see the place; None if this member sees it and has not learned about the others."""
        self._is_shared[world] = is_shared

    def take_over(self, known: dict[str, bool | None]) -> None:
        """Take over what the message to a newcomer contains about earlier worlds."""
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
        """Return whether the place has moved and all members had the time to find the new one, but could not see this
        world's name there: this member, as rank 0, wrote it into an older place, or before all had found this one."""
        if self._find_place is None or world not in self._shown:
            return False
        (place, shown_at), now = self._shown[world], self._clock()
        newest = self._place_now(self._find_place)
        found_at = -math.inf if self._newest is None else self._newest[1]
        # The next world's name is shown after that time: so a place that some members cannot see ends only one world.
        is_early = shown_at - found_at <= MOVED_SECONDS and self._is_shared.get(world) is False
        return (place is not newest or is_early) and now - found_at > MOVED_SECONDS

    def _place_now(self, find_place: Callable[[], Arbiter]) -> Arbiter:
        place = find_place()
        if self._newest is None or self._newest[0] is not place:
            self._newest = place, -math.inf if self._newest is None else self._clock()
        return place

    def is_needed(self, worlds: Sequence[Voters]) -> bool:
        """Return whether other members might go on by a claim."""
        return self._find_place is not None and any(found is not False for found in self.known(worlds).values())

    def is_enough(self, worlds: Sequence[Voters]) -> bool:
        """Return whether a claim makes up for votes: all members of these worlds see the place."""
        found = self.known(worlds).values()
        return bool(found) and all(one is True for one in found)

    def ended_holders(self, worlds: Sequence[Voters], gone: Collection[str]) -> frozenset[str]:
        """Return all members that had the state after the first of these worlds if each of them is gone for sure, and
        the place can tell whether one of them went on before it died; else none."""
        holders = frozenset(worlds[0].members) - worlds[0].dead
        return holders if holders <= set(gone) and self.is_enough(worlds) else frozenset()

    def claim(self, job: str, generation: int, claim: Claim | None, worlds: Sequence[Voters]) -> Claim | None:
        """As Arbiter.claim, for the successor of the last of `worlds`. Raises: ArbiterSilent; ArbiterLost if the lost
        place is the one where the name of that world was seen."""
        place = next((self._places[one.world] for one in reversed(worlds) if one.world in self._places), None)
        if place is None:
            raise ArbiterSilent("this member has not seen it")
        try:
            text = place.claim(job, generation, None if claim is None else to_json(claim))
        except ArbiterSilent as error:
            if isinstance(error, ArbiterLost) and worlds[-1].world in self._places:
                raise
            self._silent_at = self._clock()
            raise ArbiterSilent(str(error)) from error
        self._silent_at = -math.inf
        return None if text is None else from_json(Claim, text)

    def is_lacking(self, world: str) -> bool:
        """Whether this member cannot claim the successor of `world`: the place gave it no answer lately, or it has not
        seen the place, as a spare of that world."""
        is_unseen = self._is_shared.get(world, False) is None and world not in self._places
        return is_unseen or self._clock() - self._silent_at < 2 * self._timeout

    def has_given_way(self, world: str) -> bool:
        """Return whether this side, which lacks votes, has waited long enough for a side with votes to claim first."""
        now = self._clock()
        if self._few_since is None or self._few_since[0] != world:
            self._few_since = (world, now)
        return now - self._few_since[1] > self._timeout


def silent_members(worlds: Sequence[Voters], side: Collection[str]) -> tuple[str, ...]:
    """Return the members of the worlds since the last settled one that are neither in the side nor proven dead."""
    everybody = dict.fromkeys(uid for voters in worlds for uid in voters.members)
    dead = {uid for voters in worlds for uid in voters.dead}
    return tuple(uid for uid in everybody if uid not in side and uid not in dead)
