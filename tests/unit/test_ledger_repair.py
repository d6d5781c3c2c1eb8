"""Two ranks go on from a snapshot below which a later generation was killed in a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastic_train.config import Config
from elastic_train.elastic.ledger_repair import write_lines_again
from elastic_train.elastic.worker import make_state
from elastic_train.runlog.events import EventLog, Ledger
from elastic_train.runlog.reader import read_all
from elastic_train.training.batches import RunSampler
from elastic_train.training.tasks import ImageClassification
from elastic_train.world import World
from tests.ranks import on_each_rank
from tests.unit.test_batches import CPU, MEMBER
from tests.unit.test_ledger_ends import write

CONFIG = Config(model="mlp", global_batch_size=64, epochs=2)


def make_world(rank: int, size: int) -> World:
    return World(rank, 5, tuple(replace(MEMBER, local_rank=local) for local in range(size)))


def work(rank: int, path: Path) -> None:
    state = make_state(CONFIG, ImageClassification("digits", "mlp", Path(), 0), CPU)
    state.step, state.samples_done, state.last_commits = 20, 20 * 64, [{"generation": 3}]
    events = EventLog(path / "events", host="localhost", local_rank=rank, rank=rank, world_size=2)
    reporter = SimpleNamespace(
        events=events, ledger=Ledger(path / "new", events=events, host="localhost", local_rank=rank)
    )
    directory = SimpleNamespace(ledger_dir=path / "ledger")
    worker: Any = SimpleNamespace(state=state, config=CONFIG, reporter=reporter, directory=directory)
    write_lines_again(worker, make_world(rank, 2))


def test_all_ranks_write_their_lines_of_what_was_in_hand(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    write(tmp_path / "ledger" / "a.jsonl", (3, 19), (3, 20), (4, 11), (4, 12))
    on_each_rank(work, tmp_path, size=2)
    lines = [line for path in (tmp_path / "new").glob("*.jsonl") for line in read_all(path)]
    assert sorted((line["step"], line["rank"], line["generation"]) for line in lines) == [
        (12, 0, 5), (12, 1, 5), (13, 0, 5), (13, 1, 5)
    ]  # fmt: skip
    alone = RunSampler(
        make_state(CONFIG, ImageClassification("digits", "mlp", Path(), 0), CPU), make_world(0, 1), CONFIG
    )
    for step in (12, 13):
        written = sorted(index for line in lines if line["step"] == step for index in line["indices"])
        assert written == sorted(alone.of_step(step)[0].indices.tolist())
    told = [line for path in (tmp_path / "events").glob("*.jsonl") for line in read_all(path)]
    assert [(line["event"], line["generation"], line["steps"]) for line in told] == [("ledger", 5, [12, 13])] * 2
