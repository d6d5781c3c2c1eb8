"""Run, stop, crash and continue with other world sizes: no sample lost, repeated or reordered."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from tests.integration.cluster import (
    TORCHRUN,
    Cluster,
    check_ledger,
    events,
    last_step,
    newest_snapshot,
    outcomes,
    result,
    snapshot_names,
    wait_for_step,
    wait_until,
    worlds,
)

LENGTH, BATCH = 1437, 64
STEPS_PER_EPOCH = -(-LENGTH // BATCH)


@pytest.mark.slow
def test_main_job(cluster: Cluster) -> None:
    """The line of the README, with a port of the test's own; then a second start, a continuation, and a new start."""
    command = [*TORCHRUN, "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{cluster.port}", "--nnodes=1:4"]
    run_dir = cluster.path / "runs" / "default"
    first = cluster.launch([*command, "-m", "elastic_train"], {})
    cluster.finish([first])
    end = result(run_dir)
    assert (end["step"], end["epoch"], end["generations"]) == (30 * STEPS_PER_EPOCH, 30, 1)
    assert end["test_accuracy"] >= 0.97
    assert f"test accuracy {end['test_accuracy']:.2%}" in first.text()
    assert newest_snapshot(run_dir)[0].step == end["step"]
    own = [line for line in first.text().splitlines() if line.startswith("elastic_train: ")]
    assert any(f"step={end['step']}/{end['step']} epoch=30/30 loss=" in line for line in own), own
    assert any(line.endswith("; training image-classification from scratch; SGD, lr 0.05") for line in own), own
    assert "\x1b" not in first.text(), "plain lines where there is no terminal"

    file = run_dir / "result.json"
    before = (file.read_bytes(), file.stat().st_mtime_ns, snapshot_names(run_dir))
    again = cluster.start_alone(run_dir=run_dir)
    cluster.finish([again])
    assert (file.read_bytes(), file.stat().st_mtime_ns, snapshot_names(run_dir)) == before
    assert "is finished: 690 steps" in again.text()
    assert "--fresh" in again.text()
    assert outcomes(run_dir) == ["finished", "already_finished"]

    cluster.finish([cluster.start_alone("--epochs", "32", run_dir=run_dir)])
    longer = result(run_dir)
    assert (longer["step"], longer["epoch"]) == (32 * STEPS_PER_EPOCH, 32)
    assert longer["state_sha256"] != end["state_sha256"]
    assert [event["step"] for event in events(run_dir, "step")] == list(range(1, 32 * STEPS_PER_EPOCH + 1))
    assert worlds(run_dir) == [(0, 1), (1, 1), (2, 1)]

    fresh = cluster.start_alone("--fresh", "--max-steps", "3", run_dir=run_dir)
    cluster.finish([fresh])
    [aside] = [path for path in run_dir.parent.iterdir() if path != run_dir]
    assert str(aside) in fresh.text()
    assert result(aside) == longer
    assert newest_snapshot(aside)[0].step == longer["step"]
    assert result(run_dir)["step"] == 3
    assert worlds(run_dir) == [(0, 1)], "a fresh run counts its generations anew"
    assert [(e["source"], e["restored_step"]) for e in events(run_dir, "restore")] == [("scratch", 0)]


@pytest.mark.slow
def test_a_step_that_rank_0_did_not_live_to_write_down(cluster: Cluster) -> None:
    """It committed step 30 and was killed before its event; a survivor saved the state. The next start writes it."""
    cluster.finish([cluster.start_alone("--max-steps", "30", "--model", "mlp")])
    [file] = (cluster.run_dir / "events").iterdir()
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if b'"event":"step","rank"' in line]
    assert json.loads(lines[-1])["step"] == 30
    file.write_bytes(file.read_bytes().replace(lines[-1], b""))

    cluster.finish([cluster.start_alone("--max-steps", "33", "--model", "mlp")])
    steps = sorted(events(cluster.run_dir, "step"), key=lambda event: event["step"])
    assert [event["step"] for event in steps] == list(range(1, 34))
    assert steps[29]["generation"] == 0, "the world that committed it"
    written, original = steps[29], json.loads(lines[-1])
    for field in ("epoch", "loss", "samples_done"):
        assert written[field] == original[field]
    assert result(cluster.run_dir)["incidents"][0]["committed_steps_lost"] == 0


def test_stop_in_mid_epoch_and_continue_with_other_world_sizes(cluster: Cluster) -> None:
    batch, epochs = 8, 4  # epochs of 180 steps: a stop takes forty to a hundred
    steps_per_epoch = -(-LENGTH // batch)
    flags = ("--ledger", "--snapshot-every", "7", "--global-batch-size", str(batch), "--epochs", str(epochs))
    delays = random.Random(5)
    started = cluster.start(*flags, nodes=2)
    wait_for_step(cluster.run_dir, 30)  # their agents handle signals by then
    for node in started:
        node.signal(signal.SIGTERM)
        time.sleep(delays.uniform(0, 0.5))  # the signals of a scheduler do not arrive at one moment
    cluster.finish(started, code=1)  # torchrun's own code for a stopped job
    stopped_at = last_step(cluster.run_dir)
    assert outcomes(cluster.run_dir) == ["stopped"] * 2
    steps = {event["step"] for event in events(cluster.run_dir, "done")}
    assert steps == {stopped_at}, "all ranks stop at the same step"
    assert newest_snapshot(cluster.run_dir)[0].step == stopped_at
    assert stopped_at % steps_per_epoch, "stopped in mid-epoch"

    cluster.finish(cluster.start(*flags, nproc=3))
    end = result(cluster.run_dir)
    assert end["step"] == epochs * steps_per_epoch
    assert end["test_accuracy"] >= 0.97
    assert end["generations"] == 2
    assert [incident["committed_steps_lost"] for incident in end["incidents"]] == [0]
    assert sum(value for name, value in end["goodput"].items() if name not in ("wall", "ratio")) == pytest.approx(
        end["wall_seconds"]
    )
    check_ledger([cluster.run_dir], length=LENGTH, batch=batch, steps=end["step"])
    steps_seen = [event["step"] for event in events(cluster.run_dir, "step")]
    assert steps_seen == list(range(1, end["step"] + 1)), "every committed step once"
    assert worlds(cluster.run_dir) == [(0, 2), (1, 3)]


@pytest.mark.slow
def test_a_node_that_comes_later_joins(cluster: Cluster) -> None:
    """It is taken in between two steps: nothing is lost, and --fresh acts once per job."""
    cluster.run_dir.mkdir()
    (cluster.run_dir / "left-by-an-older-run").touch()
    # Endless, so that the newcomer cannot be too late; stopped below.
    flags = ("--fresh", "--ledger", "--snapshot-every", "0", "--epochs", "100000")
    first = cluster.start(*flags, nproc=2)
    wait_for_step(cluster.run_dir, 3)
    second = cluster.start(*flags, nproc=2)
    wait_until(lambda: (1, 4) in worlds(cluster.run_dir), "world of both nodes")
    joined_at = last_step(cluster.run_dir)
    wait_for_step(cluster.run_dir, joined_at + 5)
    for node in [*first, *second]:
        node.signal(signal.SIGTERM)
    cluster.finish([*first, *second], code=1)

    assert worlds(cluster.run_dir) == [(0, 2), (1, 4)]
    assert [node.text().count("this node joins it, and moves nothing aside") for node in (*first, *second)] == [0, 1]
    [restored] = {event["restored_step"] for event in events(cluster.run_dir, "restore") if event["generation"] == 1}
    assert restored >= 3
    steps = [event["step"] for event in events(cluster.run_dir, "step")]
    assert steps == list(range(1, last_step(cluster.run_dir) + 1)), "no committed step was lost, none redone"
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=last_step(cluster.run_dir))
    [aside] = cluster.path.glob("run.*")
    assert [path.name for path in aside.iterdir()] == ["left-by-an-older-run"]
    incidents = json.loads(newest_snapshot(cluster.run_dir)[1]["run"]["incidents"])
    assert [incident["committed_steps_lost"] for incident in incidents] == [0]


@pytest.mark.slow
def test_a_worker_that_torchrun_restarts_continues(cluster: Cluster) -> None:
    """`--max-restarts`: the restarted worker does not obey --fresh again, and its generation goes on."""
    flags = ("--fresh", "--ledger", "--snapshot-every", "10", "--max-steps", "100")
    [node] = cluster.start(*flags, max_restarts=1)
    wait_for_step(cluster.run_dir, 25)
    [worker] = node.workers()
    worker.kill()
    cluster.finish([node])
    assert not list(cluster.path.glob("run.*")), "there was nothing to move aside, and no second time to look"
    assert worlds(cluster.run_dir) == [(0, 1), (1, 1)]
    restored = events(cluster.run_dir, "restore")[1]["restored_step"]
    assert restored >= 20
    steps = [event["step"] for event in events(cluster.run_dir, "step")]
    assert steps[steps.index(restored) + 1 :][-1] == 100
    [incident] = result(cluster.run_dir)["incidents"]
    assert incident["cause"] == "restart"
    assert incident["committed_steps_lost"] == len(steps) - 100, "what was done twice is what was lost"
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=100)


@pytest.mark.slow
def test_a_job_that_ended_starts_again_at_the_same_endpoint(cluster: Cluster) -> None:
    """After a failure, and after the end of training."""
    failed = cluster.start("--task", "no_such_module:Task")
    cluster.finish(failed, code=1)
    again = cluster.start("--max-steps", "10", nodes=2)
    cluster.finish(again)
    assert result(cluster.run_dir)["step"] == 10
    finished = cluster.start("--max-steps", "10")
    cluster.finish(finished)
    assert outcomes(cluster.run_dir)[-1] == "already_finished"
