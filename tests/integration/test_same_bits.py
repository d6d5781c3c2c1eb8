"""Ordered mode through real torchrun: kills and joins change nothing, down to the last bit."""

from __future__ import annotations

from tests.integration.cluster import Cluster, events, newest_snapshot, result, running, wait_until, worlds
from tests.integration.test_in_place import check_run, rank_of, start_world

FLAGS = ("--reduction", "ordered")


def wait_for_steps_in(cluster: Cluster, generation: int) -> None:
    """Until all of that world have committed steps, and so know what has led to it."""
    wait_until(
        lambda: sum(event["generation"] == generation for event in events(cluster.run_dir, "step")) > 2,
        f"steps of generation {generation}",
    )


def test_kills_and_a_join_leave_the_bits_of_the_undisturbed_run(cluster: Cluster) -> None:
    steps = 500
    nodes = start_world(cluster, 3, *FLAGS, steps=steps)
    victim = next(node for node in nodes if rank_of(cluster, node) == 0)
    victim.kill()
    wait_until(lambda: any(e["world_size"] == 2 for e in events(cluster.run_dir, "world")), "world of 2", 20)
    joined = cluster.start("--epochs", "1000", "--ledger", "--eval-every", "1000", "--peer-timeout", "2",
                           "--max-steps", str(steps), *FLAGS)  # fmt: skip
    wait_for_steps_in(cluster, 2)
    assert worlds(cluster.run_dir)[-1] == (2, 3)
    for generation, node in enumerate((node for node in nodes if node is not victim), 3):
        node.kill()
        wait_for_steps_in(cluster, generation)
    cluster.finish(joined)
    end = check_run(cluster, steps)

    path = cluster.path / "undisturbed"
    path.mkdir()
    with running(path) as alone:
        alone.finish(start_world(alone, 1, *FLAGS, steps=steps))
        expected = result(alone.run_dir)
    assert end["state_sha256"] == expected["state_sha256"]
    # A rank 0 that was killed may have committed a step alone: the others redo it, with the same loss.
    committed = [(e["generation"], e["step"]) for e in events(cluster.run_dir, "step")]
    assert len(committed) == len(set(committed)), "no world has a step twice"
    assert steps <= len(committed) <= steps + 3, "one for each kill"
    losses = {(e["step"], e["loss"]) for e in events(cluster.run_dir, "step")}
    assert losses == {(e["step"], e["loss"]) for e in events(alone.run_dir, "step")}
    assert len(end["incidents"]) >= 4
    assert newest_snapshot(cluster.run_dir)[0].step == steps, "by the one that has joined"
