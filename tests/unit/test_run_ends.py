"""The resources that a worker frees at its end: the process that calls run() may live on."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_train.config import Config
from elastic_train.elastic import run
from elastic_train.elastic.next_world import Survivors
from elastic_train.errors import (
    ElasticTrainError,
    FormationFailed,
    JobFailed,
    LeftOut,
    NewerGeneration,
    Refused,
    UsageError,
)
from elastic_train.rendezvous.launch import Launch
from elastic_train.stopping import StopSignal
from elastic_train.storage.ownership import OWNER_RECORD
from elastic_train.storage.places import OwnedBucket
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.storage.store_urls import parse_url
from tests.unit.test_state import make_state


def test_a_failed_run_does_not_hold_its_bucket(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, directory = OwnedBucket(parse_url(f"memory://{request.node.name}")), RunDirectory(tmp_path)
    worker: Any = SimpleNamespace(
        config=Config(), launch=Launch(), bucket=bucket, directory=directory, stop=StopSignal(),
        reporter=SimpleNamespace(failed=lambda _error: None, close=lambda: None), state=make_state(),
    )  # fmt: skip

    def fail(*_: Any) -> int:
        bucket.owner.take("job", 0, lambda: None)
        bucket.owner.renew_in_background()
        raise FormationFailed("nobody is there")

    monkeypatch.setattr(run, "_as_member", fail)
    program: Any = None
    with pytest.raises(FormationFailed):
        run.run_worker(worker, program)
    assert bucket.owner._stop is None, "nobody renews it any more"
    assert bucket.store.get(OWNER_RECORD) is not None


@pytest.mark.parametrize(("least", "is_told"), [(None, False), (1, True), (2, False), (3, False)])
def test_a_least_of_nodes_with_which_no_job_begins_is_told(tmp_path: Path, least: int | None, is_told: bool) -> None:
    """It holds after a loss, as `--nnodes 2:4 --min-nodes 1` may mean it: no error."""
    said: list[str] = []
    worker: Any = SimpleNamespace(
        config=Config(min_nodes=least), launch=Launch(min_nodes=2), bucket=None, directory=RunDirectory(tmp_path),
        stop=StopSignal(), reporter=SimpleNamespace(log=said.append, failed=lambda _error: None, close=lambda: None),
        state=make_state(),
    )  # fmt: skip
    program: Any = None
    with pytest.raises(AttributeError):  # it comes no further
        run.run_worker(worker, program)
    told = "--min-nodes 1 says with how many nodes training goes on; it begins with 2 at least, as --nnodes says"
    assert said == [told] * is_told


@pytest.mark.parametrize(
    ("error", "step", "said"),
    [
        (JobFailed("nobody averages the gradients"), 7, "; mend that and start all nodes again"),
        (JobFailed("nobody averages the gradients"), 0, ""),
        (UsageError("nobody averages the gradients"), 7, "; mend that and start all nodes again"),
        (FormationFailed("no process group"), 7, "; start all nodes again to continue"),
        (FormationFailed("no process group"), 0, "; start all nodes again to continue"),
    ],
)
def test_what_would_fail_again_is_to_be_mended_first(error: ElasticTrainError, step: int, said: str) -> None:
    def end() -> int:
        raise error

    ring: Any = SimpleNamespace(run=end, world=object())
    parts: Any = SimpleNamespace(
        resume=SimpleNamespace(has_state=True, has_steps=step > 0),
        exits=SimpleNamespace(save_for_next_start=lambda _world, advice: advice),
        saver=SimpleNamespace(wait=lambda: None),
    )
    with pytest.raises(type(error)) as told:
        run._through_worlds(ring, parts, comes_back=True)
    assert str(told.value) == f"{error}{said}"


@pytest.mark.parametrize(
    ("error", "waits"),
    [(LeftOut("they went on"), False), (NewerGeneration("they went on"), False), (Refused("another flag"), True)],
    ids=lambda it: type(it).__name__,
)
def test_who_ends_waits_for_the_snapshot_in_flight(error: ElasticTrainError, waits: bool) -> None:
    """Who comes back does so where it saves its state; who is refused does not come back."""
    saver = Mock()
    ring: Any = SimpleNamespace(run=Mock(side_effect=error), world=object())
    parts: Any = SimpleNamespace(resume=SimpleNamespace(has_state=True, has_steps=True), saver=saver)
    with pytest.raises(type(error)):
        run._through_worlds(ring, parts, comes_back=True)
    assert saver.wait.called is waits


def test_who_hears_of_such_an_error_while_the_others_decide_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = SimpleNamespace(heard=lambda _key: "no parallel()")
    nothing: Any = None
    survivors = Survivors(
        part, part, part, part,
        newcomers=nothing, check=nothing, require_no_better=nothing, holds_state=nothing, leave=nothing, log=nothing,
    )  # fmt: skip
    monkeypatch.setattr(survivors, "_agree", lambda *_arguments: None)
    with pytest.raises(JobFailed, match=re.escape("no parallel()")):
        survivors.decide(nothing, has_formed=True, started=0.0)
