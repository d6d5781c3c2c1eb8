"""Two members without a state and one bucket: one of them reads, both have it; what is damaged is skipped by both.
Where nothing is there, both begin from scratch; of parted snapshots on disks of their own both get the furthest.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.elastic.restore import Restored, restore
from elastic_train.runlog.goodput import Phase, PhaseClock
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.past_snapshots import PastSnapshots
from elastic_train.storage.run_record import NO_RUN, RunRecord
from elastic_train.storage.snapshot import SnapshotInfo, find_snapshots
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.store_arms import Stored
from elastic_train.storage.store_urls import parse_url
from elastic_train.training.state import TrainState, state_sha256
from elastic_train.world import World
from tests.ranks import on_each_rank

WORLD_SIZE = 2
PARTED = (("disk-0", 3, 9), ("disk-1", 5, 4))
"""disk, step and generation of snapshots of nodes that were begun again without each other from step 2"""
AGES = (2.0, 600.0)
"""of the processes, by rank: the second one has waited for the first"""


def make_state(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainState(model, optimizer, length=100, global_batch_size=10, epochs=3)


def bucket_in(folder: Path) -> Bucket:
    return Bucket(ObjectStore(parse_url(f"file://{folder}")), part_bytes=4096)


def save(writer: SnapshotWriter, step: int, generation: int) -> None:
    state = make_state(seed=step)
    state.run_uid, state.restarts = "run", ((f"generation {generation}", 2),)
    for _ in range(step):
        state.commit(0.5)
    where: dict[str, Any] = {"epoch": 0, "samples_done": 10 * step, "generation": generation, "world_size": 2}
    writer.save(state.state_dict(), step=step, restarts=state.restarts, **where)


def restore_at_start(
    state: TrainState,
    world: World,
    offers: list[SnapshotInfo],
    warn: Callable[[str], None],
    *,
    record: RunRecord = NO_RUN,
    past: PastSnapshots | None = None,
    awaited: str | None = None,
) -> Restored:
    """Restore at a start of no special kind."""
    return restore(
        state,
        world,
        offers,
        task={},
        run_uid="new",
        lost=None,
        source=0,
        awaited=awaited,
        record=record,
        past=lambda: past,
        own_past=lambda: None,
        warn=warn,
        check=lambda: None,
    )


def bring(state: TrainState, rank: int, offers: list[SnapshotInfo], warnings: list[str]) -> Restored:
    """The members to one state."""
    world: Any = SimpleNamespace(rank=rank, world_size=WORLD_SIZE, num_nodes=2, is_first_of_node=True)
    return restore_at_start(state, world, offers, warnings.append)


def work(rank: int, folder: Path, out: Path) -> None:
    read: list[str] = []

    class Noting(ObjectStore):
        def get(self, key: str, limit: int | None = None) -> Stored | None:
            read.append(key)
            return super().get(key, limit)

    offers = find_snapshots(Bucket(Noting(parse_url(f"file://{folder}"))), warn=lambda _: None)
    state, warnings = make_state(seed=rank + 10), []
    restored = bring(state, rank, offers, warnings)
    new = make_state(seed=rank + 10)
    new.clock = PhaseClock(process_age=AGES[rank])
    new.clock.enter(Phase.FORM)
    scratch = bring(new, rank, [], [])
    parted, told = make_state(seed=rank + 20), []
    bring(parted, rank, find_snapshots(out / f"disk-{rank}", warn=lambda _: None), told)
    parts = [key for key in read if "state.pt." in key]
    full, without_room = make_state(seed=rank + 30), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(out / "not there") if rank == 0 else None)
        from_other = bring(full, rank, offers, without_room)
    found = {
        "source": restored.source,
        "step": restored.step,
        "from": restored.from_rank,
        "sha256": state_sha256(state.model.state_dict()),
        "parts": parts,
        "warnings": warnings,
        "scratch": scratch.source,
        "parted": [parted.step, parted.restarts, state_sha256(parted.model.state_dict())],
        "told": told,
        "full": [from_other.step, from_other.from_rank, state_sha256(full.model.state_dict())],
        "startup": new.clock.totals()["startup"],
        "wall": sum(new.clock.totals().values()),
        "paid": new.clock.node_seconds()[0],
    }
    (out / str(rank)).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, of a bucket whose newest snapshot is damaged."""
    out = tmp_path_factory.mktemp("restore")
    bucket = bucket_in(out / "bucket")
    writer = SnapshotWriter(bucket, keep=3, host="gone", run_uid="run", task={})
    for step in (1, 2):
        save(writer, step, 4)
    damaged = next(key for key in bucket.store.list() if key.startswith("step-000000000002") and ".00001." in key)
    bucket.store.put(damaged, bytes(bucket.store.list()[damaged]))
    for disk, step, generation in PARTED:
        save(SnapshotWriter(out / disk, keep=3, host=disk, run_uid="run", task={}), step, generation)
    on_each_rank(work, out / "bucket", out, size=WORLD_SIZE)
    return [json.loads((out / str(rank)).read_text()) for rank in range(WORLD_SIZE)]


def test_both_have_the_newest_whole_one(found: list[dict[str, Any]]) -> None:
    expected = state_sha256(make_state(seed=1).model.state_dict())
    for one in found:
        assert (one["source"], one["step"], one["from"], one["sha256"]) == ("snapshot", 1, 0, expected)


def test_one_reads_for_both(found: list[dict[str, Any]]) -> None:
    assert len(found[0]["parts"]) > 2
    assert found[1]["parts"] == []
    assert len(found[0]["warnings"]) == 1
    assert "is damaged" in found[0]["warnings"][0]


def test_another_node_reads_where_the_first_one_has_no_room(found: list[dict[str, Any]]) -> None:
    """For the temporary file. It finds the newest one damaged, too."""
    expected = state_sha256(make_state(seed=1).model.state_dict())
    assert [one["full"] for one in found] == [[1, 1, expected]] * WORLD_SIZE


def test_of_parted_snapshots_the_furthest_is_restored(found: list[dict[str, Any]]) -> None:
    """Though its generation is the lower one: they were counted apart."""
    expected = state_sha256(make_state(seed=5).model.state_dict())
    for one in found:
        step, [before, now], sha256 = one["parted"]
        assert (step, before, now[1], sha256) == (5, ["generation 4", 2], 5, expected)
    assert found[0]["parted"] == found[1]["parted"], "the name of the restart too"
    [told] = found[0]["told"]
    assert "host disk-0 has a snapshot of step 3" in told
    assert "host disk-1 one of step 5" in told
    assert found[1]["told"] == []


def test_a_run_from_scratch_began_with_the_member_that_was_there_first(found: list[dict[str, Any]]) -> None:
    """That one may die, and the other one writes result.json."""
    for one in found:
        assert one["scratch"] == "scratch"
        assert one["startup"] == pytest.approx(max(AGES), abs=1.0)
        assert max(AGES) <= one["wall"] < max(AGES) + 100.0


def test_both_nodes_are_paid_from_its_start(found: list[dict[str, Any]]) -> None:
    """Though nobody knew how many there are until the world stood."""
    for one in found:
        assert one["paid"] == pytest.approx(2 * one["wall"], abs=1.0)
