"""Lines of a run that was split: what is on which, which goes on where two meet, and what refuses to mix them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_train.branches import BRANCH, MOST_RESTARTS, Branch, Branches, Position, is_on, parting_step, restarted
from elastic_train.elastic.membership import OwnSide
from elastic_train.elastic.restore import require_line
from elastic_train.errors import BranchesMixed, Refused, StoreUnreachable, Superseded
from elastic_train.protocol.other_sides import SUPERSEDED, OtherSides
from elastic_train.storage.run_record import Offer, newest_offer, require_one_line
from elastic_train.storage.snapshot import SnapshotInfo, find_snapshots, set_aside
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.world import World, from_json, to_json
from tests.memory_store import MemoryStore
from tests.unit.test_world import member

LINE: Branches = ()
FIRST: Branches = (("b", 100),)
OTHER: Branches = (("c", 90),)
SECOND: Branches = (("b", 100), ("d", 150))


@pytest.mark.parametrize(
    ("branches", "step", "line", "expected"),
    [
        (LINE, 500, LINE, True),
        (LINE, 100, FIRST, True),
        (LINE, 101, FIRST, False),
        (FIRST, 101, LINE, False),
        (FIRST, 150, SECOND, True),
        (FIRST, 151, SECOND, False),
        (FIRST, 100, OTHER, False),
        (SECOND, 900, SECOND, True),
    ],
)
def test_what_is_on_a_line(branches: Branches, step: int, line: Branches, expected: bool) -> None:
    assert is_on(branches, step, line) is expected


def test_restarts_are_told_apart_by_what_is_remembered_of_them() -> None:
    line: Branches = ()
    for number in range(2 * MOST_RESTARTS):
        line = restarted(line, str(number), 10 * number)
    assert len(line) == MOST_RESTARTS
    assert line[-1] == ("127", 1270)
    assert is_on((("7", 70),), 80, line), "before all that is remembered"
    assert not is_on((("7", 70),), 645, line)
    assert is_on(line, 9999, line)
    assert not is_on((("parted", 1000),), 1001, line)


def offer(restarts: Branches, generation: int, step: int) -> Offer:
    return Offer("uid", (generation, step), "a", "/a", restarts)


def test_the_newest_is_the_furthest_of_those_that_were_trained_without_each_other() -> None:
    first, again, other = offer(LINE, 1, 100), offer(FIRST, 2, 308), offer(OTHER, 7, 182)
    assert newest_offer([first, other, again]) == again, "not of the later generation: those are counted apart"
    assert newest_offer([first, offer(LINE, 9, 182), again]) == again
    assert newest_offer([first, offer(LINE, 9, 400), again]) == offer(LINE, 9, 400)


def test_on_one_line_the_later_generation_is_the_newer() -> None:
    assert newest_offer([offer(LINE, 3, 120), offer(LINE, 4, 119)]) == offer(LINE, 4, 119)
    assert newest_offer([offer(LINE, 3, 100), offer(FIRST, 4, 100)]) == offer(FIRST, 4, 100)
    assert newest_offer([]) is None


def test_where_two_lines_part() -> None:
    assert parting_step(LINE, FIRST) == parting_step(FIRST, LINE) == 100
    assert parting_step(FIRST, OTHER) == 90
    assert parting_step(FIRST, SECOND) == 150


def position(branches: Branches, step: int, rank: int = -1, port: int = 1) -> Position:
    return Position(branches, step, f"host{port}", ("10.0.0.1", port), rank, "run")


def test_the_one_with_fewer_steps_stops_and_of_equals_the_branch() -> None:
    assert position(FIRST, 301, rank=2).goes_before(position(LINE, 300))
    assert position(LINE, 300).goes_before(position(FIRST, 300, rank=0))
    assert position(FIRST, 300, rank=1).goes_before(position(OTHER, 300, rank=2))


def test_a_position_is_read_as_it_was_written() -> None:
    assert from_json(Position, to_json(position(SECOND, 7, 3))) == position(SECOND, 7, 3)


# --- when they meet ---------------------------------------------------------------------------------------------------


class Finder:
    def addresses(self) -> list[tuple[str, int]]:
        return []


class Sides:
    """A world of two, on a branch, and a member of the main line at port 9."""

    def __init__(self, *, steps: int, theirs: int) -> None:
        self.stores = {("10.0.0.1", port): MemoryStore() for port in (1, 2, 9)}
        for (_, port), store in self.stores.items():
            store.put("uid", f"uid{port}")
            store.put("run_id", "job")
        members = tuple(replace(member(port, port), uid=f"uid{port}", store=("10.0.0.1", port)) for port in (1, 2))
        self.world = World(0, 3, members)
        self.steps = steps
        self.stores["10.0.0.1", 9].put("position", to_json(position(LINE, theirs, port=9)))
        self.other_sides = OtherSides(
            self.stores["10.0.0.1", 1], self.reach, Finder(), uid="uid1", run_id="job",  # type: ignore[arg-type]
            may_branch=True, in_background=lambda task: task(),
        )  # fmt: skip
        self.is_cut = False

    def reach(self, address: tuple[str, int]) -> MemoryStore:
        if self.is_cut and address[1] == 9:
            raise StoreUnreachable("silent")
        return self.stores[address]

    def tend(self) -> dict[int, str | None]:
        """Who is told to stop, and for whom."""
        branch = Branch("b", 1, (("10.0.0.1", 9),))
        for _ in range(2):  # it judges, and tells
            self.other_sides.tend(self.world, lambda: position(FIRST, self.steps, 1), branch, ())
        told = {port: store.get(SUPERSEDED) for (_, port), store in self.stores.items()}
        return {port: None if text is None else from_json(Position, text).host for port, text in told.items()}


def test_who_has_gone_on_to_another_side_is_not_told_to_stop() -> None:
    """While this member was frozen in the world that both were in."""
    sides = Sides(steps=120, theirs=130)
    sides.stores["10.0.0.1", 2].put("position", to_json(position(OTHER, 140, port=2)))
    assert sides.tend() == {1: "host9", 2: None, 9: None}


def test_who_has_not_published_yet_that_it_is_on_this_branch_is_told_when_it_has() -> None:
    """Else rank 0 would stop alone, and the others would go on."""
    sides = Sides(steps=120, theirs=130)
    sides.stores["10.0.0.1", 2].put("position", to_json(position(LINE, 119, port=2)))
    sides.tend()
    assert not sides.other_sides.has_notified(sides.world)
    sides.stores["10.0.0.1", 2].put("position", to_json(position(FIRST, 120, port=2)))
    assert sides.tend() == {1: "host9", 2: "host9", 9: None}
    assert sides.other_sides.has_notified(sides.world)


def test_the_side_with_fewer_steps_is_told_to_stop() -> None:
    sides = Sides(steps=120, theirs=130)
    assert sides.tend() == {1: "host9", 2: "host9", 9: None}, "each member of it"
    assert sides.other_sides.has_notified(sides.world)
    sides = Sides(steps=140, theirs=130)
    assert sides.tend() == {1: None, 2: None, 9: "host1"}
    assert not sides.other_sides.has_notified(sides.world)


def test_who_joins_a_side_that_stops_is_told_too() -> None:
    sides = Sides(steps=120, theirs=130)
    sides.tend()
    sides.stores["10.0.0.1", 3] = MemoryStore()
    sides.stores["10.0.0.1", 3].put("uid", "uid3")
    newcomer = replace(member(3, 3), uid="uid3", store=("10.0.0.1", 3))
    sides.world = World(0, 4, (*sides.world.members, newcomer), uid="next")
    assert not sides.other_sides.has_notified(sides.world)
    assert sides.tend() == {1: "host9", 2: "host9", 9: None, 3: "host9"}
    assert sides.other_sides.has_notified(sides.world)


def test_nobody_stops_for_a_side_that_is_silent() -> None:
    sides = Sides(steps=120, theirs=130)
    sides.is_cut = True
    assert sides.tend() == {1: None, 2: None, 9: None}
    sides.is_cut = False
    assert sides.tend() == {1: "host9", 2: "host9", 9: None}, "it looks again"


# --- two jobs of one run id -------------------------------------------------------------------------------------------


class Jobs:
    """Rank 0 of two jobs, `a` at port 1 and `b` at port 2; a second member of each is at 3 and 4."""

    def __init__(self, **steps: int) -> None:
        self.stores = {("10.0.0.1", port): MemoryStore() for port in (1, 2, 3, 4)}
        self.steps = steps
        self.waiting: set[str] = set()
        self.sides: dict[str, OtherSides] = {}
        for port, job in enumerate("ab", 1):
            for member_port in (port, port + 2):
                store = self.stores["10.0.0.1", member_port]
                store.put("run_id", "job")
                store.put("uid", f"uid{member_port}")
                store.put("host", f'["10.0.0.1", {port}]')
            self.sides[job] = OtherSides(
                self.stores["10.0.0.1", port], self.stores.__getitem__, Finder(), uid=f"uid{port}",  # type: ignore[arg-type]
                run_id="job", may_branch=False, in_background=lambda task: task(),
            )  # fmt: skip

    def position(self, job: str) -> Position:
        port = "ab".index(job) + 1
        stands = job not in self.waiting
        return replace(position(LINE, self.steps[job], port=port), job=job, stands=stands, run=f"run of {job}")

    def meet(self) -> dict[int, str | None]:
        """Each sees the sign of the other, with its second member on it; what the stores say then: for whom to stop."""
        for _ in range(3):  # they say how far they are, one judges, and who stops tells its members
            for port, job in enumerate("ab", 1):
                members = tuple(
                    replace(member(one, one), uid=f"uid{one}", store=("10.0.0.1", one)) for one in (port, port + 2)
                )
                others = [("10.0.0.1", 5 - port)]
                self.sides[job].tend(World(0, 3, members), lambda job=job: self.position(job), None, others)  # type: ignore[misc]
        told = {port: store.get(SUPERSEDED) for (_, port), store in self.stores.items()}
        return {port: None if text is None else from_json(Position, text).host for port, text in told.items()}


def test_a_side_that_is_told_of_itself_goes_on() -> None:
    """By one that had not parted yet: it tells all of the world that it was in."""
    sides = Sides(steps=100, theirs=50)
    sides.stores["10.0.0.1", 1].put(SUPERSEDED, to_json(position(FIRST, 90, 1)))
    side = OwnSide(sides.other_sides, {"run_uid": "run", BRANCH: to_json(Branch("b", 1))})
    side.progress = lambda: (FIRST, 100)
    side.enter(sides.world)
    side.require_no_better()
    assert sides.tend()[2] is None
    sides.stores["10.0.0.1", 1].put(SUPERSEDED, to_json(position(LINE, 300, port=9)))
    with pytest.raises(Superseded):
        side.require_no_better()
    assert sides.tend()[2] is not None


def test_of_two_jobs_the_one_with_fewer_steps_stops() -> None:
    assert Jobs(a=0, b=1).meet() == {1: "host2", 3: "host2", 2: None, 4: None}
    assert Jobs(a=500, b=0).meet() == {1: None, 3: None, 2: "host1", 4: "host1"}
    assert Jobs(a=0, b=0).meet() == {1: "host2", 3: "host2", 2: None, 4: None}, "by the token"


def test_a_job_that_waits_for_the_silent_ends_none_that_trains() -> None:
    jobs = Jobs(a=500, b=20)
    jobs.waiting = {"a"}
    assert set(jobs.meet().values()) == {None}
    jobs.waiting = set()
    assert jobs.meet() == {1: None, 3: None, 2: "host1", 4: "host1"}


def test_a_job_that_stops_already_is_not_judged_again() -> None:
    """By a new rank 0, say, whose own job has fallen back by then."""
    jobs = Jobs(a=100, b=99)
    jobs.stores["10.0.0.1", 1].put(SUPERSEDED, to_json(jobs.position("b")))
    assert jobs.meet()[2] is None


# --- restoring --------------------------------------------------------------------------------------------------------


def write(directory: Path, step: int, branches: Branches, host: str = "a", generation: int = 1) -> None:
    writer = SnapshotWriter(directory, keep=9, host=host, run_uid="uid", task={})
    where: dict[str, Any] = {"epoch": 0, "samples_done": 0, "generation": generation, "world_size": 1}
    writer.save({"x": 1}, step=step, branches=branches, **where)


def offers(directory: Path) -> list[SnapshotInfo]:
    return find_snapshots(directory, warn=lambda line: pytest.fail(line))


def test_a_restore_refuses_snapshots_of_two_branches(tmp_path: Path) -> None:
    write(tmp_path, 100, LINE)
    write(tmp_path, 300, FIRST, host="b", generation=3)
    assert [offer.branches for offer in offers(tmp_path)] == [FIRST, LINE]
    require_one_line(list(map(Offer.of, offers(tmp_path))))
    write(tmp_path, 500, LINE, generation=2)
    with pytest.raises(BranchesMixed) as raised:
        require_one_line(list(map(Offer.of, offers(tmp_path))))
    said = str(raised.value)
    assert "host b has a snapshot of step 300 on branch b, and host a one of step 500" in said
    assert str(tmp_path / "step-000000000500-gen-0002-a") in said, "what to move away"


def test_a_newcomer_with_snapshots_of_another_branch_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 100, LINE)
    write(tmp_path, 300, FIRST, host="b", generation=3)
    theirs = replace(position(LINE, 700), run="uid")
    require_line(offers(tmp_path), replace(theirs, branches=FIRST))
    require_line(offers(tmp_path), replace(theirs, run="another"))
    with pytest.raises(Refused, match=r"host b has a snapshot of step 300 on branch b, .* step 700 .* on host1"):
        require_line(offers(tmp_path), theirs)


def test_what_is_set_aside_is_no_offer(tmp_path: Path) -> None:
    write(tmp_path, 100, LINE)
    write(tmp_path, 300, FIRST)
    moved = set_aside(tmp_path, "discarded-b", lambda offer: not is_on(offer.branches, offer.step, LINE))
    assert [offer.step for offer in offers(tmp_path)] == [100]
    assert [path.name for path in (tmp_path / "discarded-b").iterdir()] == moved
