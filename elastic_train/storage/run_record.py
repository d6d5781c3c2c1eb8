"""Which run a run directory belongs to, and which of several runs is continued.

A run is named by a random uid. `run.json` holds it, and those of the runs that `--fresh` has put in its place: their
snapshots may turn up again with a node that was away.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_train.errors import RunsMixed
from elastic_train.runlog.reader import read_json, value_of
from elastic_train.storage.offers import Offer

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    uid: str
    """"" where no run has begun yet"""
    superseded: tuple[str, ...] = ()
    """uids of earlier runs, which are not to be continued"""
    is_fresh: bool = False
    """whether --fresh has just emptied the directory: no run that anybody sees is to be continued"""

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def beside(self, uid: str, superseded: Sequence[str]) -> RunRecord:
        """With what the owner's record of a bucket says: this directory's disk may have been away since."""
        known = {*self.superseded, *superseded}
        if self.is_fresh or (self.uid and self.uid not in known):
            return replace(self, superseded=tuple(sorted(known)))
        return replace(self, uid="" if uid in known else uid, superseded=tuple(sorted(known)))


NO_RUN = RunRecord("")


def read_record(directory: Path) -> RunRecord:
    """`NO_RUN` where the directory has none that can be read."""
    try:
        record: RunRecord = value_of(RunRecord, read_json(directory / RUN_FILE) or {})
    except (KeyError, TypeError):
        return NO_RUN
    return record


@dataclass(frozen=True)
class Choice:
    """Which run is continued."""

    uid: str | None
    """None: none of those that can be seen"""
    superseded: tuple[str, ...]
    """all that are known not to be continued"""


def run_to_continue(records: Sequence[RunRecord], offers: Sequence[Offer]) -> Choice:
    """The run to continue, of those whose snapshots can be seen: the only one, or that of the run directories.

    Args:
        records: of all members' run directories.
        offers: all members'.

    Raises:
        RunsMixed: snapshots of several runs can be seen, and nothing says which is meant.
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
            f"{other.host} {other.path} of step {other.step}: move those of one of the two out of sight and "
            "start again, give another --run-dir, or --fresh to begin anew"
        )
    return Choice(candidates[0] if candidates else None, tuple(sorted(superseded)))
