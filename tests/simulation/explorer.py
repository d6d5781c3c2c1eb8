"""Every interleaving of the actions by which a world's members decide its successor, with faults anywhere.

The states that can be reached are visited once each, depth first. A state is a value: what stands in each register,
what was announced to whom and what is claimed, and where each member stands (looks.py). A step that changes nothing for
the others, nor they for it, is made at once, and not in every order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tests.simulation.looks import PLACE, Looks, Point, View, uid_of

FINAL_LOOKS = 6
"""of each member, in which all end once no fault is left"""
LOST, LATE, DIED, FROZEN = range(4)
Late = tuple[int, str | None, str]
"""(rank of a store or PLACE, what has to stand there, what stands there afterwards)"""


@dataclass(frozen=True)
class Setting:
    """A world that is over, and what may happen while its members decide what follows it."""

    looks: tuple[int, ...]
    """how often each proposes; one that never does votes all the same"""
    cuts: frozenset[frozenset[int]] = frozenset()
    """pairs that do not hear each other"""
    apart: frozenset[int] = frozenset()
    """members that the place does not answer"""
    shared: tuple[bool | None, ...] = ()
    """whether each was told that all see the place, None where it was told nothing; all were told so by default"""
    lost: int = 0
    """requests or replies that are lost"""
    late: int = 0
    """of these, requests that are executed after their sender has given them up, at any time"""
    deaths: int = 0
    freezes: int = 0
    """of whole processes; each wakes up at some time"""

    @property
    def size(self) -> int:
        return len(self.looks)

    def hears(self, rank: int) -> list[int]:
        """This one first."""
        others = [one for one in range(self.size) if one != rank and {rank, one} not in self.cuts]
        return [rank, *others]


class Situation(NamedTuple):
    """Of all members."""

    registers: tuple[str | None, ...]
    told: tuple[str | None, ...]
    """what was announced to each"""
    claim: str | None
    points: tuple[Point, ...]
    late: tuple[Late, ...] = ()
    """on their way"""
    dead: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    spent: tuple[int, int, int, int] = (0, 0, 0, 0)
    """faults: LOST, LATE, DIED, FROZEN"""

    def at(self, point: Point) -> Situation:
        return self._replace(points=_put(self.points, point.rank, point))

    def spend(self, fault: int) -> Situation:
        return self._replace(spent=_put(self.spent, fault, self.spent[fault] + 1))

    def standing(self, kind: str, target: int) -> str | None:
        if kind == "claim":
            return self.claim
        return self.registers[target] if kind == "change" else self.told[target]

    def write(self, kind: str, target: int, text: str | None) -> Situation:
        if kind == "claim":
            return self._replace(claim=text)
        if kind == "change":
            return self._replace(registers=_put(self.registers, target, text))
        return self._replace(told=_put(self.told, target, text))


@dataclass
class Exploration:
    """What it has come to."""

    num_states: int = 0
    num_ends: int = 0
    """states in which nobody goes on until all faults are over"""
    violation: str = ""
    history: tuple[str, ...] = ()
    """that leads to it"""


class Explorer:
    """All that a setting can come to."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._looks = Looks(setting.shared or (True,) * setting.size)
        self._ends: dict[Situation, str] = {}

    def explore(self, limit: int | None = None) -> Exploration:
        """Until all states are visited or a violation is found; of so many states at most."""
        nothing = (None,) * self._setting.size
        start = Situation(nothing, nothing, None, tuple(map(self._before_look, range(self._setting.size))))
        found, before = Exploration(), {start: (start, "")}
        stack = [start]
        while stack and not found.violation and (limit is None or len(before) < limit):
            situation = stack.pop()
            found.violation = _two_decisions(situation)
            if not found.violation and self._is_end(situation):
                found.num_ends += 1
                found.violation = self._violation_at_end(situation)
            for label, after in self._moves(situation):
                if after not in before:
                    before[after] = (situation, label)
                    stack.append(after)
            if found.violation:
                found.history = _history(before, situation)
        found.num_states = len(before)
        return found

    # --- moves ----------------------------------------------------------------------------------------------------

    def _moves(self, situation: Situation) -> Iterator[tuple[str, Situation]]:
        setting, ranks = self._setting, range(self._setting.size)
        awake = [rank for rank in ranks if rank not in situation.dead and rank not in situation.frozen]
        going_on = [rank for rank in awake if self._goes_on(situation.points[rank])]
        for rank in going_on:
            if self._is_alone(situation, situation.points[rank]):
                yield from self._steps(situation, rank)
                return
        for rank in going_on:
            yield from self._steps(situation, rank)
        for rank in situation.frozen:
            yield f"{rank} wakes up", situation._replace(frozen=situation.frozen - {rank})
        for late in situation.late:
            yield f"what {_at(late[0])} was given comes late", _arrive(situation, late)
        if situation.spent[DIED] < setting.deaths:
            for rank in awake:
                yield f"{rank} dies", self._die(situation, rank)
        if situation.spent[FROZEN] < setting.freezes:
            for rank in awake:
                yield f"{rank} freezes", situation._replace(frozen=situation.frozen | {rank}).spend(FROZEN)

    def _is_end(self, situation: Situation) -> bool:
        """Whether nobody goes on until all faults are over."""
        still = situation.dead | situation.frozen
        return not any(self._goes_on(point) for point in situation.points if point.rank not in still)

    def _goes_on(self, point: Point) -> bool:
        return point.acted is None and (point.view is not None or point.look < self._setting.looks[point.rank])

    def _is_alone(self, situation: Situation, point: Point) -> bool:
        """Whether its next step may as well come before all that others do."""
        if point.view is None:
            return False
        step = self._looks.step(point)
        if step.kind == "claim":
            return situation.claim is not None or point.rank in self._setting.apart
        if step.target == point.rank:
            return False
        is_out = step.target in situation.dead or {point.rank, step.target} in self._setting.cuts
        return is_out or (step.kind == "tell" and situation.points[step.target].acted is not None)

    def _begin(self, situation: Situation, rank: int, asks_others: bool = False) -> Situation:
        """With its look begun."""
        point = situation.points[rank]
        if point.view is not None:
            return situation
        out = situation.dead | situation.frozen
        hears = tuple(one for one in self._setting.hears(rank) if one == rank or one not in out)
        view = View(hears, frozenset(map(uid_of, situation.dead)), asks_others)
        return situation.at(self._looks.point(rank, point.look, point.attempt, view, (), None))

    def _steps(self, situation: Situation, rank: int) -> Iterator[tuple[str, Situation]]:
        """The next one of a member, as it may turn out."""
        setting, spent = self._setting, situation.spent
        situation = self._begin(situation, rank)
        label, after = self._step(situation, rank)
        yield label, after
        point, step = situation.points[rank], self._looks.step(situation.points[rank])
        if label.endswith("!") or step.target == rank or spent[LOST] >= setting.lost:
            return
        lost = situation.at(self._looks.after_failure(point)).spend(LOST)
        yield f"{label}: request lost", lost
        before = situation.standing(step.kind, step.target)
        text, _ = self._looks.after(point, before)
        if step.kind == "read" or text == before:
            return
        yield f"{label}: reply lost", lost.write(step.kind, step.target, text)
        if spent[LATE] < setting.late and step.kind != "tell" and text is not None:
            late = (step.target, before, text)
            yield f"{label}: given up, on its way", lost._replace(late=(*lost.late, late)).spend(LATE)

    def _step(self, situation: Situation, rank: int) -> tuple[str, Situation]:
        """What happens where nothing is lost."""
        point = situation.points[rank]
        step = self._looks.step(point)
        label = f"{rank}: {step.kind} {_at(step.target)}"
        apart = rank in self._setting.apart if step.kind == "claim" else {rank, step.target} in self._setting.cuts
        if apart or step.target in situation.dead or (step.target in situation.frozen and step.target != rank):
            return f"{label} does not answer!", situation.at(self._looks.after_failure(point))
        before = situation.standing(step.kind, step.target)
        text, now = self._looks.after(point, before)
        if text != before:
            situation = situation.write(step.kind, step.target, text)
            label = f"{label} {text}"
        return label + (f", acts on {now.acted}" if now.acted else ""), situation.at(now)

    def _before_look(self, rank: int, look: int = 0, attempt: int = 0) -> Point:
        return self._looks.point(rank, look, attempt, None, (), None)

    def _die(self, situation: Situation, rank: int) -> Situation:
        """Nothing of it is left but what is on its way."""
        gone = situation.at(self._before_look(rank)).write("change", rank, None).write("tell", rank, None)
        return gone._replace(dead=gone.dead | {rank}).spend(DIED)

    # --- what must hold at the end ----------------------------------------------------------------------------------

    def _violation_at_end(self, situation: Situation) -> str:
        """With no fault any more all who live end, with one decision."""
        looks = self._setting.looks
        points = tuple(
            point if point.acted else self._before_look(point.rank, looks[point.rank], point.attempt)
            for point in situation.points
        )
        situation = Situation(*situation[:3], points, dead=situation.dead)
        if situation not in self._ends:
            self._ends[situation] = self._end(situation)
        return self._ends[situation]

    def _end(self, situation: Situation) -> str:
        setting = self._setting
        self._setting = replace(setting, cuts=frozenset(), apart=frozenset())
        living = [rank for rank in range(setting.size) if rank not in situation.dead]
        for rank in FINAL_LOOKS * living:
            while situation.points[rank].acted is None:
                _, situation = self._step(self._begin(situation, rank, asks_others=True), rank)
                if situation.points[rank].view is None:
                    break
        self._setting = setting
        waiting = [str(rank) for rank in living if situation.points[rank].acted is None]
        return _two_decisions(situation) or (f"rank {', '.join(waiting)} never ends" if waiting else "")


def _put(values: Any, index: int, value: Any) -> Any:
    return (*values[:index], value, *values[index + 1 :])


def _at(target: int) -> str:
    return "the place" if target == PLACE else f"at {target}"


def _arrive(situation: Situation, late: Late) -> Situation:
    """What comes late counts where what it was to replace still stands."""
    target, expected, text = late
    kind = "claim" if target == PLACE else "change"
    rest = list(situation.late)
    rest.remove(late)
    situation = situation._replace(late=tuple(rest))
    is_there = target not in situation.dead and situation.standing(kind, target) == expected
    return situation.write(kind, target, text) if is_there else situation


def _two_decisions(situation: Situation) -> str:
    acted = sorted({point.acted for point in situation.points if point.acted is not None})
    return f"two decisions: {', '.join(acted)}" if len(acted) > 1 else ""


def _history(before: dict[Situation, tuple[Situation, str]], situation: Situation) -> tuple[str, ...]:
    labels: list[str] = []
    while before[situation][0] is not situation:
        situation, label = before[situation]
        labels.append(label)
    return tuple(reversed(labels))
