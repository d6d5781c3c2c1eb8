"""Which snapshots stay: the newest, one per interval of steps, and the best by a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic_train.branches import is_on
from elastic_train.storage.snapshot import SnapshotInfo

Moment = tuple[int, int]
"""(generation, step)"""


@dataclass(frozen=True)
class Retention:
    """The rules for which snapshots of a run stay. They count moments: several hosts may have written the same one."""

    newest: int
    every: int | None = None
    """The first snapshot of each interval of this many steps stays, except of the interval from step 0."""
    best: int = 0
    """This many with the best metric stay. Of one step only the snapshot of the largest generation counts."""

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise ValueError(f"keep is {self.newest}: the newest snapshot is never removed")

    def pinned(
        self, of_run: Iterable[SnapshotInfo], is_whole: Callable[[SnapshotInfo], bool] = lambda _info: True
    ) -> frozenset[Moment]:
        """The moments that stay at any age. The result does not depend on which other snapshots are deleted later.

        Args:
            is_whole: called only for candidates for the best, so that a damaged one displaces no whole one.
        """
        infos = list(of_run)
        first: dict[int, Moment] = {}
        if self.every is not None:
            for info in sorted(infos, key=lambda info: (-info.step, info.generation)):  # the last one assigned stays
                first[info.step // self.every] = info.age_key
            first.pop(0, None)
        last: dict[int, SnapshotInfo] = {}  # a step that was repeated after a restart takes only one place
        if self.best:
            whole = (info for info in best_first(infos) if is_whole(info))
            last = {info.step: info for info in sorted(whole, key=lambda info: info.generation)}
        best = best_first(last.values())[: self.best]
        return frozenset(first.values()) | frozenset(info.age_key for info in best)

    def expired(
        self,
        of_run: Sequence[SnapshotInfo],
        removable: Sequence[SnapshotInfo],
        is_whole: Callable[[SnapshotInfo], bool] = lambda _info: True,
    ) -> list[SnapshotInfo]:
        """The `removable` snapshots that are neither pinned nor among the newest moments with a whole snapshot. What
        was trained further than the newest one, and without it, stays: the run may yet go on from there."""
        moments = sorted({info.age_key for info in of_run}, reverse=True)
        if len(moments) <= self.newest or all(info.age_key >= moments[self.newest - 1] for info in removable):
            return []  # without reading any
        pinned, newest = self.pinned(of_run, is_whole), max(of_run, key=lambda info: info.age_key)
        line = newest.restarts
        removable = [one for one in removable if one.step <= newest.step or is_on(one.restarts, one.step, line)]
        num_kept = 0
        for moment in moments:
            num_kept += any(is_whole(info) for info in of_run if info.age_key == moment)
            if num_kept == self.newest:
                return [info for info in removable if info.age_key < moment and info.age_key not in pinned]
        return []


def best_first(infos: Iterable[SnapshotInfo]) -> list[SnapshotInfo]:
    """The snapshots that have a metric, the largest first; of equal ones the earliest first."""
    rated = [(info.metric, info) for info in infos if info.metric is not None]
    return [info for _, info in sorted(rated, key=lambda pair: (-pair[0], pair[1].step, -pair[1].generation))]
