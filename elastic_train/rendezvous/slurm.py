"""Workers that SLURM's srun starts, one task each, without torchrun: its variables as those that torchrun would set."""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, NUM_PORTS = 29500, 3000
"""below 32768, where the kernel begins to give out ports for connections, any of which may be in use"""
STEP_STRIDE = 1147
"""ports between two steps of one job: the jobs around it, which may be on the same host, have the ports between. The
golden section of NUM_PORTS, nearly: 20 steps come no nearer to the first one than 80 ports, around the end as well"""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""from here on ids of steps that srun has not started: the batch script, an interactive shell (slurm.h)"""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, ... of an srun task; none where this is no task of several, or RANK is set already, or this is
    a batch script.

    The store is hosted by rank 0, on the first host of the step, at a port that follows from the ids of job and step;
    MASTER_ADDR and MASTER_PORT override either.
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
    """Whether SLURM has started this process without srun: one process alone, though it be called task 0 of as many as
    the job has asked for. SLURM gives a task's pid to both, and a step's id to srun's."""
    step = environ.get("SLURM_STEP_ID", "")
    return int(step) >= FIRST_SPECIAL_STEP if step.isdigit() else "SLURM_TASK_PID" in environ


def unused_tasks_warning(environ: Mapping[str, str]) -> str | None:
    """What to say where a batch script trains alone in a job of several tasks; None where it does not."""
    size = num_tasks(environ)
    if "RANK" in environ or size == "1" or not is_batch_script(environ):
        return None
    return (
        f"the job has {size} tasks and srun has not started this one: it trains alone; `srun python ...` starts "
        f"{size} workers, torchrun or --spawn those of one machine"
    )


def tasks_of_node(per_node: str, node: int) -> str:
    """How many tasks a node of the step has, by its index: of `2(x3),1` the fourth has one. The last number counts for
    all that follow it: SLURM_NTASKS_PER_NODE is one for all."""
    sizes: list[str] = []
    for size, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        sizes += [size] * int(repeats or 1)
    return sizes[min(node, len(sizes) - 1)] if sizes else "1"


def first_host(hosts: str) -> str:
    """The first of SLURM's host list: `n[03-07,9],m1` begins with n03."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", hosts)
    assert match is not None, "matches the empty string"
    return "".join(part or "" for part in match.groups())
