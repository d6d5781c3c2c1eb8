"""A fault that finds out too late that it cannot strike leaves nothing behind, and the drill goes on."""

from __future__ import annotations

import io
from pathlib import Path

import psutil
import pytest

from elastic_train.drills.cluster import Cluster, NodeState, Place
from elastic_train.drills.drill import Conductor, Settings
from elastic_train.drills.harm import Fault, Harm, NotStruck
from elastic_train.drills.live import Timeline
from elastic_train.drills.record import Record, read_drill
from elastic_train.drills.schedule import Planned


class HalfDone(Fault):
    name = "half-done"

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.is_undone = False

    def choose(self, harm: Harm) -> list[Place]:
        return harm.cluster.places[:1]

    def strike(self, harm: Harm) -> str:
        harm.targets[0].affliction = NodeState.FROZEN
        raise self.error

    def undo(self, harm: Harm) -> None:
        self.is_undone = True
        harm.targets[0].affliction = NodeState.OUT


@pytest.mark.parametrize("error", [NotStruck("it did not stop"), psutil.NoSuchProcess(7)], ids=["not struck", "gone"])
def test_what_was_done_in_part_is_undone(tmp_path: Path, error: Exception) -> None:
    planned = Planned(0.0, "half-done")
    settings = Settings(
        run_dir=tmp_path, seed=1, plan=[planned], flags=[], num_nodes=2, num_workers=1, global_batch_size=64,
        peer_timeout=5.0, last_step=None, wants_network=False, backend="c10d", etcd_endpoint=None,
    )  # fmt: skip
    record = Record(tmp_path)
    record.add_setting(seed=1)
    cluster = Cluster(tmp_path, record, [], num_nodes=2)
    fault = HalfDone(error)
    with Timeline(cluster, last_step=None, seconds=10.0, file=io.StringIO()) as timeline:
        Conductor(settings, cluster, record, timeline)._strike(0, planned, fault)
    record.close()
    cluster.close()
    assert fault.is_undone
    assert cluster.places[0].affliction is None
    drill = read_drill(tmp_path)
    assert drill is not None
    assert [(found.struck_at, found.target) for found in drill.faults] == [(None, "node1")]
