"""The batch scripts of deploy/slurm on a real SLURM of four nodes: lose one, requeue, cancel, join through etcd.

After each of them the run's own files must pass the audit, and its weights be those of the undisturbed run.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from elastic_train.tools.audit.record import PACE_VARIABLE, set_pace
from elastic_train.tools.drills.etcd_cluster import EtcdCluster
from elastic_train.tools.drills.network import HUB_ADDRESS
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.tools.drills.reference import undisturbed
from tests import slurm_cluster
from tests.audits import audit
from tests.deploy.tools import programs_folder
from tests.integration.cluster import (
    check_ledger,
    events,
    last_step,
    newest_snapshot,
    outcomes,
    result,
    wait_for_step,
    worlds,
)
from tests.slurm_cluster import SlurmCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(slurm_cluster.why_not() is not None, reason=f"no SLURM: {slurm_cluster.why_not()}"),
]

STEPS = 400
FLAGS = (
    "--task", "elastic_train.tools.drills.task:PacedDigits", "--epochs", "100000", "--max-steps", str(STEPS),
    "--reduction", "ordered", "--ledger", "--eval-every", "100000", "--snapshot-every", "50", "--peer-timeout", "30",
)  # fmt: skip
SLOW, CRAWL = 0.01, 0.1
"""seconds a sample: with two workers three steps a second, and one in three seconds"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LIVES, TRAINS = 300.0, 600.0
"""seconds, for what SLURM does and for what ends in training; a tenth of it on an idle machine"""


@pytest.fixture(scope="module")
def undisturbed_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = undisturbed(FLAGS, cwd=tmp_path_factory.mktemp("undisturbed"))
    assert found["step"] == STEPS
    return str(found["state_sha256"])


class Site:
    """A SLURM cluster, a login node, and a folder that all nodes share."""

    def __init__(self, path: Path, slurm: SlurmCluster) -> None:
        self.path, self.slurm = path, slurm
        self.run_dir = path / "run"
        self.pace = path / "pace"
        self.set_pace(SLOW)

    def set_pace(self, seconds: float) -> None:
        set_pace(self.pace, seconds)

    def submit(self, *arguments: str) -> str:
        given = ["--run-dir", str(self.run_dir), "--setup", self.setup(), "--cpus-per-task", "1"]
        return self.slurm.submit(*given, *arguments, "--", *FLAGS, cwd=self.path, env={PACE_VARIABLE: str(self.pace)})

    def setup(self) -> str:
        programs = programs_folder(self.path)
        return f"export PATH={shlex.quote(str(programs))}:$PATH"

    def wait_for_world(self, num_hosts: int, *, without: str = "", after: int = -1) -> set[str]:
        """Until a world of so many nodes, of a later generation, trains; their host names."""

        def hosts() -> set[str]:
            found = max(events(self.run_dir, "world"), key=lambda event: event["generation"], default=None)
            if found is None or found["generation"] <= after:
                return set()
            names = {str(member).split("/")[0] for member in found["members"]}
            return names if len(names) == num_hosts and without not in names else set()

        self.set_pace(CRAWL)  # a machine on which nodes start slowly is not to be at the end before they have come
        names = wait_until(hosts, f"world of {num_hosts} nodes", TRAINS)
        self.set_pace(SLOW)
        wait_for_step(self.run_dir, last_step(self.run_dir) + 5, LIVES)
        return set(names)

    def finish(self, *jobs: str) -> None:
        """Let it train to its end at full speed; every job must have been a success to SLURM."""
        self.set_pace(0.0)
        for job in jobs:
            wait_until(lambda job=job: self.slurm.job(job)["JobState"] in ENDED, "end", TRAINS)
            assert (self.slurm.job(job)["JobState"], self.slurm.job(job)["ExitCode"]) == ("COMPLETED", "0:0")

    def checked(self) -> list[str]:
        """What each node's `elastic-train check` has printed."""
        return [path.read_text() for path in (self.run_dir / "slurm").glob("*.check.log")]

    def check(self, expected_hash: str) -> None:
        found = audit(self.run_dir)
        assert found.passed, "\n".join(found.reasons)
        assert result(self.run_dir)["state_sha256"] == expected_hash
        steps = sorted(event["step"] for event in events(self.run_dir, "step"))
        assert steps == list(range(1, STEPS + 1)), "every committed step once"

    def logs(self) -> str:
        paths = [*self.path.glob("slurm-*.log"), *(self.run_dir / "slurm").glob("*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(paths))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with slurm_cluster.slurm_running(4) as slurm:
        site = Site(tmp_path, slurm)
        yield site
        print(site.logs())  # pytest shows it where the test failed


def test_a_node_is_lost_and_the_spare_steps_in(site: Site, undisturbed_hash: str) -> None:
    job = site.submit("--nodes", "1:3", "--allocate", "4")
    trained = site.wait_for_world(3)
    checked = site.checked()
    assert len(checked) == 4
    for text in checked:
        assert text.rstrip().endswith("PASS"), text
        assert "world: 4 workers on 4 nodes, as asked" in text
        assert f"between the signal and the kill are {slurm_cluster.KILL_WAIT} s" in text
    lost = max(trained)  # not node1, which runs the batch script and with it the job
    site.slurm.lose_power(int(lost.removeprefix("node")) - 1)
    generation = max(event["generation"] for event in events(site.run_dir, "world"))
    site.wait_for_world(3, without=lost, after=generation)
    wait_until(lambda: site.slurm.job(job)["NumNodes"] == "3", "allocation without the lost node", LIVES)
    assert site.slurm.job(job)["Restarts"] == "0"
    site.finish(job)
    site.check(undisturbed_hash)
    assert {path.name for path in (site.run_dir / "slurm").glob("*.log")} == {
        f"{job}-node{number}{kind}.log" for number in range(1, 5) for kind in ("", ".check")
    }


@contextmanager
def etcd_running(site: Site) -> Iterator[str]:
    """Three members off the nodes; their endpoint."""
    path = site.path / "etcd"
    path.mkdir()
    etcd = EtcdCluster(path, 3, host=HUB_ADDRESS, prefix=site.slurm.network.hub_prefix())
    try:
        etcd.start()
        yield etcd.endpoint
    finally:
        etcd.end()


def lose_the_first_node(site: Site, job: str) -> None:
    """The job is put in the queue again, and two others bring it to its end."""
    wait_until(lambda: [*site.run_dir.glob("snapshots/step-*")], "snapshot", LIVES)
    generation = max(event["generation"] for event in events(site.run_dir, "world"))
    site.slurm.lose_power(0)
    wait_until(lambda: site.slurm.job(job)["Restarts"] == "1", "requeue", LIVES)
    site.slurm.wait_for_state(job, "PENDING", LIVES)
    site.slurm.start_again_soon(job)
    assert "node1" not in site.wait_for_world(2, after=generation)
    site.finish(job)


def test_the_first_node_is_lost_and_the_job_starts_again(site: Site, undisturbed_hash: str) -> None:
    """A fixed allocation, of nodes with two GPUs each as far as SLURM knows."""
    job = site.submit("--no-check", "--nodes", "2", "--gpus-per-node", "2")
    assert site.wait_for_world(2) == {"node1", "node2"}
    assert max(event["world_size"] for event in events(site.run_dir, "world")) == 4, "a worker for each GPU"
    lose_the_first_node(site, job)
    site.check(undisturbed_hash)


@pytest.mark.parametrize("backend", ["c10d", "etcd3"])
def test_the_first_node_is_lost_and_the_others_train_to_the_end(
    site: Site, undisturbed_hash: str, backend: str
) -> None:
    """Nothing but the batch script was on it alone. SLURM starts the job again after their end, when there is nothing
    left to do."""
    with etcd_running(site) if backend == "etcd3" else nullcontext() as endpoint:
        job = site.submit("--no-check", "--nodes", "1:3", *(["--etcd", endpoint] if endpoint else []))
        site.wait_for_world(3)
        generation = max(event["generation"] for event in events(site.run_dir, "world"))
        site.slurm.lose_power(0)
        assert site.wait_for_world(2, without="node1", after=generation) == {"node2", "node3"}
        site.set_pace(0.0)
        wait_until(lambda: outcomes(site.run_dir) == ["finished", "finished"], "end of the others", TRAINS)
        wait_until(lambda: site.slurm.job(job)["Restarts"] == "1", "requeue", LIVES)
        site.slurm.wait_for_state(job, "PENDING", LIVES)
        site.slurm.start_again_soon(job)
        site.finish(job)
        site.check(undisturbed_hash)


def test_time_runs_out_then_the_job_is_cancelled(site: Site, undisturbed_hash: str) -> None:
    """Each time the state is saved at the step where all of them stop."""
    job = site.submit("--no-check", "--nodes", "1:2")
    site.wait_for_world(2)
    site.slurm.end_in_minutes(job, 3)  # SLURM sends what --signal=B:USR1@120 says
    site.slurm.wait_for_state(job, "PENDING", LIVES)
    assert site.slurm.job(job)["Restarts"] == "1"
    site.slurm.run(["scontrol", "update", f"jobid={job}", "TimeLimit=60"])
    stopped_at = last_step(site.run_dir)
    assert newest_snapshot(site.run_dir)[0].step == stopped_at
    assert outcomes(site.run_dir) == ["stopped", "stopped"]
    generation = max(event["generation"] for event in events(site.run_dir, "world"))
    site.slurm.start_again_soon(job)
    site.wait_for_world(2, after=generation)
    assert {event["restored_step"] for event in events(site.run_dir, "restore")} >= {stopped_at}

    site.slurm.run(["scancel", job])
    site.slurm.wait_for_state(job, "CANCELLED", LIVES)
    wait_until(lambda: len(outcomes(site.run_dir)) == 4, "end of the workers", LIVES)
    assert newest_snapshot(site.run_dir)[0].step == last_step(site.run_dir) > stopped_at
    site.finish(site.submit("--no-check", "--nodes", "1:2"))
    site.check(undisturbed_hash)


def test_a_preempted_job_saves_and_starts_again(site: Site, undisturbed_hash: str) -> None:
    """Within the partition's GraceTime, of which SLURM tells only the steps."""
    job = site.submit("--no-check", "--nodes", "1:2")
    site.wait_for_world(2)
    generation = max(event["generation"] for event in events(site.run_dir, "world"))
    words = ["sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--wrap=true"]
    urgent = site.slurm.run(words, site.path).split()[-1]
    site.slurm.wait_for_state(job, "PENDING", LIVES)
    assert site.slurm.job(job)["Restarts"] == "1"
    assert newest_snapshot(site.run_dir)[0].step == last_step(site.run_dir)
    assert outcomes(site.run_dir) == ["stopped", "stopped"]
    site.slurm.wait_for_state(urgent, "COMPLETED", LIVES)
    site.slurm.start_again_soon(job)
    site.wait_for_world(2, after=generation)
    site.finish(job)
    site.check(undisturbed_hash)


def test_an_array_of_nodes_and_a_job_that_joins(site: Site, undisturbed_hash: str) -> None:
    """Through etcd: each node is a job of its own; any of them may be lost, and others join."""
    with etcd_running(site) as endpoint:
        common = [
            "--no-check", "--nodes", "1:3", "--name", "shared", "--etcd", endpoint, "--sbatch", "exclusive",
            "--workers", "1",
        ]  # fmt: skip
        array = site.submit(*common, "--array", "--allocate", "2")
        site.wait_for_world(2)
        joining = site.submit(*common, "--allocate", "1")
        names = site.wait_for_world(3)
        generation = max(event["generation"] for event in events(site.run_dir, "world"))
        site.slurm.lose_power(0)
        site.wait_for_world(2, without="node1", after=generation)
        assert "node1" in names
        # SLURM starts the job of the lost node again, by itself; here it need not wait two minutes for it.
        first = f"{array}_0"
        wait_until(lambda: site.slurm.job(first)["Restarts"] == "1", "requeue", LIVES)
        site.slurm.wait_for_state(first, "PENDING", LIVES)
        generation = max(event["generation"] for event in events(site.run_dir, "world"))
        site.slurm.start_again_soon(first)
        site.wait_for_world(3, without="node1", after=generation)
        site.finish(first, f"{array}_1", joining)
        site.check(undisturbed_hash)


def test_an_autoscaler_keeps_a_run_at_its_most_nodes(site: Site, undisturbed_hash: str) -> None:
    """From nothing to three nodes, each a job of its own; one is cancelled and replaced; no job is left at the end."""
    with etcd_running(site) as endpoint:
        given = [
            "--no-check", "--nodes", "1:3", "--allocate", "1", "--name", "shared", "--etcd", endpoint, "--workers", "1",
            "--sbatch", "exclusive", "--run-dir", str(site.run_dir), "--setup", site.setup(), "--cpus-per-task", "1",
        ]  # fmt: skip
        words = [sys.executable, "-m", "elastic_train.cli", "submit", "slurm", "--dry-run", *given, "--", *FLAGS]
        (site.path / "node.sbatch").write_text(site.slurm.run(words, site.path))
        log = site.path / "autoscale.log"
        with site.slurm.running(autoscaler(site), site.path, log, env={PACE_VARIABLE: str(site.pace)}) as scaler:
            site.wait_for_world(3)
            jobs = site.slurm.run(["squeue", "--noheader", "--format=%i"]).split()
            assert len(jobs) == 3
            generation = max(event["generation"] for event in events(site.run_dir, "world"))
            site.set_pace(CRAWL)
            site.slurm.run(["scancel", jobs[1]])
            site.wait_for_world(3, after=generation + 1)
            site.set_pace(0.0)
            assert scaler.wait(TRAINS) == 0, log.read_text()
        assert site.slurm.run(["squeue", "--noheader"]) == ""
        assert log.read_text().count("Submitted batch job") == 4
        assert log.read_text().splitlines()[-1] == f"finished: {site.run_dir}"
        site.check(undisturbed_hash)


def autoscaler(site: Site) -> list[str]:
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "autoscale.py"
    return [sys.executable, str(script), str(site.run_dir), "node.sbatch", "--every", "2"]


def test_the_time_of_one_job_of_an_array_is_over(site: Site, undisturbed_hash: str) -> None:
    """It is the one whose number is that of the array as a whole, by which SLURM would take all of them to be meant."""
    with etcd_running(site) as endpoint:
        name = """it's "one" #1"""
        array = site.submit(
            "--no-check", "--nodes", "1:2", "--name", "shared", "--etcd", endpoint, "--array", "--sbatch", "exclusive",
            "--job-name", name,
        )  # fmt: skip
        site.wait_for_world(2)
        jobs = {number: site.slurm.job(f"{array}_{number}") for number in range(2)}
        names = site.slurm.run(["squeue", "--noheader", "--format=%j", f"--jobs={array}"])
        assert names.splitlines() == [name, name]
        number = next(number for number, job in jobs.items() if job["JobId"] == array)
        generation = max(event["generation"] for event in events(site.run_dir, "world"))
        one, other = f"{array}_{number}", f"{array}_{1 - number}"
        site.set_pace(CRAWL)
        site.slurm.run(["scancel", "--batch", "--signal=USR1", one])
        wait_until(lambda: site.slurm.job(one)["Restarts"] == "1", "requeue", LIVES)
        assert (site.slurm.job(other)["JobState"], site.slurm.job(other)["Restarts"]) == ("RUNNING", "0")
        site.slurm.wait_for_state(one, "PENDING", LIVES)
        site.slurm.start_again_soon(one)
        site.wait_for_world(2, after=generation + 1)
        site.finish(one, other)
        site.check(undisturbed_hash)


def test_what_is_submitted_is_the_script_as_it_stands_in_the_repository(site: Site) -> None:
    """`sbatch deploy/slurm/fixed.sbatch`, with nothing but its variables edited."""
    script = site.path / "fixed.sbatch"
    shutil.copy(Path(__file__).parents[2] / "deploy" / "slurm" / "fixed.sbatch", script)
    text = script.read_text().replace("SETUP='source .venv/bin/activate'", f"SETUP={shlex.quote(site.setup())}")
    text = text.replace("\nFLAGS=()", "\nFLAGS=(--max-steps 20 --no-progress)").replace("task=4 ", "task=1 ")
    script.write_text(text)
    job = site.slurm.run(["sbatch", "fixed.sbatch"], site.path).split()[-1]
    site.slurm.wait_for_state(job, "COMPLETED", TRAINS)
    run_dir = site.path / "runs" / f"slurm-{job}"
    assert result(run_dir)["step"] == 20
    checked = [path.read_text() for path in (run_dir / "slurm").glob("*.check.log")]
    assert len(checked) == 4
    for text in checked:
        assert text.rstrip().endswith("PASS"), text
        assert f"between the signal and the kill are {slurm_cluster.KILL_WAIT} s" in text


def test_a_loop_of_ones_own_is_checked_and_trained(site: Site) -> None:
    shutil.copy(Path(__file__).parents[2] / "elastic_train" / "examples" / "elastic_ddp.py", site.path / "own.py")
    given = ["--run-dir", str(site.run_dir), "--setup", site.setup(), "--cpus-per-task", "1", "--nodes", "2:2"]
    job = site.slurm.submit(*given, "--", "own.py", "--max-steps", "20", cwd=site.path)
    site.slurm.wait_for_state(job, "COMPLETED", TRAINS)
    assert result(site.run_dir)["step"] == 20
    assert worlds(site.run_dir)[-1][1] == 2
    assert [text.rstrip().endswith("PASS") for text in site.checked()] == [True, True]


def test_srun_starts_the_workers_itself(site: Site) -> None:
    """The page's line without torchrun: two tasks on each of two nodes."""
    words = "srun --ntasks-per-node 2 python -m elastic_train --run-dir run --max-steps 20 --no-progress"
    words = words.replace("python", shlex.quote(sys.executable))
    job = site.slurm.run(["sbatch", "--nodes=2", "--ntasks-per-node=2", f"--wrap={words}"], site.path).split()[-1]
    site.slurm.wait_for_state(job, "COMPLETED", TRAINS)
    assert result(site.run_dir)["step"] == 20
    (world,) = events(site.run_dir, "world")[:1]
    assert (world["world_size"], len({member.split("/")[0] for member in world["members"]})) == (4, 2)


def test_a_batch_script_trains_alone_and_srun_starts_a_worker_for_each_task(site: Site) -> None:
    """`sbatch --ntasks 3` of a script of one's own; with srun in it, and with srun forgotten."""
    train = f"{shlex.quote(sys.executable)} -m elastic_train --max-steps 20 --ledger --no-progress --run-dir"
    script = site.path / "own.sbatch"
    script.write_text(f"#!/bin/bash\n{train} alone && srun {train} together\n")
    said = site.slurm.run(["sbatch", "--ntasks=3", "--output=own.log", "own.sbatch"], site.path)
    site.slurm.wait_for_state(said.split()[-1], "COMPLETED", TRAINS)
    for name, size in (("alone", 1), ("together", 3)):
        assert worlds(site.path / name) == [(0, size)]
        check_ledger([site.path / name], length=1437, batch=64, steps=20)
    warnings = [line for line in (site.path / "own.log").read_text().splitlines() if "srun has not started" in line]
    assert len(warnings) == 1


def test_slurm_says_in_advance_that_the_time_is_nearly_over(site: Site) -> None:
    """`sbatch --signal` to workers that srun has started: all save, stop, and exit as after SIGTERM."""
    train = (
        f"{shlex.quote(sys.executable)} -m elastic_train --epochs 100000 --notices slurm --run-dir run --no-progress"
    )
    words = ["sbatch", "--nodes=2", "--ntasks-per-node=2", "--time=2", "--signal=USR1@60", f"--wrap=srun {train}"]
    job = site.slurm.run(words, site.path).split()[-1]
    wait_for_step(site.run_dir, 5, TRAINS)
    site.slurm.wait_for_state(job, "FAILED", LIVES)
    assert site.slurm.job(job)["ExitCode"] == "143:0"
    assert outcomes(site.run_dir) == ["stopped"] * 4
    step = last_step(site.run_dir)
    left = [event for event in events(site.run_dir, "notice") if event["state"] == "left"]
    assert [(event["source"], event["step"]) for event in left] == [("slurm", step)] * 4
    assert newest_snapshot(site.run_dir)[0].step == step
