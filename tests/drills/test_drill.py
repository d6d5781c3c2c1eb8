"""Real drills: a real torchrun job, faults, and an audit of what is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from elastic_train.tools.audit.record import read_drill
from elastic_train.tools.drills.environment_faults import PacketLoss
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import clean_environment, free_port
from tests.audits import audit
from tests.etcd_cluster import etcd_running


def drill_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "elastic_train.cli", "drill", "--run-dir", "run", *arguments]


def drill(cwd: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        drill_command(*arguments),
        cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


@contextmanager
def watching(run_dir: Path, output: Path) -> Iterator[None]:
    """`status --watch` without a terminal, from the first event on; it is over when the run is."""
    program = (
        "import pathlib, sys, time\nfrom elastic_train.cli import main\n"
        "while not (pathlib.Path(sys.argv[1]) / 'events').exists(): time.sleep(0.1)\n"
        "sys.exit(main(['status', '--watch', sys.argv[1]]))"
    )
    with output.open("w") as file:
        watch = subprocess.Popen([sys.executable, "-c", program, str(run_dir)], stdout=file, stderr=file)
    try:
        yield
        assert watch.wait(30) == 0, output.read_text()
    finally:
        watch.kill()
        watch.wait()


def scenario(path: Path, *faults: str, every: float = 2.0) -> str:
    file = path / "scenario.toml"
    file.write_text("".join(f'[[fault]]\nat = {every * (n + 1)}\nname = "{name}"\n' for n, name in enumerate(faults)))
    return str(file)


@pytest.mark.timeout(600)
def test_a_short_drill(tmp_path: Path) -> None:
    plan = scenario(tmp_path, "kill-rank-0", "pause")
    done = drill(tmp_path, "--seed", "5", "--nodes", "2", "--nodes-as", "processes", "--scenario", plan, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS"
    assert "seed 5" in done.stdout
    record = read_drill(tmp_path / "run")
    assert record is not None
    assert [(fault.name, fault.recovered_seconds is not None) for fault in record.faults] == [
        ("kill-rank-0", True),
        ("pause", True),
    ]
    assert record.reference is not None
    assert record.leftovers == []
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    # And the audit of this very run can fail.
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps(result | {"state_sha256": "0" * 64}))
    assert {reason.partition(":")[0] for reason in audit(tmp_path / "run").reasons} == {"state"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drill_in_etcd(tmp_path: Path) -> None:
    """Its own three members; then the same with a cluster that is there, in which nothing may be left."""
    plan = scenario(tmp_path, "kill-etcd", "kill-rank-0", "join", "freeze-etcd-leader", "kill-all")
    done = drill(tmp_path, "--backend", "etcd3", "--seed", "5", "--nodes", "3", "--scenario", plan, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "run").rename(tmp_path / "first")
    (tmp_path / "etcd").mkdir()
    with etcd_running(tmp_path / "etcd", 3) as etcd:
        plan = scenario(tmp_path, "kill-rank-0", "join")
        words = ("--backend", "etcd3", "--rdzv-endpoint", etcd.endpoint, "--nodes", "2", "--scenario", plan)
        done = drill(tmp_path, *words, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        assert etcd.keys() == []


def test_what_can_be_told_before_the_first_node_starts(tmp_path: Path) -> None:
    words = ("--backend", "etcd3", "--rdzv-endpoint", f"localhost:{free_port()}", "--nodes", "2")
    for arguments, says in (
        (words, "does not answer"),
        (("--run-dir", "/proc/x", "--nodes-as", "processes"), "/proc/x cannot be made"),
    ):
        done = drill(tmp_path, *arguments, timeout=60)
        assert done.returncode == 1
        assert done.stderr.startswith("elastic-train: error: ")
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupted_drill_says_so(tmp_path: Path) -> None:
    """And a run that is interrupted is one that ended."""
    command = drill_command("--nodes", "2", "--nodes-as", "processes")
    process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("2 nodes train" in line for line in lines)
        process.send_signal(signal.SIGTERM)  # SIGINT is ignored below a shell's background job
        rest = list(lines)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert f"interrupted; ending its nodes; what they wrote is in {tmp_path / 'run'}" in rest[-1]
    record = read_drill(tmp_path / "run")
    assert record is not None
    assert record.settings["interrupted"] is True
    assert [pid for line in record.nodes if (pid := line.get("pid")) and psutil.pid_exists(pid)] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(Network.why_not() is not None, reason=f"no network namespaces: {Network.why_not()}")
def test_a_drill_with_cables_and_power(tmp_path: Path) -> None:
    lossy = () if PacketLoss.why_not() else ("packet-loss",)  # a kernel may lack netem
    plan = scenario(tmp_path, "partition", "one-way", "power-loss", "join", "slow-link", *lossy, every=4.0)
    done = drill(tmp_path, "--seed", "5", "--nodes-as", "namespaces", "--scenario", plan, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(Network.why_not() is not None, reason="no network namespaces here")
def test_the_keys_of_a_host_without_power_are_no_leftovers(tmp_path: Path) -> None:
    plan = scenario(tmp_path, "power-loss", every=4.0)
    done = drill(tmp_path, "--seed", "5", "--nodes", "3", "--backend", "etcd3", "--scenario", plan, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(Network.why_not() is not None, reason="no network namespaces here")
def test_a_drill_without_room(tmp_path: Path) -> None:
    plan = scenario(tmp_path, "disk-full", every=4.0)
    done = drill(tmp_path, "--seed", "5", "--nodes", "3", "--scenario", plan, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No space left on device" in (tmp_path / "run" / "drill" / "faults.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["c10d", "etcd3"])
def test_a_drill_with_all_that_processes_suffer_and_its_watch(tmp_path: Path, backend: str) -> None:
    """Six nodes: two die at once, two one after the other, and so on until one is left. A watch goes on to the end."""
    faults = ["slow", "kill-two", "join", "kill-again", "hang", "stop", "join", "kill"]
    plan = scenario(tmp_path, *faults, every=4.0)
    words = ("--backend", backend, "--seed", "5", "--nodes", "6", "--nodes-as", "processes", "--scenario", plan)
    shown = tmp_path / "watch.txt"
    with watching(tmp_path / "run", shown):
        done = drill(tmp_path, *words, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_drill(tmp_path / "run")
    assert record is not None
    assert [fault.name for fault in record.faults if fault.injected_at is not None] == faults
    lines = shown.read_text().splitlines()
    assert lines[-1].startswith("state: finished; "), lines[-1]
    assert "state: starting; generation: " not in shown.read_text(), "a join restarts nobody"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drill_with_restarts(tmp_path: Path) -> None:
    plan = scenario(tmp_path, "kill-agent", "kill-worker", "damage", "kill-endpoint", every=8.0)
    done = drill(tmp_path, "--seed", "5", "--nodes-as", "processes", "--scenario", plan, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_task_of_ones_own_that_ends_too_early_fails_the_drill(tmp_path: Path) -> None:
    plan = scenario(tmp_path, "kill", "join", every=30.0)
    flags = ("--dataset", "digits", "--max-steps", "200")
    done = drill(
        tmp_path, "--nodes", "2", "--nodes-as", "processes", "--scenario", plan, "--", *flags, timeout=280
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "was not injected: training had ended before its time" in done.stdout
    assert "FAIL" in done.stdout.splitlines()
