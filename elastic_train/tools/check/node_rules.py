"""Rules about a node's resources: GPUs, data, room, time to save."""

from __future__ import annotations

import os

from elastic_train.errors import DISK_FULL
from elastic_train.preemption import SAVE_SOONER, Fit, fit_of
from elastic_train.storage.shares import senders
from elastic_train.storage.store_urls import is_url
from elastic_train.tools.check.advice import (
    Finding,
    breaks,
    by_value,
    errors,
    fine,
    matters,
    nodes_of,
    skipped,
)
from elastic_train.tools.check.facts import Gathered
from elastic_train.wording import count, human_bytes

FRAMEWORK_SHARE = 0.9
"""of a GPU's memory is free if no other process uses it"""
LOADER_BYTES = 256 * 2**20
"""of /dev/shm for each DataLoader process: a few batches in transit"""


def gpus_are_visible_and_not_shared(gathered: Gathered) -> list[Finding]:
    findings = [
        *_gpus_that_do_not_work(gathered),
        *_other_kinds_of_device(gathered),
        *_gpus_in_use(gathered),
        *_too_few_gpus(gathered),
    ]
    if findings:
        return findings
    gpus = [gpu for worker in gathered.workers if (gpu := worker.gpu) is not None]
    if not gpus:
        return fine("GPUs: none, training is on the CPU")
    kinds = by_value(gpu.name for gpu in gpus)
    return fine(f"GPUs: one for each worker, {', '.join(f'{len(ranks)} x {name}' for name, ranks in kinds.items())}")


def _gpus_that_do_not_work(gathered: Gathered) -> list[Finding]:
    findings = []
    for error, ranks in errors(worker.device_error for worker in gathered.workers):
        findings += breaks(
            f"{nodes_of(gathered, ranks)}: {error}",
            "the worker will not start",
            "see that nvidia-smi works there, that the container was given its GPUs, and CUDA_VISIBLE_DEVICES",
        )
    workers = gathered.workers
    blind = [
        rank
        for rank, worker in enumerate(workers)
        if worker.num_gpu_devices > 0 and worker.num_gpus == 0 and worker.wanted_device != "cpu"
    ]
    if blind and not findings:
        findings += matters(
            f"{nodes_of(gathered, blind)} has GPUs in /dev, and torch sees none",
            "it would train on the CPU",
            "install a CUDA build of torch that fits the driver, and look at CUDA_VISIBLE_DEVICES",
        )
    return findings


def _other_kinds_of_device(gathered: Gathered) -> list[Finding]:
    workers = gathered.workers
    with_gpu = [rank for rank, worker in enumerate(workers) if worker.gpu is not None]
    if with_gpu and len(with_gpu) < len(workers):
        without = [rank for rank in range(len(workers)) if rank not in with_gpu]
        return breaks(
            f"{nodes_of(gathered, with_gpu)} trains on a GPU, {nodes_of(gathered, without)} on the CPU",
            "members with another kind of device are refused",
            "give all the same kind, or say --device cpu for all",
        )
    return []


def _gpus_in_use(gathered: Gathered) -> list[Finding]:
    """Report GPUs that two workers share, or that other processes use."""
    findings = []
    workers = gathered.workers
    takers: dict[tuple[str, str], list[int]] = {}
    for rank, worker in enumerate(workers):
        if worker.gpu is not None:
            takers.setdefault((worker.machine, worker.gpu.uuid), []).append(rank)
    for ranks in takers.values():
        gpu = workers[ranks[0]].gpu
        assert gpu is not None
        if len(ranks) > 1:
            findings += matters(
                f"ranks {', '.join(map(str, ranks))} on {gathered.name(ranks[0])} share one GPU ({gpu.name})",
                "all workers use gloo then, which is slow on GPUs, and these share its memory and its time",
                "start one worker for each GPU: --nproc-per-node, CUDA_VISIBLE_DEVICES, one agent for each machine",
            )
        elif gpu.free_bytes < FRAMEWORK_SHARE * gpu.total_bytes:
            findings += matters(
                f"the GPU of rank {ranks[0]} on {gathered.name(ranks[0])} has {human_bytes(gpu.free_bytes)} free "
                f"of {human_bytes(gpu.total_bytes)}",
                "somebody else uses it: memory and time will be short",
                "see nvidia-smi there",
            )
    return findings


def _too_few_gpus(gathered: Gathered) -> list[Finding]:
    alone = gathered.workers[0]
    if (wanted := gathered.wanted.workers) is not None and alone.gpu is not None and alone.num_gpus < wanted:
        return breaks(
            f"{gathered.name(0)} is to have {wanted} workers, and torch sees {count(alone.num_gpus, 'GPU')} there",
            "a worker without a GPU of its own will not start",
            "start one worker for each GPU (--nproc-per-node), and look at CUDA_VISIBLE_DEVICES",
        )
    return []


def state_can_be_built(gathered: Gathered) -> list[Finding]:
    findings = []
    for error, ranks in errors(worker.state_error for worker in gathered.workers):
        findings += breaks(
            f"{nodes_of(gathered, ranks)}: {error}",
            "the worker will not start",
            "put the data there, or correct the flags after --",
        )
    return findings


def snapshot_directory_is_one(gathered: Gathered) -> list[Finding]:
    findings = []
    workers = gathered.workers
    for error, ranks in errors(worker.snapshot_dir_error for worker in workers):
        is_full = any(os.strerror(code) in error for code in DISK_FULL)
        mend = "free space there" if is_full else "mount it, give its user the right to write"
        findings += breaks(
            f"{nodes_of(gathered, ranks)} cannot write to {workers[ranks[0]].snapshot_dir}: {error}",
            "nothing could be saved there: a job that is stopped begins again from an older state",
            f"{mend}, or choose another --run-dir or --snapshot-dir",
        )
    if findings or not gathered.shared:
        return findings or fine(f"snapshot directory {workers[0].snapshot_dir}: writable")
    groups = by_value(",".join(map(str, shared.sees_directory_of)) for shared in gathered.shared)
    if len(groups) == 1 and gathered.shared[0].sees_directory_of == tuple(range(len(workers))):
        alone = "; one node alone, not compared with others'"
        told = "writable" + (" and the same for all" if len(gathered.nodes) > 1 else alone)
        return fine(f"snapshot directory {workers[0].snapshot_dir}: {told}")
    seen = "; ".join(f"{nodes_of(gathered, ranks)}: {workers[ranks[0]].snapshot_dir}" for ranks in groups.values())
    if not gathered.wanted.wants_shared_directory:
        return fine(f"snapshot directories, each node its own as --local-snapshots says: {seen}")
    return breaks(
        f"the snapshot directory is not the same for all: {seen}",
        "rank 0 writes the regular snapshots: if its machine is lost and all others stop, what only it had is gone",
        "mount one file system on all nodes and name it by --run-dir or --snapshot-dir; if each node is to keep "
        "its own, say --local-snapshots",
    )


def there_is_room(gathered: Gathered) -> list[Finding]:
    if not (measured := gathered.measured.values()):
        return skipped("room for snapshots: their size is not known")
    size, findings = max(one.bytes for one in measured), list[Finding]()
    for name, (rank, *_others) in gathered.nodes.items():
        worker = gathered.workers[rank]
        most = (worker.keep_snapshots + 1) * size
        if worker.snapshot_dir_error is None and worker.snapshot_dir_free < most:
            judge = breaks if worker.snapshot_dir_free < 2 * size else matters
            findings += judge(
                f"{worker.snapshot_dir} on {name} has {human_bytes(worker.snapshot_dir_free)} free; "
                f"{worker.keep_snapshots} snapshots and the one being written take {human_bytes(most)}",
                "a snapshot that does not fit is not taken, and the job goes on without",
                "free some space, choose another --snapshot-dir, lower --keep-snapshots or --keep-best, or raise "
                "--keep-every",
            )
        loaders = worker.num_loaders * worker.local_world_size
        if worker.shm_free < loaders * LOADER_BYTES:
            findings += matters(
                f"/dev/shm on {name} has {human_bytes(worker.shm_free)} free for {loaders} DataLoader processes",
                "a process that fills it up is killed by a bus error",
                "enlarge it (docker run --shm-size, an emptyDir with medium: Memory), or lower --num-workers",
            )
    findings = findings or fine(
        f"room: a snapshot of what {gathered.workers[0].trained} trains takes {human_bytes(size)}; enough in the "
        "snapshot directory and /dev/shm"
    )
    if (error := next((one.moments_error for one in measured if one.moments_error), None)) is not None:
        findings += skipped(
            "the optimizer's moments, which make snapshots larger and slower than shown here: its step with "
            f"gradients of zeros failed ({error})"
        )
    return findings


def grace_is_long_enough(gathered: Gathered) -> list[Finding]:
    """Compare the time of a snapshot with the grace period, and with the time that a notice leaves, if known."""
    if not (measured := gathered.measured):
        return skipped("grace period: no snapshot could be measured")
    seconds, rank = max((one.seconds, rank) for rank, one in measured.items())
    grace, what = gathered.wanted.grace_seconds, f"a snapshot takes {seconds:.1f} s on {gathered.name(rank)}"
    findings = _time_to_save(
        seconds,
        grace,
        "grace: ",
        f"{what}; between the signal and the kill are {grace:.0f} s",
        "a worker that is told to stop is killed before its state is safe",
        "raise terminationGracePeriodSeconds, SLURM's KillWait or --signal, and torchrun's --shutdown-timeout "
        "(torch 2.15), and tell this check by --grace",
    )
    given = [(one.notice_seconds, one.notices_of) for one in gathered.workers if one.notice_seconds is not None]
    if given:
        notice, source = min(given)
        num_senders = senders(
            len(gathered.nodes),
            max(one.bytes for one in measured.values()),
            is_bucket=all(is_url(one.snapshot_dir) for one in gathered.workers),
        )
        if num_senders > 1:  # all are taken at once, and each sends its share
            seconds /= num_senders
            what += f", {seconds:.1f} s by {num_senders} nodes together"
        findings += _time_to_save(
            seconds,
            notice,
            "notices: ",
            f"{what}; a notice of {source} leaves {notice:.0f} s",
            "where all nodes are taken at once the steps since the newest snapshot are lost",
            SAVE_SOONER,
        )
    return findings


def _time_to_save(seconds: float, given: float, topic: str, what: str, why: str, do: str) -> list[Finding]:
    match fit_of(seconds, given):
        case Fit.TOO_LONG:
            return breaks(what, why, do)
        case Fit.TIGHT:
            return matters(what, "the step in hand is finished first, and a busy disk takes longer", do)
    return fine(f"{topic}{what}")
