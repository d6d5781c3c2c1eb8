"""A fault reports truly what it did."""

from __future__ import annotations

import ast
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from elastic_train.runlog.events import JsonLines, file_name
from elastic_train.tools.drills.catalogue import FAULTS
from elastic_train.tools.drills.cluster import Place
from elastic_train.tools.drills.faults import Hang, KillAgain, KillAll
from elastic_train.tools.drills.watch import RunWatch


def test_every_fault_is_in_a_drill_of_these_tests() -> None:
    source = Path(__file__).with_name("test_drill.py").read_text()
    words = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert set(FAULTS) - words == set()


@pytest.mark.parametrize("name", [name for name, kind in FAULTS.items() if kind.holder is not None])
def test_what_is_for_one_node_waits_for_it_and_is_for_no_other(name: str, tmp_path: Path) -> None:
    """A fault whose target cannot be found would end the drill early."""
    first, second = Place(0), Place(1)
    ranks = {first: 1, second: 2}
    inside = [first, second, Place(2), Place(3)]
    cluster = Mock(is_settled=True, inside=inside, hosting=[], run_dir=tmp_path)
    cluster.rank_of = lambda place: ranks.get(place, 3)
    fault = FAULTS[name](cluster, random.Random(1), 5.0)
    why = fault.not_yet()
    assert why is not None
    assert why.startswith("nobody healthy ")
    ranks[second], cluster.hosting = 0, [second]
    assert fault.not_yet() is None
    assert fault.choose() == [second]


@pytest.fixture
def events(tmp_path: Path) -> Iterator[JsonLines]:
    log = JsonLines(tmp_path / "events" / file_name("node3", 0, 3))
    yield log
    log.close()


@pytest.mark.parametrize(
    ("said", "hit"),
    [
        ((["world"], []), "while the others re-formed"),
        (([], ["world"]), "while the others re-formed"),
        ((["world", "step"], ["world"]), "after their next step"),
        ((["world"], ["step"]), "after their next step"),
    ],
)
def test_a_second_death_hits_a_re_form_or_comes_too_late(
    tmp_path: Path, events: JsonLines, said: tuple[Sequence[str], Sequence[str]], hit: str
) -> None:
    """`said`: what the third node writes as the first one dies, and as the second does."""
    targets = [Place(0), Place(1)]
    members = ["node1/0/1", "node2/0/2", "node3/0/3"]

    def kill(places: Sequence[Place]) -> None:
        for event in said[targets.index(places[0])]:
            if event == "world":
                del members[0]
            of_event = {"step": 5, "members": members} if event == "world" else {"step": 6, "loss": 1.0}
            of_all = {"event": event, "time": time.time(), "generation": 3 - len(members), "world_size": len(members)}
            events.write(of_all | of_event)

    cluster = Mock(watch=RunWatch(tmp_path), kill=kill)
    fault = KillAgain(cluster, random.Random(1), 5.0, targets=targets)
    fault.generation, fault.members = 0, ("node1/0/1", "node2/0/2")
    assert fault.inject().endswith(f"ms after the first, {hit}")


def cluster_of(*inside: Place, num_nodes: int = 3, backend: str = "c10d") -> Mock:
    """A cluster in which the rank of a node is its number."""
    places = [next((place for place in inside if place.index == index), Place(index)) for index in range(num_nodes)]
    started: list[Place] = []
    cluster = Mock(places=places, inside=list(inside), rank_of=lambda place: place.index, started=started)
    cluster.start = started.append
    cluster.backend.name = backend
    return cluster


@pytest.mark.parametrize(
    ("backend", "num_inside", "chosen"), [("c10d", 2, {1}), ("c10d", 3, {0, 1, 2}), ("etcd3", 2, {0, 1})]
)
def test_under_c10d_of_two_nodes_the_one_that_may_go_on_alone_stays(
    backend: str, num_inside: int, chosen: set[int]
) -> None:
    cluster = cluster_of(*(Place(index) for index in range(num_inside)), backend=backend)
    found = [Hang(cluster, random.Random(seed), 5.0).choose() for seed in range(30)]
    assert {place.index for (place,) in found} == chosen


def test_after_everything_was_killed_the_first_node_begins() -> None:
    cluster = cluster_of(Place(1), Place(2))
    fault = KillAll(cluster, random.Random(1), 5.0, targets=cluster.inside)
    assert fault.inject() == "2 killed and started again"
    assert [place.index for place in cluster.started] == [0, 1], "as many as there were"
