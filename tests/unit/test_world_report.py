"""The reports of rank 0 about worlds that end one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.elastic.membership import Change
from elastic_train.elastic.world_report import Interruption
from elastic_train.observe.reporting import Reporter
from elastic_train.world import Member, World
from tests.unit.test_admission import member
from tests.unit.test_events import a_start
from tests.unit.test_quarantined import lines, report_of, reporter  # noqa: F401  # a fixture
from tests.unit.test_state import make_state

A, B, C, D = (member(number) for number in range(4))
OF_ONE_NODE = A, *(replace(one, host=A.host, agent_pid=A.agent_pid) for one in (B, C, D))
"""as `--spawn` starts them: each may die alone"""


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
    warnings = told_of(reporter, rank, (A, B, C, D), lost, steps)
    assert len(warnings) == is_told
    assert all(f"{A.name} after step 7, {B.name} after step 8" in one for one in warnings)


@pytest.mark.parametrize(
    ("lost", "is_told"),
    [((0, 1), True), ((2, 3), False), ((3, 0), False), ((0, 3), False)],
    ids=["rank 0 twice", "two others", "rank 0 then", "rank 0 before"],
)
def test_who_is_of_rank_0s_node_is_not_rank_0(
    reporter: Reporter,  # noqa: F811
    lost: tuple[int, int],
    is_told: bool,
) -> None:
    """The message would name two that live."""
    gone = [OF_ONE_NODE[rank] for rank in lost]
    warnings = told_of(reporter, 0, OF_ONE_NODE, [(one,) for one in gone], [7, 8])
    assert len(warnings) == is_told
    assert all(f"{gone[0].name} after step 7, {gone[1].name} after step 8" in one for one in warnings)


def told_of(
    reporter: Reporter,  # noqa: F811
    rank: int,
    members: tuple[Member, ...],
    lost: list[tuple[Member, ...]],
    steps: list[int],
) -> list[str]:
    """The warnings of one in whose worlds so many are lost after these steps; it is `rank` where it is there yet."""
    state = make_state()
    report = report_of(reporter, state, "off")
    reporter.events.write(a_start())
    report.begins(World(rank + 2, 0, members), Change(), Interruption("start"))
    for generation, (gone, step) in enumerate(zip(lost, steps, strict=True), start=1):
        state.step = step
        members = tuple(one for one in members if one not in gone)
        world = World(min(rank, len(members) - 1), generation, members)
        report.begins(world, Change(lost=gone), Interruption("peer_lost"))
    return [line["message"] for line in lines(reporter) if line["event"] == "warning"]
