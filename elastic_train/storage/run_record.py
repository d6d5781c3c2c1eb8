"""The identity of runs: the run of a run directory, the run that a job continues, and the snapshot to continue from.

A run has a random uid. `run.json` holds it, and the uids of the runs that it replaced by `--fresh`: their snapshots may
turn up again with a node that was away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from elastic_train.branches import Branches, describe, is_on
from elastic_train.errors import BranchesMixed, RunsMixed
from elastic_train.runlog.reader import read_json
from elastic_train.storage.snapshot import STATE_FILE, SnapshotInfo
from elastic_train.world import to_json, value_or_none

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    uid: str
    """"" if no run has begun yet."""
    superseded: tuple[str, ...] = ()
    """The uids of earlier runs, which must not be continued."""
    is_fresh: bool = False
    """Whether --fresh has just emptied the directory: then no run that any member sees is continued."""

    def to_json(self) -> bytes:
        return to_json(self).encode()

    def beside(self, uid: str, superseded: Sequence[str]) -> RunRecord:
        """This record, merged with the owner's record of a bucket. That may be newer if this disk was not mounted."""
        known = {*self.superseded, *superseded}
        if self.is_fresh or (self.uid and self.uid not in known):
            return replace(self, superseded=tuple(sorted(known)))
        return replace(self, uid="" if uid in known else uid, superseded=tuple(sorted(known)))


NO_RUN = RunRecord("")


def read_record(directory: Path) -> RunRecord:
    """Read the record of a run directory; `NO_RUN` if it is missing or cannot be read."""
    return value_or_none(RunRecord, read_json(directory / RUN_FILE)) or NO_RUN


def run_to_continue(records: Sequence[RunRecord], offers: Sequence[Offer]) -> RunRecord:
    """Choose the run to continue among those with visible snapshots: the only one, or the one of the run directories.
    The result has no uid for a new run, and all runs known not to be continued.

    Args:
        records: those of all members' run directories.
        offers: those of all members.

    Raises:
        RunsMixed: snapshots of several runs are visible, and nothing tells which is meant.
    """
    superseded = {uid for record in records for uid in record.superseded}
    if any(record.is_fresh for record in records):
        superseded |= {offer.run for offer in offers}
    by_age = sorted(offers, key=lambda offer: offer.age)
    newest = {offer.run: offer for offer in by_age if offer.run not in superseded}
    known = {record.uid for record in records} & newest.keys()
    candidates = sorted(known or newest)
    if len(candidates) > 1:
        one, other = (newest[uid] for uid in candidates[:2])
        raise RunsMixed(
            f"there are snapshots of two runs: host {one.host} has {one.path} of step {one.step}, and host "
            f"{other.host} {other.path} of step {other.step}: move the snapshots of one run to another folder and "
            "start again, give another --run-dir, or --fresh to begin anew"
        )
    return RunRecord(candidates[0] if candidates else "", tuple(sorted(superseded)))


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
    """Size and checksum of its state file. Two offers of equal age and file are one snapshot, or copies of it."""

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
    """The newest offer by (generation, step). If nodes restarted and trained independently of each other, their
    generations cannot be compared; then of the ends of these lines the one with the most steps."""
    heads = {offer.restarts: offer for offer in sorted(offers, key=lambda one: one.age)}
    ends = [
        head
        for line, head in heads.items()
        if not any(line != other and is_on(line, head.step, other) for other in heads)
    ]
    return max(ends or heads.values(), key=lambda head: (head.step, *head.age), default=None)


def require_one_line(offers: Sequence[Offer]) -> None:
    """Raises: BranchesMixed: an offer of a member is not on the branch that leads to the newest one of its run."""
    newest = max(offers, key=lambda one: one.age, default=None)
    for one in offers:
        if newest is not None and one.run == newest.run and not is_on(one.branches, one.step, newest.branches):
            raise BranchesMixed(
                f"host {newest.host} has a snapshot of step {newest.step} on {describe(newest.branches)}, and host "
                f"{one.host} one of step {one.step} on {describe(one.branches)} of the same run: move the snapshots "
                f"of one branch to another folder, e.g. {one.path}, and start again"
            )


def parted(offers: Iterable[Snapshot], restarts: Branches) -> Snapshot | None:
    """The offer of the most steps that does not lead to a state with these restarts: it was trained independently of
    that state. None if all lead there."""
    others = [one for one in offers if not is_on(one.restarts, one.step, restarts)]
    return max(others, key=lambda one: one.step, default=None)
