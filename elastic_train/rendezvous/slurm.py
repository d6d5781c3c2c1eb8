"""Workers started by SLURM's srun, one per task, without torchrun: srun's variables translated to torchrun's."""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, NUM_PORTS = 29500, 3000
"""below 32768: from there on the kernel gives out ports for connections, so that they may be in use"""
STEP_STRIDE = 1147
"""ports between two steps of one job, so that the ports between are for neighbouring job ids, perhaps on the same host.
It is near the golden section of NUM_PORTS: 20 steps stay at least 80 ports from the first, also modulo NUM_PORTS."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""from here on step ids are not srun's: the batch script, an interactive shell (slurm.h)"""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, ... of an srun task; none if it is the only task, RANK is set already, or this is a
    batch script.

    Rank 0 hosts the store on the step's first host, at a port computed from the ids of job and step; MASTER_ADDR and
    MASTER_PORT override either.
    """
    size = num_tasks(environ)
    if "RANK" in environ or "SLURM_PROCID" not in environ or size == "1" or is_batch_script(environ):
        return {}
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE", "1")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    offset = int(job) + STEP_STRIDE * int(step) if job.isdigit() and step.isdigit() else 0
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": tasks_of_node(per_node, int(environ.get("SLURM_NODEID", "0"))),
        "GROUP_WORLD_SIZE": environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1"),
        "TORCHELASTIC_RUN_ID": f"slurm-{job}",
        "TORCHELASTIC_RESTART_COUNT": environ.get("SLURM_RESTART_COUNT", "0"),
        "MASTER_ADDR": first_host(hosts) or "localhost",
        "MASTER_PORT": str(FIRST_PORT + offset % NUM_PORTS),
    }
    return {name: environ.get(name, value) for name, value in found.items()}


def num_tasks(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")


def is_batch_script(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM has started this process without srun. It is then alone, though its variables say task 0 of
    all that the job has asked for. SLURM sets SLURM_TASK_PID for both, but an ordinary step id only under srun."""
    step = environ.get("SLURM_STEP_ID", "")
    return int(step) >= FIRST_SPECIAL_STEP if step.isdigit() else "SLURM_TASK_PID" in environ


def unused_tasks_warning(environ: Mapping[str, str]) -> str | None:
    """Return a warning if a batch script trains alone in a job of several tasks, else None."""
    size = num_tasks(environ)
    if "RANK" in environ or size == "1" or not is_batch_script(environ):
        return None
    return (
        f"the job has {size} tasks and srun has not started this one: it trains alone; `srun python ...` starts "
        f"{size} workers, torchrun or --spawn those of one machine"
    )


def tasks_of_node(per_node: str, node: int) -> str:
    """Return the number of tasks on a node, by its index in the step: for `2(x3),1` the fourth node has one. The last
    number holds for all further nodes: SLURM_NTASKS_PER_NODE is one number for all."""
    sizes: list[str] = []
    for size, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        sizes += [size] * int(repeats or 1)
    return sizes[min(node, len(sizes) - 1)] if sizes else "1"


def first_host(hosts: str) -> str:
    """Return the first host of SLURM's list: n03 for `n[03-07,9],m1`."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", hosts)
    assert match is not None, "matches the empty string"
    return "".join(part or "" for part in match.groups())
