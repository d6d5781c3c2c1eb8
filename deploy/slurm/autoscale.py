"""Keep a run at the maximum of its --nnodes on SLURM: submit one job per node that is missing, cancel surplus ones.

    elastic-train submit slurm --nodes 1:4 --allocate 1 --name RUN --etcd ... --run-dir DIR --dry-run > node.sbatch
    python autoscale.py DIR node.sbatch

It runs on a login node until the run has finished or failed. If it ends earlier, start it again: nothing is lost.
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
"""rounds in a row that may submit before the pause grows; nodes may also be lost one after the other"""
LONGEST_SECONDS = 900.0


def decide(status: Mapping[str, Any] | None, jobs: Sequence[tuple[str, str]]) -> tuple[int, list[str]]:
    """Return (how many jobs to submit, which jobs to cancel).

    Args:
        status: what `elastic-train status --json` prints; None before the run has begun.
        jobs: (id, SLURM's state) of each job, oldest first.
    """
    pending = [job for job, state in jobs if state == "PENDING"]
    is_begun = status is not None and (status["capacity"]["max_nodes"] is not None or status["state"] in OVER)
    if status is None or not is_begun:  # the first node begins the run, and knows the maximum
        return (0 if jobs else 1), []
    most, wanted = status["capacity"]["max_nodes"] or 0, status["capacity"]["wanted"]
    if status["state"] == "silent":  # dead, or in a long step: count the jobs that SLURM runs
        wanted = max(0, most - (len(jobs) - len(pending)))
    surplus = [] if status["state"] == "starting" else pending[wanted:]  # `wanted` is still of the last world
    return max(0, min(wanted - len(pending), most - len(jobs))), surplus


def pause(every: float, num_fruitless: int) -> float:
    """Return the seconds until the next round, after `num_fruitless` rounds in a row that had to submit. It grows, for
    jobs that fail at once."""
    return every if num_fruitless <= PATIENCE else min(every * 2.0 ** (num_fruitless - PATIENCE), LONGEST_SECONDS)


def job_name(run_dir: Path) -> str:
    """Return a name that only this run has: folders elsewhere may have the same name. To squeue a comma ends a name."""
    whole = run_dir.resolve()
    return f"{whole.name.replace(',', '_')}-{hashlib.sha256(bytes(whole)).hexdigest()[:8]}-node"


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
        except subprocess.CalledProcessError as error:  # slurmctld restarts, for example
            num_new = 0
            print(f"warning: {error.cmd[0]} ended with {error.returncode}: asked again", file=sys.stderr, flush=True)
        if num_new is None:
            return
        num_fruitless = num_fruitless + 1 if num_new else 0
        time.sleep(pause(arguments.every, num_fruitless))


def look(run_dir: Path, script: Path) -> int | None:
    """Submit missing jobs and cancel surplus ones. Returns the number of jobs submitted; None if the run is over."""
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
