"""What rank 0 says of worlds that end one after the other."""

from __future__ import annotations

import pytest

from elastic_train.elastic.membership import Change
from elastic_train.elastic.world_report import Interruption
from elastic_train.observe.reporting import Reporter
from elastic_train.world import Member, World
from tests.unit.test_admission import member
from tests.unit.test_quarantined import lines, report_of, reporter  # noqa: F401  # a fixture
from tests.unit.test_state import make_state

A, B, C, D = (member(number) for number in range(4))


@pytest.mark.parametrize(
    ("rank", "lost", "steps", "is_told"),
    [
        (0, [(A,), (B,)], [7, 8], True),
        (1, [(A,), (B,)], [7, 8], False),
        (0, [(A,), (B,)], [7, 17], False),
        (0, [(A,), (C,)], [7, 7], False),
        (0, [(C,), (A,)], [7, 7], False),
        (0, [(A, B), (C,)], [7, 7], False),
    ],
    ids=["rank 0 twice", "another rank", "ten steps later", "another one then", "another one before", "two at once"],
)
def test_two_that_are_lost_in_the_place_of_rank_0(
    reporter: Reporter,  # noqa: F811
    rank: int,
    lost: list[tuple[Member, ...]],
    steps: list[int],
    is_told: bool,
) -> None:
    """Nobody can see how a process has ended: it is said, and training goes on."""
    state = make_state()
    report = report_of(reporter, state, "off")
    reporter.events.write("start")
    members = (A, B, C, D)
    report.begins(World(rank + 2, 0, members), Change(), Interruption("start"))
    for generation, (gone, step) in enumerate(zip(lost, steps, strict=True), start=1):
        state.step = step
        members = tuple(one for one in members if one not in gone)
        world = World(min(rank, len(members) - 1), generation, members)
        report.begins(world, Change(lost=gone), Interruption("peer_lost"))
    warnings = [line["message"] for line in lines(reporter) if line["event"] == "warning"]
    assert len(warnings) == is_told
    assert all(f"{A.name} after step 7, {B.name} after step 8" in one for one in warnings)
