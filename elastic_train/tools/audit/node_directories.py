"""The run directories of one job's nodes as one, where each node has its own: only together are they complete."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from elastic_train.errors import RunDirectoryError, cause_of
from elastic_train.observe.status import Status, read_status
from elastic_train.runlog.reader import Line, int_of, read_json
from elastic_train.storage.run_record import read_record
from elastic_train.tools.audit.history import History, require_run

RESULT_FILE = "result.json"
FOLDERS = ("events", "ledger")
"""in which each worker has files of its own name"""


@contextlib.contextmanager
def as_one_run(run_dirs: Sequence[Path]) -> Iterator[Path]:
    """Yield a directory that shows the files of all, until the block ends; a single one is yielded itself. Of files of
    the same name it shows the first; of result.json, that with most steps, and others of that step by other names.

    Raises: RunDirectoryError: one is no run or cannot be read, two are of different runs, or two have files of the same
        worker.
    """
    if len(run_dirs) == 1:
        yield run_dirs[0]
        return
    for run_dir in run_dirs:
        with _reading(run_dir):
            require_run(run_dir)
    runs = {run_dir: record.uid for run_dir in run_dirs if (record := read_record(run_dir)).uid}
    if len(set(runs.values())) > 1:
        raise RunDirectoryError(f"{' and '.join(map(str, runs))} are not all of one run: give those of one job's nodes")
    with tempfile.TemporaryDirectory(prefix="elastic-train-audit-") as name:
        folder = Path(name, run_dirs[0].resolve().name)  # the name that the page shows
        folder.mkdir()
        for run_dir in run_dirs:
            with _reading(run_dir):
                for path in sorted(run_dir.resolve().iterdir()):
                    _show(path, folder / path.name)
        yield folder


@contextlib.contextmanager
def _reading(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{run_dir} cannot be read: {cause_of(error)}") from error


def read_status_of(run_dirs: Sequence[Path], now: float) -> Status:
    """Read the status of the run in all directories, like `read_status`. A path in it is that of the file itself.

    Raises: RunDirectoryError, as `as_one_run` and `read_status`.
    """
    with as_one_run(run_dirs) as folder:
        status = read_status(folder, now)
        if len(run_dirs) == 1:
            return status
        snapshot, result = status.snapshot, status.result_path
        return replace(
            status,
            run_dir=run_dirs[0],
            snapshot=replace(snapshot, path=snapshot.path.resolve())
            if snapshot is not None and isinstance(snapshot.path, Path)
            else snapshot,
            result_path=None if result is None else result.resolve(),
            warnings=tuple(text.replace(str(folder), str(run_dirs[0])) for text in status.warnings),
            notes=(f"told together with {', '.join(map(str, run_dirs[1:]))}", *status.notes),
        )


def other_results(history: History) -> list[Line]:
    """The further result.json files of the nodes, of the same step: each node writes the same."""
    names = (name for name in history.names if name.removesuffix(f"-{RESULT_FILE}").isdigit())  # by `_show`
    found = [read_json(history.run_dir / name) or {} for name in names]
    return [one for one in found if one.get("step") == dict(history.result or {}).get("step")]


def _step_of(path: Path) -> int:
    return int_of(read_json(path) or {}, "step") or 0


def _show(path: Path, place: Path) -> None:
    if not path.is_dir():
        if path.name == RESULT_FILE and place.is_symlink():
            if _step_of(path) > _step_of(place):
                place.unlink()
            elif _step_of(path) == _step_of(place):
                place = place.with_name(f"{len(list(place.parent.iterdir()))}-{RESULT_FILE}")
        if not place.is_symlink():
            place.symlink_to(path)
        return
    place.mkdir(exist_ok=True)
    for child in path.iterdir():
        shown = place / child.name
        if not shown.is_symlink():
            shown.symlink_to(child)
        elif path.name in FOLDERS:
            raise RunDirectoryError(
                f"{child} and {shown.resolve()} tell of the same worker: give each run directory once"
            )
