"""Places of snapshots, as a person types them: a folder, a run directory, one snapshot, or the URL of any of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from elastic_train.errors import SnapshotDamaged, SnapshotDenied, SnapshotError, SnapshotUnread, cause_of
from elastic_train.runlog.reader import Line, dict_of, int_of, newest_first, parse, time_of, worker_files
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
    is_snapshot,
    is_there,
    manifest_of,
    name_of,
    open_verified,
    read_info,
    read_manifest,
    verify,
)
from elastic_train.storage.store_urls import StoreUrl, is_url, parse_url
from elastic_train.world import host_name

HEAD_LINES = 4
"""Lines at the beginning of an event file, among which is the event `start` of the process."""


class OwnedBucket(Bucket):
    """The snapshots of a job below a URL, with the record of their owner."""

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(ObjectStore(url))
        self.owner = BucketOwner(self.store, host_name())

    def note_visible(self, manifest: Mapping[str, Any]) -> Callable[[], None]:
        return self.owner.note_snapshot(str(manifest["run_uid"]), int(manifest["generation"]), int(manifest["step"]))


@functools.lru_cache
def bucket_at(url: str) -> OwnedBucket:
    """The bucket at a URL; cached for the life of the process, to keep connections and knowledge of the owner.

    Raises: UsageError: the URL is not supported, or a package is missing.
    """
    return OwnedBucket(parse_url(url, "--snapshot-dir"))


def place_at(text: str | os.PathLike[str]) -> SnapshotPlace | SnapshotFolder:
    """The place that a path or URL names: one snapshot, or a place of many. Raises: UsageError: an unsupported URL."""
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
    """Copy a snapshot, or the newest whole one of a place of many; return it, and its new place.

    The target is a folder, a URL, or a run directory, where a start of the run finds it. The copy is whole or absent.
    An existing whole copy stays; a damaged one is replaced, with a line to `warn`. With a key only signed ones count.

    Raises:
        SnapshotError: no snapshot, another one at the target, or it cannot be written. UsageError: as `place_at`.
    """
    folder = _target_at(target)
    with _open_whole(place_at(source), warn, key) as (info, manifest, file):
        manifest.pop("parts", None)
        name = name_of(info.step, info.generation, info.host)  # the source folder may have any name

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
    """The folder or bucket for a copy. Raises: as `copy_snapshot`."""
    place = place_at(text)
    if not isinstance(place, Path | Bucket) or is_snapshot(place):
        raise SnapshotError(f"{text} names one snapshot: name what it is to lie in")
    if not isinstance(place, Path) or not (place / "events").is_dir():
        return place
    found = snapshots_in(place)
    return folder_by({}, place) if found == place else found  # equal if it has no folder of snapshots yet


def _require_left(folder: Bucket, place: BucketSnapshot, key: bytes | None) -> None:
    """Check that a job that trains there has not deleted parts, which without a manifest look like a killed writer's.
    Raises: SnapshotError: parts are missing; the rest is deleted, too. SnapshotDenied: the store refused the check."""
    try:
        place.read_info(key)
    except SnapshotDenied as error:
        raise SnapshotDenied(f"snapshot {place} is written, and could not be looked at: {error}") from error
    except SnapshotDamaged as error:
        folder.delete(place)
        raise SnapshotError(f"{error}; the job that trains there has deleted it: copy it once more") from error


def _is_whole_copy(place: SnapshotPlace, info: SnapshotInfo, key: bytes | None, warn: Callable[[str], None]) -> bool:
    """Whether a place holds an undamaged copy of this snapshot; False if the copy is damaged.

    Raises:
        SnapshotError: the place holds another snapshot, or may do so: a copy must not replace the only one.
    """
    try:
        there = read_manifest(place, key)
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
    """Open a snapshot, or the newest whole one of a place of many: its info, manifest and verified state file."""
    is_one = is_snapshot(place)
    infos = [read_info(place, key)] if is_snapshot(place) else find_snapshots(snapshots_in(place), warn=warn, key=key)
    with contextlib.ExitStack() as stack:
        for info in infos:
            try:
                file = stack.enter_context(open_verified(info))
                found = info, manifest_of(info.path), file
            except SnapshotUnread as error:
                if is_one:
                    raise
                if is_there(info.path):  # else it was pruned meanwhile
                    warn(error.warning)
            else:
                yield found
                return
    raise SnapshotError(f"no whole snapshot in {snapshots_in(place)}")


def snapshots_in(path: SnapshotPlace | SnapshotFolder) -> SnapshotFolder:
    """The folder of snapshots of a path that is no snapshot: the path itself, or for a run directory its folder, which
    may be elsewhere (--snapshot-dir).

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
    """The folder of a run's snapshots by its flags. If they are at a URL, the result is a path that does not exist."""
    given = config.get("snapshot_dir")
    return Path(given) if isinstance(given, str) else run_dir / "snapshots"


def _newest_config(run_dir: Path) -> Line:
    """The flags of the run's newest training; empty if there is no run."""
    files = worker_files(run_dir / "events")
    trained = [path for path in files if any(int_of(line, "generation") is not None for line in newest_first(path))]
    starts = [line for path in trained or files for line in _head(path) if line.get("event") == "start"]
    return dict_of(max(starts, key=time_of, default={}), "config")


def _head(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for raw in itertools.islice(file, HEAD_LINES):
            if (line := parse(raw)) is not None:
                yield line
