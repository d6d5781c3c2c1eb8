"""srun's variables, read as torchrun's."""

from __future__ import annotations

import pytest

from elastic_train.elastic.barriers import Waits
from elastic_train.elastic.connect import launcher_of
from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.finder import Finder
from elastic_train.rendezvous.launch import Launch
from elastic_train.rendezvous.slurm import NUM_PORTS, first_host, torchrun_variables, unused_tasks_warning
from elastic_train.stopping import StopSignal
from elastic_train.tools.drills.nodes import free_port

WAITS = Waits(formation_timeout=10.0, peer_timeout=10.0, wait_timeout=10.0)

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
        step="0",
        master=("gpu03", 29500 + 1567),
    )


def test_no_step_meets_at_a_port_that_the_kernel_gives_to_anybodys_connections() -> None:
    """net.ipv4.ip_local_port_range begins at 32768, where nobody has set it."""
    ports = {int(torchrun_variables(TASK | {"SLURM_JOB_ID": str(job)})["MASTER_PORT"]) for job in range(20000)}
    assert len(ports) == 3000
    assert min(ports) > 29400, "torchrun's own default"
    assert max(ports) < 32768


@pytest.mark.parametrize(
    ("per_node", "sizes"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, ["1", "2"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, ["2", "2", "2", "1"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2(x2),10(x2)"}, ["4", "2", "2", "10", "10"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "3"}, ["3", "3"]),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, ["1", "1"]),
    ],
)
def test_each_node_has_as_many_workers_as_srun_says_of_it(per_node: dict[str, str], sizes: list[str]) -> None:
    found = [torchrun_variables(TASK | per_node | {"SLURM_NODEID": str(node)}) for node in range(len(sizes))]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == sizes


def test_two_steps_of_a_job_meet_at_two_ports_and_never_take_each_other_for_their_own() -> None:
    """`srun A & srun B & wait` in one allocation; in the same run directory the later of two goes on with the run."""
    steps = [Launch.from_environment(TASK | {"SLURM_STEP_ID": step}, None) for step in ("0", "1", "2")]
    assert len({launch.master for launch in steps}) == 3
    assert {launch.run_id for launch in steps} == {"slurm-1234567"}
    after = Launch.from_environment(TASK | {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1234568"}, None)
    assert after.master not in [launch.master for launch in steps], "the next job's, which may be on the same host"


def test_the_steps_of_a_job_leave_the_ports_around_it_to_the_jobs_around_it() -> None:
    def port_of(step: int) -> int:
        return int(torchrun_variables(TASK | {"SLURM_STEP_ID": str(step)})["MASTER_PORT"])

    apart = [(port_of(step) - port_of(0)) % NUM_PORTS for step in range(1, 21)]
    assert min(min(one, NUM_PORTS - one) for one in apart) > 80


def finder_at(port: int, environ: dict[str, str]) -> Finder:
    here = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return launcher_of(Launch.from_environment(TASK | here | environ, None), WAITS, StopSignal())


def test_a_step_at_the_port_of_another_one_is_a_stranger() -> None:
    """MASTER_PORT was set for both."""
    port = free_port()
    first = finder_at(port, {"SLURM_PROCID": "0"})
    first.show([("10.0.0.1", 5001)], "")
    assert finder_at(port, {"SLURM_PROCID": "1"}).addresses() == [("10.0.0.1", 5001)]
    assert finder_at(port, {"SLURM_PROCID": "1", "SLURM_STEP_ID": "1"}).addresses() == ()
    with pytest.raises(StoreUnreachable, match=f"cannot serve the store at localhost:{port}: .*set MASTER_ADDR"):
        finder_at(port, {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1"})


def test_a_step_is_one_of_srun_alone() -> None:
    """Each node's torchrun may be started by an srun of its own."""
    environ = TASK | {"RANK": "0", "WORLD_SIZE": "2", "SLURM_STEP_ID": "3"}
    assert Launch.from_environment(environ, None).step == ""


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
