"""From the command line of `elastic-train drill` to the settings of the drill, with every check on a flag."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from elastic_train.config import check_number, parse, value_of
from elastic_train.errors import UsageError
from elastic_train.tools.drills.backends import C10d, Etcd3
from elastic_train.tools.drills.catalogue import FAULTS
from elastic_train.tools.drills.jobs import BUNDLED_TASK, JOBS, PACED, DrillJob
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.schedule import (
    DEFAULT_FAULTS,
    Planned,
    Settings,
    default_plan,
    random_plan,
    read_scenario,
)
from elastic_train.tools.drills.trace import AvailabilityTrace, read_trace
from elastic_train.tools.program import BUNDLED_PROGRAM, Program, read_program
from elastic_train.training.own_flags import own_flags
from elastic_train.wording import aligned

TASK_FLAGS = ("--task", "--dataset", "--model")
OWNED_FLAGS = ("--run-dir", "--fresh", "--snapshot-dir")
"""flags of the worker that the drill sets itself, or that would break it"""
EVERY_SECONDS = 5.0
MOST_FAULTS = 100_000
"""per drill: one every five seconds takes six days"""
SHARE_TRAINED = 0.8
"""approximate share of a long schedule in training: the rest is incidents, and fewer nodes are slower"""


def list_faults() -> list[str]:
    """One line for each fault and for each job."""
    rows = []
    for name, kind in FAULTS.items():
        needs = " (needs network namespaces)" if kind.needs_network else ""
        rows.append((name, f"{kind.says}{needs}{f' (--backend {kind.backend})' if kind.backend else ''}"))
    rows += [("", ""), *((f"--job {name}", job.says) for name, job in JOBS.items())]
    return aligned(rows, left=(0, 1))


def may_use_namespaces(arguments: argparse.Namespace) -> bool:
    """Return whether the nodes should be network namespaces if this machine allows that."""
    return arguments.nodes_as != "processes" and arguments.rdzv_endpoint is None


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the flags ask for. Raises UsageError naming the flag."""
    program, given = read_program(arguments.flags, os.environ)
    is_bundled = program == BUNDLED_PROGRAM and not any(word.partition("=")[0] in TASK_FLAGS for word in given)
    if arguments.job is not None and not is_bundled:
        raise UsageError(f"--job {arguments.job}: is for the drill's own jobs; leave it out, or what you train")
    job = JOBS[arguments.job or PACED]
    trace = trace_of(arguments)
    if trace is not None:
        arguments.nodes = len(trace.nodes)
    if arguments.nodes is None:
        arguments.nodes = job.num_nodes
    check_number("--nodes", arguments.nodes, least=2)
    check_number("--workers", arguments.workers, least=1)
    check_number("--duration", arguments.duration)
    check_number("--every", arguments.every)
    every = arguments.every or EVERY_SECONDS
    if arguments.duration > MOST_FAULTS * every:
        told = f"is longer than {MOST_FAULTS:,} faults, one every {every:g} s"
        raise UsageError(f"--duration {arguments.duration:g}: {told}")
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    why_not = _why_no_network(arguments)
    has_network = may_use_namespaces(arguments) and why_not is None
    if trace is not None and has_network and arguments.backend == C10d.name:
        _require_first_node(arguments.trace, trace)
    plan = plan_of(arguments, seed, has_network) if trace is None else trace.plan
    is_long = bool(arguments.every or arguments.faults or trace)
    most = num_steps(plan, job, is_long=is_long) if is_bundled else None
    flags = [*default_flags(program, most, job), *given]
    for word in given:
        if word.partition("=")[0] in OWNED_FLAGS:
            raise UsageError(f"{word}: the drill sets that itself")
    # Only a user's script knows all its flags.
    known = flags if program == BUNDLED_PROGRAM else [f"--peer-timeout={value_of(flags, '--peer-timeout')}"]
    config = parse(known, own_flags(known))
    run_dir = arguments.run_dir or Path("runs") / f"drill-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UsageError(f"--run-dir {run_dir} is there already; a drill starts with an empty one")
    return Settings(
        run_dir=run_dir.absolute(),
        seed=seed,
        plan=plan,
        flags=flags,
        num_nodes=arguments.nodes,
        num_workers=arguments.workers,
        global_batch_size=config.global_batch_size,
        peer_timeout=config.peer_timeout,
        last_step=config.max_steps if is_bundled else None,
        wants_network=has_network,
        why_no_network=why_not,
        backend=arguments.backend,
        etcd_endpoint=arguments.rdzv_endpoint,
        program=program,
        job=job,
        trace=trace,
    )


def trace_of(arguments: argparse.Namespace) -> AvailabilityTrace | None:
    """Read the trace to replay, if there is one. Raises: UsageError."""
    if arguments.trace is None:
        if arguments.speed is not None:
            raise UsageError(f"--speed {arguments.speed:g}: is of a trace: it goes with --trace FILE")
        return None
    for name in ("scenario", "faults", "every", "nodes"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--trace says which nodes are there when: it goes without --{name}")
    check_number("--speed", arguments.speed)
    return read_trace(arguments.trace, 1.0 if arguments.speed is None else arguments.speed)


def _require_first_node(path: Path, trace: AvailabilityTrace) -> None:
    """Raises: UsageError: after all nodes are gone, the job would have to begin without the trace's first node."""
    for at, nodes in trace.new_beginnings:
        if trace.nodes[0] not in nodes:
            raise UsageError(
                f"--trace {path}: all nodes are gone before {at:g}, and under c10d {nodes[0]} cannot begin the job "
                f"anew, only {trace.nodes[0]}, the first: give --backend etcd3"
            )


def _why_no_network(arguments: argparse.Namespace) -> str | None:
    """What this machine lacks for nodes that are network namespaces; None if nothing, or if the flags exclude them.

    Raises: UsageError: the flags require them, and they do not work, or flags do not fit together.
    """
    if arguments.rdzv_endpoint is not None and arguments.backend != Etcd3.name:
        raise UsageError("--rdzv-endpoint: of an etcd cluster; it goes with --backend etcd3")
    if arguments.rdzv_endpoint is not None and arguments.nodes_as == "namespaces":
        raise UsageError("--nodes-as namespaces: nodes there reach nothing but each other; leave out --rdzv-endpoint")
    why_not = Network.why_not() if may_use_namespaces(arguments) else None
    if arguments.nodes_as == "namespaces" and why_not is not None:
        raise UsageError(f"--nodes-as namespaces: not on this machine: {why_not}")
    return why_not


def num_steps(plan: Sequence[Planned], job: DrillJob, *, is_long: bool) -> int:
    """The steps of a bundled job, so that it lasts as long as the schedule; or the job's own number of steps."""
    if job.num_steps is not None:
        return job.num_steps
    steps = int(max(10.0, plan[-1].at) * job.spare * job.steps_per_second * (SHARE_TRAINED if is_long else 1.0))
    return steps + job.snapshot_every * sum(FAULTS[planned.fault].snapshots for planned in plan)


def plan_of(arguments: argparse.Namespace, seed: int, has_network: bool) -> list[Planned]:
    """The schedule that the flags ask for. Raises UsageError."""
    if arguments.scenario is not None:
        if arguments.faults is not None or arguments.every is not None:
            raise UsageError("--scenario says what happens when: it goes without --faults and --every")
        plan = read_scenario(arguments.scenario)
        _require_available([planned.fault for planned in plan], arguments.backend, has_network)
        return plan
    if arguments.faults is None and arguments.every is None:
        if arguments.nodes < len(DEFAULT_FAULTS) - 1:
            every = arguments.duration / (len(DEFAULT_FAULTS) + 1)
            return random_plan(seed, DEFAULT_FAULTS, arguments.duration, every, arguments.nodes)
        return default_plan(seed, arguments.duration, arguments.nodes)
    if arguments.faults is not None:
        names = arguments.faults.split(",")
        unknown = sorted(set(names) - set(FAULTS))
        if unknown:
            raise UsageError(f"--faults: no {', '.join(map(repr, unknown))}; --list shows what there is")
        _require_available(names, arguments.backend, has_network)  # also those that this seed does not draw
    else:
        names = [name for name in FAULTS if _why_not(name, arguments.backend, has_network) is None]
    every = arguments.every or EVERY_SECONDS
    return random_plan(seed, names, arguments.duration, every, arguments.nodes)


def _require_available(names: Iterable[str], backend: str, has_network: bool) -> None:
    """Raises: UsageError: naming the first fault that this drill cannot inject."""
    for name in sorted(set(names)):
        if (why_not := _why_not(name, backend, has_network)) is not None:
            raise UsageError(f"{name}: {why_not}")


def _why_not(name: str, backend: str, has_network: bool) -> str | None:
    """Why this drill cannot inject a fault; None if it can. It may try the fault, which takes a moment."""
    kind = FAULTS[name]
    if kind.backend not in (None, backend):
        return f"goes with --backend {kind.backend} only"
    if kind.needs_network and not has_network:
        return "needs network namespaces, which this machine or --nodes-as does not allow"
    return None if (why_not := kind.why_not()) is None else f"not on this machine: {why_not}"


def default_flags(program: Program, last_step: int | None, job: DrillJob) -> list[str]:
    """The default flags of the program on the nodes; the user's flags come after them and win."""
    common = ["--ledger", "--no-progress", "--peer-timeout", "5", "--snapshot-every", str(job.snapshot_every)]
    if program != BUNDLED_PROGRAM:
        return common  # a script may compute steps itself, which no flag can order
    bundled = ["--task", BUNDLED_TASK, "--epochs", "1000000", "--max-steps", str(last_step)] if last_step else []
    return [*bundled, "--reduction", "ordered", "--eval-every", "1000000", *common, *job.flags]
