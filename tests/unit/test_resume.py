"""How the members of a world come to hold one state, in one process: what others say is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.elastic import resume
from elastic_train.elastic.membership import Change
from elastic_train.elastic.resume import Holding, Resume
from elastic_train.training.ratings import Ratings
from elastic_train.training.state_lock import StateLock
from elastic_train.world import World
from tests.unit.test_liveness import make_member

LOGGED = 42


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps", [(42, 43), (43, 43), (42, 42)], ids=str)
def test_nobody_goes_on_from_a_step_whose_event_is_not_written(
    steps: tuple[int, int], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that writes it may be killed right after it has given its state away, or begun to train."""
    done: list[str] = []

    def noting(what: str) -> Any:
        return lambda *_arguments: done.append(what)

    def gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**mine, "step": step, "plain": {}} for step in steps]

    nothing = noting("")
    state = SimpleNamespace(step=steps[rank], last_step=100, ratings=Ratings(), lock=StateLock(), branches=())
    reporter = SimpleNamespace(last_logged_step=lambda: LOGGED, write_missing_commits=noting("written"))
    monkeypatch.setattr(resume, "gather_json", gather)
    monkeypatch.setattr(resume, "plain_hashes", lambda _state: {})
    monkeypatch.setattr(resume, "barrier", noting("all know"))
    monkeypatch.setattr(resume, "sync_from_freshest", noting("handed over"))
    monkeypatch.setattr(resume, "set_group_timeout", lambda _timeout: None)
    job = SimpleNamespace(sees_place=lambda _world: True, note_place=lambda _world, is_shared: None)
    membership: Any = SimpleNamespace(
        job=job,
        sockets=SimpleNamespace(require_unbroken=nothing),
        watcher=SimpleNamespace(do=nothing),
        side=SimpleNamespace(branch=None),
    )
    trainer: Any = SimpleNamespace(states=SimpleNamespace(comparison=lambda *_arguments: None))
    files: Any = SimpleNamespace(finish_claim=nothing, note_run=lambda _world: None)
    worker: Any = SimpleNamespace(state=state, reporter=reporter)
    report: Any = SimpleNamespace(interrupted=[])
    held = Resume(worker, membership, trainer, nothing, files, report, has_trained=False, was_left_out=False)
    held.holding = Holding.STATE
    state.lock.hold()
    members = (make_member(0), make_member(1))
    held.into(World(rank, 1, members), Change(), is_formed_ahead=False)
    source = steps.index(max(steps))
    if max(steps) == LOGGED:
        assert done[-1:] == ["handed over"]
        assert "all know" not in done
    else:
        written = ["written"] if rank == source else []
        assert [what for what in done if what] == [*written, "all know", "handed over"]
