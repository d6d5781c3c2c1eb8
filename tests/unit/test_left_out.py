"""A worker that was left out comes back as a newcomer: which of its times the run's totals have already."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.config import Config
from elastic_train.elastic import run
from elastic_train.elastic.connect import Return
from elastic_train.elastic.exits import Exits
from elastic_train.elastic.noticed import Noticed
from elastic_train.errors import LeftOut
from elastic_train.protocol.links import Links
from elastic_train.runlog.goodput import Phase, PhaseClock
from elastic_train.stopping import StopSignal
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.training.state import TrainState
from tests.unit.test_state import make_state


def give_way(state: TrainState, known_run: str | None = None, before: Return | None = None) -> Return:
    """What it does where it was no member of a world yet; `known_run` is what it was told of the others' run."""
    nothing: Any = SimpleNamespace(leave=lambda: None, release=lambda: None, stand_down=lambda: None)
    worker: Any = SimpleNamespace(
        state=state, host="here", launch=SimpleNamespace(local_rank=0), config=SimpleNamespace(wait_timeout=60.0),
        reporter=SimpleNamespace(warn=lambda _warning: None, void_commits=lambda _state: [], leave=print),
    )  # fmt: skip
    membership: Any = SimpleNamespace(
        watcher=nothing, job=nothing, uid="uid0", has_settled=False, published=lambda _name: known_run
    )
    exits = Exits(worker, membership, nothing, nothing, nothing)
    error = LeftOut("the others went on")
    error.by = "world7"
    return exits.give_way(error, None, before, has_state=False)


@pytest.mark.parametrize(("generation", "counted"), [(None, 30.0), (4, 0.0)], ids=["it had no run", "it trained"])
def test_its_time_counts_once(generation: int | None, counted: float) -> None:
    state, now = make_state(), [0.0]
    state.clock = PhaseClock(lambda: now[0], lambda: now[0], process_age=10.0)
    state.clock.enter(Phase.FORM)
    state.generation = generation
    now[0] = 20.0
    give_way(state)
    assert sum(state.clock.totals().values()) == counted
    assert state.generation is None, "a snapshot's clock is loaded again"


@pytest.mark.parametrize(("mine", "theirs", "known"), [("", "r", "r"), ("r", None, "r"), ("", None, "")])
def test_a_spare_brings_along_that_others_have_trained_the_run(mine: str, theirs: str | None, known: str) -> None:
    """Else it would begin that anew where all of them die before it stands in their queue."""
    state = make_state()
    state.run_uid = mine
    assert give_way(state, theirs).has_trained == bool(known)
    assert state.run_uid == known


class Part(SimpleNamespace):
    """A part of a worker, which refers to others."""


def test_nothing_of_the_member_that_it_was_is_kept_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stores, which others are to see closed, and the memory of them."""
    made: list[weakref.ref[Part]] = []

    def nothing(*_arguments: Any, **_options: Any) -> None:
        pass

    def connect(_applicant: Any) -> Part:
        watcher = Part(contacts=Part(is_refused=nothing))
        membership = Part(close=nothing, watcher=watcher, joins=Part(news=Part()), survivors=Part(), side=Part())
        made.append(weakref.ref(membership))
        return membership

    def make_parts(_worker: Any, membership: Part, *_others: Any) -> Part:
        return Part(
            files=Part(wait_for_claim=nothing), trainer=Part(membership=membership, close=nothing),
            resume=Part(has_state=True), saver=Part(wait=nothing, save_time=Part(seconds=0.0)),
            exits=Part(membership=membership, give_way=lambda *_arguments, **_options: "back"),
        )  # fmt: skip

    def leave_out() -> int:
        raise LeftOut("the others went on")

    monkeypatch.setattr(run, "connect_worker", connect)
    monkeypatch.setattr(run, "_make_parts", make_parts)
    monkeypatch.setattr(run, "arbiter_of", nothing)
    monkeypatch.setattr(run, "Ring", lambda _worker, membership, _parts: Part(
        membership=membership, world=None, run=leave_out
    ))  # fmt: skip
    worker: Any = Part(
        config=Config(), launch=Part(local_rank=0, local_world_size=1, is_open=True),
        reporter=Part(log=nothing, warn=nothing), stop=StopSignal(),
        directory=Part(path=tmp_path), bucket=None, reach=nothing, state=None,
    )  # fmt: skip
    ends, unused, noticed = ExitStack(), Part(), Noticed(worker)
    assert run._as_member(worker, unused, None, ends, noticed) == "back"  # type: ignore[arg-type]
    ends.close()
    gc.collect()
    assert [found() for found in made] == [None]


def test_what_a_forked_child_is_to_close_is_not_kept_for_that() -> None:
    sockets, links = GroupSockets(), Links("127.0.0.1", "a", 0.05, 10.0)
    links.close()
    found = [weakref.ref(sockets), weakref.ref(links)]
    del sockets, links
    gc.collect()
    assert [one() for one in found] == [None, None]


def test_it_brings_along_as_whom_it_was_left_out_and_by_which_world() -> None:
    """Also the times before, as long as no world with it was settled."""
    once = give_way(make_state())
    assert once.was == (("uid0", "world7"),)
    before = Return("other", num_fruitless=2, was=(("other", "world3"),))
    assert give_way(make_state(), before=before).was == (("other", "world3"), ("uid0", "world7"))
