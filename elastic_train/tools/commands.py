"""The commands of the console script: each function takes the parsed arguments and returns the exit code.

Each imports its code when it runs, and torch only if it handles tensors. So `elastic-train --help` and the commands
that only read files start at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.errors import ElasticTrainError, SnapshotError, SnapshotUnread, UsageError
from elastic_train.system import num_cores, require_linux

if TYPE_CHECKING:
    from elastic_train.storage.snapshot import SnapshotInfo

SLURM_OPTIONS = ("job-name", "time", "partition", "account", "gpus-per-node", "cpus-per-task")
"""the options of sbatch that most jobs need"""


def show_status(arguments: argparse.Namespace) -> int:
    if arguments.watch:
        from elastic_train.tools.audit.watching import watch_status

        watch_status(arguments.run_dir, sys.stdout)
        return 0
    from elastic_train.observe.status_table import show, to_json
    from elastic_train.tools.audit.node_directories import read_status_of

    now = time.time()
    status = read_status_of(arguments.run_dir, now)
    if arguments.json:
        print(to_json(status))
    else:
        show(status, now, sys.stdout)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    require_linux("a check")
    _exit_on_signals()  # so that the check removes its files
    from elastic_train.tools.check.check_command import run_check

    return run_check(arguments)


def run_drill(arguments: argparse.Namespace) -> int:
    if not arguments.list:
        require_linux("a drill")
    from elastic_train.tools.drills.drill import run_drill
    from elastic_train.tools.drills.drill_command import list_faults, may_use_namespaces, settings_of
    from elastic_train.tools.drills.user_namespace import become_root

    if arguments.list:
        print("\n".join(list_faults()))
        return 0
    if may_use_namespaces(arguments):
        become_root([Path.cwd(), *filter(None, (arguments.run_dir, arguments.scenario, arguments.trace))])
    _exit_on_signals()  # so that the drill ends its nodes
    return 0 if run_drill(settings_of(arguments)) else 1


def _exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit in the main thread, so that it cleans up."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, lambda received, _frame: sys.exit(128 + received))


def run_audit(arguments: argparse.Namespace) -> int:
    from elastic_train.tools.audit.audit import audit_history, conclude, describe
    from elastic_train.tools.audit.history import read_history
    from elastic_train.tools.audit.node_directories import as_one_run

    with as_one_run(arguments.run_dir) as run_dir:
        history = read_history(run_dir)
        found = audit_history(history)
        print("\n".join([*describe(found, history), *conclude(found)]))
    return 0 if found.passed else 1


def write_report(arguments: argparse.Namespace) -> int:
    from elastic_train.tools.audit.audit import audit_history
    from elastic_train.tools.audit.history import read_history
    from elastic_train.tools.audit.node_directories import as_one_run
    from elastic_train.tools.audit.report import FILE, write_report

    with as_one_run(arguments.run_dir) as run_dir:
        history = read_history(run_dir)
        path = arguments.output or arguments.run_dir[0] / FILE
        path = write_report(history, audit_history(history), path).absolute()
    print(path)
    if arguments.open:
        import webbrowser

        if not webbrowser.open(path.as_uri()):
            print("elastic-train: no browser could be opened: open the file above in one", file=sys.stderr)
    return 0


def submit_slurm(arguments: argparse.Namespace) -> int:
    from elastic_train.tools.submit import SlurmJob, submit, write_script

    given = {option: getattr(arguments, option.replace("-", "_")) for option in SLURM_OPTIONS}
    options = {option: str(value) for option, value in given.items() if value is not None}
    for text in arguments.sbatch:
        name, _, value = text.removeprefix("--").partition("=")
        options[name] = value
    names = {entry.name for entry in dataclasses.fields(SlurmJob)}
    same = {name: value for name, value in vars(arguments).items() if name in names}
    script = write_script(SlurmJob(**same, options=options))
    print(script.rstrip("\n") if arguments.dry_run else submit(script))
    return 0


def serve_etcd(arguments: argparse.Namespace) -> int:
    from elastic_train.config import check_number
    from elastic_train.tools.drills.etcd_command import serve_etcd

    check_number("--members", arguments.members, least=1)
    return serve_etcd(arguments)


def list_snapshots(arguments: argparse.Namespace) -> int:
    from elastic_train.storage.places import place_at, snapshots_in
    from elastic_train.storage.snapshot import find_snapshots, is_snapshot
    from elastic_train.wording import aligned, duration, human_bytes

    place = place_at(arguments.path)
    if is_snapshot(place) and not isinstance(place, Path):
        raise SnapshotError(f"{arguments.path} is one snapshot; give what it lies in")
    directory = snapshots_in(place)
    found = find_snapshots(directory, warn=_warn, key=_key(arguments))
    if not found:
        raise SnapshotError(f"no whole snapshot in {directory}")
    rows = [("step", "epoch", "samples", "generation", "workers", "metric", "age", "size", "name")]
    for info in found:
        size = sum(file.bytes for file in info.files.values())
        numbers = (info.step, info.epoch, info.samples_done, info.generation, info.world_size)
        metric = "-" if info.metric is None else f"{info.metric:g}"
        rows.append((*map(str, numbers), metric, duration(time.time() - info.time), human_bytes(size), info.name))  # type: ignore[arg-type]
    print("\n".join(aligned(rows, left=(len(rows[0]) - 1,))))
    return 0


def verify_snapshots(arguments: argparse.Namespace) -> int:
    """Print a line per snapshot. Returns 1 if one is damaged or cannot be read. Raises: SnapshotError: none found."""
    from elastic_train.storage.places import place_at, snapshots_in
    from elastic_train.storage.snapshot import find_snapshots, is_snapshot, is_there, read_info, verify

    others: list[str] = []

    place, key = place_at(arguments.path), _key(arguments)
    if is_snapshot(place):
        infos = []
        try:
            infos = [read_info(place, key)]
        except SnapshotUnread as error:
            others.append(error.warning)
    else:
        infos = find_snapshots(snapshots_in(place), warn=others.append, key=key)
    for info in infos:
        try:
            verify(info)
        except SnapshotUnread as error:
            if info.path == place or is_there(info.path):  # else a running job has pruned it since
                others.append(error.warning)
        else:
            print(f"whole: {info.path}")
    for line in others:
        print(line)
    if not infos and not others:
        raise SnapshotError(f"no snapshot in {snapshots_in(place)}")
    return 1 if others else 0


def hash_snapshot(arguments: argparse.Namespace) -> int:
    from elastic_train.storage.dcp import is_dcp
    from elastic_train.storage.weights import read_weights
    from elastic_train.training.state import state_sha256

    path = Path(arguments.path)
    is_exported = path.is_file() or is_dcp(path)
    key = _key(arguments)
    weights = read_weights(path, warn=_warn, key=key) if is_exported else _read_state(arguments)[1]["model"]
    print(state_sha256(weights))
    return 0


def export_snapshot(arguments: argparse.Namespace) -> int:
    from elastic_train.storage.weights import export_weights, typed_as

    output = arguments.output or Path(f"weights.{arguments.format}")
    if arguments.output is None and output.exists():
        raise UsageError(f"{output} is there already: say where to by --output, which replaces a file")
    info, state = _read_state(arguments, is_best=arguments.best)
    averaged = state.get("extras", {}).get("ema")
    if not isinstance(averaged, Mapping) or averaged.keys() != state["model"].keys():  # a task's own extra of that name
        averaged = None
    weights = averaged if arguments.averaged else state["model"]
    if weights is None:
        raise SnapshotError(f"{arguments.path} holds no averaged weights; --ema-decay keeps them")
    export_weights(typed_as(state["model"], weights), output, arguments.format)
    rated = "" if info.metric is None else f", metric {info.metric:.6g}"
    print(f"{len(weights)} tensors of step {info.step}{rated}: {output.absolute()}")
    best = state.get("run", {}).get("ratings", {}).get("best")
    if arguments.best and best and best[0] != info.step:
        print(f"the best so far was {best[1]:.6g}, of step {best[0]}: no snapshot of it is here (--keep-best)")
    if not arguments.averaged and averaged is not None:
        print("these are the weights that are trained; --averaged gives those of the average `ema`")
    return 0


def copy_snapshot(arguments: argparse.Namespace) -> int:
    from elastic_train.storage.places import copy_snapshot

    info, place = copy_snapshot(arguments.source, arguments.target, warn=_warn, key=_key(arguments))
    print(f"step {info.step}: {place}")
    return 0


def _key(arguments: argparse.Namespace) -> bytes | None:
    """Read the key. Raises: UsageError: --snapshot-key names no key."""
    from elastic_train.storage.signature import read_key

    return None if arguments.snapshot_key is None else read_key(arguments.snapshot_key)


def _read_state(arguments: argparse.Namespace, *, is_best: bool = False) -> tuple[SnapshotInfo, dict[str, Any]]:
    from elastic_train.storage.places import place_at
    from elastic_train.storage.weights import read_state

    return read_state(place_at(arguments.path), warn=_warn, key=_key(arguments), is_best=is_best)


def run_benchmark(arguments: argparse.Namespace) -> int:
    require_linux("a benchmark")
    from elastic_train.tools import bench
    from elastic_train.tools.bench import table

    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise UsageError(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    load, cores = os.getloadavg()[0], num_cores()
    if load > cores / 2:
        _warn(f"the load is {load:.1f} on {cores} cores: what else is running here will show in the numbers")
    report = bench.run(arguments.name, arguments.quick)
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ElasticTrainError(f"{arguments.json} cannot be written: {error.strerror}") from error
    table.show(report)
    return 0


def _warn(message: str) -> None:
    print(f"elastic-train: warning: {message}", file=sys.stderr, flush=True)
