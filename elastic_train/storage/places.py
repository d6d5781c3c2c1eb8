"""Where snapshots are, as a person writes it: a folder, a run directory, one snapshot, or the URL of any of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from elastic_train.errors import SnapshotDamaged, SnapshotDenied, SnapshotError, SnapshotUnread, cause_of
from elastic_train.runlog.reader import Line, dict_of, int_of, newest_first, parse, time_of
from elastic_train.storage.bucket import Bucket, BucketSnapshot
from elastic_train.storage.bucket_owner import BucketOwner
from elastic_train.storage.local_folder import LocalFolder
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.snapshot import (
    MANIFEST_FILE,
    SNAPSHOT_NAME,
    SnapshotFolder,
    SnapshotInfo,
    SnapshotPlace,
    find_snapshots,
    info_of,
    is_snapshot,
    is_there,
    name_of,
    open_verified,
    read_info,
    read_manifest,
    verify,
)
from elastic_train.storage.store_urls import StoreUrl, is_url, parse_url
from elastic_train.world import host_name

HEAD_LINES = 4
"""of a file of events, among which a process has its start"""


class OwnedBucket(Bucket):
    """The snapshots of a job, below a URL that it owns."""

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(ObjectStore(url))
        self.owner = BucketOwner(self.store, host_name())

    def note_visible(self, manifest: Mapping[str, Any]) -> Callable[[], None]:
        return self.owner.note_snapshot(str(manifest["run_uid"]), int(manifest["generation"]), int(manifest["step"]))


@functools.lru_cache
def bucket_at(url: str) -> OwnedBucket:
    """One for the life of the process: connections are kept, and what is known of its owner.

    Raises:
        UsageError: it is no URL that works here, or a package is missing.
    """
    return OwnedBucket(parse_url(url, "--snapshot-dir"))


def place_at(text: str | os.PathLike[str]) -> SnapshotPlace | SnapshotFolder:
    """What a path or a URL names: one snapshot, or a place of many. Raises: UsageError: it is no URL that works."""
    if not is_url(text):
        return Path(text)
    url = parse_url(str(text))
    above, _, name = url.place.rpartition("/")
    if above and SNAPSHOT_NAME.fullmatch(name):
        return Bucket(ObjectStore(StoreUrl(url.scheme, above))).snapshot(name)
    return Bucket(ObjectStore(url))


def copy_snapshot(
    source: str, target: str, *, warn: Callable[[str], None], key: bytes | None = None
) -> tuple[SnapshotInfo, str]:
    """Copy a snapshot, or the newest whole one of a place of many, to a folder, a URL, or where a start looks for those
    of a run directory; there it is whole or absent. One that is there stays; a damaged copy of it is replaced, and
    `warn` told. With a key, one that it has signed. Returns it, and where it is now.

    Raises:
        SnapshotError: there is none, another one is in its place, or it cannot be written. UsageError: as `place_at`.
    """
    folder = _target_at(target)
    with _open_whole(place_at(source), warn, key) as (info, manifest, file):
        manifest.pop("parts", None)
        name = name_of(info.step, info.generation, info.host)  # its folder may be called anything

        def fill(into: IO[bytes]) -> None:
            shutil.copyfileobj(file, into)

        if isinstance(folder, Path):
            path = folder / name
            if not path.exists() or not _is_whole_copy(path, info, key, warn):
                try:
                    LocalFolder(folder).write(name, fill, manifest)
                except OSError as error:
                    raise SnapshotError(f"snapshot {path} cannot be written: {cause_of(error)}") from error
        else:
            place = folder.snapshot(name)
            if MANIFEST_FILE in place.files() and not _is_whole_copy(place, info, key, warn):
                folder.delete(place)
            folder.write(name, fill, manifest, key=key)
            _require_left(folder, place, key)
    return info, f"{folder}/{name}"


def _target_at(text: str) -> SnapshotFolder:
    """What a copy is to lie in. Raises: as `copy_snapshot`."""
    place = place_at(text)
    if not isinstance(place, Path | Bucket) or is_snapshot(place):
        raise SnapshotError(f"{text} names one snapshot: name what it is to lie in")
    if not isinstance(place, Path) or not (place / "events").is_dir():
        return place
    found = snapshots_in(place)
    return folder_by({}, place) if found == place else found  # it has none yet


def _require_left(folder: Bucket, place: BucketSnapshot, key: bytes | None) -> None:
    """A job that trains there takes parts of an earlier generation, while they have no manifest, for a killed writer's.
    Raises: SnapshotError: it has deleted some; then the rest is deleted, too. SnapshotDenied: nobody can tell."""
    try:
        place.read_info(key)
    except SnapshotDenied as error:
        raise SnapshotDenied(f"snapshot {place} is written, and could not be looked at: {error}") from error
    except SnapshotDamaged as error:
        folder.delete(place)
        raise SnapshotError(f"{error}; the job that trains there has deleted it: copy it once more") from error


def _is_whole_copy(place: SnapshotPlace, info: SnapshotInfo, key: bytes | None, warn: Callable[[str], None]) -> bool:
    """Whether what is in a place is this snapshot, to the last byte; False where it was, and is damaged.

    Raises:
        SnapshotError: it is another one, or may be: who copies removes nothing that is only there.
    """
    try:
        there = read_manifest(place, key) if isinstance(place, Path) else info_of(place.read_manifest(), place, key)
    except SnapshotDamaged as error:
        raise SnapshotError(f"{error}: move it out of the way first") from error
    if (there.run_uid, there.files) != (info.run_uid, info.files):
        raise SnapshotError(f"snapshot {place} is there already, and is another one: copy to another folder or URL")
    try:
        verify(read_info(place, key))
    except SnapshotDamaged as error:
        warn(f"replaced: {error}")
        return False
    return True


@contextlib.contextmanager
def _open_whole(
    place: SnapshotPlace | SnapshotFolder, warn: Callable[[str], None], key: bytes | None
) -> Iterator[tuple[SnapshotInfo, dict[str, Any], IO[bytes]]]:
    """A snapshot, or the newest whole one of a place of many, with its manifest and its state, which is read once."""
    is_one = is_snapshot(place)
    infos = [read_info(place, key)] if is_snapshot(place) else find_snapshots(snapshots_in(place), warn=warn, key=key)
    with contextlib.ExitStack() as stack:
        for info in infos:
            try:
                file = stack.enter_context(open_verified(info))
                found = info, _manifest_of(info), file
            except SnapshotUnread as error:
                if is_one:
                    raise
                if is_there(info.path):  # else it was pruned meanwhile
                    warn(error.warning)
            else:
                yield found
                return
    raise SnapshotError(f"no whole snapshot in {snapshots_in(place)}")


def _manifest_of(info: SnapshotInfo) -> dict[str, Any]:
    """All that it says, with its signature, which holds wherever the snapshot lies. Raises: SnapshotDamaged."""
    if not isinstance(info.path, Path):
        return info.path.read_manifest()
    try:
        return dict(json.loads((info.path / MANIFEST_FILE).read_bytes()))
    except OSError as error:
        raise SnapshotDamaged(f"snapshot {info.path}: {MANIFEST_FILE} cannot be read: {cause_of(error)}") from error


def snapshots_in(path: SnapshotPlace | SnapshotFolder) -> SnapshotFolder:
    """The folder of snapshots that a path, which is no snapshot, names: itself, or that of a run directory, which may
    be elsewhere (--snapshot-dir).

    Raises:
        SnapshotError: there is no such folder, or the run has its snapshots at a URL.
    """
    if not isinstance(path, Path):
        return cast(Bucket, path)
    if not path.is_dir():
        raise SnapshotError(f"{path} is no directory; give a run directory or its snapshots/")
    try:
        config = _newest_config(path)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {cause_of(error)}") from error
    if is_url(given := config.get("snapshot_dir")):
        raise SnapshotError(f"the snapshots of {path} are at {given} (--snapshot-dir): give that")
    folder = folder_by(config, path)
    return folder if given is not None or folder.is_dir() else path


def folder_by(config: Line, run_dir: Path) -> Path:
    """Where the snapshots of a run are by its flags; one that is not there, for a URL."""
    given = config.get("snapshot_dir")
    return Path(given) if isinstance(given, str) else run_dir / "snapshots"


def _newest_config(run_dir: Path) -> Line:
    """The flags with which the run was last trained; none where there is no run."""
    files = list((run_dir / "events").glob("*.jsonl"))
    trained = [path for path in files if any(int_of(line, "generation") is not None for line in newest_first(path))]
    starts = [line for path in trained or files for line in _head(path) if line.get("event") == "start"]
    return dict_of(max(starts, key=time_of, default={}), "config")


def _head(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for raw in itertools.islice(file, HEAD_LINES):
            if (line := parse(raw)) is not None:
                yield line
