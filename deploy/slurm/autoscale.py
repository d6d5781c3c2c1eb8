"""Keeps a run at the most nodes of its --nnodes on SLURM: one job for each node, submitted and cancelled as it wants.

    elastic-train submit slurm --nodes 1:4 --allocate 1 --name RUN --etcd ... --run-dir DIR --dry-run > node.sbatch
    python autoscale.py DIR node.sbatch

Runs on a login node until the run has finished or failed. Nothing is lost where it ends: start it again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OVER = ("finished", "failed")
PATIENCE = 3
"""looks in a row that had to submit, before the next one is put off; nodes are taken away in turn as well"""
LONGEST_SECONDS = 900.0


def decide(status: Mapping[str, Any] | None, jobs: Sequence[tuple[str, str]]) -> tuple[int, list[str]]:
    """(how many jobs to submit, which to cancel).

    Args:
        status: of the run, by `elastic-train status --json`; None before it has begun.
        jobs: (id, SLURM's state) of each, oldest first.
    """
    pending = [job for job, state in jobs if state == "PENDING"]
    is_begun = status is not None and (status["capacity"]["max_nodes"] is not None or status["state"] in OVER)
    if status is None or not is_begun:  # one begins it, and says how many there may be
        return (0 if jobs else 1), []
    most, wanted = status["capacity"]["max_nodes"] or 0, status["capacity"]["wanted"]
    if status["state"] == "silent":  # gone, or in a long step: of these jobs SLURM knows which run
        wanted = max(0, most - (len(jobs) - len(pending)))
    surplus = [] if status["state"] == "starting" else pending[wanted:]  # the nodes of the last world count still
    return max(0, min(wanted - len(pending), most - len(jobs))), surplus


def pause(every: float, num_fruitless: int) -> float:
    """Seconds until the next look, after so many in a row that had to submit: a job that fails at once is submitted
    again ever more rarely."""
    return every if num_fruitless <= PATIENCE else min(every * 2.0 ** (num_fruitless - PATIENCE), LONGEST_SECONDS)


def job_name(run_dir: Path) -> str:
    """Of one run alone, however many folders have the same name."""
    whole = run_dir.resolve()
    return f"{whole.name}-{hashlib.sha256(bytes(whole)).hexdigest()[:8]}-node"


def read_status(run_dir: Path) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "elastic_train.cli", "status", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and run_dir.exists() and (run_dir / "events").exists():
        print(done.stderr, file=sys.stderr, end="")
    return json.loads(done.stdout) if done.returncode == 0 else None


def read_jobs(name: str) -> list[tuple[str, str]]:
    command = ["squeue", "--me", "--noheader", "--sort=i", "--format=%i %T", f"--name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [(job, state) for job, state in map(str.split, done.stdout.splitlines())]


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep a run on SLURM at the most nodes of its --nnodes.")
    parser.add_argument("run_dir", type=Path, help="the run's, on storage that this machine sees")
    parser.add_argument("script", type=Path, help="a batch script for one node that joins the run")
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS", help="between two looks (default: 15)")
    arguments = parser.parse_args()
    num_fruitless = 0
    while True:
        try:
            num_new = look(arguments.run_dir, arguments.script)
        except subprocess.CalledProcessError as error:  # of a slurmctld that restarts, say
            num_new = 0
            print(f"warning: {error.cmd[0]} ended with {error.returncode}: asked again", file=sys.stderr, flush=True)
        if num_new is None:
            return
        num_fruitless = num_fruitless + 1 if num_new else 0
        time.sleep(pause(arguments.every, num_fruitless))


def look(run_dir: Path, script: Path) -> int | None:
    """Submit and cancel what is to be now. Returns how many were submitted; None where the run is over."""
    name = job_name(run_dir)
    status, jobs = read_status(run_dir), read_jobs(name)
    if status is not None and status["state"] in OVER and not jobs:
        print(f"{status['state']}: {run_dir}", flush=True)
        return None
    num_new, surplus = decide(status, jobs)
    for _ in range(num_new):
        subprocess.run(["sbatch", f"--job-name={name}", str(script)], check=True)
    if surplus:
        print(f"cancelled: {' '.join(surplus)}", flush=True)
        subprocess.run(["scancel", *surplus], check=True)
    return num_new


if __name__ == "__main__":
    main()
