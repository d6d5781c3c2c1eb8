"""Snapshots below a URL: as in a folder, with the bytes of the state in parts and the manifest put last.

    <url>/step-000000000120-gen-0003-<host>/
        state.pt.00000.<nonce>, ...   of 16 MiB; joined in order, they are the state.pt of a folder
        state.pt.share-00000.<sha>    of 8 MiB, if several nodes write it together: see shares.py
        manifest.json                 format version 3: also names the parts
    <url>/owner.json                  see bucket_owner.py

An object store has no rename, so the manifest makes a snapshot visible; it is created and never replaced. Each attempt
to write has its own nonce, so that no other attempt under the same name can change a byte of a whole snapshot. Parts
without a manifest are leftovers, which the owner of the bucket deletes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, cast

from elastic_train.errors import (
    ObjectStoreError,
    SnapshotDamaged,
    SnapshotDenied,
    SnapshotError,
    SnapshotUnread,
    cause_of,
    first_line,
)
from elastic_train.storage.appearance import MOST_MANIFEST_BYTES, Appearance, Flight
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.parts import MOST_PART_BYTES, PART_BYTES, Part, PartStream, each, fetch
from elastic_train.storage.retention import Retention
from elastic_train.storage.shares import SHARE_BYTES, SharedState, SharedStream
from elastic_train.storage.signature import sign
from elastic_train.storage.snapshot import (
    MANIFEST_FILE,
    SNAPSHOT_NAME,
    STATE_FILE,
    SnapshotInfo,
    info_of,
    parse_manifest,
    require_same_run,
)
from elastic_train.storage.state_bytes import HashingFile, SnapshotFile
from elastic_train.storage.store_urls import translated_errors, translated_refusals

FORMAT_VERSION = 3
PART_PREFIX = f"{STATE_FILE}."

Files = Mapping[str, int]
"""The files of one snapshot: size in bytes by name."""


@dataclass(frozen=True)
class BucketSnapshot:
    """The place of one snapshot, with the parts that its manifest names, if that was read."""

    store: ObjectStore
    name: str
    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        return f"{self.store}/{self.name}"

    def key_of(self, file: str) -> str:
        return f"{self.name}/{file}"

    def files(self) -> Files:
        prefix = self.key_of("")
        return {path.removeprefix(prefix): size for path, size in self.store.list(prefix).items()}

    def read_info(self, key: bytes | None = None, files: Files | None = None) -> SnapshotInfo:
        """Read the manifest, and check that all parts exist in the right size. `files`: the result of a listing, which
        saves a request. Raises: SnapshotDamaged."""
        files = self.files() if files is None else files
        manifest = self.read_manifest(files)
        info = info_of(manifest, self, key)
        promised = info.files[STATE_FILE]
        try:
            parts = tuple(Part.from_fields(fields, PART_PREFIX) for fields in manifest["parts"])
            if sum(part.bytes for part in parts) != promised.bytes:
                raise ValueError(f"its parts have not the {promised.bytes} bytes of {STATE_FILE}")
            if len({part.name for part in parts}) < len(parts):
                raise ValueError("it names one part twice")
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotDamaged(f"snapshot {self}: {MANIFEST_FILE} is wrong or incomplete: {error!r}") from error
        for part in parts:
            if (size := files.get(part.name)) != part.bytes:
                seen = "is missing" if size is None else f"has {size} bytes"
                raise SnapshotDamaged(f"snapshot {self}: {part.name} {seen}, its manifest says {part.bytes}")
        return replace(info, path=replace(self, parts=parts))

    def read_manifest(self, files: Files | None = None) -> dict[str, Any]:
        """The whole content of the manifest. Raises: SnapshotDamaged: it is missing or cannot be read."""
        return parse_manifest(self.manifest_bytes(files), self, FORMAT_VERSION)

    def manifest_bytes(self, files: Files | None = None) -> bytes:
        size = (self.files() if files is None else files).get(MANIFEST_FILE)
        if size is None or size > MOST_MANIFEST_BYTES:
            seen = "is missing" if size is None else f"has {size} bytes, which no manifest has"
            raise SnapshotDamaged(f"snapshot {self}: {MANIFEST_FILE} {seen}")
        data = self._get(MANIFEST_FILE, MOST_MANIFEST_BYTES)
        if data is None:
            raise SnapshotDamaged(f"snapshot {self}: {MANIFEST_FILE} is missing")
        return data

    def _get(self, file: str, limit: int) -> bytes | None:
        """Read one object; None if there is none. Raises: SnapshotDenied: the store refuses to return it."""
        with translated_refusals():
            found = self.store.get(self.key_of(file), limit)
        return None if found is None else found.data

    @contextlib.contextmanager
    def open_verified(self, promised: SnapshotFile) -> Iterator[IO[bytes]]:
        """Fetch the state into a local temporary file without a name, verify it, and yield the file.

        Raises:
            SnapshotDamaged: the bytes do not match the manifest. SnapshotError: they cannot be fetched.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(tempfile.TemporaryFile(prefix="elastic_train-"))
                self._fetch_into(file, promised)
                file.seek(0)
            except OSError as error:
                raise SnapshotError(
                    f"snapshot {self} cannot be fetched: {cause_of(error)} in {tempfile.gettempdir()}, where it takes "
                    f"{promised.bytes} bytes: free some space, or set TMPDIR to where there is some"
                ) from error
            yield cast("IO[bytes]", file)

    def _fetch_into(self, file: IO[bytes], promised: SnapshotFile) -> None:
        digest = hashlib.sha256()
        try:
            for data in fetch(self.parts, lambda part: self._get(part, MOST_PART_BYTES)):
                file.write(data)
                digest.update(data)
        except SnapshotDamaged as error:
            raise SnapshotDamaged(f"snapshot {self}: {error}") from error
        if digest.hexdigest() != promised.sha256:
            raise SnapshotDamaged(f"snapshot {self}: {STATE_FILE} is damaged: its SHA-256 is not that of its manifest")


class Bucket:
    """The snapshots below one URL."""

    def __init__(self, store: ObjectStore, *, part_bytes: int = PART_BYTES) -> None:
        self.store = store
        self._part_bytes = part_bytes
        self._left: dict[BucketSnapshot, list[str]] = {}
        """Parts yet to be deleted, of snapshots that failed or whose manifest was deleted."""
        self._whole: dict[str, tuple[int, SnapshotInfo]] = {}
        """Whole snapshots by name, each with a hash of its files in the listing at that time."""

    def __str__(self) -> str:
        return str(self.store)

    def snapshot(self, name: str) -> BucketSnapshot:
        return BucketSnapshot(self.store, name)

    def find(self, *, warn: Callable[[str], None], key: bytes | None = None) -> list[SnapshotInfo]:
        """Find snapshots as `snapshot.find_snapshots`. Parts without a manifest are ignored without a warning."""
        found = []
        for name, files in self._list().items():
            if MANIFEST_FILE not in files:
                continue
            try:
                found.append(self.snapshot(name).read_info(key, files))
            except SnapshotUnread as error:
                warn(error.warning)
        return found

    def _list(self) -> dict[str, dict[str, int]]:
        """The files of each snapshot, whole or not, by the snapshot's name."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self.store.list().items():
            name, _, file = path.partition("/")
            if file and SNAPSHOT_NAME.fullmatch(name):
                found.setdefault(name, {})[file] = size
        return found

    def write(
        self,
        name: str,
        fill: Callable[[IO[bytes]], None],
        manifest: dict[str, Any],
        *,
        key: bytes | None = None,
        flight: Flight | None = None,
        shared: SharedState | None = None,
    ) -> SnapshotFile:
        """Write a snapshot, whole or not at all. An existing whole one of that name and run stays.

        Args:
            fill: writes the bytes of the state into a file.
            manifest: in the format of a folder, without `files`.
            key: signs the manifest, if given.
            flight: its `check` is called before each try to put the manifest, and once afterwards. If it is given up,
                the rest is not sent, unless the snapshot is `shared`.
            shared: the state that `fill` writes, if other nodes send shares of it.

        Raises:
            SnapshotError: it cannot be written; older snapshots are untouched. Any error of the check of `flight`.
        """
        place, flight = self.snapshot(name), flight or Flight()
        with translated_errors(str(place)):
            try:
                existing = self._existing(place, str(manifest["run_uid"]), key)
                return existing or self._write_new(place, fill, manifest, key, flight, shared)
            except (ObjectStoreError, SnapshotDenied) as error:
                raise SnapshotError(f"snapshot {name} cannot be written: {error}; older ones are untouched") from error

    def write_share(self, name: str, shared: SharedState) -> bool:
        """Send this node's share of a snapshot that the first node of a fleet writes now, and parts of nodes that are
        too slow. Blocks until the snapshot is visible; returns False if it will not be. Raises: SnapshotError: this
        node cannot send."""
        place = self.snapshot(name)
        with translated_errors(str(place)):
            stream = self._open_share(place, shared)
            try:
                shared(stream)
                return stream.finish_share()
            except ObjectStoreError as error:
                raise SnapshotError(f"this node's share of snapshot {name} cannot be written: {error}") from error

    def _open_parts(self, place: BucketSnapshot, host: str, flight: Flight) -> PartStream:
        nonce = secrets.token_hex(4)
        return PartStream(
            lambda number: f"{PART_PREFIX}{number:05d}.{nonce}",
            lambda part, data: self.store.put(place.key_of(part), data),
            host,
            self._part_bytes,
            flight.is_given_up,
        )

    def _open_share(self, place: BucketSnapshot, shared: SharedState) -> SharedStream:
        return SharedStream(
            shared,
            lambda part: f"{PART_PREFIX}{part}",
            secrets.token_hex(4),
            lambda part, data: self.store.put(place.key_of(part), data),
            place.files,
            min(self._part_bytes, SHARE_BYTES),
        )

    def delete(self, place: BucketSnapshot) -> None:
        """Delete all files of a snapshot. Raises: ObjectStoreError."""
        self._delete(self.store, place, place.files())

    def note_visible(self, manifest: Mapping[str, Any]) -> Callable[[], None]:
        """Hook: a snapshot with this manifest is visible. The returned function is called if it is taken back."""
        return lambda: None

    def _existing(self, place: BucketSnapshot, run_uid: str, key: bytes | None) -> SnapshotFile | None:
        """The state file of a snapshot that is there already and whole, else None; deletes a damaged manifest."""
        files = place.files()
        if MANIFEST_FILE not in files:
            return None
        try:
            require_same_run(place.manifest_bytes(files), place, run_uid)
            return place.read_info(key, files).files[STATE_FILE]
        except SnapshotDamaged:
            self.store.delete(place.key_of(MANIFEST_FILE))
            return None

    def _write_new(
        self,
        place: BucketSnapshot,
        fill: Callable[[IO[bytes]], None],
        manifest: dict[str, Any],
        key: bytes | None,
        flight: Flight,
        shared: SharedState | None,
    ) -> SnapshotFile:
        stream: PartStream | SharedStream = (
            self._open_parts(place, manifest["host"], flight) if shared is None else self._open_share(place, shared)
        )
        appearance: Appearance | None = None
        try:
            hashing = HashingFile(cast("IO[bytes]", stream), flight.is_given_up)
            fill(cast("IO[bytes]", hashing))
            parts = stream.finish()
            written = hashing.written()
            whole = sign(
                {
                    **manifest,
                    "format_version": FORMAT_VERSION,
                    "files": {STATE_FILE: vars(written)},
                    "parts": [vars(part) for part in parts],
                },
                key,
            )
            data = json.dumps(whole, indent=2).encode() + b"\n"
            appearance = Appearance(self.store, place.key_of(MANIFEST_FILE), data, flight.check)
            if appearance.make(lambda: self.note_visible(manifest)):
                return written
            # Another worker of this host has written the same snapshot meanwhile.
            existing = self._existing(place, str(manifest["run_uid"]), key)
            if existing is None:
                raise SnapshotError(f"snapshot {place} cannot be written: a damaged one was in its place, and is gone")
            return existing
        finally:
            if appearance is None or not appearance.may_be_there:
                stream.wait()
                self._left[place] = [*self._left.get(place, ()), *stream.names]
                # Suppressed: the first error is the one to report. If given up, a newer snapshot needs the network.
                with contextlib.suppress(ObjectStoreError):
                    if not flight.is_given_up():
                        self._delete_left(self.store.impatient())

    def prune(
        self, written: str, *, keep: Retention, run_uid: str, key: bytes | None = None, flight: Flight | None = None
    ) -> list[str]:
        """Delete old snapshots of a run, now that `written` is visible, and leftovers of killed writers. Stops if
        `flight` is awaited; the next call deletes the rest. Returns warnings.

        Deletes those of all hosts, because preemptible machines come back under other names. No member of the run reads
        a deleted one: the owner has restored before it prunes, and if states differ, ring.py waits for it first."""

        def is_given_up() -> bool:
            return flight is not None and flight.is_awaited

        if is_given_up():
            return []
        try:
            listed = self._list()
            whole = self._find_whole(listed, key, is_given_up)
            past = [name for name in listed.keys() - whole.keys() if _generation_of(name) < _generation_of(written)]
            doomed = [name for name in past if self._is_leftover(name, run_uid, key)]
            of_run = [info for info in whole.values() if info.run_uid == run_uid]
            doomed += [info.name for info in keep.expired(of_run, [info for info in of_run if info.name != written])]
            for name in doomed:
                if is_given_up():
                    return []
                self._delete(self.store, self.snapshot(name), listed[name], is_given_up)
            self._delete_left(self.store, is_given_up)
            self.store.delete_old_probes()
        except Exception as error:  # any object may cause it: the snapshot is safe, and training must not end
            if is_given_up():
                return []
            said = str(error) if isinstance(error, SnapshotError) else f"{type(error).__name__}: {first_line(error)}"
            return [f"old snapshots in {self} cannot be deleted: {said}"]
        return []

    def _find_whole(
        self, listed: Mapping[str, Files], key: bytes | None, is_given_up: Callable[[], bool]
    ) -> dict[str, SnapshotInfo]:
        """The whole snapshots, by name. If the listed files of one have not changed, its manifest is not read again:
        manifests are never replaced, and many snapshots may stay for good."""
        looks = {name: hash((key, *sorted(files.items()))) for name, files in listed.items()}
        self._whole = {name: known for name, known in self._whole.items() if looks.get(name) == known[0]}

        def read(name: str) -> None:
            with contextlib.suppress(SnapshotUnread):
                info = self.snapshot(name).read_info(key, listed[name])
                self._whole[name] = looks[name], replace(info, path=self.snapshot(name))  # without its many parts

        each(read, listed.keys() - self._whole.keys(), is_given_up)
        return {name: info for name, (_look, info) in self._whole.items()}

    def _is_leftover(self, name: str, run_uid: str, key: bytes | None) -> bool:
        """Whether a killed writer left what is there: parts without manifest, or a manifest of the run without parts.
        Looks again: `copy`, which does not own the bucket, or a store that refused a read may have made it whole."""
        place, files, is_of_run = self.snapshot(name), self.snapshot(name).files(), False
        try:
            is_of_run = MANIFEST_FILE not in files or info_of(place.read_manifest(files), place, key).run_uid == run_uid
            place.read_info(key, files)
        except SnapshotUnread as error:
            return is_of_run and isinstance(error, SnapshotDamaged)
        return False

    def _delete_left(self, store: ObjectStore, is_given_up: Callable[[], bool] = lambda: False) -> None:
        for place in list(self._left):
            self._delete(store, place, (), is_given_up)

    def _delete(
        self,
        store: ObjectStore,
        place: BucketSnapshot,
        files: Collection[str],
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Delete files, the manifest first: a reader finds the whole snapshot or none. `_delete_left` deletes the rest
        after an error. Raises: ObjectStoreError; SnapshotError if given up."""
        if MANIFEST_FILE in files:
            store.delete(place.key_of(MANIFEST_FILE))
        parts = (file for file in files if file != MANIFEST_FILE)
        self._left[place] = list(dict.fromkeys((*self._left.get(place, ()), *parts)))
        each(lambda file: store.delete(place.key_of(file)), self._left[place], is_given_up)
        del self._left[place]


def _generation_of(name: str) -> int:
    """The generation in a snapshot's name. Parts of an earlier generation have no writer: it may write no manifest."""
    return int(name.split("-")[3])
