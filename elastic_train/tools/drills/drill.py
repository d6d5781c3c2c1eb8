"""`elastic-train drill`: a real job with real torchrun, faults by a seeded schedule, and an audit of what is left."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from elastic_train.runlog.goodput import process_identity
from elastic_train.runlog.reader import read_json
from elastic_train.tools.audit.audit import audit_history, conclude, describe
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.record import Record, write_reference
from elastic_train.tools.audit.report import write_report
from elastic_train.tools.drills.backends import backend_of
from elastic_train.tools.drills.cluster import Cluster
from elastic_train.tools.drills.conductor import Conductor, DrillFailed
from elastic_train.tools.drills.live import Timeline
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.reference import ReferenceFailed, undisturbed
from elastic_train.tools.drills.replay import Replay
from elastic_train.tools.drills.schedule import Settings
from elastic_train.world import host_name

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTIONS = (KeyboardInterrupt, SystemExit)
"""raised by Ctrl-C, and by the other ending signals"""


class _Ends(ExitStack):
    """An exit stack that ignores further signals while it ends the drill. A second Ctrl-C would leave nodes and
    namespaces behind, and would also reach the commands that remove them."""

    def __exit__(self, *details: Any) -> bool | None:
        kept = {signum: signal.signal(signum, signal.SIG_IGN) for signum in ENDING_SIGNALS}
        try:
            return super().__exit__(*details)
        finally:
            for signum, handler in kept.items():
                signal.signal(signum, handler)


def run_drill(settings: Settings) -> bool:
    """Run a drill and audit it; return whether the audit passed. Blocks for the whole drill.

    Raises:
        DrillFailed: the job did not start. CommandFailed, EtcdMissing: this machine lacks something.
    """
    with _Ends() as ends:
        try:
            record = Record(settings.run_dir)
        except OSError as error:
            raise DrillFailed(f"--run-dir {settings.run_dir} cannot be made: {error.strerror}") from error
        ends.callback(record.close)
        network = None
        try:
            if settings.wants_network:
                network = Network(settings.num_nodes)
                ends.callback(network.close)
            _conduct(settings, record, network, ends)
        except INTERRUPTIONS:
            record.add_setting(interrupted=True)
            print(f"interrupted; ending its nodes; what they wrote is in {settings.run_dir}", flush=True)
            raise
    try:
        _compare(settings)
    except INTERRUPTIONS:
        told = f"`elastic-train audit {settings.run_dir}` judges all the rest"
        print(f"interrupted, so that there is nothing to compare with; {told}", flush=True)
        raise
    return _judge(settings)


def _conduct(settings: Settings, record: Record, network: Network | None, ends: ExitStack) -> None:
    """Run the job from its first process to its last; `ends` ends what an error leaves running."""
    kind = "network namespaces" if network else "processes"
    record.add_setting(
        seed=settings.seed,
        backend=settings.backend,
        nodes=settings.num_nodes,
        workers_per_node=settings.num_workers,
        nodes_as=kind,
        program=list(settings.program),
        flags=list(settings.flags),
        busy=list(settings.job.busy),
        standstill=settings.job.standstill,
        num_faults=len(settings.plan),
        plan=[{"at": planned.at, "fault": planned.fault} for planned in settings.plan],
        **({} if settings.trace is None else settings.trace.as_json()),
        started=time.time(),
        host=host_name(),
        pid=os.getpid(),
        **process_identity(),
    )
    cluster = Cluster(
        settings.run_dir,
        record,
        [*settings.flags, *settings.job.busy],
        num_nodes=settings.num_nodes,
        num_workers=settings.num_workers,
        network=network,
        backend=backend_of(settings.backend, network, run_id=settings.run_dir.name, endpoint=settings.etcd_endpoint),
        program=settings.program,
        hears_notices=settings.job.hears_notices,
    )
    ends.callback(cluster.close)
    seconds = settings.plan[-1].at + 30
    with Timeline(cluster, last_step=settings.last_step, seconds=seconds) as timeline:
        timeline.log(
            f"drill with seed {settings.seed}: {settings.num_nodes} nodes as {kind}, backend {settings.backend}; "
            f"{', '.join(planned.fault for planned in settings.plan)}"
        )
        timeline.log(f"run directory {settings.run_dir}")
        if settings.why_no_network is not None:
            timeline.log(f"no network namespaces, so that no node can lose its network: {settings.why_no_network}")
        if settings.trace is None:
            Conductor(settings, cluster, record, timeline).conduct()
        else:
            Replay(settings, settings.trace, cluster, record, timeline).conduct()
        record.leftovers(cluster.leftovers())


def _compare(settings: Settings) -> None:
    try:
        found = undisturbed(
            settings.flags, cwd=Path.cwd(), program=settings.program, log=partial(print, flush=True),
            last_step=(read_json(settings.run_dir / "result.json") or {}).get("step"),
        )  # fmt: skip
    except ReferenceFailed as error:
        print(f"elastic-train: warning: nothing to compare with: {error}", flush=True)
    else:
        wanted = ("state_sha256", "step", "train_loss", "early_loss", "late_loss", "test_accuracy")
        write_reference(settings.run_dir, {name: found.get(name) for name in wanted})


def _judge(settings: Settings) -> bool:
    history = read_history(settings.run_dir)
    found = audit_history(history)
    where = f"seed {settings.seed}; {write_report(history, found)}"
    print("\n".join([*describe(found, history), where, *conclude(found)]), flush=True)
    return found.passed
