"""Photographs from a folder, read by loader processes, with a model of our own and one of torchvision's."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import (
    Cluster,
    check_ledger,
    events,
    is_running,
    last_step,
    result,
    wait_for_step,
    worlds,
)

PHOTOS = Path(__file__).parents[2].parent / "shared" / "data" / "cifar10-mini"
TRAIN_LENGTH = 2000

pytestmark = pytest.mark.skipif(not PHOTOS.is_dir(), reason=f"no {PHOTOS.name} beside the repository")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """All training images and 3 test images of each class, which spares time."""
    folder = tmp_path / "photos"
    (folder / "test").mkdir(parents=True)
    (folder / "train").symlink_to(PHOTOS / "train")
    for source in sorted((PHOTOS / "test").iterdir()):
        target = folder / "test" / source.name
        target.mkdir()
        for image in sorted(source.iterdir())[:3]:
            (target / image.name).symlink_to(image)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("model", "batch", "first", "end"), [("cnn", 128, 3, 20), ("resnet18", 8, 2, 6)])
def test_stop_and_resume_with_another_world_size(
    cluster: Cluster, photos: Path, model: str, batch: int, first: int, end: int
) -> None:
    """cnn: over the end of an epoch (16 steps)."""
    flags = (
        "--dataset", "imagefolder", "--data-dir", str(photos), "--model", model, "--num-workers", "2",
        "--global-batch-size", str(batch), "--max-steps", str(end), "--ledger", "--snapshot-every", "0",
    )  # fmt: skip
    [node] = cluster.start(*flags, nproc=2)
    wait_for_step(cluster.run_dir, first)
    loaders = [child for worker in node.workers() for child in worker.children()]
    assert len(loaders) == 4
    node.signal(signal.SIGTERM)
    assert node.wait() == 1
    stopped_at = last_step(cluster.run_dir)
    assert first <= stopped_at < end
    _, alive = psutil.wait_procs(loaders, timeout=10)
    assert not [loader for loader in alive if is_running(loader)], "no loader process outlives its worker"

    others = ("--num-workers", "1", "--prefetch-factor", "1", "--multiprocessing-context", "spawn")
    cluster.finish([cluster.start_alone(*flags, *others)])
    assert worlds(cluster.run_dir) == [(0, 2), (1, 1)]
    assert events(cluster.run_dir, "restore")[-1]["restored_step"] == stopped_at
    summary = result(cluster.run_dir)
    assert summary["step"] == end
    assert 0.0 <= summary["test_accuracy"] <= 1.0
    assert (summary["test_accuracy"] * 30) == pytest.approx(round(summary["test_accuracy"] * 30))
    steps = [event["step"] for event in events(cluster.run_dir, "step")]
    assert steps == list(range(1, end + 1))
    check_ledger([cluster.run_dir], length=TRAIN_LENGTH, batch=batch, steps=end)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cnn_learns_photos(cluster: Cluster) -> None:
    """Ten classes: chance is 10 %."""
    flags = ("--dataset", "imagefolder", "--data-dir", str(PHOTOS), "--num-workers", "1", "--epochs", "8")
    cluster.finish(cluster.start(*flags, nproc=2), timeout=1000)
    assert result(cluster.run_dir)["test_accuracy"] >= 0.3
