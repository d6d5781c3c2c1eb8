"""The bill: node-seconds that were paid and kept, and what a million kept samples cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import parse
from elastic_train.elastic.membership import Change
from elastic_train.elastic.restore import Restored
from elastic_train.elastic.world_report import Interruption, WorldReport
from elastic_train.errors import UsageError
from elastic_train.observe.bill import describe_bill
from elastic_train.observe.status_table import describe
from elastic_train.runlog.goodput import Phase, bill
from elastic_train.world import World
from tests.unit.test_events import fields_of
from tests.unit.test_goodput import Time
from tests.unit.test_liveness import make_member
from tests.unit.test_state import make_state
from tests.unit.test_status import NOW, Files, read


def test_a_second_of_three_nodes_is_three_node_seconds() -> None:
    passing = Time()
    clock = passing.clock(process_age=2.0)
    clock.enter(Phase.FORM)
    passing.pass_by(3.0)
    clock.count_nodes(3)  # which were there from the start, as far as this process knows
    clock.enter(Phase.TRAIN)
    passing.pass_by(10.0)
    clock.count_nodes(2)
    passing.pass_by(5.0)
    clock.lose(1.0)
    assert clock.node_seconds() == (15.0 + 40.0, 40.0 - 2.0)


def test_they_travel_with_the_state_and_nobody_pays_while_nothing_runs() -> None:
    passing = Time()
    first = passing.clock()
    first.count_nodes(4)
    first.enter(Phase.TRAIN)
    passing.pass_by(10.0)
    saved = first.state_dict()
    passing.pass_by(100.0)
    second = passing.clock(process_age=5.0)
    second.load_state_dict(saved)
    second.count_nodes(2)
    assert second.node_seconds() == (40.0 + 10.0, 40.0)
    newcomer = passing.clock(process_age=50.0)
    newcomer.take_over(second.state_dict())
    newcomer.count_nodes(3)
    assert newcomer.node_seconds() == (50.0, 40.0), "from the world that takes it in"
    newcomer.enter(Phase.TRAIN)
    passing.pass_by(1.0)
    assert newcomer.node_seconds() == (53.0, 43.0)


phases = st.sampled_from([Phase.FORM, Phase.TRAIN, Phase.EVALUATE])


@given(st.lists(st.tuples(st.integers(1, 8), phases, st.integers(0, 100)), max_size=20))
def test_all_is_paid_and_no_more_is_kept(life: list[tuple[int, Phase, int]]) -> None:
    passing = Time()
    clock = passing.clock()
    clock.count_nodes(1)
    for num_nodes, phase, seconds in life:
        clock.count_nodes(num_nodes)
        clock.enter(phase)
        passing.pass_by(seconds)
    paid, kept = clock.node_seconds()
    assert paid == pytest.approx(sum(nodes * seconds for nodes, _, seconds in life))
    assert kept == pytest.approx(sum(nodes * seconds for nodes, phase, seconds in life if phase is Phase.TRAIN))


def test_what_a_million_samples_cost() -> None:
    found = bill(paid=7200.0, kept=3600.0, samples=500_000, price=1.5)
    assert found == {
        "node_seconds": {"paid": 7200.0, "kept": 3600.0}, "kept_samples": 500_000, "node_price": 1.5, "cost": 3.0,
        "cost_per_million_samples": 6.0,
    }  # fmt: skip
    assert describe_bill(found) == "7,200 node-seconds paid, 50% kept; 3.00 in all, 6.00 per million kept samples"


def test_without_a_price_or_a_sample() -> None:
    found = bill(paid=72.0, kept=0.0, samples=0, price=None)
    assert (found["cost"], found["cost_per_million_samples"]) == (None, None)
    assert describe_bill(found) == "72 node-seconds paid, 0% kept"
    assert (
        describe_bill(bill(paid=72.0, kept=0.0, samples=0, price=50.0)) == "72 node-seconds paid, 0% kept; 1.00 in all"
    )
    assert describe_bill(bill(paid=0.0, kept=0.0, samples=0, price=None)) is None


@given(st.floats(0, 1e9), st.floats(0.001, 1e3), st.integers(1, 10**12))
def test_the_cost_is_that_of_all_samples(paid: float, price: float, samples: int) -> None:
    found = bill(paid=paid, kept=0.0, samples=samples, price=price)
    assert found["cost_per_million_samples"] * samples / 1e6 == pytest.approx(found["cost"])


def test_the_price_is_a_positive_number() -> None:
    assert parse(["--node-price", "0.4"]).node_price == 0.4
    with pytest.raises(UsageError, match=r"--node-price 0\.0: must be a positive number"):
        parse(["--node-price", "0"])


def test_status_tells_the_newest_bill(tmp_path: Path) -> None:
    files = Files(tmp_path / "run")
    worker = files.worker(0, started=NOW - 60)
    worker.enter(0, NOW - 50)
    assert read(files).bill is None
    old: dict[str, Any] = bill(paid=10.0, kept=5.0, samples=640, price=None)
    new = bill(paid=100.0, kept=90.0, samples=6400, price=None)
    worker.write("snapshot", NOW - 20, bill=old)
    worker.write("snapshot", NOW - 10, bill=new)
    worker.train(1, 20, NOW - 1)
    assert read(files).bill == new
    bill_line = dict(describe(read(files), NOW))["bill"]
    assert bill_line == "100 node-seconds paid, 90% kept at step 0", "no snapshot since: what was kept then is no share"
    last = bill(paid=200.0, kept=180.0, samples=12800, price=None)
    worker.write("done", NOW, outcome="finished")
    files.result(step=20, bill=last)
    assert read(files, False).bill == last
    assert dict(describe(read(files, False), NOW))["bill"] == "200 node-seconds paid, 90% kept", "of the last step"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_who_has_the_clock_of_the_run_tells_its_bill(rank: int) -> None:
    """A newcomer may get the state within the first step; rank 0 is never one of a world that others were in."""
    told: dict[str, dict[str, Any]] = {}
    state = make_state()
    state.ratings.note(0, 0.5)
    told_bill = bill(paid=10.0, kept=5.0, samples=640, price=None)
    events = SimpleNamespace(write=lambda event: told.update({event.name: fields_of(event)}), step=0)
    reporter = SimpleNamespace(
        events=events, enter=lambda _world, _state: None, bill=lambda _state: told_bill, report=lambda _text: None,
        report_for_node=lambda _text: None,
    )  # fmt: skip
    worker: Any = SimpleNamespace(
        reporter=reporter, state=state, config=parse([]), device=SimpleNamespace(type="cpu"),
        task=SimpleNamespace(title="t"),
    )  # fmt: skip
    world = World(rank=rank, generation=1, members=(make_member(0), make_member(1)), uid="pair")
    restored = Restored("peer", 0, 0) if rank else None
    report, why = WorldReport(worker), Interruption("start" if rank else "join")
    report.begins(world, Change(), why)
    report.stands(world, None, Change(), why, restored, 0.0, 0.0)
    assert told["world"].get("bill") == (None if rank else told_bill)
    assert told["world"].get("best") == (None if rank else {"step": 0, "metric": 0.5}), "the state may come later, too"
