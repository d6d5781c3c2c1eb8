"""What the members tell each other of the snapshots that they can see, and which of all is the newest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic_train.branches import Branches, describe, is_on
from elastic_train.errors import BranchesMixed
from elastic_train.storage.snapshot import STATE_FILE, SnapshotInfo


@dataclass(frozen=True)
class Offer:
    """One snapshot that a member can see."""

    run: str
    age: tuple[int, int]
    """(generation, step)"""
    host: str
    path: str
    restarts: Branches = ()
    branches: Branches = ()
    file: str = ""
    """what its state's file is: two offers of one age and file are one snapshot, or copies of it"""

    @property
    def step(self) -> int:
        return self.age[1]

    @staticmethod
    def of(info: SnapshotInfo) -> Offer:
        file = str(sorted(vars(info.files[STATE_FILE]).items()))
        return Offer(info.run_uid, info.age_key, info.host, str(info.path), info.restarts, info.branches, file)

    def is_same(self, other: Offer) -> bool:
        return (self.age, self.file) == (other.age, other.file)


Snapshot = TypeVar("Snapshot", Offer, SnapshotInfo)


def newest_offer(offers: Sequence[Offer]) -> Offer | None:
    """The newest by (generation, step). Of several that were trained without each other, as they were begun again on
    different nodes, generations say nothing: the one that has come furthest."""
    heads = {offer.restarts: offer for offer in sorted(offers, key=lambda one: one.age)}
    ends = [
        head
        for line, head in heads.items()
        if not any(line != other and is_on(line, head.step, other) for other in heads)
    ]
    return max(ends or heads.values(), key=lambda head: (head.step, *head.age), default=None)


def require_one_line(offers: Sequence[Offer]) -> None:
    """Raises BranchesMixed where one of all members' offers is not on the way to the newest of its run."""
    newest = max(offers, key=lambda one: one.age, default=None)
    for one in offers:
        if newest is not None and one.run == newest.run and not is_on(one.branches, one.step, newest.branches):
            raise BranchesMixed(
                f"host {newest.host} has a snapshot of step {newest.step} on {describe(newest.branches)}, and host "
                f"{one.host} one of step {one.step} on {describe(one.branches)} of the same run: move those of one of "
                f"the two out of sight, e.g. {one.path}, and start again"
            )


def parted(offers: Iterable[Snapshot], restarts: Branches) -> Snapshot | None:
    """The furthest of those that are not on the way to a state with such restarts: trained without what it was begun
    again from."""
    others = [one for one in offers if not is_on(one.restarts, one.step, restarts)]
    return max(others, key=lambda one: one.step, default=None)
