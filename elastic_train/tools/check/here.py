"""The facts that a worker finds alone: versions, device, addresses, room, and how long a snapshot takes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from elastic_train.config import Config
from elastic_train.elastic.membership import versions
from elastic_train.elastic.process_group import choose_backend, choose_device, gpu_of
from elastic_train.elastic.worker import check_start, check_state, make_state, make_task
from elastic_train.errors import ElasticTrainError, UsageError, kind_and_line
from elastic_train.notices.clouds import find_cloud
from elastic_train.observe.metrics import Metrics
from elastic_train.preemption import given_seconds, notices_flag
from elastic_train.protocol.addresses import interface_addresses
from elastic_train.rendezvous.launch import Launch
from elastic_train.snapshot_interval import interval_of
from elastic_train.storage.atomic_files import require_writable
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.tools.check.facts import Gpu, Measured, RendezvousFacts, WorkerFacts
from elastic_train.tools.check.trial_place import TrialPlace
from elastic_train.world import host_name

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = Path("/dev/shm")


def look_here(
    config: Config, launch: Launch, address: str, directory: TrialPlace, rendezvous: RendezvousFacts
) -> WorkerFacts:
    """Gather all facts that need no other member. `address` is the IP address at which others reach this worker;
    `config` and `launch` are those of a worker of the job. Blocks for the data, the model and a snapshot."""
    device, device_error, state_error, measured = torch.device("cpu"), None, None, None
    try:
        device = choose_device(config.device, launch.local_rank)
    except UsageError as error:
        device_error = str(error)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    gpu = describe_gpu(device)  # before this process uses its memory
    try:
        try_flags(config, launch)
        measured = measure_snapshot(config, device, directory, is_writer=launch.local_rank == 0)
    except ElasticTrainError as error:
        state_error = str(error)
    except Exception as error:  # raised by the user's own task
        traceback.print_exc()
        state_error = kind_and_line(error)
    notices_of, notice_seconds = notices_here(config.notices, os.environ) if launch.local_rank == 0 else ("", None)
    backend = choose_backend(device)
    own = interface_addresses()
    return WorkerFacts(
        host=host_name(),
        machine=BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node(),
        pid=os.getpid(),
        agent_pid=launch.agent_pid or 0,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        address=address,
        versions=all_versions(backend),
        has_hook=has_hook(),
        backend=backend,
        interface=next((name for name, found in own if found == address), None),
        interfaces=interfaces_with_addresses(own),
        wanted_interfaces=wanted_interfaces(os.environ),
        host_addresses=host_addresses(),
        num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        num_gpu_devices=sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*")),
        gpu=gpu,
        device_error=device_error,
        snapshot_dir=str(directory.path),
        snapshot_dir_error=directory.error,
        snapshot_dir_free=0 if directory.error else directory.free_bytes,
        shm_free=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        state_error=state_error,
        trained=trained_by(config),
        measured=measured,
        num_loaders=config.num_workers,
        keep_snapshots=num_kept(config, measured.last_step if measured else 0),
        rendezvous=rendezvous,
        notices_of=notices_of,
        notice_seconds=notice_seconds,
        wanted_device=config.device,
    )


def notices_here(flag: str, environ: Mapping[str, str]) -> tuple[str, float | None]:
    """Return the source of notices of --notices, and the seconds that they leave. `auto` is resolved as by a worker."""
    kind = notices_flag(flag).kind
    if kind == "auto":
        cloud = find_cloud()
        kind = kind if cloud is None else cloud.name
    return kind, given_seconds(kind, environ)


def all_versions(backend: str) -> dict[str, str]:
    found = {"python": platform.python_version().rpartition(".")[0], **versions()}
    found["torchvision"] = importlib.metadata.version("torchvision")
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        if "nccl" in backend:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def has_hook() -> bool:
    """Return whether torchrun on this node would load our entry point."""
    entries = importlib.metadata.entry_points(group="torchrun.handlers")
    return any(entry.name == "elastic_train" for entry in entries)


def interfaces_with_addresses(addresses: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """All network interfaces, with their first address if they have any."""
    first = {name: "" for _, name in socket.if_nameindex()} | dict(reversed(addresses))
    return tuple(f"{name}={found}" if found else name for name, found in first.items())


def wanted_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if environ.get(name)}


def host_addresses() -> tuple[str, ...]:
    with suppress(OSError):
        found = socket.getaddrinfo(platform.node(), None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    return ()


def describe_gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = gpu_of(device)
    assert uuid is not None, "a GPU has one"
    return Gpu(uuid=uuid, name=properties.name, free_bytes=free, total_bytes=total)


def trained_by(config: Config) -> str:
    """The flags that choose the model and the data."""
    return f"--dataset {config.dataset} --model {config.model}" if config.task is None else f"--task {config.task}"


def num_kept(config: Config, last_step: int) -> int:
    """The most snapshots that stay when training ends."""
    newest_and_best, steps = config.keep_snapshots + config.keep_best, interval_of(config.snapshot_every).steps
    if config.keep_every is None or steps == 0:
        return newest_and_best
    return newest_and_best + last_step // max(config.keep_every, steps or 1)


def try_flags(config: Config, launch: Launch) -> None:
    """Try everything that may fail in a worker's start before it builds anything. Leaves nothing; a taken port is fine.

    Raises:
        UsageError, SnapshotError: as `check_start`; --metrics-port lacks a package, or its address does not work.
        RunDirectoryError: the run directory cannot be made, or not be written to.
    """
    check_start(config, launch)
    if config.run_dir is not None and config.snapshot_dir is not None:  # else the snapshot directory lies in it
        folders = (config.run_dir, *config.run_dir.parents)
        require_writable(next(folder for folder in folders if os.path.exists(folder)), "run directory")
    if config.metrics_port is not None and launch.local_rank == 0:
        Metrics(
            config.metrics_host, config.metrics_port, run="check", max_nodes=1, log=lambda _: None, warn=lambda _: None
        ).close()


def measure_snapshot(
    config: Config, device: torch.device, directory: TrialPlace, *, is_writer: bool
) -> Measured | None:
    """Write a snapshot and measure it; None if this worker writes none.

    Raises:
        torch.OutOfMemoryError: the optimizer's moments do not fit.
        UsageError, DatasetMissing: the task cannot be built; a worker of the job would fail as well. Also whatever the
            user's own task raises.
    """
    task = make_task(config)
    state = make_state(config, task, device)
    check_state(config, task, state)
    task.describe()
    if not is_writer or directory.error is not None:
        return None
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    moments_error = None
    try:
        state.optimizer.step()  # optimizers create their moments in the first step
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # due to these gradients, not to the task: SparseAdam needs sparse ones, LBFGS a closure
        moments_error = kind_and_line(error)
    with directory.noting_errors(), directory.trial() as place:
        writer = SnapshotWriter(place, keep=1, host=host_name(), run_uid="check", task={})
        written = writer.save(state.state_dict(), step=1, epoch=0, samples_done=0, generation=0, world_size=1)
        return Measured(written.bytes, written.total_seconds, state.last_step, moments_error)
    return None
