"""Which lines of a ledger may be those of some ranks alone, and the samples that are to be written again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from elastic_train.config import Config
from elastic_train.elastic.worker import make_state
from elastic_train.runlog.ledger_ends import newest_steps, unfinished
from elastic_train.training.batches import RunSampler
from elastic_train.training.tasks import ImageClassification
from elastic_train.world import World
from tests.unit.test_batches import CPU, MEMBER


def write(path: Path, *places: tuple[int, int], samples: int = 3) -> None:
    lines = ({"step": step, "generation": generation, "indices": [0] * samples} for generation, step in places)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')


@pytest.mark.parametrize("samples", [3, 50_000], ids=["short lines", "lines longer than what is read at first"])
def test_the_newest_step_of_each_later_generation(tmp_path: Path, samples: int) -> None:
    assert newest_steps(tmp_path / "ledger", after=0) == {}
    write(tmp_path / "a.jsonl", (0, 1), (0, 2), (1, 2), (1, 3), (3, 2), samples=samples)
    write(tmp_path / "b.jsonl", (1, 2), (1, 3), (1, 4), samples=samples)
    write(tmp_path / "c.jsonl", *((0, step) for step in range(1, 40)), samples=samples)
    assert newest_steps(tmp_path, after=0) == {1: 4, 3: 2}
    assert newest_steps(tmp_path, after=1) == {3: 2}
    assert newest_steps(tmp_path, after=3) == {}


def test_the_last_step_in_hand_and_one_more_are_unfinished() -> None:
    assert unfinished([], 9) == []
    assert unfinished([{1: 5}, {1: 4, 2: 9}, {}], 9) == [4, 5, 6, 9]
    assert unfinished([{1: 9}], 8) == [], "lines above the last committed step do not count"


@pytest.mark.parametrize("flags", [{}, {"reduction": "ordered", "virtual_ranks": 8}])
def test_any_step_has_the_samples_that_it_had_when_it_was_trained(flags: dict[str, object]) -> None:
    """Whatever the world was, and at the end of an epoch, where a step is smaller."""
    config = Config(model="mlp", global_batch_size=500, epochs=2, **flags)  # type: ignore[arg-type]
    state = make_state(config, ImageClassification("digits", "mlp", Path(), 0), CPU)
    alone = World(rank=0, generation=0, members=(MEMBER,))
    trained = {micro.step: [] for micro in RunSampler(state, alone, config)}
    for micro in RunSampler(state, alone, config):
        trained[micro.step] += micro.indices.tolist()
    state.epoch, state.step, state.samples_done = 1, 5, 1000
    for step, samples in trained.items():
        found = [RunSampler(state, World(rank, 3, (MEMBER, MEMBER)), config).of_step(step) for rank in (0, 1)]
        assert {(micro.epoch, micro.step) for rank in found for micro in rank} == {((step - 1) // 3, step)}
        assert np.concatenate([micro.indices for rank in found for micro in rank]).tolist() == samples
