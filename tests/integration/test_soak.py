"""Twenty changes in a row, drawn by a seed: kills, hangs, polite stops, joins, restarts of the whole job.

In ordered mode, so that the strongest thing can be asked for: the weights of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import random
import signal
from collections import Counter

import pytest

from tests.integration.cluster import (
    Cluster,
    Node,
    check_ledger,
    check_steps,
    events,
    last_step,
    newest_snapshot,
    result,
    running,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_in_place import BATCH, ENDLESS, LENGTH

FLAGS = (*ENDLESS, "--epochs", "100000", "--reduction", "ordered", "--schedule", "constant", "--eval-every", "100000")
NUM_CHANGES = 20


class Soak:
    """A job, and what can be done to it."""

    def __init__(self, cluster: Cluster, chance: random.Random, flags: tuple[str, ...], nproc: int, max_nodes: int):
        self.cluster = cluster
        self.chance = chance
        self.flags = flags
        self.nproc = nproc
        self.max_nodes = max_nodes
        self.nodes: list[Node] = []

    def start(self, count: int) -> None:
        nnodes, conf = f"1:{self.max_nodes}", self.cluster.last_call(2)  # a node that comes later joins in place
        self.nodes += self.cluster.start(*self.flags, nodes=count, nproc=self.nproc, nnodes=nnodes, conf=conf)

    def possible(self) -> list[str]:
        return [
            *(["kill", "stop"] if len(self.nodes) > 1 else []),
            # Under c10d the second of two nodes waits for a first one that is silent.
            *(["hang"] if len(self.nodes) > (1 if self.cluster.etcd else 2) else []),
            *(["join"] * 3 if len(self.nodes) < self.max_nodes else []),
            "restart",
        ]

    def do(self, change: str) -> None:
        if change == "join":
            self.start(1)
        elif change == "restart":
            for node in self.nodes:
                node.signal(signal.SIGTERM)
            self.cluster.finish(self.nodes, code=1)
            self.nodes = []
            self.start(self.chance.randint(1, self.max_nodes))
        elif change == "hang":
            self.hang(self.chance.choice(self.nodes))
        else:
            node = self.nodes.pop(self.chance.randrange(len(self.nodes)))
            if change == "kill":
                node.kill()
            else:
                node.signal(signal.SIGTERM)
                node.wait(60)

    def hang(self, node: Node) -> None:
        worker = self.chance.choice(node.workers())
        generation = worlds(self.cluster.run_dir)[-1][0]
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: worlds(self.cluster.run_dir)[-1][0] > generation, "world without the hung worker", 60)
        worker.send_signal(signal.SIGCONT)  # it comes back

    def settle(self, generation: int) -> None:
        """Wait until all nodes train in one world that is newer than `generation`."""
        size = len(self.nodes) * self.nproc

        def stands() -> bool:
            newest, newest_size = worlds(self.cluster.run_dir)[-1]
            return newest > generation and newest_size == size

        wait_until(stands, f"world of {size}", 120)
        wait_for_step(self.cluster.run_dir, last_step(self.cluster.run_dir) + 10)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cluster", ["c10d", "etcd3"], indirect=True)
@pytest.mark.parametrize(("seed", "nproc", "max_nodes", "loaders"), [(1, 1, 4, 0), (2, 2, 3, 1)])
def test_twenty_changes_leave_the_bits_of_the_undisturbed_run(
    cluster: Cluster, seed: int, nproc: int, max_nodes: int, loaders: int
) -> None:
    chance = random.Random(seed)
    soak = Soak(cluster, chance, (*FLAGS, "--num-workers", str(loaders)), nproc, max_nodes)
    soak.start(2)
    wait_until(lambda: (cluster.run_dir / "events").is_dir(), "events", 120)
    wait_until(lambda: worlds(cluster.run_dir), "first world", 120)
    soak.settle(-1)
    done: Counter[str] = Counter()
    for number in range(NUM_CHANGES):
        change = chance.choice(soak.possible())
        generation = worlds(cluster.run_dir)[-1][0]
        print(f"seed {seed}, change {number}: {change}, {len(soak.nodes)} nodes, step {last_step(cluster.run_dir)}")
        soak.do(change)
        soak.settle(generation)
        done[change] += 1
    for node in soak.nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(soak.nodes, code=1)

    found, _ = newest_snapshot(cluster.run_dir)
    assert found.step == last_step(cluster.run_dir)
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=found.step)
    check_steps(cluster.run_dir, found.step)
    print(f"seed {seed}: {dict(done)}, {found.step} steps")
    cluster.finish([cluster.start_alone(*FLAGS, "--max-steps", str(found.step + 5))])

    path = cluster.path / "undisturbed"
    path.mkdir()
    with running(path) as alone:
        alone.finish([alone.start_alone(*FLAGS, "--max-steps", str(found.step + 5))], timeout=600)
        expected = result(alone.run_dir)
    assert result(cluster.run_dir)["state_sha256"] == expected["state_sha256"]
    losses = [e["loss"] for e in sorted(events(cluster.run_dir, "step"), key=lambda e: e["step"])]
    assert losses == [e["loss"] for e in events(alone.run_dir, "step")]
