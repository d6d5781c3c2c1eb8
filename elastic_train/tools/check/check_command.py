"""`elastic-train check`: the order of the checks, the rules that judge the facts, and the output."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from elastic_train.config import Config, check_number, parse
from elastic_train.errors import FormationFailed, LeftOut, StoreRefused, StoreUnreachable, UsageError
from elastic_train.protocol.addresses import parse_endpoints
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.rendezvous.launch import C10dSettings, Launch, max_nodes_of
from elastic_train.stopping import StopSignal, die_with_agent
from elastic_train.tools.check import node_rules, world_rules
from elastic_train.tools.check.advice import Finding, Level
from elastic_train.tools.check.facts import Gathered, RendezvousFacts, Wanted
from elastic_train.wording import count

OWN_ID = "check"
"""follows the job's run id in the rendezvous of the check"""
LEAST_PEER_TIMEOUT = 30.0
"""seconds: a check need not lose a slow node soon"""
RULES: tuple[Callable[[Gathered], list[Finding]], ...] = (
    world_rules.world_is_the_one_asked_for,
    world_rules.versions_are_equal,
    world_rules.torch_is_known,
    world_rules.store_is_usable,
    world_rules.names_resolve,
    world_rules.addresses_are_usable,
    world_rules.everybody_reaches_everybody,
    world_rules.clocks_agree,
    node_rules.gpus_are_visible_and_not_shared,
    node_rules.state_can_be_built,
    node_rules.snapshot_directory_is_one,
    node_rules.there_is_room,
    node_rules.grace_is_long_enough,
)
"""in the order in which a person would look: pure functions, whose findings are for the user that starts the job"""


def run_check(arguments: argparse.Namespace) -> int:
    """Gather, judge and print. Under torchrun every worker calls it. Returns 0, or 1 if something would break the job.

    Raises:
        UsageError: a flag of the check or of the job is wrong.
    """
    refuse_what_cannot_work(arguments)
    if "RANK" in os.environ:
        die_with_agent()
    from elastic_train.training.own_flags import own_flags

    config = replace(parse(arguments.flags, own_flags(arguments.flags)), formation_timeout=arguments.wait)
    launch = launch_of(config, os.environ)
    wanted = wanted_of(arguments, launch, os.environ)
    launch = until_all_come(launch, wanted.nodes, arguments.wait)
    findings = judge(gather(config, launch, wanted, arguments))
    is_good = is_passed(findings)
    if launch.local_rank == 0:  # once in each node's terminal or log
        print("\n".join([*describe(findings), "PASS" if is_good else "FAIL"]), flush=True)
    return 0 if is_good else 1


def judge(gathered: Gathered) -> list[Finding]:
    """The findings of all rules."""
    return [finding for rule in RULES for finding in rule(gathered)]


def is_passed(findings: Iterable[Finding]) -> bool:
    return not any(finding.level is Level.BREAKS for finding in findings)


def refuse_what_cannot_work(arguments: argparse.Namespace) -> None:
    """Refuse flags that cannot work, before anything that takes long. Raises: UsageError."""
    first = next(iter(arguments.flags), "--")
    if first in ("-m", "--module") or not first.startswith("-"):
        raise UsageError(
            f"{' '.join(arguments.flags[:2]) if first.startswith('-') else first}: the check builds what "
            "`-m elastic_train` trains by its flags, not the model of a script: leave the script and its own flags "
            "out, and machines, network, directories and data processes are checked without it"
        )
    check_number("--nodes", arguments.nodes, least=1)
    check_number("--workers", arguments.workers, least=1)
    check_number("--grace", arguments.grace, least=0)
    check_number("--wait", arguments.wait)
    if arguments.rdzv_backend == "etcd3":
        etcd_settings(arguments, os.environ)
    elif arguments.rdzv_endpoint is not None:
        parse_endpoints(arguments.rdzv_endpoint, "--rdzv-endpoint")


def launch_of(config: Config, environ: Mapping[str, str]) -> Launch:
    launch = Launch.from_environment(environ, config.store_endpoint)
    if launch.c10d is not None or launch.etcd is not None:
        # A job of its own: a training under the same run id would admit the check's workers. Its keys in etcd are below
        # the run's, where its user may write.
        c10d = launch.c10d and replace(launch.c10d, join_timeout=config.formation_timeout)
        return replace(launch, run_id=f"{launch.run_id}/{OWN_ID}", c10d=c10d)
    return launch


def until_all_come(launch: Launch, nodes: int | None, seconds: float) -> Launch:
    """The launch of a world that waits up to `seconds` for the wanted `nodes`, if their number is known: people start
    them one by one, and the last call of a job, which admits later nodes, is short."""
    settings = launch.c10d or launch.etcd
    if nodes is None or settings is None:
        return launch
    most = max(settings.min_nodes, min(nodes, settings.max_nodes))
    waiting = replace(settings, max_nodes=most, last_call=max(seconds, settings.last_call))
    return replace(launch, c10d=waiting) if isinstance(waiting, C10dSettings) else replace(launch, etcd=waiting)


def of_the_job(config: Config, launch: Launch, workers: int | None) -> tuple[Config, Launch]:
    """The flags and the launch that a worker of the job will have, as far as they are known here: without torchrun the
    job's number of nodes is unknown, and the tasks of srun are not its workers.

    Args:
        workers: of this node, if the check is a single process.
    """
    if launch.agent_pid is not None:
        return config, launch
    return replace(config, min_nodes=None), replace(launch, world_size=workers or 1)


def wanted_of(arguments: argparse.Namespace, launch: Launch, environ: Mapping[str, str]) -> Wanted:
    by_scheduler = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_JOB_NUM_NODES") or ""
    nodes, nodes_by = arguments.nodes, "--nodes"
    if nodes is None and by_scheduler.isdigit() and ("RANK" in environ or launch.world_size > 1):
        nodes, nodes_by = int(by_scheduler), "SLURM's allocation"
    return Wanted(
        nodes=nodes,
        nodes_by=nodes_by,
        max_nodes=max_nodes_of(launch, environ),
        workers=arguments.workers,
        grace_seconds=arguments.grace,
        wants_shared_directory=not arguments.local_snapshots,
        is_c10d=launch.c10d is not None,
    )


def gather(config: Config, launch: Launch, wanted: Wanted, arguments: argparse.Namespace) -> Gathered:
    """Gather all facts for the rules; only those of this worker if no world forms."""
    # Imported here: they import torch, and a wrong flag should be reported before that.
    from elastic_train.elastic.barriers import Waits
    from elastic_train.elastic.connect import Applicant, connect_worker
    from elastic_train.storage.run_directory import default_run_dir
    from elastic_train.tools.check.here import look_here
    from elastic_train.tools.check.together import look_together, meet_others
    from elastic_train.tools.check.trial_place import trial_place

    run_dir = config.run_dir or default_run_dir(launch.run_id.removesuffix(f"/{OWN_ID}"))
    directory = trial_place(config, run_dir)
    of_job = of_the_job(replace(config, run_dir=run_dir), launch, wanted.workers)
    rendezvous, membership, mine = RendezvousFacts(), None, None
    try:
        rendezvous = look_at_rendezvous(arguments, launch)
        membership = connect_worker(
            Applicant(
                launch,
                StopSignal(),
                Waits(config.formation_timeout, max(config.peer_timeout, LEAST_PEER_TIMEOUT), config.wait_timeout),
                max_world_size=None,
                run_dir=None,
                log=lambda message: print(message, flush=True),
                warn=lambda message: print(f"warning: {message}", flush=True),
            )
        )
        mine = look_here(*of_job, membership.address[0], directory, rendezvous)
        world = meet_others(membership, launch, mine)
        workers, shared = look_together(membership, world, mine, directory)
        return Gathered(wanted, tuple(workers), tuple(shared))
    except (StoreUnreachable, StoreRefused, FormationFailed, LeftOut) as error:
        if mine is None:
            mine = look_here(*of_job, "127.0.0.1", directory, rendezvous)
        return Gathered(wanted, (mine,), world_error=str(error))
    finally:
        if membership is not None:
            membership.close()
        directory.remove_marks()


def look_at_rendezvous(arguments: argparse.Namespace, launch: Launch) -> RendezvousFacts:
    """Check the rendezvous of torchrun's options, or of the check's own flags; once per node."""
    from elastic_train.tools.check.endpoint import look_at_endpoints, look_at_etcd

    if launch.local_rank != 0:
        return RendezvousFacts()
    if launch.etcd is not None:
        return look_at_etcd(launch.etcd, launch.run_id)
    if arguments.rdzv_backend == "etcd3":
        return look_at_etcd(etcd_settings(arguments, os.environ), f"{arguments.rdzv_id}/{OWN_ID}")
    if launch.c10d is not None:
        return look_at_endpoints(launch.c10d.endpoints, launch.run_id.removesuffix(f"/{OWN_ID}"))
    if arguments.rdzv_endpoint is not None:
        return look_at_endpoints(parse_endpoints(arguments.rdzv_endpoint, "--rdzv-endpoint"), arguments.rdzv_id)
    return RendezvousFacts()


def etcd_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> EtcdSettings:
    """The settings of etcd by the check's own flags. Raises: UsageError."""
    conf: dict[str, object] = {}
    for part in filter(None, arguments.rdzv_conf.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--rdzv-conf: {part!r} is not KEY=VALUE")
        conf[key.strip()] = value.strip()
    return EtcdSettings.from_torchrun(arguments.rdzv_endpoint or "", conf, environ, min_nodes=1, max_nodes=1)


def describe(findings: list[Finding]) -> list[str]:
    """Lines for the findings, the worst last: people see the end of a log first."""
    lines = []
    order = (Level.FINE, Level.SKIPPED, Level.MATTERS, Level.BREAKS)
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        lines.append(f"{finding.level.value:<8} {finding.what}")
        if finding.why:
            lines.append(f"{'':8}   why: {finding.why}")
        if finding.do:
            lines.append(f"{'':8}   do:  {finding.do}")
    broken = sum(finding.level is Level.BREAKS for finding in findings)
    warnings = sum(finding.level is Level.MATTERS for finding in findings)
    if broken or warnings:
        lines.append(f"{count(broken, 'thing')} would break the job, {count(warnings, 'warning')}")
    return lines
