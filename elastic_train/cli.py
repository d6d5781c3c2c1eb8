"""The console script `elastic-train`, for people: the status of a run, drills and audits, snapshots, benchmarks.

The parser is built by one function per group of commands; tools/commands.py runs the commands. The parser imports
nothing heavy, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from elastic_train.errors import ElasticTrainError, UsageError
from elastic_train.tools.commands import (
    SLURM_OPTIONS,
    copy_snapshot,
    export_snapshot,
    hash_snapshot,
    list_snapshots,
    run_audit,
    run_benchmark,
    run_check,
    run_drill,
    serve_etcd,
    show_status,
    submit_slurm,
    verify_snapshots,
    write_report,
)
from elastic_train.wording import empty_values, flags_in, no_value, unrecognized

Command = Callable[[argparse.Namespace], int]
OF_EACH_NODE = "run directory; if the nodes do not share one, that of each node"
Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"  # in quotes: it cannot be subscripted when it runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Prints one line to stderr for expected errors, else a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a message may have a name that is no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        parsed = make_parser().parse_args(arguments)
        command: Command = parsed.command
        code = command(parsed)
        sys.stdout.flush()  # here, while a closed pipe or a full disk can still be handled
        return code
    except ElasticTrainError as error:
        print(f"elastic-train: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE  # as if ended by the signal: `| head` is no error
    except OSError as error:
        if error.strerror is None or not (error.filename is None or _is_named(error.filename, parsed)):
            raise  # a bug, of a task or ours. Not shown in one line: the name may be a URL with a secret.
        if error.filename is None:
            _discard_output()
        what = "output cannot be written" if error.filename is None else error.filename
        print(f"elastic-train: error: {what}: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _is_named(path: object, arguments: argparse.Namespace) -> bool:
    """Whether an argument names this path, a folder above it, or a path below it. Flags behind `--` do not count."""
    own = [value for name, value in vars(arguments).items() if name != "flags"]
    given = [word for value in own for word in (value if isinstance(value, list) else [value])]
    if not isinstance(path, str):
        return False
    pairs = [[os.path.realpath(path), os.path.realpath(word)] for word in given if isinstance(word, (str, Path))]
    return any(os.path.commonpath(pair) in pair for pair in pairs)


def _discard_output() -> None:
    """Redirect stdout to /dev/null: Python flushes it again at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    takes_worker_flags = False
    """Whether the command takes flags of the worker behind `--`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help tells more)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does. Raises: UsageError: an empty value, or an unknown argument, with the hints of this
        command instead of the main parser's."""
        if self.get_default("command") is not None:
            self._require_values(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = flags_in(unknown)
            known = [name for action in self._actions for name in action.option_strings]
            where = f"{self.prog} --help tells more"
            if not given and "--output" in known:
                where = f"to write there: --output {unknown[0]}; {where}"
            script = next((word for word in getattr(found, "flags", None) or [] if word.endswith(".py")), "")
            if self.takes_worker_flags and (script or any(_is_of_worker(name) for name in given)):
                behind = f"{script} {given[0]}".lstrip()
                known, where = [], f"flags of the worker stand behind --: {self.prog} -- {behind} ...; {where}"
            raise UsageError(unrecognized(unknown, known, where))
        return found, unknown

    def _require_values(self, words: Sequence[str]) -> None:
        """Raises: UsageError: a value is empty, except behind `--` and for flags with an empty default."""
        defaults = {
            name: action.default for action in self._actions if action.nargs != 0 for name in action.option_strings
        }
        for name in empty_values(itertools.takewhile(lambda word: word != "--", words)):
            if defaults.get(name) != "":
                given = no_value(name) if name in defaults else "an argument has no value: is a variable not set?"
                raise UsageError(given)


def _is_of_worker(name: str) -> bool:
    from elastic_train.config import Config, flag

    return name in {flag(entry.name) for entry in dataclasses.fields(Config)}


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="elastic-train",
        description="Commands for people beside a training: status, checks, drills, audits, snapshots, benchmarks.",
        epilog="The training itself: torchrun ... -m elastic_train (--help lists its flags).",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_status(commands)
    _add_check(commands)
    _add_drill(commands)
    _add_audit_and_report(commands)
    _add_submit(commands)
    _add_snapshot(commands)
    _add_etcd(commands)
    _add_bench(commands)
    return parser


def _add(commands: Commands, name: str, command: Command, what: str) -> _Parser:
    parser = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    parser.set_defaults(command=command)
    return parser


def _add_status(commands: Commands) -> None:
    status = _add(commands, "status", show_status, "show the progress of a run, alive or ended, from its files alone")
    status.add_argument("run_dir", metavar="RUN_DIR", nargs="+", type=Path, help=OF_EACH_NODE)
    how = status.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="repeat until the run has ended, or Ctrl-C")
    how.add_argument("--json", action="store_true", help="print one JSON object, for programs such as an autoscaler")


def _add_check(commands: Commands) -> None:
    check = _add(
        commands, "check", run_check, "check before a job whether the machines can run it; also under torchrun"
    )
    check.add_argument("--nodes", type=int, metavar="N", help="nodes that the job needs; the check fails with fewer")
    check.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS",
        help="time between SIGTERM and SIGKILL: terminationGracePeriodSeconds, KillWait (default: 30)",
    )  # fmt: skip
    check.add_argument("--local-snapshots", action="store_true", help="accept that each node keeps its own snapshots")
    check.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long to wait for the other nodes (default: 120)",
    )
    alone = check.add_argument_group("for one node alone, without torchrun", "the values that torchrun will get")
    alone.add_argument("--workers", type=int, metavar="N", help="workers of this node, as torchrun's --nproc-per-node")
    alone.add_argument(
        "--rdzv-backend", choices=("c10d", "etcd3"), default="c10d", help="where nodes meet (default: c10d)"
    )
    alone.add_argument("--rdzv-endpoint", metavar="HOST:PORT,...", help="endpoint, as torchrun will get it")
    alone.add_argument("--rdzv-id", default="none", metavar="NAME", help="run id of the job (default: none)")
    alone.add_argument(
        "--rdzv-conf",
        default="",
        metavar="KEY=VALUE,...",
        help="settings of etcd: ca, cert, key, user, password_file, prefix",
    )
    check.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="worker flags of the job: its model, data and directories"
    )


def _add_drill(commands: Commands) -> None:
    from elastic_train.tools.drills.jobs import JOBS, PACED

    drill = _add(
        commands,
        "drill",
        run_drill,
        "run a real job on this machine, inject faults by a seeded schedule, and audit the run",
    )
    drill.takes_worker_flags = True
    drill.add_argument(
        "--seed", type=int, help="determines the faults, their targets and times (default: a new one, printed)"
    )
    drill.add_argument("--job", choices=tuple(JOBS), help=f"one of the drill's own jobs (default: {PACED}; see --list)")
    drill.add_argument("--nodes", type=int, help="most nodes of the job (default: 4; for large-state 3)")
    drill.add_argument("--workers", type=int, default=1, help="workers per node (default: 1)")
    drill.add_argument("--backend", choices=("c10d", "etcd3"), default="c10d", help="where nodes meet (default: c10d)")
    drill.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT,...", help="etcd cluster for etcd3 (default: start one of three members)"
    )
    drill.add_argument(
        "--duration", type=float, default=60.0, metavar="SECONDS", help="length of the schedule (default: 60)"
    )
    drill.add_argument(
        "--every", type=float, metavar="SECONDS", help="time between faults, which are drawn from --faults"
    )
    drill.add_argument("--faults", metavar="NAME,...", help="faults to draw from (default: five in a row; see --list)")
    drill.add_argument("--scenario", type=Path, metavar="FILE", help="TOML with [[fault]] tables: at = SECONDS, name")
    drill.add_argument("--trace", type=Path, metavar="FILE", help="replay a CSV file with node,from,to,notice,price")
    drill.add_argument(
        "--speed", type=float, metavar="N", help="seconds of the trace per second of the drill (default: 1)"
    )
    drill.add_argument("--list", action="store_true", help="print the faults and what each does, and the jobs")
    drill.add_argument(
        "--nodes-as", choices=("auto", "processes", "namespaces"), default="auto",
        help="network namespaces let a node lose its network or its power, and reach nothing but the others; auto: "
        "where this machine allows",
    )  # fmt: skip
    drill.add_argument(
        "--run-dir", type=Path, metavar="PATH", help="run directory of the drill (default: runs/drill-SEED-DATE-TIME)"
    )
    drill.add_argument(
        "flags", nargs="*", metavar="-- [SCRIPT | -m MODULE] FLAGS",
        help="worker flags, to drill your own task; after a script, as for torchrun, the flags of the script",
    )  # fmt: skip


def _add_audit_and_report(commands: Commands) -> None:
    auditing = _add(commands, "audit", run_audit, "check from the files of a run whether it kept all promises")
    auditing.add_argument("run_dir", metavar="RUN_DIR", nargs="+", type=Path, help=OF_EACH_NODE)

    report = _add(
        commands, "report", write_report, "write RUN_DIR/report.html, one page about a run, which needs no network"
    )
    report.add_argument("run_dir", metavar="RUN_DIR", nargs="+", type=Path, help=OF_EACH_NODE)
    report.add_argument(
        "--output", metavar="FILE", type=Path, help="write the page there instead, e.g. if RUN_DIR is read-only"
    )
    report.add_argument("--open", action="store_true", help="open the page in a browser")


def _add_submit(commands: Commands) -> None:
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
    slurm.add_argument(
        "--array", dest="is_array", action="store_true", help="make each node a job of its own; the jobs meet in --etcd"
    )
    slurm.add_argument("--name", help="name of the run (default: the job's id); in etcd, jobs of one name are one run")
    slurm.add_argument("--etcd", metavar="H1:2379,...", help="meet in etcd, where any node may die (default: c10d)")
    slurm.add_argument("--etcd-conf", default="", metavar="KEY=VALUE,...", help="for --rdzv-conf: ca, cert, key, ...")
    slurm.add_argument(
        "--run-dir", metavar="PATH", help="run directory on shared storage (default: runs/slurm-ID, here)"
    )
    slurm.add_argument(
        "--setup",
        metavar="COMMAND",
        help="makes torchrun available (default: activates this environment; true: nothing)",
    )
    slurm.add_argument("--workers", type=int, help="workers per node (default: one for each GPU that SLURM gives it)")
    for option in SLURM_OPTIONS:
        slurm.add_argument(f"--{option}", metavar="VALUE", help="option of sbatch")
    slurm.add_argument(
        "--sbatch", metavar="OPTION=VALUE", action="append", default=[], help="any other option of sbatch"
    )
    slurm.add_argument(
        "--no-check", dest="is_checked", action="store_false", help="start at once, without `elastic-train check`"
    )
    slurm.add_argument(
        "--local-snapshots", dest="has_local_snapshots", action="store_true",
        help="let the check accept that each node keeps its own snapshots",
    )  # fmt: skip
    slurm.add_argument("--dry-run", action="store_true", help="print the script, and submit nothing")
    slurm.takes_worker_flags = True
    slurm.add_argument(
        "flags", nargs="*", metavar="-- [SCRIPT | -m MODULE] FLAGS",
        help="flags of the worker, after a program with its own training function, if there is one",
    )  # fmt: skip


def _add_snapshot(commands: Commands) -> None:
    snapshot = commands.add_parser("snapshot", help="list, verify, hash, export and copy snapshots", allow_abbrev=False)
    actions = snapshot.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _add(actions, "list", list_snapshots, "list the snapshots of a run, newest first")
    listing.add_argument("path", metavar="RUN_DIR|SNAPSHOTS_DIR", help="a folder, or a URL such as s3://bucket/run-1")
    verify = _add(actions, "verify", verify_snapshots, "compare size and SHA-256 of one snapshot, or of all of a run")
    verify.add_argument("path", metavar="PATH", help="a snapshot, a folder of snapshots, a run directory, or a URL")
    hashing = _add(actions, "hash", hash_snapshot, "print state_sha256 of a model, as in result.json")
    hashing.add_argument(
        "path",
        metavar="PATH",
        help="a snapshot; of a folder of snapshots, a run or a URL, the newest whole one; or exported weights",
    )

    export = _add(actions, "export", export_snapshot, "export a snapshot's weights for other programs")
    export.add_argument(
        "path", metavar="PATH", help="a snapshot; of a folder of snapshots, a run or a URL, the newest whole one"
    )
    export.add_argument(
        "--format", choices=("pt", "safetensors", "dcp"), default="pt",
        help="default: pt, for torch.load; dcp: a folder for torch.distributed.checkpoint",
    )  # fmt: skip
    export.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        help="where to write; replaces a file; default: weights.FORMAT here, if there is none yet",
    )
    export.add_argument(
        "--best", action="store_true", help="export the snapshot with the best metric instead of the newest"
    )
    export.add_argument("--averaged", action="store_true", help="export the averaged weights of --ema-decay")

    copying = _add(actions, "copy", copy_snapshot, "copy a snapshot to another folder or URL, whole or not at all")
    copying.add_argument(
        "source", metavar="SOURCE", help="a snapshot; of a folder or URL of many, the newest whole one"
    )
    copying.add_argument("target", metavar="TARGET", help="the folder or URL to contain the copy")
    for action in (listing, verify, hashing, export, copying):
        action.add_argument(
            "--snapshot-key",
            metavar="FILE",
            type=Path,
            help="key file; snapshots that it has not signed count as damaged",
        )


def _add_etcd(commands: Commands) -> None:
    etcd = _add(commands, "etcd", serve_etcd, "run a local etcd cluster for trying out a job, until Ctrl-C")
    etcd.add_argument(
        "--members", type=int, default=3, metavar="N", help="members of the cluster (default: 3, of which one may die)"
    )


def _add_bench(commands: Commands) -> None:
    bench = _add(
        commands, "bench", run_benchmark, "compare elastic_train with hand-written code, interleaved in one run"
    )
    from elastic_train.tools.bench import BENCHMARKS

    bench.add_argument("name", metavar="NAME", choices=sorted(BENCHMARKS), help=", ".join(sorted(BENCHMARKS)))
    bench.add_argument("--quick", action="store_true", help="take less than a minute, with more noise")
    bench.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to this file")


if __name__ == "__main__":
    sys.exit(main())
