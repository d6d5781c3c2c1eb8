"""Serialise a state and read it back: torch's format, from copies in host memory, hashed during the write."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import re
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from elastic_train.errors import SnapshotDamaged, SnapshotError, cause_of, first_line
from elastic_train.system import starts

if TYPE_CHECKING:  # torch takes seconds to import, and listing snapshots does not need it
    import torch

_PLAIN_TYPES = frozenset([type(None), bool, int, float, complex, str, bytes])
_EMPTY_BYTES = (lambda: b"", "builtins.bytes")
"""Pickle writes b"" as a call of `bytes`. No arguments: in a crafted file they could make any number of bytes."""

NUMBERS_AT_ONCE = 2**24
"""Numbers in one piece of the search for NaN, which takes as many bytes of memory."""

ALIKE = "alike"
"""The key, in a file that several nodes wrote together, of the tensors equal on all; its state holds them as well."""

AT_ONCE = 2**19
"""Bytes of one piece, which is written and then hashed. It stays in a core's cache in between."""


@dataclass(frozen=True)
class SnapshotFile:
    """Size and checksum of one file, as in the manifest."""

    bytes: int
    sha256: str


def serialize_state(state: dict[str, Any]) -> bytes:
    """Serialise a state dict of tensors and plain values, the tensors moved to the CPU.

    Raises:
        SnapshotError: the state holds anything else; `deserialize_state` would refuse it.
    """
    buffer = io.BytesIO()
    write_state(HostBuffers().copy(state), buffer)
    return buffer.getvalue()


def deserialize_state(data: bytes, *, source: str = "snapshot") -> dict[str, Any]:
    """Read a state dict from the bytes of `serialize_state`, its tensors on the CPU. Never runs code that the bytes
    contain. `source` names them in an error.

    Raises:
        SnapshotError: the bytes hold anything but tensors and plain values, or cannot be read.
    """
    return read_state(io.BytesIO(data), "cpu", source)


def read_state(file: IO[bytes], map_location: str | torch.device | None, source: str) -> dict[str, Any]:
    import pickle

    import torch

    if file.read(4) != b"PK\x03\x04":  # torch.load has readers for older formats, which nothing of ours needs
        raise SnapshotError(
            f"{source} was refused: it is no zip archive, as torch.save writes them; nothing of it was run"
        )
    try:
        entries = zipfile.ZipFile(file).infolist()
        size = file.seek(0, os.SEEK_END)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise SnapshotError(f"{source} cannot be read: {first_line(error)}") from error
    except OSError as error:
        raise SnapshotDamaged(f"{source} cannot be read: {cause_of(error)}") from error
    # Otherwise a few bytes could expand to any number of bytes.
    if any(one.compress_type != zipfile.ZIP_STORED for one in entries) or sum(one.file_size for one in entries) > size:
        raise SnapshotError(f"{source} was refused: its tensors are compressed or overlap, as torch.save writes none")
    file.seek(0)
    torch.serialization.add_safe_globals([_EMPTY_BYTES])
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
        raise SnapshotDamaged(f"{source} cannot be read: {cause_of(error)}") from error
    except Exception as error:  # crafted or torn bytes make the reader fail in any way; that is no bug of ours
        raise SnapshotError(f"{source} cannot be read: {first_line(error)}") from error
    if not isinstance(state, dict):
        raise SnapshotError(f"{source} was refused: it holds a {type(state).__name__}, not a state dict")
    state.pop(ALIKE, None)
    return state


def write_state(state: dict[str, Any], file: object) -> None:
    import torch
    from torch.utils.serialization import config

    # The zip's own CRC costs a third of the time; the manifest has a SHA-256, and torch.load does not look at it.
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]  # put there at import
        torch.save(state, cast("IO[bytes]", file))


class HostBuffers:
    """Host memory for a copy of a state, reused for the next copy of a state of the same shape."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._sources: list[tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device]] = []
        self._used = 0
        self._allocation: threading.Thread | None = None

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate the buffers for a state of this shape on a thread, unless they exist or a tensor is on a GPU.
        Returns at once. The kernel needs several times as long to provide the memory as a copy takes.

        Raises:
            SnapshotError: as `copy`.
        """
        if self._buffers or self._allocation is not None:
            return
        wanted: list[torch.Tensor] = []
        rebuilt(state, once(wanted.append))
        if any(tensor.is_cuda for tensor in wanted):
            return  # not beside a CUDA graph that is being captured, which pinned memory may break

        def allocate() -> None:
            for tensor in wanted:
                if not is_odd(tensor):
                    try:
                        self._put(len(self._buffers), tensor)
                    except SnapshotError:  # no memory: `copy` raises it where it can be reported
                        return
                    memory = self._buffers[-1].untyped_storage()
                    ctypes.memset(memory.data_ptr(), 0, memory.nbytes())  # uses one core only; the other cores train

        allocation = threading.Thread(target=allocate, name="snapshot-buffers")
        self._allocation = allocation if starts(allocation) else None  # without it, `copy` allocates

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the state: every tensor into host memory, every container built anew. Valid until the next call. What
        was one tensor in two places is one there, too: tied weights, or the rate of several groups of an optimizer.

        Raises:
            SnapshotError: a leaf is neither a tensor nor a plain value; names it. Or there is no memory for the copy.
        """
        import torch

        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None
        self._used = 0
        with torch.no_grad():
            copied = rebuilt(state, once(self._copy_tensor))
        del self._buffers[self._used :], self._sources[self._used :]
        for device in {device for *_, device in self._sources if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return cast("dict[str, Any]", copied)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = _without_class(tensor)
        if is_odd(tensor):
            return tensor.detach().to("cpu", copy=True)
        index = self._used
        self._used += 1
        if self._sources[index : index + 1] != [self._shape(tensor)]:
            self._put(index, tensor)
        buffer = self._buffers[index]
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return buffer

    def _put(self, index: int, tensor: torch.Tensor) -> None:
        try:
            self._buffers[index : index + 1] = [self._allocate(tensor)]
        except RuntimeError as error:
            self._buffers, self._sources = [], []  # the training goes on, and needs what there is
            raise SnapshotError(f"there is no memory for a copy of it: {first_line(error)}") from error
        self._sources[index : index + 1] = [self._shape(tensor)]

    @staticmethod
    def _shape(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device]:
        return tensor.shape, tensor.dtype, tensor.stride(), tensor.device

    @staticmethod
    def _allocate(tensor: torch.Tensor) -> torch.Tensor:
        import torch

        # Pinned for a GPU: all its copies then run in a row without a wait after each. But not beside a step
        # (StepStart.copy_beside): to pin memory, CUDA waits for running kernels, which may hang in a reduction.
        is_pinned = tensor.is_cuda and threading.current_thread() is threading.main_thread()
        return torch.empty_like(_without_class(tensor), device="cpu", pin_memory=is_pinned, requires_grad=False)


def once(of_tensor: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Return `of_tensor`, called once for tensors that are the same numbers in memory."""
    known: dict[tuple[object, ...], Any] = {}

    def result(tensor: torch.Tensor) -> Any:
        if is_odd(tensor) or not tensor.numel():
            return of_tensor(tensor)
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in known:
            known[place] = of_tensor(tensor)
        return known[place]

    return result


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor is more than numbers in one piece of memory, such as sparse tensors, conjugated views, and
    those made of other tensors. Such tensors are copied as a whole, without a buffer."""
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        return True
    return tensor.is_conj() or tensor.is_neg() or _is_made_of_others(tensor)


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor only wraps other tensors, as DTensor does: its class says how to take it apart."""
    return hasattr(type(tensor), "__tensor_flatten__")


def _without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a foreign subclass as a plain one: the reader of snapshots refuses foreign classes."""
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or _is_made_of_others(tensor):
        return tensor
    return tensor.as_subclass(torch.Tensor)


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Return whether the reader accepts the class of a tensor that wraps others: libraries can register theirs."""
    import torch

    registered = (one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals())
    return any(one is type(tensor) for one in registered)


def rebuilt(value: Any, of_tensor: Callable[[torch.Tensor], Any], where: str = "state") -> Any:
    """Rebuild a state: each container anew, of its own type; each tensor replaced by `of_tensor(tensor)`; NumPy scalars
    by Python's.

    Raises:
        SnapshotError: a leaf is neither a tensor nor a plain value, or a tensor that could not be read; names it.
    """
    import torch

    leaves = _PLAIN_TYPES | {torch.Size, torch.dtype}

    def again(value: Any, where: str) -> Any:
        kind = type(value)
        if kind in leaves:
            return value
        if isinstance(value, torch.Tensor):
            if value.is_meta or (_is_made_of_others(value) and not _can_be_read(value)):
                raise _refused(value, where)
            return of_tensor(value)
        if kind is list or kind is tuple:  # most items are leaves
            return kind(item if type(item) in leaves else again(item, f"{where}[{i}]") for i, item in enumerate(value))
        if kind in (dict, OrderedDict, Counter):  # torch's MultiStepLR counts its milestones
            copied: dict[Any, Any] = kind()
            for key, item in value.items():
                key = _plain(key)
                if type(key) not in _PLAIN_TYPES:
                    raise _refused(key, f"a key of {where}")
                copied[key] = item if type(item) in leaves else again(item, f"{where}[{key!r}]")
            if kind is OrderedDict:
                vars(copied).update(again(vars(value), where))  # Module.state_dict() keeps versions there, in _metadata
            return copied
        plain = _plain(value)
        if type(plain) is kind:
            raise _refused(value, where)
        return again(plain, where)

    return again(value, where)


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar, such as the mean of an array, to Python's type."""
    if type(value) in _PLAIN_TYPES:
        return value
    import numpy as np

    return value.item() if isinstance(value, np.generic) else value


def _refused(value: object, where: str) -> SnapshotError:
    kind, place = type(value), " on the meta device, without values" if getattr(value, "is_meta", False) else ""
    return SnapshotError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}{place}: a snapshot takes tensors and plain Python values "
        "only; convert it in the state_dict() that it comes from"
    )


class HashingFile:
    """A file for torch.save that also computes SHA-256 and size of the written bytes.

    Args:
        is_over: whether all further bytes are useless; they are only counted then.
    """

    def __init__(self, file: IO[bytes], is_over: Callable[[], bool] = lambda: False) -> None:
        self._file, self._is_over = file, is_over
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        """All bytes given to `write`, including those that were not written."""
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        # Called from C++, which turns an exception into an unrelated one. So keep it for the writer to raise.
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        if self.error is None and not self._is_over():
            left = memoryview(data).cast("B")
            try:
                while left:
                    self._file.write(left[:AT_ONCE])
                    self._hash.update(left[:AT_ONCE])
                    left = left[AT_ONCE:]
            except OSError as error:
                self.error = error
        return num_bytes

    def flush(self) -> None:
        """Called by torch.save; the writer flushes and fsyncs by itself."""

    def written(self) -> SnapshotFile:
        return SnapshotFile(bytes=self.num_bytes, sha256=self._hash.hexdigest())


def size_of(state: dict[str, Any]) -> int:
    """The number of bytes that `write_state` writes for this state."""
    with open(os.devnull, "wb") as nowhere:
        counting = HashingFile(nowhere, is_over=lambda: True)
        write_state(state, counting)
    return counting.num_bytes


NO_EXTRAS: Mapping[str, Collection[str]] = {"": ()}
"""For `require_numbers`: check the model alone."""


def require_numbers(state: Mapping[str, Any], step: int, may_be_nan: Mapping[str, Collection[str]]) -> None:
    """Raises: SnapshotError: a weight or buffer is NaN. As the newest snapshot, every start would load it. Running
    statistics count too, although training does not read them. Infinity is allowed, as in buffers with masks.

    Args:
        may_be_nan: the modules to check ("" for the model, else the name of an extra), each with the names of its
            buffers that contained NaN from the beginning.
    """
    import torch

    for of, expected in may_be_nan.items():
        module, place = (state.get("extras", {}).get(of), f"{of}.") if of else (state.get("model"), "")
        for name, tensor in module.items() if isinstance(module, Mapping) else ():
            if name in expected or not isinstance(tensor, torch.Tensor):
                continue
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if _has_nan(_values_of(tensor)):
                raise SnapshotError(
                    f"snapshot of step {step} not written: {place}{name} holds NaN, though the loss was finite; older "
                    "ones are untouched. Lower the learning rate, or clip gradients, and start again from them"
                )


def _has_nan(values: torch.Tensor) -> bool:
    import torch

    # A sum takes a seventh of the time. It is NaN if a number is NaN, but also for inf and -inf, hence the second look.
    has_sum = values.is_floating_point() and values.element_size() > 1  # torch sums no 8 bits, nor complex halves
    if has_sum and not bool(values.sum().isnan()):
        return False
    parts: Iterable[torch.Tensor] = torch.split(values.reshape(-1), NUMBERS_AT_ONCE)
    return any(bool(part.isnan().any()) for part in parts)


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as a dense tensor; for a sparse tensor its stored values."""
    import torch

    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
