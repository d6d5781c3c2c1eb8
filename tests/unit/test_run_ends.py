"""What a worker lets go of at its end, whatever ended it: who calls run() may live on."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from elastic_train.config import Config
from elastic_train.elastic import exits, next_world, run
from elastic_train.elastic.barriers import Barriers, Surroundings, Waits
from elastic_train.elastic.exits import Exits
from elastic_train.elastic.next_world import Survivors
from elastic_train.errors import ElasticTrainError, FormationFailed, JobFailed, LeftOut, Stopped, UsageError
from elastic_train.protocol.agreement import Fatal
from elastic_train.protocol.store import MemoryStore
from elastic_train.rendezvous.launch import Launch
from elastic_train.stopping import StopSignal
from elastic_train.storage.ownership import OWNER_RECORD
from elastic_train.storage.places import OwnedBucket
from elastic_train.storage.run_directory import RunDirectory
from elastic_train.storage.store_urls import parse_url


def test_a_failed_run_does_not_hold_its_bucket(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, directory = OwnedBucket(parse_url(f"memory://{request.node.name}")), RunDirectory(tmp_path)
    worker: Any = SimpleNamespace(
        config=Config(), launch=Launch(), bucket=bucket, directory=directory, stop=StopSignal(),
        reporter=SimpleNamespace(failed=lambda _error: None, close=lambda: None),
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


@pytest.mark.parametrize(("found", "heard"), [(Fatal("no parallel()"), None), (None, "no parallel()")])
def test_who_hears_of_such_an_error_ends_with_it(
    found: Fatal | None, heard: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    part: Any = SimpleNamespace(heard=lambda _world, _key: heard)
    nothing: Any = None
    survivors = Survivors(
        part, part, part, part, facts={}, newcomers=nothing, check=nothing, require_no_better=nothing, log=nothing
    )
    monkeypatch.setattr(next_world, "expect_answer", lambda _job, _watcher: None)
    monkeypatch.setattr(survivors, "_agree", lambda *_arguments: found)
    with pytest.raises(JobFailed, match=re.escape("no parallel()")):
        survivors.decide(nothing, has_formed=True, started=0.0)


# --- a new start that takes the job away as soon as rank 0 is through ----------------------------------------------


class Taken(MemoryStore):
    """Of a job that was taken away: nothing is written any more."""

    def put(self, key: str, value: str) -> None:
        raise LeftOut("this worker's job is over")

    def create(self, key: str, value: str) -> str:
        raise LeftOut("this worker's job is over")


@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_through_is_through_though_its_job_is_taken_away(rank: int) -> None:
    store, world = Taken(), MagicMock(rank=rank, world_size=2)
    job: Any = SimpleNamespace(
        world_store=lambda _world: store,
        parting_store=lambda _world: store,
        world_key=lambda _world: "world",
        announce=lambda _world, name, text: store.create(name, text),
        finish=lambda _world: store.put("over", "finished"),
        say_ready=lambda _world: store.put("ready", ""),
    )
    barriers = Barriers(job, MagicMock(), Waits(10.0, 10.0, 10.0), Surroundings(), lambda: None)
    barriers.announce_finished(world, "{}")
    barriers.finish(world)
    barriers.end_together(world)
    job.seconds_to_wait = lambda _world, _answered: 0.0
    with pytest.raises(LeftOut):  # who is not through is left out
        barriers.wait_for_workers(world)


def test_who_is_through_is_through_though_it_is_told_to_stop_and_the_store_is_away() -> None:
    """The store of a training thread raises Stopped between two attempts."""

    class Away(MemoryStore):
        def put(self, key: str, value: str) -> None:
            raise Stopped(15)

    job: Any = SimpleNamespace(
        world_store=lambda _world: Away(), parting_store=lambda _world: MemoryStore(), world_key=lambda _world: "world"
    )
    world = MagicMock(rank=0, world_size=1)
    Barriers(job, MagicMock(), Waits(10.0, 10.0, 10.0), Surroundings(), lambda: None).end_together(world)


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_watcher_that_finds_the_job_taken_away_sends_nobody_back_who_is_through(
    is_spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "set_group_timeout", lambda _timeout: None)
    monkeypatch.setattr(exits, "write_result", lambda *_, **_fields: b'{"wall_seconds": 1, "goodput": {"ratio": 1}}')
    worker, membership, saver = MagicMock(), MagicMock(), MagicMock()
    membership.watcher.leave.side_effect = LeftOut("this worker's job is over")
    worker.state.test_metrics, saver.unsaved.return_value = {}, ""
    world, ends = (
        MagicMock(num_spares=0, is_directory_leader=False),
        Exits(worker, membership, saver, MagicMock(), MagicMock()),
    )
    code = ends.finish_as_spare(world, "{}") if is_spare else ends.finish(world, "finished", is_saved=True)
    assert code == 0
    worker.reporter.events.write.assert_called_once_with("done", outcome="finished")
