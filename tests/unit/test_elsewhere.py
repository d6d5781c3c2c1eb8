"""A member that waits for votes finds out that its job has gone on without it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.protocol.agreement import Denied
from elastic_train.protocol.ballots import Elsewhere, Round
from elastic_train.protocol.known_worlds import KnownWorlds
from elastic_train.protocol.store import Clients
from elastic_train.world import World
from tests.memory_store import MemoryStore
from tests.unit.test_world import member

PLACE = ("10.0.0.9", 29400)
"""of a member that shows the way at the endpoint"""
WORLD = World(0, 5, (member(0, 0), member(1, 0)), uid="mine")


def denied(own_job: str | None, their_job: str | None) -> Denied:
    """What a member finds in generation 5, where one at the endpoint has settled generation 6."""
    theirs = MemoryStore()
    theirs.put("run_id", "run")
    theirs.put("settled", json.dumps([6, "theirs"]))
    if their_job is not None:
        theirs.put("fact/job_token", their_job)
    known = KnownWorlds(MemoryStore())
    known.enter(WORLD, None)
    finder: Any = SimpleNamespace(addresses=lambda: [PLACE])
    facts = {} if own_job is None else {"job_token": own_job}
    clients = Clients(MemoryStore(), "me", {PLACE: theirs}.__getitem__)
    elsewhere = Elsewhere(finder, known, facts, run_id="run", goes_on=False)
    return elsewhere.denied(Round(clients, WORLD, (), "", (0,), frozenset()), ["other"])


@pytest.mark.parametrize("job", ["ours", None])
def test_its_job_has_gone_on(job: str | None) -> None:
    assert denied(job, job) == Denied(("other",), gone_on=6)


def test_a_generation_of_another_job_tells_nothing() -> None:
    """A second job of the same run id, which was begun by a host that came back cut off."""
    assert denied("ours", "another") == Denied(("other",))
