"""Snapshots of the training state: bytes to disk and back, whole or absent.

A snapshot is a directory `step-000000000120-gen-0003-<host>` with two files. `state.pt` is a state dict of tensors and
plain values, all on the CPU, as `torch.save` writes it. `manifest.json` holds the position in training, and the size
and SHA-256 of `state.pt`. The directory is written under a name that begins with `.tmp-`, flushed to the disk and
renamed last. So a kill, a full disk or a power cut at any moment leaves the whole snapshot or none. Size and checksum
reveal later damage; the reader then takes the next older snapshot.

The newest snapshot is the largest by (generation, step). A later generation supersedes an earlier one even at a lower
step: it has fenced that one off, and steps that only the earlier generation took are lost.

The cost for a training step: `SnapshotWriter.save_in_background` copies the tensors into host buffers, allocated once,
and returns. One background thread serialises, hashes, fsyncs, renames and prunes. It costs a share of a core and of
memory bandwidth. The training thread waits at most milliseconds at a time for the GIL: `hashlib` and writes release it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeGuard

from elastic_train.branches import Branches, branches_of
from elastic_train.errors import SnapshotDamaged, SnapshotError, SnapshotUnread, cause_of, first_line
from elastic_train.runlog.reader import parse
from elastic_train.storage.signature import why_not_signed
from elastic_train.storage.state_bytes import SnapshotFile, read_state
from elastic_train.system import twice
from elastic_train.version import VERSION

if TYPE_CHECKING:  # torch takes seconds to import, and listing snapshots does not need it
    import torch

    from elastic_train.storage.bucket import Bucket, BucketSnapshot

FORMAT_VERSION = 2
STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"
_LAST_SECOND = 2.5e11
"""Unix time in the year 9892. Later times cannot be shown as a date."""
SNAPSHOT_NAME = re.compile(r"step-\d{12,}-gen-\d{4,}-(?P<host>.+)")


SnapshotFolder: TypeAlias = "Path | Bucket"
SnapshotPlace: TypeAlias = "Path | BucketSnapshot"


def name_of(step: int, generation: int, host: str) -> str:
    """The name of a snapshot in its folder or bucket."""
    return f"step-{step:012d}-gen-{generation:04d}-{host_in_name(host)}"


def host_in_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", host)


@dataclass(frozen=True)
class SnapshotInfo:
    """One snapshot as its manifest describes it. The size of its state is right; its checksum is not verified yet."""

    path: SnapshotPlace
    step: int
    epoch: int
    samples_done: int
    generation: int
    run_uid: str
    host: str
    """As in the manifest. The directory's name contains it with unusual characters replaced."""
    time: float
    """Unix seconds."""
    world_size: int
    task: Mapping[str, Any]
    """The settings that a run must share to continue from here."""
    files: Mapping[str, SnapshotFile]
    branches: Branches = ()
    """The branches that its state has gone through, if the run was split."""
    restarts: Branches = ()
    """The positions at which the run was started again from a snapshot."""
    metric: float | None = None
    """The metric of its model, if it was evaluated at this step; larger is better."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def age_key(self) -> tuple[int, int]:
        """(generation, step): the larger is the newer."""
        return (self.generation, self.step)


@dataclass(frozen=True)
class SnapshotResult:
    """One snapshot written."""

    path: SnapshotPlace
    step: int
    bytes: int
    """Size of the state file."""
    stall_seconds: float
    """How long the caller was blocked."""
    total_seconds: float
    """From the call until the snapshot was durable."""
    warnings: tuple[str, ...] = ()
    """Problems that did not prevent the snapshot, such as an old one that could not be deleted."""


def read_info(path: SnapshotPlace, key: bytes | None = None) -> SnapshotInfo:
    """Read the manifest of one snapshot and compare file sizes. Cheap: the state is not read.

    Raises:
        SnapshotDamaged: the manifest is missing, torn, of an unknown version, or not signed with `key`, if one is
            given; or a file has another size.
    """
    if not isinstance(path, Path):
        return path.read_info(key)
    info = read_manifest(path, key)
    for name, promised in info.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise SnapshotDamaged(f"snapshot {path}: {name} cannot be read: {cause_of(error)}") from error
        if size != promised.bytes:
            raise SnapshotDamaged(f"snapshot {path}: {name} has {size} bytes, its manifest says {promised.bytes}")
    return info


def read_manifest(path: SnapshotPlace, key: bytes | None = None) -> SnapshotInfo:
    return info_of(manifest_of(path), path, key)


def manifest_of(path: SnapshotPlace) -> dict[str, Any]:
    """The whole manifest, with its signature, which is valid at any place. Raises: SnapshotDamaged."""
    if not isinstance(path, Path):
        return path.read_manifest()
    try:
        data = (path / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} cannot be read: {cause_of(error)}") from error
    return parse_manifest(data, path, FORMAT_VERSION)


def parse_manifest(data: bytes, path: SnapshotPlace, wanted_version: int) -> dict[str, Any]:
    """Raises: SnapshotDamaged: `data` is no manifest of that version."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} is not JSON: {first_line(error)}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != wanted_version:
        raise SnapshotDamaged(
            f"snapshot {path}: unknown format_version {version!r}; elastic_train {VERSION} reads {wanted_version}"
        )
    return dict(manifest)


def info_of(manifest: dict[str, Any], path: SnapshotPlace, key: bytes | None) -> SnapshotInfo:
    """Raises: SnapshotDamaged: the manifest is incomplete, or not signed with `key`."""
    try:
        why = None if key is None else why_not_signed(manifest, key)
        if why is not None:
            raise SnapshotDamaged(f"snapshot {path}: {why}")
        info = SnapshotInfo(
            path=path,
            step=_whole_number(manifest["step"]),
            epoch=_whole_number(manifest["epoch"]),
            samples_done=_whole_number(manifest["samples_done"]),
            generation=_whole_number(manifest["generation"]),
            run_uid=str(manifest["run_uid"]),
            host=str(manifest["host"]),
            time=_moment(manifest["time"]),
            world_size=_whole_number(manifest["world_size"]),
            task=dict(manifest["task"]),
            files={
                _plain_file_name(name): SnapshotFile(_whole_number(file["bytes"]), str(file["sha256"]))
                for name, file in manifest["files"].items()
            },
            branches=branches_of(manifest.get("branches", ())),
            restarts=branches_of(manifest.get("restarts", ())),
            metric=_finite_number(manifest.get("metric")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} is wrong or incomplete: {error!r}") from error
    if STATE_FILE not in info.files:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} does not name {STATE_FILE}")
    return info


def _whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _moment(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < _LAST_SECOND:
        raise ValueError(f"{value!r} is no time")
    return seconds


def _finite_number(value: Any) -> float | None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return None if value is None else float(value)


def _plain_file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in the snapshot")
    return name


def find_snapshots(
    directory: SnapshotFolder, *, warn: Callable[[str], None], key: bytes | None = None
) -> list[SnapshotInfo]:
    """Return the snapshots in a directory, newest first, after the cheap check of `read_info`.

    Leaves out each snapshot that is damaged or not signed with `key`, and passes one line about it to `warn`. Returns
    an empty list for a missing directory.

    Raises:
        SnapshotError: the directory cannot be listed.
    """
    if not isinstance(directory, Path):
        return newest_first(directory.find(warn=warn, key=key))
    found = []
    for path in twice(lambda: snapshot_paths(directory), SnapshotError):
        try:
            found.append(twice(partial(read_info, path, key), SnapshotUnread))
        except SnapshotDamaged as error:
            if is_there(path):  # else its writer has pruned it meanwhile
                warn(error.warning)
    return newest_first(found)


def require_same_run(manifest: bytes, path: SnapshotPlace, run_uid: str) -> None:
    """Raises: SnapshotError: the existing `manifest` at the place of a new snapshot belongs to another run. Its version
    and signature do not matter."""
    if (parse(manifest) or {}).get("run_uid", run_uid) != run_uid:
        raise SnapshotError(
            f"snapshot {path} cannot be written: another run has one of that name there; choose another --snapshot-dir"
        )


def newest_first(found: list[SnapshotInfo]) -> list[SnapshotInfo]:
    return sorted(found, key=lambda info: (info.age_key, info.time, info.name), reverse=True)


def snapshot_paths(directory: Path) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if SNAPSHOT_NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnapshotError(
            f"snapshots in {directory} cannot be listed: {cause_of(error)}; choose another --snapshot-dir"
        ) from error


def _free_name(folder: Path, name: str) -> Path:
    """The path `name` in the folder; with a number appended if it exists already."""
    names = (folder / (f"{name}.{number}" if number else name) for number in itertools.count())
    return next(path for path in names if not path.exists())


def set_aside(directory: Path, folder: str, which: Callable[[SnapshotInfo], bool]) -> list[str]:
    """Move the snapshots that `which` selects into a subfolder, where no search finds them. Return their names.

    Raises:
        SnapshotError: a snapshot cannot be moved.
    """
    moved = []
    try:
        for info in find_snapshots(directory, warn=lambda _damaged: None):
            if which(info):
                (directory / folder).mkdir(exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # another worker on this directory has moved it
                    os.rename(directory / info.name, _free_name(directory / folder, info.name))
                    moved.append(info.name)
    except OSError as error:
        raise SnapshotError(f"snapshots in {directory} cannot be moved to {folder}: {cause_of(error)}") from error
    return moved


def load_state(info: SnapshotInfo, map_location: str | torch.device | None = "cpu") -> dict[str, Any]:
    """Verify the state file of a snapshot and load it, its tensors on `map_location`. It is in memory only once.

    Raises:
        SnapshotDamaged: the file does not match the manifest, or cannot be read, twice in a row.
        SnapshotError: as `read_state`.
    """
    return twice(partial(_load_once, info, map_location), SnapshotUnread)


def _load_once(info: SnapshotInfo, map_location: str | torch.device | None) -> dict[str, Any]:
    with open_verified(info) as file:
        return read_state(file, map_location, source=f"snapshot {info.path}")


def verify(info: SnapshotInfo) -> None:
    """Verify the state file as `load_state` does, without loading it: takes hardly any memory.

    Raises:
        SnapshotDamaged: as `load_state`.
    """
    with open_verified(info):
        pass


@contextlib.contextmanager
def open_verified(info: SnapshotInfo) -> Iterator[IO[bytes]]:
    """Verify the state file and yield it, open at its start. It stays the verified one even if its name is replaced."""
    if not isinstance(info.path, Path):
        with info.path.open_verified(info.files[STATE_FILE]) as fetched:
            yield fetched
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(info.path / STATE_FILE, "rb"))
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            file.seek(0)
        except OSError as error:
            raise SnapshotDamaged(f"snapshot {info.path}: {STATE_FILE} cannot be read: {cause_of(error)}") from error
        _compare(info, SnapshotFile(size, digest))
        yield file


def _compare(info: SnapshotInfo, found: SnapshotFile) -> None:
    promised = info.files[STATE_FILE]
    if found != promised:
        raise SnapshotDamaged(
            f"snapshot {info.path}: {STATE_FILE} is damaged: {found.bytes} bytes with sha256 {found.sha256[:12]}…, "
            f"its manifest says {promised.bytes} with {promised.sha256[:12]}…"
        )


def first_whole(
    infos: Iterable[SnapshotInfo], warn: Callable[[str], None], map_location: str | torch.device | None = "cpu"
) -> tuple[SnapshotInfo, dict[str, Any]] | None:
    """Load the first of some snapshots whose state file verifies. Warns of each damaged one and tries the next.

    Raises:
        SnapshotError: as `load_state`.
    """
    for info in infos:
        try:
            return info, load_state(info, map_location)
        except SnapshotUnread as error:
            warn(error.warning)
    return None


def is_there(path: SnapshotPlace) -> bool:
    """Whether a snapshot that could not be read still exists, or was pruned meanwhile. Below a URL one request."""
    if not isinstance(path, Path):
        return MANIFEST_FILE in path.files()
    with contextlib.suppress(OSError):
        return path.exists()
    return True  # the disk does not tell


def is_snapshot(path: SnapshotPlace | SnapshotFolder) -> TypeGuard[SnapshotPlace]:
    """Whether a path is one snapshot, possibly a damaged one, and not a folder of snapshots."""
    if not isinstance(path, Path):
        return hasattr(path, "open_verified")  # not isinstance: bucket.py imports this module
    return (path / MANIFEST_FILE).exists() or (path / STATE_FILE).exists()
