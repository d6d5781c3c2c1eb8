"""What a run leaves at its end: result.json, the same bytes on every node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_train.config import as_json
from elastic_train.elastic.run_files import RunFiles
from elastic_train.elastic.worker import Worker
from elastic_train.preemption import shown_notices
from elastic_train.runlog.goodput import goodput
from elastic_train.runlog.reader import parse
from elastic_train.runlog.strict_json import file_of
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.training.collectives import barrier, broadcast_bytes, gather_json
from elastic_train.training.state import state_sha256
from elastic_train.world import World


def config_of(worker: Worker) -> dict[str, Any]:
    """Return the flags that matter for what this worker trains, by name, without secrets; `snapshot_dir` as used."""
    told = {name: value for name, value in as_json(worker.config).items() if name not in worker.task.unused_flags}
    told["notices"] = shown_notices(worker.config.notices)
    if told.get("snapshot_dir") is not None and worker.bucket is None:
        told["snapshot_dir"] = str(worker.directory.snapshots_dir)
    return told


def write_result(worker: Worker, world: World, files: RunFiles, *, has_trained: bool) -> bytes:
    """Write result.json; every rank calls it. Returns its bytes, the same on every rank.

    Where nothing was trained (a finished run that was started again) and a node has a result already, the nodes that
    lack it write the same bytes.
    """
    path = worker.directory.result_path
    is_leader = world.is_directory_leader
    found = existing_result(path, worker.state.step) if is_leader and not has_trained else None
    has_result: list[bool] = gather_json(found is not None)
    owner = has_result.index(True) if True in has_result else 0
    if world.rank == owner and found is None:
        found = (file_of(result(worker)) + "\n").encode()
    data = broadcast_bytes(found if world.rank == owner else None, owner)
    if is_leader and (has_trained or existing_result(path, worker.state.step) is None):
        files.check_owner(world.generation)
        save_result(worker, data)
    barrier()
    return data


def save_result(worker: Worker, data: bytes) -> None:
    path = worker.directory.result_path
    try:
        write_atomic(path, data)
    except OSError as error:
        worker.reporter.warn(f"{path} cannot be written: {error.strerror}: this end has none")


def existing_result(path: Path, step: int) -> bytes | None:
    """Return the bytes of result.json, if it is of this end of the run."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if (parse(data) or {}).get("step") == step else None


def result(worker: Worker) -> dict[str, Any]:
    state = worker.state
    phases = goodput(state.clock.totals())
    return {
        "state_sha256": state_sha256(state.model.state_dict()),
        "step": state.step,
        "epoch": state.epoch,
        "test_accuracy": state.test_metrics.get("accuracy"),
        "test_metrics": state.test_metrics,
        "best": state.ratings.best_as_json(),
        "train_loss": state.last_loss,
        "wall_seconds": phases["wall"],
        "generations": state.generations,
        "goodput": phases,
        "bill": worker.reporter.bill(state),
        "incidents": state.incidents,
        "config": config_of(worker),
    }
