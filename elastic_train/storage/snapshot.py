"""Snapshots of the training state: bytes to disk and back, whole or absent.

A snapshot is a directory `step-000000000120-gen-0003-<host>` with two files: `state.pt`, a state dict of tensors and
plain values as `torch.save` writes it, all on the CPU, and `manifest.json`, which says what it is and gives size and
SHA-256 of the other. It is written under a name that begins with `.tmp-`, flushed to the disk and renamed last, so
that a kill, a full disk or a power cut at any moment leaves the whole snapshot or none. What rots later is found by
size or checksum, and the next older one is taken.

Newest is by (generation, step): a later generation supersedes an earlier one even at a lower step, because it has
fenced it; what the earlier one did beyond that step is nobody's.

What a training step pays: `SnapshotWriter.save_in_background` copies the tensors into host buffers that are allocated
once and used again, and returns. Serialising, hashing, fsync, rename and pruning run in one thread behind it. `hashlib`
and file writes let go of the interpreter lock, so the step thread loses a share of a core and of the memory's
bandwidth, but no more than milliseconds at a time to the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from elastic_train.branches import Branches, branches_of
from elastic_train.errors import SnapshotDamaged, SnapshotError
from elastic_train.storage.run_directory import fsync_directory
from elastic_train.version import VERSION

if TYPE_CHECKING:  # torch takes seconds to import, and listing snapshots does not need it
    import torch

FORMAT_VERSION = 2
STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"

_SNAPSHOT_NAME = re.compile(r"step-\d{12,}-gen-\d{4,}-(?P<host>.+)")
_TEMPORARY_NAME = re.compile(r"\.tmp-(?:old-)?step-\d{12,}-gen-\d{4,}-(?P<host>.+)-(?P<pid>\d{1,9})")
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)

NUMBERS_AT_ONCE = 2**24
"""of which a writer looks whether one is NaN: so many bytes of memory"""

# Temporary directories that a writer of this process has in hand; one that bears our pid and is not among them was
# left by an earlier process with the same pid, as is usual in containers.
_in_hand: set[Path] = set()


@dataclass(frozen=True)
class SnapshotFile:
    """What the manifest promises about one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SnapshotInfo:
    """One snapshot as its manifest describes it. Its state has the right size, its checksum is not verified yet."""

    path: Path
    step: int
    epoch: int
    samples_done: int
    generation: int
    run_uid: str
    host: str
    """As in the manifest; the directory's name has it with unusual characters replaced."""
    time: float
    """Unix seconds."""
    world_size: int
    torch_version: str
    elastic_train_version: str
    task: Mapping[str, Any]
    """What must agree with a run that continues from here."""
    files: Mapping[str, SnapshotFile]
    branches: Branches = ()
    """That its state has gone through, where the run was split."""

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

    path: Path
    step: int
    generation: int
    bytes: int
    """Size of the state file."""
    stall_seconds: float
    """How long the caller was held up."""
    total_seconds: float
    """From the call until the snapshot was durable."""
    warnings: tuple[str, ...] = ()
    """What did not keep the snapshot from being written, such as an old one that could not be removed."""


# --- state to bytes and back ------------------------------------------------------------------------------------


def serialize_state(state: dict[str, Any]) -> bytes:
    """The bytes of a state dict of tensors and plain values, the tensors moved to the CPU.

    Raises:
        SnapshotError: something in it is neither; `deserialize_state` would refuse it.
    """
    buffer = io.BytesIO()
    _save(_HostBuffers().copy(state), buffer)
    return buffer.getvalue()


def deserialize_state(
    data: bytes, map_location: str | torch.device | None = "cpu", *, source: str = "snapshot"
) -> dict[str, Any]:
    """The state dict in the bytes of `serialize_state`, its tensors on `map_location`. Never runs code that the bytes
    bring along. `source` names them in an error.

    Raises:
        SnapshotError: they hold something else than tensors and plain values, or cannot be read.
    """
    return _load(io.BytesIO(data), map_location, source)


def _load(file: IO[bytes], map_location: str | torch.device | None, source: str) -> dict[str, Any]:
    import pickle

    import torch

    if file.read(4) != b"PK\x03\x04":  # torch.load has readers for older formats, which nothing of ours needs
        raise SnapshotError(
            f"{source} was refused: it is no zip archive, as torch.save writes them; nothing of it was run"
        )
    file.seek(0)
    try:
        state = torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|function|class) (\w+(?:\.\w+)+)|Unsupported operand \d+", str(error))
        what = f" ({found[1] or found[0]})" if found else ""
        raise SnapshotError(
            f"{source} was refused: it holds something else than tensors and plain values{what}; "
            "nothing of it was run; use a snapshot that elastic_train wrote"
        ) from error
    except OSError as error:
        raise SnapshotDamaged(f"{source} cannot be read: {_cause(error)}") from error
    except Exception as error:  # crafted or torn bytes make the reader fail in any way; none of them is our bug
        raise SnapshotError(f"{source} cannot be read: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise SnapshotError(f"{source} was refused: it holds a {type(state).__name__}, not a state dict")
    return state


def _save(state: dict[str, Any], file: object) -> None:
    import torch
    from torch.utils.serialization import config

    # The zip's own CRC costs a third of the time; the manifest has a SHA-256, and torch.load does not look at it.
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]  # put there at import
        torch.save(state, cast("IO[bytes]", file))


class _HostBuffers:
    """Copies of a state in host memory that is used again for the next copy of a state of the same shape."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._sources: list[tuple[object, ...]] = []
        self._used = 0
        self._cuda_devices: set[torch.device] = set()
        self._allocation: threading.Thread | None = None

    def prepare(self, state: dict[str, Any]) -> None:
        """Make the buffers for a state of this shape, where there are none yet, on a thread: what the kernel takes to
        provide the memory is several times what a copy takes. Returns at once.

        Raises:
            SnapshotError: as `copy`.
        """
        if self._buffers or self._allocation is not None:
            return
        wanted: list[torch.Tensor] = []
        rebuilt(state, wanted.append)
        if any(tensor.is_cuda for tensor in wanted):
            return  # not beside a CUDA graph that is being captured, which pinned memory may break

        def allocate() -> None:
            for tensor in wanted:
                if not is_odd(tensor):
                    try:
                        self._add(tensor)
                    except RuntimeError:  # no memory: `copy` meets it where it can be told
                        return
                    memory = self._buffers[-1].untyped_storage()
                    ctypes.memset(memory.data_ptr(), 0, memory.nbytes())  # on this core alone; the others train

        self._allocation = threading.Thread(target=allocate, name="snapshot-buffers")
        self._allocation.start()

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with every tensor copied and every container built anew. Valid until the next call.

        Raises:
            SnapshotError: a leaf is neither a tensor nor a plain value; names it.
        """
        import torch

        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None
        self._used = 0
        self._cuda_devices.clear()
        with torch.no_grad():
            copied = rebuilt(state, self._copy_tensor)
        for device in self._cuda_devices:
            torch.cuda.current_stream(device).synchronize()
        del self._buffers[self._used :], self._sources[self._used :]
        return cast("dict[str, Any]", copied)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_odd(tensor):
            return tensor.detach().to("cpu", copy=True)
        index = self._used
        self._used += 1
        if index == len(self._buffers):
            self._add(tensor)
        elif self._sources[index] != self._shape(tensor):
            self._buffers[index] = self._allocate(tensor)
            self._sources[index] = self._shape(tensor)
        buffer = self._buffers[index]
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self._cuda_devices.add(tensor.device)
        return buffer

    def _add(self, tensor: torch.Tensor) -> None:
        self._buffers.append(self._allocate(tensor))
        self._sources.append(self._shape(tensor))

    @staticmethod
    def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.shape, tensor.dtype, tensor.stride(), tensor.is_cuda

    @staticmethod
    def _allocate(tensor: torch.Tensor) -> torch.Tensor:
        import torch

        # pinned for a GPU: all its copies then run behind one another without a wait after each
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether it is more than numbers in one piece of memory, as sparse ones are: it is copied as a whole."""
    import torch

    return tensor.layout != torch.strided or tensor.is_quantized


def rebuilt(value: Any, of_tensor: Callable[[torch.Tensor], Any], where: str = "state") -> Any:
    """A state with every container built anew, of its own kind, and `of_tensor` of every tensor.

    Raises:
        SnapshotError: a leaf is neither a tensor nor a plain value; names it.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    kind = type(value)
    if kind in _PLAIN_TYPES or kind in (torch.Size, torch.dtype):
        return value
    if kind is list or kind is tuple:
        return kind(rebuilt(item, of_tensor, f"{where}[{i}]") for i, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter):  # torch's MultiStepLR counts its milestones
        copied: dict[Any, Any] = kind()
        for key, item in value.items():
            if type(key) not in _PLAIN_TYPES:
                raise _refused(key, f"a key of {where}")
            copied[key] = rebuilt(item, of_tensor, f"{where}[{key!r}]")
        if kind is OrderedDict:
            vars(copied).update(vars(value))  # Module.state_dict() keeps module versions there, in _metadata
        return copied
    raise _refused(value, where)


def _refused(value: object, where: str) -> SnapshotError:
    kind = type(value)
    return SnapshotError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: a snapshot takes tensors and plain Python values "
        "only; convert it in the state_dict() that it comes from"
    )


class _HashingFile:
    """What torch.save writes to: a file, and the SHA-256 and size of what went into it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        # Called from C++, which turns an exception into an unrelated one; hence kept, and raised by the writer.
        num_bytes = memoryview(data).nbytes
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            else:
                self._hash.update(data)
                self._bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Called by torch.save; the writer flushes and fsyncs by itself."""

    def written(self) -> SnapshotFile:
        return SnapshotFile(bytes=self._bytes, sha256=self._hash.hexdigest())


# --- reading ----------------------------------------------------------------------------------------------------


def read_info(path: Path) -> SnapshotInfo:
    """What the manifest of one snapshot says. Cheap: the state is not read, only its size is compared.

    Raises:
        SnapshotDamaged: the manifest is missing, torn or of an unknown version, or a file has another size.
    """
    info = _read_manifest(path)
    for name, promised in info.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise SnapshotDamaged(f"snapshot {path}: {name} cannot be read: {_cause(error)}") from error
        if size != promised.bytes:
            raise SnapshotDamaged(f"snapshot {path}: {name} has {size} bytes, its manifest says {promised.bytes}")
    return info


def _read_manifest(path: Path) -> SnapshotInfo:
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} cannot be read: {_cause(error)}") from error
    except ValueError as error:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} is not JSON: {_first_line(error)}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise SnapshotDamaged(
            f"snapshot {path}: unknown format_version {version!r}; elastic_train {VERSION} reads {FORMAT_VERSION}"
        )
    try:
        info = SnapshotInfo(
            path=path,
            step=_whole_number(manifest["step"]),
            epoch=_whole_number(manifest["epoch"]),
            samples_done=_whole_number(manifest["samples_done"]),
            generation=_whole_number(manifest["generation"]),
            run_uid=str(manifest["run_uid"]),
            host=str(manifest["host"]),
            time=float(manifest["time"]),
            world_size=_whole_number(manifest["world_size"]),
            torch_version=str(manifest["torch_version"]),
            elastic_train_version=str(manifest["elastic_train_version"]),
            task=dict(manifest["task"]),
            files={
                _plain_file_name(name): SnapshotFile(_whole_number(file["bytes"]), str(file["sha256"]))
                for name, file in manifest["files"].items()
            },
            branches=branches_of(manifest.get("branches", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} is wrong or incomplete: {error!r}") from error
    if STATE_FILE not in info.files:
        raise SnapshotDamaged(f"snapshot {path}: {MANIFEST_FILE} does not name {STATE_FILE}")
    return info


def _whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _plain_file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in the snapshot")
    return name


def find_snapshots(directory: Path, *, warn: Callable[[str], None]) -> list[SnapshotInfo]:
    """The snapshots in a directory, newest first, after the cheap check of `read_info`. Hands `warn` one line for
    each damaged one and leaves it out. A missing directory holds none.

    Raises:
        SnapshotError: the directory cannot be listed.
    """
    found = []
    for path in _snapshot_paths(directory):
        try:
            found.append(read_info(path))
        except SnapshotDamaged as error:
            if path.exists():  # else its writer has pruned it since
                warn(f"skipped: {error}")
    return sorted(found, key=lambda info: (info.age_key, info.time, info.name), reverse=True)


def _snapshot_paths(directory: Path) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if _SNAPSHOT_NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnapshotError(
            f"snapshots in {directory} cannot be listed: {_cause(error)}; choose another --snapshot-dir"
        ) from error


def _free_name(folder: Path, name: str) -> Path:
    """One of this name and a number, where there is one already."""
    names = (folder / (f"{name}.{number}" if number else name) for number in itertools.count())
    return next(path for path in names if not path.exists())


def set_aside(directory: Path, folder: str, which: Callable[[SnapshotInfo], bool]) -> list[str]:
    """Move snapshots into a folder below, where nobody looks for any. Returns their names.

    Raises:
        SnapshotError: one cannot be moved.
    """
    moved = []
    try:
        for info in find_snapshots(directory, warn=lambda _damaged: None):
            if which(info):
                (directory / folder).mkdir(exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # another worker that sees this directory has moved it
                    os.rename(info.path, _free_name(directory / folder, info.name))
                    moved.append(info.name)
    except OSError as error:
        raise SnapshotError(f"snapshots in {directory} cannot be moved to {folder}: {_cause(error)}") from error
    return moved


def load_state(info: SnapshotInfo, map_location: str | torch.device | None = "cpu") -> dict[str, Any]:
    """The state of a snapshot, its tensors on `map_location`, once its file is verified. It is in memory once.

    Raises:
        SnapshotDamaged: the file is not the one that the manifest promises, or cannot be read.
        SnapshotError: as `deserialize_state`.
    """
    with _verified(info) as file:
        return _load(file, map_location, source=f"snapshot {info.path}")


def verify(info: SnapshotInfo) -> None:
    """`load_state` for those who do not want the state: takes no memory to speak of.

    Raises:
        SnapshotDamaged: as there.
    """
    with _verified(info):
        pass


@contextlib.contextmanager
def _verified(info: SnapshotInfo) -> Iterator[IO[bytes]]:
    """The file of the state, at its beginning: whatever is done to its name now, it is the one that was verified."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(info.path / STATE_FILE, "rb"))
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            file.seek(0)
        except OSError as error:
            raise SnapshotDamaged(f"snapshot {info.path}: {STATE_FILE} cannot be read: {_cause(error)}") from error
        _compare(info, SnapshotFile(size, digest))
        yield file


def _compare(info: SnapshotInfo, found: SnapshotFile) -> None:
    promised = info.files[STATE_FILE]
    if found != promised:
        raise SnapshotDamaged(
            f"snapshot {info.path}: {STATE_FILE} is damaged: {found.bytes} bytes with sha256 {found.sha256[:12]}…, "
            f"its manifest says {promised.bytes} with {promised.sha256[:12]}…"
        )


def newest_whole(
    directory: Path,
    *,
    accept: Callable[[SnapshotInfo], bool] = lambda info: True,
    map_location: str | torch.device | None = "cpu",
    warn: Callable[[str], None],
) -> tuple[SnapshotInfo, dict[str, Any]] | None:
    """The newest snapshot that `accept` says yes to and whose file verifies, with its state. A damaged one costs a
    warning and the next older one is tried.

    Raises:
        SnapshotError: the directory cannot be listed; as `load_state`. Whatever `accept` raises.
    """
    for info in find_snapshots(directory, warn=warn):
        if not accept(info):
            continue
        try:
            return info, load_state(info, map_location)
        except SnapshotDamaged as error:
            warn(f"skipped: {error}")
    return None


def is_snapshot(path: Path) -> bool:
    """Whether a path is one snapshot, perhaps a damaged one."""
    return (path / MANIFEST_FILE).exists() or (path / STATE_FILE).exists()


def snapshots_in(path: Path) -> Path:
    """The folder of snapshots that a path names: itself, or that of a run directory.

    Raises:
        SnapshotError: there is no such folder.
    """
    if not path.is_dir():
        raise SnapshotError(f"{path} is no directory; give a run directory or its snapshots/")
    return path / "snapshots" if (path / "snapshots").is_dir() else path


# --- writing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Position:
    """What the manifest says about where in training the state stands."""

    step: int
    epoch: int
    samples_done: int
    generation: int
    world_size: int
    branches: Branches = ()


class SnapshotWriter:
    """Writes the snapshots of one process, one at a time. Its methods are for one thread, the one that trains.

    `keep` is how many moments, by (generation, step), stay on disk of a run; only those of this host are ever
    removed. `before_rename` is called by the thread that writes, when a snapshot is complete but not yet visible; what
    it raises (OwnershipLost) ends that snapshot. `task` is JSON: what must agree with a run that continues.

    A process that ends while a snapshot is being written loses that snapshot; call `wait` before.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        host: str,
        run_uid: str,
        task: Mapping[str, Any],
        before_rename: Callable[[], None] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: the newest snapshot is never removed")
        self.directory = directory
        self._keep = keep
        self._host = host
        self._host_in_name = re.sub(r"[^A-Za-z0-9._-]", "_", host)
        self._run_uid = run_uid
        self._task = json.loads(json.dumps(task))
        self._before_rename = before_rename
        self._now = now
        self._verified: set[str] = set()
        """names of snapshots that were found to be whole, or written here"""
        self._buffers = _HostBuffers()
        self._thread: threading.Thread | None = None
        self._outcomes: list[SnapshotResult | BaseException] = []  # append and pop are atomic
        self._remove_leftovers()

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate what the first snapshot of a state of this shape is copied into, beside the caller's work.

        Raises:
            SnapshotError: the state holds something that cannot be saved; names it.
        """
        self._buffers.prepare(state)

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        epoch: int,
        samples_done: int,
        generation: int,
        world_size: int,
        branches: Branches = (),
        in_flight_timeout: float = 300.0,
    ) -> SnapshotResult:
        """Write a snapshot and return when it is durable. Waits first for the one in flight, whose outcome is left
        for `collect`.

        Raises:
            SnapshotError: it cannot be written; the older ones are untouched. Or the one in flight has not ended
                after `in_flight_timeout` seconds.
            OwnershipLost, or whatever else `before_rename` raises.
        """
        start = time.perf_counter()
        if not self.wait(in_flight_timeout):
            raise SnapshotError(
                f"snapshot of step {step} not written: the one before it is still being written to "
                f"{self.directory} after {in_flight_timeout:g} s"
            )
        position = _Position(step, epoch, samples_done, generation, world_size, branches)
        return self._write(self._buffers.copy(state), position, start, stall_seconds=None)

    def save_in_background(
        self,
        state: dict[str, Any],
        *,
        step: int,
        epoch: int,
        samples_done: int,
        generation: int,
        world_size: int,
        branches: Branches = (),
    ) -> bool:
        """Copy the state into the host buffers, start writing it and return; the caller may change the state at once.
        Blocks for the copy, the first time also for allocating the buffers, where `prepare` has not.

        Returns:
            False where the one before is still being written: nothing was done. Else the outcome comes from `collect`.

        Raises:
            SnapshotError: the state holds something that cannot be saved; names it.
        """
        if self.is_busy():
            return False
        start = time.perf_counter()
        copied = self._buffers.copy(state)
        position = _Position(step, epoch, samples_done, generation, world_size, branches)
        stall_seconds = time.perf_counter() - start

        def write() -> None:
            try:
                self._outcomes.append(self._write(copied, position, start, stall_seconds))
            except BaseException as error:  # not handled here: collect() gives it to the thread that trains
                self._outcomes.append(error)

        self._thread = threading.Thread(target=write, name="snapshot-writer", daemon=True)
        self._thread.start()
        return True

    def is_busy(self) -> bool:
        """Whether a snapshot is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout: float) -> bool:
        """Wait for the snapshot in flight, if there is one, `timeout` seconds at most; False if it has not ended."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_busy()

    def collect(self) -> list[SnapshotResult | SnapshotError]:
        """The outcomes of the background since the last call, without blocking. A SnapshotError is a snapshot that
        was not written, over which no training need end.

        Raises:
            OwnershipLost, or whatever else ended a snapshot in the background, once each.
        """
        collected: list[SnapshotResult | SnapshotError] = []
        while self._outcomes:
            outcome = self._outcomes[0]
            if not isinstance(outcome, SnapshotResult | SnapshotError):
                if collected:
                    break  # first hand over what came before it; the next call raises
                raise self._outcomes.pop(0)  # type: ignore[misc]
            collected.append(outcome)
            self._outcomes.pop(0)
        return collected

    def _write(
        self, state: dict[str, Any], position: _Position, start: float, stall_seconds: float | None
    ) -> SnapshotResult:
        """`state` is already the writer's own copy."""
        name = f"step-{position.step:012d}-gen-{position.generation:04d}-{self._host_in_name}"
        path = self.directory / name
        warnings: list[str] = []
        num_bytes = self._existing_bytes(path, warnings)
        if num_bytes is None:
            num_bytes = self._write_new(state, position, path)
        self._verified.add(name)
        total_seconds = time.perf_counter() - start
        self._prune(path, warnings)
        return SnapshotResult(
            path=path,
            step=position.step,
            generation=position.generation,
            bytes=num_bytes,
            stall_seconds=total_seconds if stall_seconds is None else stall_seconds,
            total_seconds=total_seconds,
            warnings=tuple(warnings),
        )

    def _existing_bytes(self, path: Path, warnings: list[str]) -> int | None:
        """The size of the state where this very snapshot is there already and whole."""
        if not path.exists():
            return None
        try:
            info = read_info(path)
            verify(info)
        except SnapshotDamaged as error:
            warnings.append(f"replaced: {error}")
            return None
        if info.run_uid != self._run_uid:
            raise SnapshotError(
                f"snapshot {path} cannot be written: another run has one of that name there; "
                "choose another --snapshot-dir"
            )
        return info.files[STATE_FILE].bytes

    def _write_new(self, state: dict[str, Any], position: _Position, path: Path) -> int:
        _require_numbers(state.get("model"), position.step)
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        displaced = path.with_name(f".tmp-old-{path.name}-{os.getpid()}")
        _in_hand.update((temporary, displaced))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            os.mkdir(temporary)
            written = _write_state(temporary / STATE_FILE, state)
            _write_bytes(temporary / MANIFEST_FILE, self._manifest(position, written))
            fsync_directory(temporary)
            if self._before_rename is not None:
                self._before_rename()
            # Another worker of this host may have written the same moment of the same run meanwhile: one is enough.
            if self._existing_bytes(path, []) is None:
                if path.exists():
                    shutil.rmtree(displaced, ignore_errors=True)
                    os.rename(path, displaced)
                try:
                    os.rename(temporary, path)
                except OSError:
                    if self._existing_bytes(path, []) is None:
                        raise
            fsync_directory(self.directory)
        except OSError as error:
            raise SnapshotError(
                f"snapshot {path} cannot be written: {_cause(error)}; older snapshots are untouched; "
                f"{_advice(error)}choose another --snapshot-dir"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(displaced, ignore_errors=True)
            _in_hand.difference_update((temporary, displaced))
        return written.bytes

    def _manifest(self, position: _Position, state_file: SnapshotFile) -> bytes:
        import torch

        manifest = {
            "format_version": FORMAT_VERSION,
            **vars(position),
            "run_uid": self._run_uid,
            "host": self._host,
            "time": self._now(),
            "torch_version": str(torch.__version__),
            "elastic_train_version": VERSION,
            "task": self._task,
            "files": {STATE_FILE: vars(state_file)},
        }
        return json.dumps(manifest, indent=2).encode() + b"\n"

    def _prune(self, written: Path, warnings: list[str]) -> None:
        try:
            of_run = [info for info in self._readable() if info.run_uid == self._run_uid]
            for path in self._to_remove(of_run, written):
                self._remove(path)
        except (OSError, SnapshotError) as error:
            cause = _cause(error) if isinstance(error, OSError) else error
            warnings.append(f"old snapshots in {self.directory} cannot be removed: {cause}")

    def _readable(self) -> list[SnapshotInfo]:
        """Every snapshot whose manifest can be read, its other files being there or not."""
        readable = []
        for path in _snapshot_paths(self.directory):
            with contextlib.suppress(SnapshotDamaged):
                readable.append(_read_manifest(path))
        return readable

    def _to_remove(self, of_run: Iterable[SnapshotInfo], written: Path) -> list[Path]:
        """The snapshots of this host beyond the `keep` newest moments of the run. A moment counts when one of its
        snapshots is whole; several hosts may have written the same one. With several writers none removes what
        another counts on: more snapshots only push the border up, where the newest are."""
        of_run = list(of_run)
        removable = [info for info in of_run if self._is_own(info.path) and info.path != written]
        moments = sorted({info.age_key for info in of_run}, reverse=True)
        if len(moments) <= self._keep or all(info.age_key >= moments[self._keep - 1] for info in removable):
            return []  # nor need any be read
        kept: list[tuple[int, int]] = []
        for moment in moments:
            if any(self._is_whole(info) for info in of_run if info.age_key == moment):
                kept.append(moment)
            if len(kept) == self._keep:
                return [info.path for info in removable if info.age_key < moment]
        return []

    def _is_whole(self, info: SnapshotInfo) -> bool:
        """To the last byte, of those that others have written; each is read once. One that is damaged must not push
        out one that a restart could use."""
        try:
            read_info(info.path)
            if info.name not in self._verified:
                verify(info)
                self._verified.add(info.name)
        except SnapshotDamaged:
            return False
        return True

    def _is_own(self, path: Path) -> bool:
        match = _SNAPSHOT_NAME.fullmatch(path.name)
        return match is not None and match["host"] == self._host_in_name

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(f".tmp-old-{path.name}-{os.getpid()}")
        _in_hand.add(doomed)
        try:
            os.rename(path, doomed)  # out of sight first: a reader never meets half of it
            shutil.rmtree(doomed)
        finally:
            _in_hand.discard(doomed)

    def _remove_leftovers(self) -> None:
        """Remove what writers of this host left behind that were killed."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.directory):
                match = _TEMPORARY_NAME.fullmatch(name)
                if match is None or match["host"] != self._host_in_name:
                    continue
                path, pid = self.directory / name, int(match["pid"])
                if path not in _in_hand if pid == os.getpid() else not _is_alive(pid):
                    shutil.rmtree(path, ignore_errors=True)


def _require_numbers(model: object, step: int) -> None:
    """Raises: SnapshotError where a weight is NaN: such a snapshot would be the newest, and every start would take it.
    Infinite ones are left alone: buffers have them, such as masks."""
    import torch

    for name, tensor in model.items() if isinstance(model, Mapping) else ():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        parts: Iterable[torch.Tensor] = torch.split(tensor.reshape(-1), NUMBERS_AT_ONCE)
        if any(bool(part.isnan().any()) for part in parts):
            raise SnapshotError(
                f"snapshot of step {step} not written: {name} holds NaN, though the loss was finite; older ones are "
                "untouched. Lower the learning rate, or clip gradients, and start again from them"
            )


def _write_state(path: Path, state: dict[str, Any]) -> SnapshotFile:
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        _save(state, hashing)
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    return hashing.written()


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _advice(error: OSError) -> str:
    """What helps, beside another folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there or "
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable for this user or "
    return ""


def _cause(error: OSError) -> str:
    return error.strerror or str(error)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
