"""Deterministic kernels, and the fingerprint of all that a run's bits depend on beside its flags.

Equal samples, weights and order of additions give equal bits only with the same kernels. These depend on the torch
version, the kind of CPU or GPU, the libraries below torch with their environment variables, and the number of threads,
over which a kernel may split a sum.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.compiler.config

from elastic_train.errors import UsageError
from elastic_train.system import processor_facts

THREADS_PER_WORKER = 1
"""kernels split sums over threads, so all machines use one; with a worker per core this costs nothing"""

MOST_GRAPHS = 256
"""graphs that torch.compile may make of one function, one per shape: equal to its own limit over all functions"""
_OVER_LIMIT = "FailOnRecompileLimitHit"
"""name of torch's error class beyond that limit; it is not public"""

_NONDETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")
# cuBLAS chooses kernels by its workspace; torch calls it deterministic only with a fixed one, such as this.
_CUBLAS_WORKSPACE = ":4096:8"
_ENVIRONMENT = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG")


def switch_on(*, strict: bool, warn: Callable[[str], None]) -> None:
    """Set deterministic kernels and one thread for the rest of this process. Call it before the first use of CUDA.

    Args:
        strict: an operator without a deterministic form raises; otherwise it runs.
        warn: called once per such operator, with one line that names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # This helps debugging only, and costs a pass over memory. A metaclass makes the attribute, which mypy cannot see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(THREADS_PER_WORKER)
    _compile_each_shape()
    _name_operators_in_warnings(warn)


def _compile_each_shape() -> None:
    """Make torch.compile compile a graph for each shape, and run nothing uncompiled. By default torch compiles one
    graph for several shapes after an epoch's first smaller step. That graph rounds differently, and a process that has
    just joined does not have it. Beyond torch's limit of eight graphs new shapes would run uncompiled."""
    compiler = torch.compiler.config
    compiler.automatic_dynamic_shapes = False
    compiler.recompile_limit = max(compiler.recompile_limit, MOST_GRAPHS)
    compiler.fail_on_recompile_limit_hit = True


@contextmanager
def refused_as_what_it_is(device: torch.device) -> Iterator[None]:
    """Run user code inside the block. Raises: UsageError: torch refuses an operation that is not deterministic, as
    `switch_on` demands."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == _OVER_LIMIT:
            raise UsageError(
                f"--reduction ordered: torch.compile has made {torch.compiler.config.recompile_limit} graphs of one "
                "function, and would run further shapes uncompiled, so the bits would depend on the shapes that a "
                "process has seen: pad to fewer lengths, or raise torch.compiler.config.recompile_limit and "
                "accumulated_recompile_limit when your module is imported"
            ) from error
        operator = _name_nondeterministic_operator(str(error)) if isinstance(error, RuntimeError) else None
        if operator is None:
            raise
        raise UsageError(
            f"--strict: {operator} has no deterministic form on {device.type}; replace it in the model or "
            "the loss, or leave out --strict and the bits may differ from run to run"
        ) from error


def _name_nondeterministic_operator(message: str) -> str | None:
    """Return the operator that torch's message reports as nondeterministic; None for any other message."""
    found = _NONDETERMINISTIC.search(message)
    if found:
        return found.group(1)
    return "cuBLAS" if "CUBLAS_WORKSPACE_CONFIG" in message else None


def _name_operators_in_warnings(warn: Callable[[str], None]) -> None:
    """Replace torch's paragraph, printed for every calling line, by one line per operator."""
    show = warnings.showwarning
    warned: set[str] = set()

    def show_once(message: Warning | str, *arguments: Any, **more: Any) -> None:
        operator = _name_nondeterministic_operator(str(message))
        if operator is None:
            show(message, *arguments, **more)
        elif operator not in warned:
            warned.add(operator)
            warn(
                f"{operator} has no deterministic form: the bits may differ from run to run and between worlds "
                "(--strict makes this an error)"
            )

    warnings.showwarning = show_once


def fingerprint(device: torch.device) -> dict[str, str | int]:
    """Return all that the bits depend on in this process now, as plain values for a snapshot."""
    found: dict[str, str | int] = {
        "torch": str(torch.__version__),  # torch.__version__ is a subclass of str, which a snapshot refuses
        "machine": platform.machine(),
        "cpu": _cpu_kind(processor_facts()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": "on" if torch.backends.mkldnn.enabled else "off",
        "mkl": "on" if torch._C.has_mkl else "off",
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": "on" if torch.are_deterministic_algorithms_enabled() else "off",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "device": device.type,
    }
    for name in _ENVIRONMENT:
        if name in os.environ:
            found[name] = os.environ[name]
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["cudnn_allow_tf32"] = "on" if torch.backends.cudnn.allow_tf32 else "off"
    return found


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two fingerprints, one text each; empty if equal bits can be expected."""
    return [
        f"{name} {saved.get(name, 'unset')} before, {now.get(name, 'unset')} now"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]


def _cpu_kind(values: Mapping[str, str]) -> str:
    """Vendor, family and model: MKL and oneDNN choose kernels and block sizes by them."""
    if "vendor_id" in values:
        return f"{values['vendor_id']} family {values.get('cpu family', '?')} model {values.get('model', '?')}"
    named = [values[name] for name in ("CPU implementer", "CPU part") if name in values]
    return " ".join(named) or platform.processor() or "unknown"
