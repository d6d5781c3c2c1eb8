"""The console script `elastic-train`, for people: what a run is doing, drills and audits, snapshots, benchmarks.

Each command's code is imported only when it is asked for, and torch only where tensors are: `--help` and the commands
that read files answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_train.errors import ElasticTrainError, SnapshotDamaged, SnapshotError, UsageError
from elastic_train.system import num_cores, require_linux
from elastic_train.wording import flags_in, unrecognized

if TYPE_CHECKING:
    from elastic_train.storage.snapshot import SnapshotInfo

Command = Callable[[argparse.Namespace], int]

SLURM_OPTIONS = ("job-name", "time", "partition", "account", "gpus-per-node", "cpus-per-task")
"""those that most jobs need"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Expected errors are one line on stderr, others a traceback."""
    try:
        parsed = make_parser().parse_args(arguments)
        command: Command = parsed.command
        code = command(parsed)
        sys.stdout.flush()  # here, where a closed pipe or a full disk can still be handled
        return code
    except ElasticTrainError as error:
        print(f"elastic-train: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE  # as a program that the signal ends: `| head` is no error
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
        print(f"elastic-train: error: output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _discard_output() -> None:
    """Python flushes stdout once more at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    takes_worker_flags = False
    """behind `--`"""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help tells more)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's. Raises: UsageError of the command that was given what it does not know, and not of all."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = flags_in(unknown)
            known = [name for action in self._actions for name in action.option_strings]
            where = f"{self.prog} --help tells more"
            if self.takes_worker_flags and any(_is_of_worker(name) for name in given):
                known, where = [], f"flags of the worker stand behind --: {self.prog} -- {given[0]} ...; {where}"
            raise UsageError(unrecognized(unknown, known, where))
        return found, unknown


def _is_of_worker(name: str) -> bool:
    from elastic_train.config import Config, flag

    return name in {flag(entry.name) for entry in dataclasses.fields(Config)}


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="elastic-train",
        description="For people beside a training: where it stands, drills and audits, its snapshots, benchmarks.",
        epilog="The training itself: torchrun ... -m elastic_train (--help lists its flags).",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    status = _add(
        commands, "status", show_status, "where a run stands, from its files alone; also of one that is alive"
    )
    status.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    status.add_argument("--watch", action="store_true", help="again and again, until the run has ended or Ctrl-C")

    from elastic_train.tools.check.flags import add_flags

    add_flags(_add(commands, "check", run_check, "whether machines can do a job, before it; also under torchrun"))

    drill = _add(
        commands, "drill", run_drill, "a real job on this machine, harm done to it by a seeded schedule, and an audit"
    )
    drill.takes_worker_flags = True
    drill.add_argument("--seed", type=int, help="decides what is done to whom and when (default: a new one, printed)")
    drill.add_argument("--nodes", type=int, default=4, help="how many the job has at most (default: 4)")
    drill.add_argument("--workers", type=int, default=1, help="of a node (default: 1)")
    drill.add_argument("--backend", choices=("c10d", "etcd3"), default="c10d", help="where nodes meet (default: c10d)")
    drill.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT,...", help="an etcd cluster for etcd3 (default: three members of its own)"
    )
    drill.add_argument("--duration", type=float, default=60.0, metavar="SECONDS", help="of the schedule (default: 60)")
    drill.add_argument("--every", type=float, metavar="SECONDS", help="a fault so often, drawn from --faults")
    drill.add_argument("--faults", metavar="NAME,...", help="draw from these (default: five in a row; see --list)")
    drill.add_argument("--scenario", type=Path, metavar="FILE", help="TOML with [[fault]] tables: at = SECONDS, name")
    drill.add_argument("--list", action="store_true", help="print the faults and what each does")
    drill.add_argument(
        "--nodes-as", choices=("auto", "processes", "namespaces"), default="auto",
        help="network namespaces let a node lose its network or its power, and reach nothing but the others; auto: "
        "where this machine allows",
    )  # fmt: skip
    drill.add_argument(
        "--run-dir", type=Path, metavar="PATH", help="where it leaves the run (default: runs/drill-SEED-DATE-TIME)"
    )
    drill.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of the worker, to drill a task of your own")

    auditing = _add(commands, "audit", run_audit, "whether a run kept the promises: every check, from its files alone")
    auditing.add_argument("run_dir", metavar="RUN_DIR", type=Path)

    report = _add(commands, "report", write_report, "RUN_DIR/report.html, one page about a run that needs no network")
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    report.add_argument("--output", metavar="FILE", type=Path, help="where else, for a run that one may only read")
    report.add_argument("--open", action="store_true", help="show it in a browser")

    submit = commands.add_parser("submit", help="hand a training to a cluster's scheduler", allow_abbrev=False)
    schedulers = submit.add_subparsers(title="schedulers", metavar="SCHEDULER", required=True)
    slurm = _add(schedulers, "slurm", submit_slurm, "fill in a batch script of deploy/slurm and submit it")
    slurm.add_argument(
        "--nodes", default="1:4", help="as torchrun's --nnodes: 4, exactly four; 1:4, an elastic job (default: 1:4)"
    )
    slurm.add_argument(
        "--allocate", type=int, metavar="N",
        help="nodes to ask for, if not the most of --nodes: more are spares, with fewer other jobs are to join",
    )  # fmt: skip
    slurm.add_argument("--array", action="store_true", help="each node a job of its own; they meet in --etcd")
    slurm.add_argument("--name", help="of the run (default: the job's id); in etcd, jobs of one name are one run")
    slurm.add_argument("--etcd", metavar="H1:2379,...", help="meet in etcd, where any node may die (default: c10d)")
    slurm.add_argument("--etcd-conf", metavar="KEY=VALUE,...", help="of --rdzv-conf: ca, cert, key, user, ...")
    slurm.add_argument("--run-dir", metavar="PATH", help="on shared storage (default: runs/slurm-ID, here)")
    slurm.add_argument("--setup", metavar="COMMAND", help="brings torchrun (default: activates this environment)")
    slurm.add_argument("--workers", type=int, help="of a node (default: one for each GPU that SLURM gives it)")
    for option in SLURM_OPTIONS:
        slurm.add_argument(f"--{option}", metavar="VALUE", help="of sbatch")
    slurm.add_argument("--sbatch", metavar="OPTION=VALUE", action="append", default=[], help="any other of sbatch")
    slurm.add_argument("--no-check", action="store_true", help="start at once, without `elastic-train check`")
    slurm.add_argument(
        "--local-snapshots", action="store_true", help="of the check: each node keeps its own snapshots, on purpose"
    )
    slurm.add_argument("--dry-run", action="store_true", help="print the script, and submit nothing")
    slurm.takes_worker_flags = True
    slurm.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of the worker")

    snapshot = commands.add_parser("snapshot", help="list, verify, hash and export snapshots", allow_abbrev=False)
    actions = snapshot.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _add(actions, "list", list_snapshots, "the snapshots of a run, newest first")
    listing.add_argument("path", metavar="RUN_DIR|SNAPSHOTS_DIR", type=Path)
    verify = _add(actions, "verify", verify_snapshots, "compare size and SHA-256 of one snapshot, or of all of a run")
    verify.add_argument("path", metavar="PATH", type=Path, help="a snapshot, a folder of snapshots, or a run directory")
    hashing = _add(actions, "hash", hash_snapshot, "state_sha256 of a snapshot's model, as in result.json")
    hashing.add_argument(
        "path", metavar="PATH", type=Path, help="a snapshot; of a folder of snapshots or a run, the newest whole one"
    )

    export = _add(actions, "export", export_snapshot, "a snapshot's weights as a file for other programs")
    export.add_argument(
        "path", metavar="PATH", type=Path, help="a snapshot; of a folder of snapshots or a run, the newest whole one"
    )
    export.add_argument("--format", choices=("pt", "safetensors"), default="pt", help="default: pt, for torch.load")
    export.add_argument("--output", metavar="FILE", type=Path, help="default: weights.FORMAT here")
    export.add_argument("--averaged", action="store_true", help="the averaged weights of --ema-decay")

    etcd = _add(commands, "etcd", serve_etcd, "a local etcd cluster to try a job on, until Ctrl-C")
    etcd.add_argument("--members", type=int, default=3, metavar="N", help="how many (default: 3, of which one may die)")
    etcd.add_argument("--tls", action="store_true", help="with certificates of its own, for the client too")
    etcd.add_argument("--dir", type=Path, metavar="PATH", help="leave data, logs and certificates there")

    certs = _add(commands, "certs", make_certs, "certificates for an etcd cluster and its clients")
    certs.add_argument("dir", type=Path, metavar="DIR", help="ca, server and client go there, each .pem and .key")
    certs.add_argument(
        "--hosts", metavar="HOST,...",
        help="names and addresses of the etcd servers; without, only the client's is made, by the authority in DIR",
    )  # fmt: skip
    certs.add_argument("--client", default="client", metavar="NAME", help="user name in etcd (default: client)")
    certs.add_argument("--days", type=int, default=365, help="that server and client are valid (default: 365)")
    certs.add_argument(
        "--renew", action="store_true", help="replace what is there, without --hosts the client's; the authority stays"
    )

    bench = _add(commands, "bench", run_benchmark, "ours against what one would write by hand, interleaved in one run")
    from elastic_train.tools.bench import BENCHMARKS

    bench.add_argument("name", metavar="NAME", choices=sorted(BENCHMARKS), help=", ".join(sorted(BENCHMARKS)))
    bench.add_argument("--quick", action="store_true", help="less than a minute, with more noise")
    bench.add_argument("--json", metavar="FILE", type=Path, help="also write the rows there")
    return parser


def _add(commands: argparse._SubParsersAction[_Parser], name: str, command: Command, what: str) -> _Parser:
    parser = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    parser.set_defaults(command=command)
    return parser


# --- commands ---------------------------------------------------------------------------------------------------------


def show_status(arguments: argparse.Namespace) -> int:
    if arguments.watch:
        from elastic_train.tools.audit.watching import watch_status

        watch_status(arguments.run_dir, sys.stdout)
        return 0
    from elastic_train.observe.status import read_status
    from elastic_train.observe.status_table import show

    now = time.time()
    show(read_status(arguments.run_dir, now), now, sys.stdout)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    require_linux("a check")
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
        become_root([Path.cwd(), *filter(None, (arguments.run_dir, arguments.scenario))])
    for signum in (signal.SIGTERM, signal.SIGHUP):  # so that its nodes are ended
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(signum, lambda received, _frame: sys.exit(128 + received))
    return 0 if run_drill(settings_of(arguments)) else 1


def run_audit(arguments: argparse.Namespace) -> int:
    from elastic_train.tools.audit.audit import audit_history, conclude, describe
    from elastic_train.tools.audit.history import read_history

    history = read_history(arguments.run_dir)
    found = audit_history(history)
    print("\n".join([*describe(found, history), *conclude(found)]))
    return 0 if found.passed else 1


def write_report(arguments: argparse.Namespace) -> int:
    from elastic_train.tools.audit.audit import audit_history
    from elastic_train.tools.audit.history import read_history
    from elastic_train.tools.audit.report import write_report

    history = read_history(arguments.run_dir)
    path = write_report(history, audit_history(history), arguments.output).absolute()
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
    if "" in options.values():
        raise UsageError(f"--{next(option for option, value in options.items() if not value)}: has no value")
    for text in arguments.sbatch:
        name, _, value = text.removeprefix("--").partition("=")
        options[name] = value
    script = write_script(
        SlurmJob(
            nodes=arguments.nodes,
            allocate=arguments.allocate,
            is_array=arguments.array,
            name=arguments.name,
            etcd=arguments.etcd,
            etcd_conf=arguments.etcd_conf,
            run_dir=arguments.run_dir,
            setup=arguments.setup,
            workers=arguments.workers,
            is_checked=not arguments.no_check,
            has_local_snapshots=arguments.local_snapshots,
            options=options,
            flags=arguments.flags,
        )
    )
    print(script.rstrip("\n") if arguments.dry_run else submit(script))
    return 0


def serve_etcd(arguments: argparse.Namespace) -> int:
    if arguments.members < 1:
        raise UsageError(f"--members {arguments.members}: must be at least 1")
    from elastic_train.tools.drills.etcd_command import serve_etcd

    return serve_etcd(arguments)


def make_certs(arguments: argparse.Namespace) -> int:
    from elastic_train.rendezvous.certificates import make_certificates

    hosts = [host.strip() for host in (arguments.hosts or "").split(",") if host.strip()]
    if arguments.hosts is not None and not hosts:
        raise UsageError("--hosts: name the hosts of the servers, as clients will")
    files = make_certificates(arguments.dir, hosts, client=arguments.client, days=arguments.days, renew=arguments.renew)
    name = arguments.client
    if hosts:
        print(f"servers: {files.certificate('server')}, {files.key('server')}; authority: {files.ca}")
    print(f"workers: --rdzv-conf=ca={files.ca},cert={files.certificate(name)},key={files.key(name)}")
    print(f"keep {files.ca_key} away from all nodes: whoever has it makes certificates that they accept")
    return 0


def list_snapshots(arguments: argparse.Namespace) -> int:
    from elastic_train.storage.snapshot import find_snapshots, snapshots_in
    from elastic_train.wording import duration, human_bytes

    directory = snapshots_in(arguments.path)
    found = find_snapshots(directory, warn=_warn)
    if not found:
        raise SnapshotError(f"no whole snapshot in {directory}")
    rows = [("step", "epoch", "samples", "generation", "workers", "age", "size", "name")]
    for info in found:
        size = sum(file.bytes for file in info.files.values())
        numbers = (info.step, info.epoch, info.samples_done, info.generation, info.world_size)
        rows.append((*map(str, numbers), duration(time.time() - info.time), human_bytes(size), info.name))  # type: ignore[arg-type]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        *cells, name = row
        print("  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)), name]))
    return 0


def verify_snapshots(arguments: argparse.Namespace) -> int:
    """Prints a line per snapshot; 1 if one is damaged or there is none."""
    from elastic_train.storage.snapshot import find_snapshots, is_snapshot, read_info, snapshots_in, verify

    damaged = []
    if is_snapshot(arguments.path):
        infos = []
        try:
            infos = [read_info(arguments.path)]
        except SnapshotDamaged as error:
            damaged.append(str(error))
    else:
        infos = find_snapshots(snapshots_in(arguments.path), warn=lambda line: damaged.append(_without_skipped(line)))
    for info in infos:
        try:
            verify(info)
        except SnapshotDamaged as error:
            damaged.append(str(error))
        else:
            print(f"whole: {info.path}")
    for message in damaged:
        print(f"damaged: {message}")
    if not infos and not damaged:
        raise SnapshotError(f"no snapshot in {snapshots_in(arguments.path)}")
    return 1 if damaged else 0


def hash_snapshot(arguments: argparse.Namespace) -> int:
    from elastic_train.training.state import state_sha256

    _, state = _read_state(arguments.path)
    print(state_sha256(state["model"]))
    return 0


def export_snapshot(arguments: argparse.Namespace) -> int:
    from elastic_train.storage.weights import export_weights

    info, state = _read_state(arguments.path)
    weights = state.get("extras", {}).get("ema") if arguments.averaged else state["model"]
    if weights is None:
        raise SnapshotError(f"{arguments.path} holds no averaged weights; --ema-decay keeps them")
    output = arguments.output or Path(f"weights.{arguments.format}")
    export_weights(weights, output, arguments.format)
    print(f"{len(weights)} tensors of step {info.step}: {output.absolute()}")
    return 0


def _read_state(path: Path) -> tuple[SnapshotInfo, dict[str, Any]]:
    from elastic_train.storage.weights import read_state

    return read_state(path, warn=_warn)


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


def _without_skipped(message: str) -> str:
    return message.removeprefix("skipped: ")


if __name__ == "__main__":
    sys.exit(main())
