"""`elastic-train submit slurm`: fill in a batch script of deploy/slurm and hand it to sbatch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_train.config import check_number, check_task_stands_alone, parse, value_of
from elastic_train.errors import ElasticTrainError, UsageError
from elastic_train.rendezvous.etcd_settings import parse_endpoints, require_known
from elastic_train.tools.program import BUNDLED_PROGRAM, read_program

SCRIPTS = Path(__file__).parent / "data"
"""the scripts of deploy/slurm, so that they come with an installation too"""
OWNED_FLAGS = {
    "--run-dir": "it is submit's own: before the --",
    "--fresh": "a job that SLURM starts again would begin anew; give another --run-dir",
    "--spawn": "torchrun starts the workers of a node: --workers says how many",
}


@dataclass(frozen=True)
class SlurmJob:
    """Values for a batch script; None or an empty value keeps what the script has."""

    nodes: str = "1:4"
    """as torchrun's --nnodes: `4` is a fixed allocation, `1:4` an elastic job"""
    allocate: int | None = None
    """nodes to request, by default the maximum of `nodes`: more are spares; if fewer, jobs of the same name can join"""
    is_array: bool = False
    """whether each node is a SLURM job of its own, started, ended and requeued separately; the nodes meet in etcd"""
    name: str | None = None
    etcd: str | None = None
    etcd_conf: str | None = None
    run_dir: str | None = None
    setup: str | None = None
    workers: int | None = None
    is_checked: bool = True
    """whether `elastic-train check` runs on the nodes first"""
    has_local_snapshots: bool = False
    """whether each node keeps its own snapshots; the check then accepts it"""
    options: Mapping[str, str] = field(default_factory=dict)
    """options of sbatch by long name without dashes; "" for a switch"""
    flags: Sequence[str] = ()
    """flags of the worker, after a program as torchrun takes it where that is not the bundled one"""


def write_script(job: SlurmJob) -> str:
    """Return the batch script. Raises: UsageError, which names the flag."""
    fewest, most = _nodes(job.nodes)
    is_fixed = fewest is None
    program, flags = read_program(job.flags, os.environ)
    _check(job, is_fixed)
    _check_flags(flags, is_bundled=program == BUNDLED_PROGRAM)
    if job.allocate and job.allocate < (fewest or 1) and not job.etcd:
        raise UsageError(
            f"--allocate {job.allocate}: training starts with {fewest} nodes, and another job joins only with --etcd"
        )
    script = (SCRIPTS / ("fixed.sbatch" if is_fixed else "elastic.sbatch")).read_text(encoding="utf-8")
    asked = job.allocate or most
    options = {"nodes": str(1 if job.is_array else asked)}
    if job.is_array:
        options |= {"array": f"0-{asked - 1}", "output": "slurm-%A_%a.log"}
    for name, value in (options | dict(job.options)).items():
        script = set_option(script, name, value)
    variables = {
        "SETUP": job.setup if job.setup is not None else _setup_of_this_environment(),
        "NNODES": None if is_fixed else job.nodes,
        "JOB": job.name,
        "RUN_DIR": job.run_dir,
        "ETCD": job.etcd,
        "ETCD_CONF": job.etcd_conf or None,
        "CHECK": None if job.is_checked else "",
        "WORKERS": None if job.workers is None else str(job.workers),
    }
    if job.has_local_snapshots:
        script = set_variable(script, "CHECK_FLAGS", "(--local-snapshots)")
    for name, text in variables.items():
        if text is not None:
            script = set_variable(script, name, shlex.quote(text) if text else "")
    if program != BUNDLED_PROGRAM:
        script = set_variable(script, "PROGRAM", f"({shlex.join(program)})")
    return set_variable(script, "FLAGS", f"({shlex.join(flags)})") if flags else script


def _nodes(text: str) -> tuple[int | None, int]:
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    fewest, most = (int(part) if part else None for part in match.groups()) if match else (0, 0)
    if not most or fewest == 0 or (fewest or 1) > most:
        raise UsageError(f"--nodes {text}: give 4 for exactly four, or 1:4 for an elastic job of one to four")
    return fewest, most


def _check(job: SlurmJob, is_fixed: bool) -> None:
    if is_fixed:
        elastic_only = {"--allocate": job.allocate, "--array": job.is_array, "--etcd": job.etcd, "--name": job.name}
        for flag, value in elastic_only.items():
            if value:
                raise UsageError(f"{flag}: a fixed allocation has none; --nodes 1:{job.nodes} is an elastic job")
    if job.is_array and not job.etcd:
        raise UsageError("--array: jobs of one node each meet in etcd; give --etcd H1:2379,H2:2379,H3:2379")
    if job.has_local_snapshots and not job.is_checked:
        raise UsageError("--local-snapshots: it is for the check, which --no-check leaves out")
    if job.etcd_conf and not job.etcd:
        raise UsageError("--etcd-conf goes with --etcd")
    if job.etcd:
        parse_endpoints(job.etcd)
        try:
            require_known(dict(part.partition("=")[::2] for part in (job.etcd_conf or "").split(",") if part))
        except UsageError as error:
            raise UsageError(f"--etcd-conf: {error}") from error
    check_number("--allocate", job.allocate, least=1)
    check_number("--workers", job.workers, least=1)
    for name in ("nodes", "array", "ntasks-per-node"):
        if name in job.options:
            raise UsageError(f"--sbatch {name}: follows from --nodes, --allocate and --array")


def _check_flags(flags: Sequence[str], *, is_bundled: bool) -> None:
    for given in flags:
        owned = OWNED_FLAGS.get(given.partition("=")[0])
        if owned is not None:
            raise UsageError(f"{given}: {owned}")
    if not is_bundled:
        return  # the flags of such a program, and those of a task, are known only on the nodes
    check_task_stands_alone(flags)
    if not value_of(flags, "--task"):
        parse(flags)


def _setup_of_this_environment() -> str:
    """Return a shell line that activates this environment. conda, a module and `pip install --user` have no activation
    script, and may install programs outside Python's folder: then the line extends PATH."""
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.exists():
        return f"source {shlex.quote(str(activate))}"
    programs = [sys.executable, *filter(None, map(shutil.which, ("torchrun", "elastic-train")))]
    folders = dict.fromkeys(str(Path(program).parent) for program in programs)
    return f"export PATH={shlex.quote(':'.join(folders))}:$PATH"


def set_option(script: str, name: str, value: str) -> str:
    """Replace the script's line of this option, or add `#SBATCH --name=value` after the last option. Quotes the value
    for sbatch where needed. Raises: UsageError."""
    if re.fullmatch(r"[a-z][a-z-]*", name) is None:
        raise UsageError(f"--sbatch {name}: is no option of sbatch")
    if len(value.splitlines()) > 1:
        raise UsageError(f"--{name} {value!r}: sbatch takes one line")
    if re.search(r"[\s#'\"\\]", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    option = f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"
    line = re.compile(rf"^#SBATCH --{re.escape(name)}(?![\w-])[^\n]*$", re.MULTILINE)
    if line.search(script):
        return line.sub(lambda _: option, script, count=1)
    last = list(re.finditer(r"^#SBATCH [^\n]*\n", script, re.MULTILINE))[-1]
    return f"{script[: last.end()]}{option}\n{script[last.end() :]}"


def set_variable(script: str, name: str, value: str) -> str:
    """Replace the script's line `NAME=...`; `value` is already quoted for the shell."""
    return re.sub(rf"^{name}=[^\n]*$", lambda _: f"{name}={value}", script, count=1, flags=re.MULTILINE)


def submit(script: str) -> str:
    """Return the output of sbatch. Raises: ElasticTrainError: sbatch is missing or refuses the script."""
    own = dict(os.environ)
    if "SLURM_JOB_ID" in own:  # sbatch would pass on this job's array, and the GPUs and memory that srun asks for here
        own = {name: value for name, value in own.items() if not re.match("SLURM_(?!(CONF|CLUSTERS|JWT)$)", name)}
    try:
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, check=False, env=own)
    except FileNotFoundError as error:
        raise ElasticTrainError("there is no sbatch here; --dry-run prints the script") from error
    if done.returncode != 0:
        raise ElasticTrainError(f"sbatch refused it: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
