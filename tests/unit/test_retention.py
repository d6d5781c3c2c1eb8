"""Which snapshots stay, in a folder and below a URL."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from elastic_train.errors import SnapshotDamaged
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.places import bucket_at
from elastic_train.storage.retention import Retention
from elastic_train.storage.snapshot import SnapshotFolder, SnapshotInfo, find_snapshots, info_of, read_info
from elastic_train.storage.snapshot_writer import SnapshotWriter
from tests.processes import flip_a_bit


def make_info(step: int, generation: int = 0, metric: float | None = None) -> SnapshotInfo:
    manifest = {
        "step": step, "epoch": 0, "samples_done": 0, "generation": generation, "run_uid": "run", "host": "a",
        "time": 0.0, "world_size": 1, "torch_version": "", "elastic_train_version": "", "task": {},
        "files": {"state.pt": {"bytes": 1, "sha256": ""}}, "metric": metric,
    }  # fmt: skip
    return info_of(manifest, Path(f"step-{step}-{generation}"), None)


@pytest.mark.parametrize(
    ("retention", "stays"),
    [
        (Retention(1), []),
        (Retention(1, every=100), [120, 200, 310]),  # of 160, 120 was the first; none yet before 100
        (Retention(1, every=1000), []),
        (Retention(1, best=1), [120]),
        (Retention(1, best=2), [120, 310]),
        (Retention(1, best=9), [40, 120, 310]),
        (Retention(1, every=100, best=9), [40, 120, 200, 310]),
    ],
)
def test_what_is_pinned(retention: Retention, stays: list[int]) -> None:
    infos = [make_info(40, metric=0.1), make_info(80), make_info(120, metric=0.9), make_info(160), make_info(200)]
    infos += [make_info(240), make_info(280), make_info(310, metric=0.9)]
    random.Random(0).shuffle(infos)
    assert sorted(step for _, step in retention.pinned(infos)) == stays


def test_what_is_pinned_stays_so_whatever_is_removed() -> None:
    """Pruned after each snapshot, or all at once at the end: the same are left."""
    draw = random.Random(1)
    for _ in range(50):
        retention = Retention(1, every=draw.choice((None, 7, 50)), best=draw.randrange(4))
        infos = [make_info(step, metric=draw.choice((None, draw.random()))) for step in range(3, 300, 11)]
        left: list[SnapshotInfo] = []
        for info in infos:
            left.append(info)
            left = [one for one in left if one.age_key in retention.pinned(left) or one is info]
        at_once = retention.pinned(infos) | {infos[-1].age_key}
        assert {info.age_key for info in left} == at_once


def test_a_damaged_one_is_none_of_the_best() -> None:
    infos = [make_info(step, metric=step / 100) for step in (10, 20, 30)]
    assert Retention(1, best=1).pinned(infos, lambda info: info.step != 30) == {(0, 20)}


def test_a_step_that_was_done_again_takes_one_place() -> None:
    """As it was done last, unless that is damaged; where it was not rated then, as it was rated before."""
    infos = [make_info(200, 1, 0.85), make_info(300, 1, 0.8), make_info(400, 1, 0.9), make_info(400, 2, 0.9)]
    assert Retention(1, best=3).pinned(infos) == {(1, 200), (1, 300), (2, 400)}
    assert Retention(1, best=1).pinned(infos, lambda info: info.generation == 1) == {(1, 400)}
    assert Retention(1, best=2).pinned([*infos, make_info(400, 3, 0.82)]) == {(1, 200), (3, 400)}
    assert Retention(1, best=1).pinned([*infos, make_info(400, 3)]) == {(2, 400)}


def test_what_was_trained_further_without_this_state_stays_until_this_has_come_as_far(place: SnapshotFolder) -> None:
    """A node was away when the run was begun again from step 100, and comes back: all may yet go on from its own."""
    where = {"epoch": 0, "samples_done": 0, "world_size": 1}

    def save(step: int, generation: int, *restarts: tuple[str, int]) -> list[int]:
        writer = SnapshotWriter(place, keep=2, host="a", run_uid="run", task={})
        writer.save({"model": {}}, step=step, generation=generation, restarts=restarts, **where)
        return sorted(info.step for info in find_snapshots(place, warn=pytest.fail))

    for step in (800, 900):
        save(step, 7)
    for step in (200, 300, 400):
        left = save(step, 8, ("again", 100))
    assert left == [300, 400, 800, 900]
    save(850, 8, ("again", 100))
    assert save(880, 8, ("again", 100)) == [850, 880, 900]
    assert save(910, 8, ("again", 100)) == [880, 910]


@pytest.mark.parametrize("metric", [float("nan"), float("inf"), "0.5", [1]])
def test_a_metric_that_is_none(metric: object) -> None:
    with pytest.raises(SnapshotDamaged, match=r"manifest\.json is wrong or incomplete"):
        make_info(1, metric=metric)  # type: ignore[arg-type]


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotFolder:
    if request.param == "folder":
        return tmp_path / "snapshots"
    return Bucket(bucket_at(f"memory://{tmp_path.name}/{tmp_path.parent.name}").store)


def write(place: SnapshotFolder, retention: Retention, metrics: dict[int, float | None]) -> None:
    writer = SnapshotWriter(place, keep=retention, host="a", run_uid="run", task={})
    for step, metric in metrics.items():
        state = {"model": {"w": torch.tensor(float(step))}}
        done = writer.save(state, step=step, epoch=0, samples_done=0, generation=0, world_size=1, metric=metric)
        assert done.warnings == ()


def steps(place: SnapshotFolder) -> list[int]:
    return [info.step for info in find_snapshots(place, warn=pytest.fail)]


def test_the_newest_every_and_the_best_stay(place: SnapshotFolder) -> None:
    metrics = dict.fromkeys(range(40, 401, 40)) | {80: 0.7, 240: 0.9, 320: 0.8}
    write(place, Retention(2, every=100, best=2), metrics)
    assert steps(place) == [400, 360, 320, 240, 200, 120]
    found = {info.step: info.metric for info in find_snapshots(place, warn=pytest.fail)}
    assert (found[240], found[320], found[400]) == (0.9, 0.8, None)


def test_a_later_start_with_other_flags_counts_anew(place: SnapshotFolder) -> None:
    write(place, Retention(1, best=3), {10: 0.1, 20: 0.2, 30: 0.3, 40: None})
    assert steps(place) == [40, 30, 20, 10]
    write(place, Retention(1, best=1), {50: None})
    assert steps(place) == [50, 30]


def test_a_flipped_bit_in_the_best_does_not_cost_the_next(tmp_path: Path) -> None:
    write(tmp_path, Retention(1, best=2), {10: 0.8, 20: 0.9, 30: None})
    flip_a_bit(next(tmp_path.glob("step-000000000020*")) / "state.pt")
    write(tmp_path, Retention(1, best=1), {40: None})
    assert 10 in steps(tmp_path)


def test_what_has_no_metric_yet_is_read(tmp_path: Path) -> None:
    """A manifest of before there was one; and the field is of no other format."""
    write(tmp_path, Retention(1), {10: 0.5})
    [path] = tmp_path.iterdir()
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    assert manifest.pop("metric") == 0.5
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert read_info(path).metric is None
