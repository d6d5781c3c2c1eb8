"""The operations of an `ObjectStore` for each kind of store: a single try, with the errors of the library below.

fsspec has no conditional put for all its file systems. Here s3:// uses the requests of its protocol, and memory:// and
file:// use locks. For other stores no conditional put is tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.storage.atomic_files import create_once, write_atomic
from elastic_train.storage.ownership import close_lock, open_for_lock
from elastic_train.storage.store_urls import PACKAGES, StoreUrl


@dataclass(frozen=True)
class Stored:
    """An object as it was read."""

    data: bytes
    version: str
    """Changes whenever the object changes."""


def open_arm(url: StoreUrl, *, attempt_seconds: float, silence_seconds: float) -> PlainArm:
    """Raises: UsageError: a package is missing; names what to install."""
    try:
        fsspec = importlib.import_module("fsspec")  # takes a second, with s3fs: so only if a URL is given
        if url.scheme == "s3":
            return S3Arm(url, attempt_seconds, silence_seconds)
        # otherwise fsspec shares instances and their cached listings
        filesystem = fsspec.filesystem(url.scheme, skip_instance_cache=True, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{url}: what reads {url.scheme}:// is not installed ({error}): pip install {PACKAGES[url.scheme]}"
        ) from error
    arms = {"memory": MemoryArm, "file": FileArm}
    return arms.get(url.scheme, PlainArm)(filesystem, url)


def version_of(data: bytes) -> str:
    """The version of an object in a store without versions of its own."""
    return hashlib.sha256(data).hexdigest()


def _require_below(limit: int, size: int) -> None:
    if size > limit:
        raise ValueError(f"it has {size} bytes, and none of more than {limit} is read")


class PlainArm:
    """The objects below one URL, with a single try per operation. Raises the errors of the libraries, which `fault_of`
    interprets. If a condition does not hold, that is FileExistsError, or the protocol's own error.

    This class is any file system of fsspec, without conditional puts.
    """

    is_atomic = False
    """Whether the store itself is meant to check the condition of `put_if`."""
    _lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    credentials = 0
    """When the file of those in use was written."""

    def __init__(self, filesystem: Any, url: StoreUrl) -> None:
        self.pid = os.getpid()  # the process that may use it
        self._filesystem = filesystem
        self._root = str(filesystem._strip_protocol(str(url)))
        _arms.add(self)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def renew(self) -> int:
        """Read the credentials again if their file was written since. Returns `credentials`."""
        return self.credentials

    def read(self, key: str, limit: int | None = None) -> Stored:
        path = self._path(key)
        with self._lock:
            if limit is not None:
                _require_below(limit, self._filesystem.size(path))
            data = bytes(self._filesystem.cat_file(path))
        return Stored(data, version_of(data))

    def put(self, key: str, data: bytes | bytearray) -> None:
        with self._lock:
            self._filesystem.pipe_file(self._path(key), bytes(data))

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        raise NotImplementedError("it is asked for where is_atomic says so")

    def _require_version(self, key: str, version: str | None) -> None:
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = self.read(key).version
        if found != version:
            raise FileExistsError(f"{key} has changed")

    def list(self, prefix: str) -> dict[str, int]:
        with self._lock:
            found = self._filesystem.find(self._path(prefix).rstrip("/"), detail=True)
        names = {path.removeprefix(f"{self._root}/"): int(entry["size"]) for path, entry in found.items()}
        # drafts and locks of file:// are no objects
        return {name: size for name, size in names.items() if not name.rpartition("/")[2].startswith(".")}

    def remove(self, key: str) -> None:
        with self._lock:
            self._filesystem.rm_file(self._path(key))


class MemoryArm(PlainArm):
    """Objects in the memory of this process, for tests and experiments."""

    is_atomic = True
    _lock = threading.RLock()
    """Needed because a listing fails if an object is put meanwhile."""

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        with self._lock:
            self._require_version(key, version)
            self.put(key, data)
        return version_of(data)


class FileArm(PlainArm):
    """A folder that is used as an object store."""

    is_atomic = True

    def put(self, key: str, data: bytes | bytearray) -> None:
        path = Path(self._path(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, bytes(data))

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        path = Path(self._path(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        if version is None:
            create_once(path, data)
        else:
            lock = open_for_lock(path.with_name(f".{path.name}.lock"))  # not open(): a forked child would keep the lock
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._require_version(key, version)
                write_atomic(path, data)
            finally:
                close_lock(lock)
        return version_of(data)

    def remove(self, key: str) -> None:
        super().remove(key)
        path = Path(self._path(key))
        with contextlib.suppress(FileNotFoundError):
            path.with_name(f".{path.name}.lock").unlink()
        with contextlib.suppress(OSError):  # unless other files are in it: object stores have no empty folders
            path.parent.rmdir()


class S3Arm(PlainArm):
    """S3's own requests through s3fs. The retries of s3fs and botocore are off, because `Tries` alone decides."""

    is_atomic = True

    def __init__(self, url: StoreUrl, attempt_seconds: float, silence_seconds: float) -> None:
        self._bucket, _, prefix = url.place.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._attempt_seconds = attempt_seconds
        self._options = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(10.0, silence_seconds),
            "read_timeout": silence_seconds,
            # manifests hold checksums; not every S3-compatible server knows the newer trailing checksums
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        self.credentials, self._lock = _written_at(), threading.Lock()
        super().__init__(self._open(), url)

    def _open(self) -> Any:
        """A new file system; it reads the credentials at its first request."""
        s3fs = importlib.import_module("s3fs")
        filesystem = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, config_kwargs=self._options)
        filesystem.retries = 1
        return filesystem

    def renew(self) -> int:
        with self._lock:  # several parts may be refused at once
            if (now := _written_at()) != self.credentials:
                self._filesystem = self._open()  # `connect` of the old one would keep all that it had, some 13 MiB
                self.credentials = now
        return self.credentials

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._filesystem.call_s3(method, Bucket=self._bucket, timeout=self._attempt_seconds, **arguments)

    def read(self, key: str, limit: int | None = None) -> Stored:
        from fsspec.asyn import sync

        async def read() -> Stored:
            answer = await self._filesystem._call_s3("get_object", Bucket=self._bucket, Key=f"{self._prefix}{key}")
            if limit is not None:
                _require_below(limit, answer["ContentLength"])
            async with answer["Body"] as body:
                return Stored(await body.read(), answer["ETag"])

        found: Stored = sync(self._filesystem.loop, read, timeout=self._attempt_seconds)
        return found

    def put(self, key: str, data: bytes | bytearray) -> None:
        self._call("put_object", Key=f"{self._prefix}{key}", Body=data)

    def put_if(self, key: str, data: bytes, version: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        return str(self._call("put_object", Key=f"{self._prefix}{key}", Body=data, **condition)["ETag"])

    def list(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        more: dict[str, str] = {}
        while True:
            answer = self._call("list_objects_v2", Prefix=f"{self._prefix}{prefix}", **more)
            for entry in answer.get("Contents", ()):
                found[entry["Key"].removeprefix(self._prefix)] = int(entry["Size"])
            if not answer.get("IsTruncated"):
                return found
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def remove(self, key: str) -> None:
        self._call("delete_object", Key=f"{self._prefix}{key}")


def _written_at() -> int:
    """When the file of credentials was written; 0 without one."""
    path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    with contextlib.suppress(OSError):
        return os.stat(os.path.expanduser(path)).st_mtime_ns
    return 0


# --- children of fork() -----------------------------------------------------------------------------------------------

_arms: weakref.WeakSet[Any] = weakref.WeakSet()
_kept: list[Any] = []
"""In a child: objects that must not be collected, because their finalizers wait for a thread that does not exist."""


def _forget_in_child() -> None:
    for arm in list(_arms):
        _close_connections(arm._filesystem)


def _close_connections(filesystem: Any) -> None:
    """Close the parent's connections in a child, such as a DataLoader process. The thread that serves them is not in
    the child, and the server would see them open as long as the child lives."""
    loop = getattr(filesystem, "_loop", None)
    _kept.extend((filesystem, loop))
    selector = getattr(loop, "_selector", None)
    if selector is None:
        return
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in list((selector.get_map() or {}).values()):
        # Not through the selector: the parent shares its epoll. By dup2 the number stays taken: no other file gets it.
        with contextlib.suppress(OSError):
            os.dup2(nowhere, entry.fd, inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_forget_in_child)
