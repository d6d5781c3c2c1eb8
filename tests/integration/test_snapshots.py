"""Snapshots under kills, rot, forgery and full disks: whole or absent, the newest whole one is used, none runs code."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import (
    PYTHON,
    Cluster,
    Node,
    check_ledger,
    error_line,
    events,
    last_step,
    newest_snapshot,
    outcomes,
    result,
    running,
    snapshot_names,
    wait_for_step,
    wait_until,
    worlds,
)

LENGTH, BATCH = 1437, 64

# A parameter that is never trained makes a snapshot large enough to be met in its middle.
LARGE_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train.training.tasks import Task

class Large(Task):
    def build_model(self):
        model = nn.Linear(8, 2)
        model.ballast = nn.Parameter(torch.zeros(24 * 2**20 // 4), requires_grad=False)
        return model

    def train_dataset(self):
        bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)) % 2
        return TensorDataset(bits.float(), bits.sum(1) % 2)
"""


def kill_rounds(cluster: Cluster, *, seed: int, rounds: int, max_steps: int, nodes: int = 1, nproc: int = 1) -> None:
    """Kill everything at a random step, over and over; every start must go on from the newest snapshot there was."""
    chance = random.Random(seed)
    print(f"seed {seed}")  # shown where the test fails
    flags = ("--ledger", "--snapshot-every", "1", "--max-steps", str(max_steps))
    newest = None
    for number in range(rounds):
        cluster.start(*flags, nodes=nodes, nproc=nproc, nnodes=f"{nodes}:4")
        begun = wait_until(
            lambda generation=number: [e for e in events(cluster.run_dir, "restore") if e["generation"] == generation],
            f"world of generation {number}",
        )
        assert {event["restored_step"] for event in begun} == {newest or 0}
        wait_for_step(cluster.run_dir, (newest or 0) + chance.randint(2, 2 * max_steps // (3 * rounds)))
        wait_until(  # they are written behind the steps
            lambda generation=number: any(e["generation"] == generation for e in events(cluster.run_dir, "snapshot")),
            f"snapshot of generation {number}",
        )
        cluster.kill()
        found, state = newest_snapshot(cluster.run_dir)
        assert found.generation == number, "a snapshot of this round is there"
        assert state["position"]["step"] == found.step
        assert newest is None or found.step > newest
        assert last_step(cluster.run_dir) < max_steps, "the kill came too late to show anything"
        newest = found.step

    assert newest is not None
    cluster.finish(cluster.start(*flags, nodes=nodes, nproc=nproc, nnodes=f"{nodes}:4"))
    end = result(cluster.run_dir)
    assert [incident["cause"] for incident in end["incidents"]] == ["restart"] * rounds
    assert worlds(cluster.run_dir) == [(generation, nodes * nproc) for generation in range(rounds + 1)]
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=max_steps)
    redone = len(events(cluster.run_dir, "step")) - max_steps
    assert sum(incident["committed_steps_lost"] for incident in end["incidents"]) == redone
    names = snapshot_names(cluster.run_dir)
    assert not [name for name in names if name.startswith(".")], names
    assert len(names) == 3


@pytest.mark.slow
def test_kill_of_every_process(cluster: Cluster) -> None:
    kill_rounds(cluster, seed=1, rounds=2, nproc=3, max_steps=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3])
def test_kill_of_every_process_many_times(cluster: Cluster, seed: int) -> None:
    kill_rounds(cluster, seed=seed, rounds=12, max_steps=600, nodes=3)


def kill_amid_writing(cluster: Cluster, flags: tuple[str, ...], occasion: int) -> str:
    """SIGKILL the worker in the middle of its write number `occasion`; the name of what it left half-written."""
    node = cluster.start_alone(*flags)
    directory = cluster.run_dir / "snapshots"
    seen: set[str] = set()

    def half_written() -> str | None:
        names = os.listdir(directory) if directory.is_dir() else []
        # those of killed processes stay visible until the new one cleans up
        seen.update(name for name in names if name.startswith(".tmp-step-") and f"-{node.process.pid}." in name)
        return max(seen) if len(seen) >= occasion else None

    while (name := half_written()) is None:  # no pause: the moment is short
        assert node.process.poll() is None, node.text()
    node.process.kill()
    node.process.wait(10)
    return name


@pytest.mark.slow
def test_kill_amid_writing(cluster: Cluster) -> None:
    (cluster.path / "large.py").write_text(LARGE_TASK)
    flags = ("--task", "large:Large", "--global-batch-size", "16", "--snapshot-every", "1", "--ledger")
    num_torn = 0
    for occasion in (2, 5):
        before = newest_snapshot(cluster.run_dir)[0].step if (cluster.run_dir / "snapshots").is_dir() else 0
        name = kill_amid_writing(cluster, (*flags, "--epochs", "100000"), occasion)
        left = snapshot_names(cluster.run_dir)
        num_torn += name in left
        assert len([one for one in left if one.startswith(".")]) <= 2, "leftovers of earlier kills were removed"
        assert newest_snapshot(cluster.run_dir)[0].step > before
    assert num_torn, "no kill hit a write"
    newest = newest_snapshot(cluster.run_dir)[0].step
    end = newest + 20
    cluster.finish([cluster.start_alone(*flags, "--epochs", "100000", "--max-steps", str(end))])
    assert events(cluster.run_dir, "restore")[-1]["restored_step"] == newest
    assert events(cluster.run_dir, "warning") == [], "what was half-written is no snapshot and needs no warning"
    assert not [name for name in snapshot_names(cluster.run_dir) if name.startswith(".")]
    check_ledger([cluster.run_dir], length=256, batch=16, steps=end)


# --- damaged, forged and foreign snapshots: all from one stopped run, looked at by many starts ------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with snapshots, the last of step 30; where the disk is slow some come late."""
    with running(tmp_path_factory.mktemp("prepared")) as cluster:
        cluster.finish([cluster.start_alone("--snapshot-every", "10", "--max-steps", "30", "--model", "mlp")])
        assert len(snapshot_names(cluster.run_dir)) >= 2
        return cluster.run_dir


class Payload:
    """Unpickled carelessly, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def newest_of(run_dir: Path) -> Path:
    return run_dir / "snapshots" / snapshot_names(run_dir)[-1]


def replace_state(snapshot: Path, data: bytes) -> None:
    """Other bytes for the state, and a manifest that vouches for them."""
    (snapshot / "state.pt").write_bytes(data)
    manifest = json.loads((snapshot / "manifest.json").read_bytes())
    manifest["files"]["state.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (snapshot / "manifest.json").write_text(json.dumps(manifest))


def flip_a_bit(run_dir: Path) -> None:
    file = newest_of(run_dir) / "state.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def forge_zip(run_dir: Path) -> None:
    import io

    import torch

    buffer = io.BytesIO()
    torch.save({"model": Payload(run_dir / "payload-ran")}, buffer)
    replace_state(newest_of(run_dir), buffer.getvalue())


SAME = ("--model", "mlp", "--snapshot-every", "0", "--max-steps", "35")
STARTS = {
    "bit": (flip_a_bit, SAME),
    "zip": (forge_zip, SAME),
    "seed": (None, (*SAME, "--seed", "7")),
    "model": (None, (*SAME[2:], "--model", "cnn")),
}


@pytest.fixture(scope="module")
def starts(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Node, Path]]]:
    """All of them side by side: most of a start is imports."""
    with running(tmp_path_factory.mktemp("starts")) as cluster:
        started = {}
        for name, (damage, flags) in STARTS.items():
            run_dir = cluster.path / name
            shutil.copytree(prepared, run_dir)
            if damage is not None:
                damage(run_dir)
            started[name] = (cluster.start_alone(*flags, run_dir=run_dir), run_dir)
        yield started


def test_damaged_snapshot_is_skipped(starts: dict[str, tuple[Node, Path]], prepared: Path) -> None:
    node, run_dir = starts["bit"]
    before = int(snapshot_names(prepared)[-2].split("-")[1])
    assert node.wait() == 0, node.text()
    restored = events(run_dir, "restore")[-1]
    assert (restored["source"], restored["restored_step"]) == ("snapshot", before)
    [warning] = events(run_dir, "warning")
    assert "step-000000000030-gen-0000" in warning["message"]
    assert warning["message"] in node.text()
    assert result(run_dir)["step"] == 35
    [incident] = result(run_dir)["incidents"]
    assert incident["committed_steps_lost"] == 30 - before


def test_forged_snapshot_is_refused(starts: dict[str, tuple[Node, Path]]) -> None:
    node, run_dir = starts["zip"]
    assert node.wait() == 1
    line = error_line(node)
    assert "refused" in line
    assert "step-000000000030-gen-0000" in line
    assert not (run_dir / "payload-ran").exists()
    assert outcomes(run_dir)[-1] == "failed"


@pytest.mark.parametrize(("what", "values"), [("seed", ("--seed", "0", "7")), ("model", ("model", "'mlp'", "'cnn'"))])
def test_snapshot_of_another_run_is_refused(
    starts: dict[str, tuple[Node, Path]], prepared: Path, what: str, values: tuple[str, ...]
) -> None:
    node, run_dir = starts[what]
    assert node.wait() == 1
    line = error_line(node)
    for value in (*values, "--fresh"):
        assert value in line
    assert snapshot_names(run_dir) == snapshot_names(prepared)
    assert (run_dir / "result.json").read_bytes() == (prepared / "result.json").read_bytes()


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 KiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("no file system can be mounted: that takes root, and mount")
    path = tmp_path / "tiny"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
def test_full_disk_during_a_snapshot(tiny_disk: Path, cluster: Cluster) -> None:
    """Room for two snapshots of 257 kB, and five to be kept: the regular ones fail, and the last state is saved."""
    flags = ("--snapshot-dir", str(tiny_disk), "--snapshot-every", "10", "--keep-snapshots", "5", "--ledger")
    node = cluster.start_alone(*flags, "--max-steps", "120")
    cluster.finish([node])
    assert result(cluster.run_dir)["step"] == 120
    written = [event["path"] for event in events(cluster.run_dir, "snapshot")]
    assert [Path(path).parent for path in written] == [tiny_disk] * 3
    there = {path.name for path in tiny_disk.iterdir() if path.name.startswith("step-")}
    assert there == {Path(path).name for path in written[1:]}, "the oldest has made room for the last state"
    *warnings, of_room = [event["message"] for event in events(cluster.run_dir, "warning")]
    assert of_room == f"no room for the state of step 120: removed {Path(written[0]).name}"
    assert warnings
    assert all("No space left on device" in message and str(tiny_disk) in message for message in warnings)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=120)

    again = cluster.start_alone(*flags, "--max-steps", "125")
    cluster.finish([again])
    assert events(cluster.run_dir, "restore")[-1]["restored_step"] == 120
    assert result(cluster.run_dir)["step"] == 125
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=125)


FILES_OF_100_KIB = ("bash", "-c", 'ulimit -f 100; exec "$@"', "bash", PYTHON)
"""what has room for events, and none for a snapshot, nor for what NCCL shares"""
OWN_LOOP = """
from torch import nn, optim
from elastic_train import parse_flags, run
from elastic_train.examples import elastic_ddp

model = nn.Linear(10, 10000)
optimizer = optim.SGD(model.parameters(), lr=0.01)
state = run(elastic_ddp.train, model, optimizer, elastic_ddp.parity(bits=10), parse_flags())
print("returned with step", state.step)
"""


def test_what_was_trained_and_cannot_be_saved_is_no_success(cluster: Cluster) -> None:
    """A loop of one's own has the state in its hands, and may save it elsewhere."""
    (cluster.path / "own.py").write_text(OWN_LOOP)
    flags = ("--max-steps", "20", "--run-dir")
    bundled = cluster.launch([*FILES_OF_100_KIB, "-m", "elastic_train", "--device=cpu", *flags, "bundled"], {})
    own = cluster.launch([*FILES_OF_100_KIB, "own.py", *flags, "own"], {})
    assert (bundled.wait(), own.wait()) == (1, 0), bundled.text() + own.text()
    for node, name in ((bundled, "bundled"), (own, "own")):
        assert "THIS STATE IS NOT SAVED, a warning above says why; the same command goes on from" in node.text()
        assert outcomes(cluster.path / name) == ["finished"]
        [warning] = events(cluster.path / name, "warning")
        assert "File too large" in warning["message"]
    assert "returned with step 20" in own.text()


@pytest.mark.slow
def test_a_learning_rate_of_the_script_that_the_run_does_not_take_is_told(cluster: Cluster) -> None:
    """Its optimizer's groups are the run's. Once, by rank 0, and not where it is the same."""
    for steps, lr in ((5, "0.01"), (10, "0.01"), (15, "0.5")):
        (cluster.path / "own.py").write_text(OWN_LOOP.replace("lr=0.01", f"lr={lr}"))
        cluster.finish(cluster.start("--max-steps", str(steps), nproc=2, program=("own.py",)))
    told = [line for node in cluster.nodes for line in node.text().splitlines() if "learning rate" in line]
    assert told == ["elastic_train: the run's learning rate 0.01 is used, not this start's 0.5"]
    assert "not this start's 0.5" in cluster.nodes[-1].text()


@pytest.mark.slow
def test_of_two_hosts_with_one_run_directory_the_second_saves_what_the_first_cannot(cluster: Cluster) -> None:
    """Rank 0 saves for both, but here it may write no large file from step 10 on, as if its host had lost the disk."""
    nodes = cluster.start("--model", "mlp", "--max-steps", "60", "--snapshot-every", "0", nodes=2, nnodes="2:2")
    wait_for_step(cluster.run_dir, 10)
    [first] = [event["pid"] for event in events(cluster.run_dir, "world") if event["rank"] == 0]
    psutil.Process(first).rlimit(psutil.RLIMIT_FSIZE, (102400, 102400))
    cluster.finish(nodes)
    [warning] = events(cluster.run_dir, "warning")
    assert warning["pid"] == first
    assert "File too large" in warning["message"]
    assert [(event["outcome"], "unsaved" in event) for event in events(cluster.run_dir, "done")] == [
        ("finished", False)
    ] * 2
    info, _state = newest_snapshot(cluster.run_dir)
    assert info.step == result(cluster.run_dir)["step"] == 60


def test_a_stop_whose_state_cannot_be_saved_is_no_orderly_one(cluster: Cluster) -> None:
    command = ["-m", "elastic_train", "--device=cpu", "--run-dir", str(cluster.run_dir)]
    node = cluster.launch([*FILES_OF_100_KIB, *command], {})
    wait_for_step(cluster.run_dir, 5)
    node.signal(signal.SIGTERM)
    assert node.wait() == 1
    assert (
        "THIS STATE IS NOT SAVED, a warning above says why; the same command continues from the newest" in node.text()
    )
    assert outcomes(cluster.run_dir) == ["stopped"]
    assert [event["unsaved"] for event in events(cluster.run_dir, "done")] == [True]


@pytest.mark.slow
def test_leftover_of_a_dead_writer_is_removed(prepared: Path, cluster: Cluster) -> None:
    """Also where its process id is in use again, as is usual in containers: by us."""
    shutil.copytree(prepared, cluster.run_dir)
    host = newest_of(prepared).name.split("-gen-0000-")[1]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert not psutil.pid_exists(dead.pid)
    torn = cluster.run_dir / "snapshots" / f".tmp-step-000000000040-gen-0000-{host}-{dead.pid}"
    torn.mkdir()
    (torn / "state.pt").write_bytes(b"half")
    node = cluster.start_alone("--model", "mlp", "--epochs", "100000", "--snapshot-every", "5")
    wait_until(lambda: not torn.exists(), "removal with the first snapshot")
    node.signal(signal.SIGINT)
    cluster.finish([node], code=130)


@pytest.mark.slow
def test_several_hosts_have_the_newest_snapshot_and_one_of_them_a_damaged_one(cluster: Cluster) -> None:
    """Who has it whole reads it; the one whose copy is damaged says so, and gets the state from another."""
    flags = (
        "--reduction", "ordered", "--virtual-ranks", "3", "--global-batch-size", "63", "--max-steps", "120",
        "--snapshot-every", "20",
    )  # fmt: skip
    first = cluster.start_alone(*flags, run_dir=cluster.path / "a")
    wait_for_step(cluster.path / "a", 45)
    first.signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM
    newest = newest_snapshot(cluster.path / "a")[0]
    for host in ("b", "c"):
        shutil.copytree(cluster.path / "a" / "snapshots", cluster.path / host / "snapshots")
    damaged = cluster.path / "c" / "snapshots" / newest.name / "state.pt"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)

    hosts = "cab"  # the damaged one is rank 0
    nodes = []
    for host in hosts:
        nodes += cluster.start(*flags, run_dir=cluster.path / host, nnodes="3:3")
    cluster.finish(nodes)
    for host in hosts:
        [restored] = events(cluster.path / host, "restore")[-1:]
        assert (restored["source"], restored["restored_step"]) == ("snapshot", newest.step)
    [warning] = [e["message"] for e in events(cluster.path / "c", "warning") if "damaged: " in e["message"]]
    assert newest.name in warning
    ends = [result(cluster.path / host) for host in hosts if (cluster.path / host / "result.json").exists()]

    path = cluster.path / "undisturbed"
    path.mkdir()
    with running(path) as alone:
        alone.finish([alone.start_alone(*flags)])
        expected = result(alone.run_dir)
    assert [end["state_sha256"] for end in ends] == [expected["state_sha256"]] * len(ends)
    assert ends
