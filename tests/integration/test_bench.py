"""The benchmarks really run what they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic_train.errors import ElasticTrainError, SnapshotError
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.bench import goodput_of_trace, snapshot_cost
from elastic_train.tools.bench.goodput_of_trace import NUM_NODES, Restarts, Torchft
from elastic_train.tools.bench.goodput_of_trace import measure as measure_goodput
from elastic_train.tools.bench.loop_speed import Effort, Launched, LoopCase, lower_bound, measure
from elastic_train.tools.bench.loop_speed import rows_of as rows_of_loops
from elastic_train.tools.bench.snapshot_cost import (
    OURS,
    Cost,
    SnapshotEffort,
    measure_all,
    measure_way,
    save_once,
    way_of,
)
from elastic_train.tools.bench.snapshot_cost import RIVALS as SAVING
from elastic_train.tools.bench.snapshot_cost import rows_of as rows_of_snapshots
from elastic_train.tools.bench.startup import measure as measure_startup
from elastic_train.tools.bench.startup import rows_of
from elastic_train.tools.drills.backends import backend_of
from elastic_train.tools.drills.nodes import wait_until

pytestmark = pytest.mark.timeout(180)

RIVALS = {"restarts": lambda _: Restarts(None), "torchft": Torchft}


@pytest.mark.slow
def test_a_small_measurement() -> None:
    cases = [LoopCase("mlp", 64, 2, snapshot_every=5), LoopCase("cnn", 512, 2)]
    rows = measure(cases, Effort(block_seconds=0.02, case_seconds=0.1, min_pairs=2, launches=1))
    assert [row.case for row in rows] == [str(case) for case in cases]
    assert all(row.ours > 0 and row.theirs > 0 and row.ratio > 0 for row in rows)


@pytest.mark.slow
def test_a_small_measurement_of_a_loop_of_ones_own() -> None:
    cases = [LoopCase("mlp", 64, 2, items=True, num_workers=number) for number in (0, 1)]
    rows = measure(cases, Effort(block_seconds=0.05, case_seconds=0.3, min_pairs=2, launches=2))
    names = [str(cases[0]), "  at least, at 95 %", "  of processor time"]
    assert [row.case for row in rows] == [*names, str(cases[1]), *names[1:]]
    for rate, bound, of_cpu in zip(*[iter(rows)] * 3, strict=True):
        assert 0 < bound.ours <= rate.ratio
        assert of_cpu.ours > 0
    assert not [child for child in psutil.Process().children(recursive=True) if child.status() == psutil.STATUS_STOPPED]


def test_a_lower_bound_is_that_of_the_launches() -> None:
    assert lower_bound([[1.0] * 5] * 9) == 1.0
    assert lower_bound([[0.8] * 50] * 4 + [[1.0] * 50] * 5) == 0.8
    assert lower_bound([[0.8] * 50] * 1 + [[1.0] * 50] * 8) == 1.0


def test_one_launch_shows_no_bound() -> None:
    case, launched = LoopCase("cnn", 64, 1, items=True), Launched([(0.9, 1.0), (1.3, 1.0)], (1.0, 1.0))
    assert [row.case for row in rows_of_loops(case, [launched])] == [str(case), "  of processor time"]
    assert [row.case for row in rows_of_loops(case, [launched] * 2)][1] == "  at least, at 95 %"


@pytest.mark.slow
def test_a_worker_that_fails_ends_it() -> None:
    with pytest.raises(ElasticTrainError, match="rank 0 of OurLoop ended with code 1"):
        measure(
            [LoopCase("no-such-model", 64, 1)], Effort(block_seconds=0.02, case_seconds=0.1, min_pairs=2, launches=1)
        )


def test_a_save_of_ours_that_fails_is_none(tmp_path: Path) -> None:
    folder, state = tmp_path / "snapshots", {"model": {"weight": torch.zeros(10)}}
    folder.mkdir()
    save, _ = way_of("ours", folder, state)
    folder.rmdir()
    folder.touch()
    with pytest.raises(SnapshotError, match="cannot be written"):
        save_once(save, state, 1)


def test_a_snapshot_is_written_where_python_passes_over_asserts(tmp_path: Path) -> None:
    """PYTHONOPTIMIZE=1; it would be told as durable at once, as our time."""
    names: dict[str, Any] = {"__name__": snapshot_cost.__name__}
    exec(compile(Path(snapshot_cost.__file__).read_text(), "optimized", "exec", optimize=1), names)
    state = {"model": {"weight": torch.ones(4)}}
    wait_until(names["OurWriter"](tmp_path, state)(state, 1), "durable snapshot", 60.0)
    assert [*tmp_path.rglob("state.pt")]


def test_what_a_snapshot_costs_in_small() -> None:
    cost = measure_way("torch.save", SnapshotEffort(6_400_000, 1, 2))
    assert [len(one) for one in (cost.blocked, cost.total, cost.lost_idle, cost.lost_busy)] == [2] * 4
    assert 0 < cost.memcpy < min(cost.blocked), "it also writes"
    assert min(cost.lost_idle) > 0, "no step is taken meanwhile"


def test_rows_of_costs() -> None:
    """A ratio is theirs in terms of ours; beside memcpy, too."""
    found = {way: [Cost([2.0, 1.0], [3.0, 3.0], [-0.5, -0.5], [0.2, 0.2], 10**9, 1.0, 0.0, 10**9)] for way in SAVING}
    ours = Cost([1.0] * 2, [3.0], [0.1], [0.1], 5, 0.8, 3.2, 8 * 10**9)
    rows = {row.case: row for row in rows_of_snapshots(found | {OURS: [ours]})}
    assert len(rows) == 6 * len(SAVING) + 3
    hashed = rows["hash of a state: memcpy"]
    assert (hashed.ours, hashed.theirs, hashed.unit) == (2.5, 10.0, "GB/s")
    assert rows["held up by the first call: torch.save"].ratio == 2.0
    assert rows["held up by later calls: torch.save"].ratio == 1.0
    assert rows["held up by the first call: memcpy"].ratio == 0.8
    assert rows["training lost, a core idle: DCP save"].ratio == pytest.approx(0.01), "less than a millisecond is noise"
    assert rows["memory at the peak: DCP save"].theirs == 1.0


@pytest.mark.slow
def test_every_way_to_save() -> None:
    found = measure_all(SnapshotEffort(6_400_000, 1, 2))
    assert list(found) == [OURS, *SAVING]
    assert all(min(cost.blocked) > 0 for costs in found.values() for cost in costs)


@pytest.mark.slow
def test_the_phases_of_a_join(tmp_path: Path) -> None:
    joins = measure_startup(1, tmp_path / "run")
    [join] = joins
    assert min(join.phases.values()) >= 0
    assert join.phases["worker: imports"] > max(join.phases["find the job"], join.phases["process group and state"])
    whole, *phases = rows_of(joins)
    assert (whole.ours, whole.theirs) == (join.seconds, join.imports.limit)
    assert sum(row.ours for row in phases) == pytest.approx(whole.ours)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["etcd3", "c10d", "restarts", "torchft"])
def test_every_contender_goes_on_after_a_death_and_with_a_newcomer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "torchft":
        pytest.importorskip("torchft")
    run_dir = tmp_path / "run"
    backend = RIVALS[kind](tmp_path / "log") if kind in RIVALS else backend_of(kind, None)
    monkeypatch.setattr(goodput_of_trace, "EVERY_SECONDS", 40.0)
    found = measure_goodput(backend, run_dir, num_deaths=1)
    assert 0.0 < found < 1.05
    history = read_history(run_dir)
    sizes = [step.world_size for step in history.kept]
    assert sizes[0] == 1
    assert sizes[-1] == NUM_NODES, "the node that came back is in"
    if kind not in RIVALS:  # torchrun's restarts may take longer than the newcomer
        assert [world.cause for world in history.worlds][-2:] == ["peer_lost", "join"]
        assert 2 in sizes[sizes.index(3) :], "without the node that was killed"
