"""The members of a world come to hold one state; one process, with faked peers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_train.config import Config
from elastic_train.elastic import resume
from elastic_train.elastic.earlier_run import EarlierRun
from elastic_train.elastic.membership import Change
from elastic_train.elastic.restore import Restored
from elastic_train.elastic.resume import Holding, Resume
from elastic_train.errors import FormationFailed, SnapshotError, StatesDiffer
from elastic_train.training import determinism
from elastic_train.training.ratings import Ratings
from elastic_train.training.state_lock import StateLock
from elastic_train.world import World
from tests.unit.test_liveness import make_member

CPU = torch.device("cpu")
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
    own = {"cpu": f"of rank {rank}"}
    state = SimpleNamespace(
        step=steps[rank], last_step=100, ratings=Ratings(), lock=StateLock(), branches=(), fingerprint=own
    )

    def take(*_arguments: Any) -> None:
        done.append("handed over")
        state.fingerprint = {"cpu": "of whoever is furthest"}

    reporter = SimpleNamespace(last_logged_step=lambda: LOGGED, write_missing_commits=noting("written"))
    monkeypatch.setattr(resume, "gather_json", gather)
    monkeypatch.setattr(resume, "plain_hashes", lambda _state: {})
    monkeypatch.setattr(resume, "barrier", noting("all know"))
    monkeypatch.setattr(resume, "sync_from_freshest", take)
    monkeypatch.setattr(resume, "set_group_timeout", lambda _timeout: None)
    job = SimpleNamespace(place=SimpleNamespace(sees=lambda _world: True, note=lambda _world, is_shared: None))
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
    held = Resume(worker, membership, trainer, nothing, files, report)
    held.holding = Holding.STATE
    state.lock.hold()
    members = (make_member(0), make_member(1))
    held.into(World(rank, 1, members), Change(), is_formed_ahead=False)
    assert state.fingerprint is own, "what it saves was trained here"
    source = steps.index(max(steps))
    if max(steps) == LOGGED:
        assert done[-1:] == ["handed over"]
        assert "all know" not in done
    else:
        written = ["written"] if rank == source else []
        assert [what for what in done if what] == [*written, "all know", "handed over"]


class Hands:
    """The one that trains hands its state over in a world that was formed ahead."""

    def __init__(self, _state: Any, source: int, loaded: Any) -> None:
        assert source == 0
        self._loaded = loaded

    def wait_for_position(self, _check: Any) -> int:
        return 1

    def begin(self) -> None:
        pass

    def finish(self, _check: Any) -> None:
        self._loaded({})


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
@pytest.mark.parametrize("is_formed_ahead", [False, True])
@pytest.mark.parametrize("other", [None, "another kind of cpu"])
def test_who_joins_an_ordered_run_on_a_machine_of_another_kind_warns(
    other: str | None, is_formed_ahead: bool, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bits differ from there on, and where they are compared machines of two kinds may. What it saves later was
    trained here."""
    here = determinism.fingerprint(CPU)
    there = here if other is None else {**here, "cpu": other}
    state = SimpleNamespace(
        step=43, last_step=100, ratings=Ratings(), lock=StateLock(), branches=(), restarts=(), run_uid="run",
        fingerprint={}, clock=SimpleNamespace(take_over=lambda _clock: None),
    )  # fmt: skip
    warnings: list[str] = []

    def nothing(*_arguments: Any, **_named: Any) -> None:
        pass

    def take(*arguments: Any) -> None:
        state.fingerprint = dict(there)
        for loaded in arguments[-1:]:
            loaded({})

    class Taking(Hands):
        def finish(self, check: Any) -> None:
            take()
            super().finish(check)

    def gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**mine, "step": 43, "logged": 43}, mine]

    monkeypatch.setattr(resume, "gather_json", gather)
    monkeypatch.setattr(resume, "sync_from_freshest", take)
    monkeypatch.setattr(resume, "set_group_timeout", nothing)
    monkeypatch.setattr(resume, "Taking", Taking)
    membership: Any = SimpleNamespace(
        job=SimpleNamespace(place=SimpleNamespace(sees=lambda _world: True, note=nothing)),
        sockets=SimpleNamespace(require_unbroken=nothing),
        watcher=SimpleNamespace(do=nothing),
        side=SimpleNamespace(branch=None),
        arrival=SimpleNamespace(report_ready=nothing, check=nothing),
    )
    trainer: Any = SimpleNamespace(states=SimpleNamespace(comparison=nothing), has_room_for_handover=False)
    files: Any = SimpleNamespace(finish_claim=nothing, note_run=nothing, claim=nothing)
    worker: Any = SimpleNamespace(
        state=state,
        reporter=SimpleNamespace(last_logged_step=lambda: None, warn=warnings.append),
        config=Config(reduction=reduction),
        device=CPU,
        launch=SimpleNamespace(local_rank=0),
    )
    report: Any = SimpleNamespace(interrupted={})
    earlier = EarlierRun(worker, membership, files)
    held = Resume(worker, membership, trainer, earlier, files, report)
    world = World(1, 1, (make_member(0), make_member(1)))
    restored = held.into(world, Change(joined=(world.me,)), is_formed_ahead=is_formed_ahead).restored
    assert (restored, held.holding) == (Restored("peer", 43, 0), Holding.STATE)
    name = world.me.name
    told = [f"the bits may differ from here on: on {name}, cpu {other} before, {here['cpu']} now"]
    assert warnings == (told if reduction == "ordered" and other is not None else [])
    assert state.fingerprint == (here if reduction == "ordered" else there)


def test_a_state_that_has_come_stays_where_its_sender_dies_before_all_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the only one that is left of all committed steps. Its receiver is no newcomer in the next world: what a
    newcomer does with its own past is done by then."""
    clocks: list[dict[str, Any]] = []
    done: list[str] = []

    def nothing(*_arguments: Any, **_named: Any) -> None:
        pass

    def take(*arguments: Any) -> None:
        arguments[-1]({"totals": {}})
        raise FormationFailed("connection reset")

    monkeypatch.setattr(resume, "gather_json", lambda mine: [{**mine, "step": 43, "logged": 43}, mine, mine])
    monkeypatch.setattr(resume, "sync_from_freshest", take)
    monkeypatch.setattr(resume, "set_group_timeout", nothing)
    clock = SimpleNamespace(take_over=clocks.append)
    state = SimpleNamespace(step=0, last_step=100, ratings=Ratings(), lock=StateLock(), fingerprint={}, clock=clock)
    worker: Any = SimpleNamespace(state=state, reporter=SimpleNamespace(last_logged_step=lambda: None))
    membership: Any = SimpleNamespace(
        job=SimpleNamespace(place=SimpleNamespace(sees=lambda _world: True, note=nothing)),
        sockets=SimpleNamespace(require_unbroken=nothing),
        watcher=SimpleNamespace(do=nothing),
    )
    files: Any = SimpleNamespace(
        finish_claim=nothing,
        set_branch_aside=lambda: done.append("branch set aside"),
        note_run=lambda _world: done.append("run noted"),
    )
    monkeypatch.setattr(resume, "compare_with_peers", lambda *_arguments: done.append("machines compared"))
    earlier: Any = SimpleNamespace(warn_of_parted=lambda: done.append("snapshots compared"))
    report: Any = SimpleNamespace(interrupted={})
    trainer: Any = SimpleNamespace(has_room_for_handover=True)
    back: Any = SimpleNamespace(has_trained=True)
    held = Resume(worker, membership, trainer, earlier, files, report, back)
    with pytest.raises(FormationFailed):
        held._synchronise(World(1, 1, tuple(make_member(rank) for rank in range(3))))
    assert held.has_state
    assert clocks == [{"totals": {}}]
    assert done == ["branch set aside", "snapshots compared", "machines compared", "run noted"]


def test_who_has_other_weights_right_after_it_has_taken_over_the_others_leaves() -> None:
    """Else a worker with broken memory would have the others begin world after world, until all give up."""
    nothing: Any = SimpleNamespace()
    clock = SimpleNamespace(enter=lambda _phase: None)
    state = SimpleNamespace(step=7, clock=clock, rollback=lambda: False)
    reporter = SimpleNamespace(events=SimpleNamespace(write=lambda *_names, **_more: None), log=lambda _line: None)
    worker: Any = SimpleNamespace(state=state, reporter=reporter)
    held = Resume(worker, nothing, nothing, nothing, nothing, nothing)
    world = World(2, 1, tuple(make_member(rank) for rank in range(3)))
    for has_majority in (False, True):
        held.holding = Holding.STATE
        held.drop_wrong_states(world, StatesDiffer([2], 2, has_majority=has_majority), 0.0)
        assert not held.has_state
    with pytest.raises(SnapshotError, match="has taken over the others' state of step 7, and again has other weights"):
        held.drop_wrong_states(world, StatesDiffer([2], 2, has_majority=True), 0.0)
    state.step = 8
    held.drop_wrong_states(world, StatesDiffer([2], 2, has_majority=True), 0.0)
    reporter.warn = lambda _line: None  # type: ignore[attr-defined]
    held.drop_wrong_states(replace(world, rank=0), StatesDiffer([2], 2, has_majority=True), 0.0)
