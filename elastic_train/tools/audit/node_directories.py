"""The run directories of one job's nodes, where each had its own, as one: only together do they tell the whole run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_train.errors import RunDirectoryError
from elastic_train.storage.run_record import read_record

FOLDERS = ("events", "ledger")
"""in which each worker has files of its own name"""


@contextlib.contextmanager
def as_one_run(run_dirs: Sequence[Path]) -> Iterator[Path]:
    """A directory that shows the files of all of them, for as long as the block lasts; of one, itself. What each has
    for itself, such as result.json, is that of the first one that has it.

    Raises: RunDirectoryError where one is no run, two are of different runs, or two tell of the same worker.
    """
    if len(run_dirs) == 1:
        yield run_dirs[0]
        return
    runs = {run_dir: record.uid for run_dir in run_dirs if (record := read_record(run_dir)).uid}
    if len(set(runs.values())) > 1:
        raise RunDirectoryError(f"{' and '.join(map(str, runs))} are not all of one run: give those of one job's nodes")
    with tempfile.TemporaryDirectory(prefix="elastic-train-audit-") as name:
        folder = Path(name)
        for run_dir in run_dirs:
            if not (run_dir / "events").is_dir():
                raise RunDirectoryError(f"{run_dir} holds no run: it has no events/")
            for path in sorted(run_dir.resolve().iterdir()):
                _show(path, folder / path.name)
        yield folder


def _show(path: Path, place: Path) -> None:
    if not path.is_dir():
        if not place.exists():
            place.symlink_to(path)
        return
    place.mkdir(exist_ok=True)
    for child in path.iterdir():
        shown = place / child.name
        if not shown.exists():
            shown.symlink_to(child)
        elif path.name in FOLDERS:
            raise RunDirectoryError(
                f"{child} and {shown.resolve()} tell of the same worker: give each run directory once"
            )
