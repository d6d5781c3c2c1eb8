"""srun's variables, read as torchrun's."""

from __future__ import annotations

import pytest

from elastic_train.rendezvous.launch import Launch
from elastic_train.rendezvous.slurm import first_host, torchrun_variables, unused_tasks_warning

TASK = {
    "SLURM_JOB_ID": "1234567", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NODEID": "2",
    "SLURM_NNODES": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_STEP_NODELIST": "gpu[03-06],big1",
    "SLURM_STEP_ID": "0", "SLURM_TASK_PID": "33",
}  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("", ""), ("a", "a"), ("a,b", "a"), ("n[03-06]", "n03"), ("n[7,9]-ib,m", "n7-ib"), ("r1n[1-2]", "r1n1")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_task_of_several() -> None:
    assert Launch.from_environment(TASK, None) == Launch(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=2,
        num_nodes=4,
        run_id="slurm-1234567",
        master=("gpu03", 29500 + 4567),
    )


def test_three_variables_are_enough() -> None:
    launch = Launch.from_environment({"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}, None)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.master) == (1, 2, 1, ("localhost", 29500))


def test_what_is_set_wins() -> None:
    launch = Launch.from_environment(TASK | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, None)
    assert launch.master == ("head", 1)


@pytest.mark.parametrize("environ", [{}, TASK | {"SLURM_NTASKS": "1"}, TASK | {"RANK": "0", "WORLD_SIZE": "2"}])
def test_where_srun_started_no_task_of_several(environ: dict[str, str]) -> None:
    assert torchrun_variables(environ) == {}


BATCH = {
    "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_TASK_PID": "14", "SLURM_JOB_NODELIST": "node[1-2]",
}  # fmt: skip
"""what sbatch --ntasks 4 sets for the script itself (SLURM 22.05)"""


@pytest.mark.parametrize("environ", [BATCH, BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFA)}], ids=["batch", "interactive"])
def test_a_batch_script_is_no_task_of_several(environ: dict[str, str]) -> None:
    assert Launch.from_environment(environ, None) == Launch()
    assert "the job has 4 tasks and srun has not started this one" in str(unused_tasks_warning(environ))


@pytest.mark.parametrize(
    "environ", [{}, TASK, BATCH | {"SLURM_NTASKS": "1"}, BATCH | {"RANK": "0", "WORLD_SIZE": "2"}],
    ids=["no SLURM", "srun", "one task", "torchrun"],
)  # fmt: skip
def test_nothing_is_said_where_all_is_used(environ: dict[str, str]) -> None:
    assert unused_tasks_warning(environ) is None
