"""A join that is prepared while the others train: the next world's process group stands before anybody stops.

1. Rank 0 chooses newcomers and tells them. When they have answered, it votes SOON with its next step.
2. The commit of that step tells every member. Each begins a `Preparation` on a thread of its own; rank 0 tells the
   newcomers that it is time.
3. All form the group of the planned world, and leave a mark beside rank 0.
4. Rank 0 has seen all marks. It makes the plan the decision on what follows the world: the agreement of every other
   change (agreement.py), only earlier.
5. Each reads whether all see the place that may be an arbiter (arbiter.py): their marks say so.
6. The newcomers find themselves admitted, make ready, and leave a second mark. Rank 0 votes NOW: the step that carries
   this vote is the last of the old world.

A plan that fails before 4 leaves no trace. After 4 it is the decision, whatever happens: who dies meanwhile is found
out in the world that follows, as in every world.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import FormationFailed, StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.peers import PeerJob
from elastic_train.protocol.store import Answer, SharedStore
from elastic_train.world import Member, Reach, World, to_json, value_of

HERE_SECONDS = 2.0
"""that rank 0 waits for an answer of the newcomers"""
MARKS_SECONDS = 10.0
"""that rank 0 waits for a mark of all; training goes on meanwhile"""
POLL_SECONDS = 0.005
GO_POLL_SECONDS = 0.02
"""of a newcomer, which asks rank 0's store for as long as a step takes"""
SEES, BLIND = "sees", "blind"
"""with its mark each member tells whether it sees the arbiter's place"""


@dataclass(frozen=True)
class Plan:
    """What the next world shall be."""

    parent: str
    """uid of the world that it follows"""
    old: tuple[Member, ...]
    """its members"""
    decision: Decision

    def to_json(self) -> str:
        return to_json({**vars(self), "decision": self.decision.to_fields()})

    @staticmethod
    def from_json(text: str) -> Plan:
        told: dict[str, Any] = json.loads(text)
        old = value_of(tuple[Member, ...], told["old"])
        return Plan(str(told["parent"]), old, Decision.from_fields(told["decision"]))

    def world_for(self, uid: str) -> World | None:
        """The planned world, in which nobody is a spare, as the member `uid` sees it; None where it is not in it."""
        return self.decision.world_for(uid, World(0, self.decision.generation - 1, self.old))


class _Missing(FormationFailed):
    """Something was awaited in vain."""

    ranks: Sequence[int]
    """whose it was"""


class Preparation:
    """One member's part in one plan, for a thread of its own: one of the three methods that block, once.

    Args:
        form: makes the process group of a world. Blocks until all have; raises FormationFailed.
        reach: told at `planned`, `formed` and `proposed`, for the faults of drills.
    """

    def __init__(
        self,
        job: PeerJob,
        form: Callable[[World], Any],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        reach: Reach = lambda _point, _world: None,
    ) -> None:
        self._job, self._form, self._clock, self._sleep, self._reach = job, form, clock, sleep, reach
        self.world: World | None = None
        """the planned one"""
        self.plan: Plan | None = None
        self.is_place_shared: bool | None = False
        """whether all members of the planned world see the arbiter's place; None where this one does, and was not told
        of the others"""
        self.formed: Any = None
        """its group, once it stands"""
        self.is_decided = self.is_ready = False
        """for rank 0: whether the plan is the decision; whether the old world may end"""
        self.absent: tuple[Member, ...] = ()
        """newcomers that did not answer"""
        self.is_due = False
        """for rank 0: whether the newcomers have answered, so that SOON may be voted"""
        self.may_form = False
        """for rank 0: set when SOON was voted"""
        self.failure: str | None = None
        self.crash: Exception | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """The world has ended otherwise. From any thread."""
        self.is_cancelled, self.formed = True, None

    def run(self, part: Callable[[], None]) -> None:
        """Run one of the methods below; what it raises is in `failure`, or in `crash` where it is a bug."""
        try:
            part()
        except (StoreUnreachable, FormationFailed) as error:
            self.failure = str(error)
        except Exception as error:  # the end of this thread; the training thread raises it
            self.crash = error
        finally:
            self._job.stop_planning()
            if self.is_cancelled:
                self.formed = None

    def lead(self, world: World, plan: Plan, planned: World) -> None:
        """As rank 0 of `world`."""
        self.plan, self.world = plan, planned
        self._reach("planned", planned)
        self._job.place.show(planned.uid, is_decided=False)
        self._invite(plan, planned)
        self.is_due = True
        while not self.may_form and not self.is_cancelled:
            self._sleep(POLL_SECONDS)
        if self.is_cancelled:
            return
        self._put(world.me, f"go/{planned.key}", "go")
        self._take_part(plan, planned)
        marks = self._wait_for("formed", planned, range(planned.world_size))
        if self.is_cancelled:
            return
        is_shared = all(found == SEES for found in marks)
        self._put(world.me, f"shared/{planned.key}", str(int(is_shared)))
        self._note_place(planned, is_shared)
        self._reach("proposed", world)
        self.is_decided = self._decide(world, plan)
        with suppress(FormationFailed, StoreUnreachable):  # it is the decision all the same
            self._wait_for("ready", planned, range(len(plan.old), planned.world_size))
        self.is_ready = True

    def _invite(self, plan: Plan, planned: World) -> None:
        """Raises: FormationFailed where a newcomer does not answer."""
        for member in plan.decision.new:
            if self.is_cancelled:  # while a directory or a store took its time; it may follow a later plan by now
                break
            self.absent = (member,)
            self._put(member, "plan", plan.to_json())
        self.absent = ()
        try:
            self._wait_for("here", planned, range(len(plan.old), len(planned.members)), HERE_SECONDS)
        except _Missing as missing:
            self.absent = tuple(planned.members[rank] for rank in missing.ranks)
            raise

    def _decide(self, world: World, plan: Plan) -> bool:
        """Until it is said whether the plan is the decision: a call without an answer may have made it that. False
        where this was cancelled."""
        while not self.is_cancelled:
            with suppress(StoreUnreachable):
                if not self._job.decide_ahead(world, plan.decision):
                    raise FormationFailed("another world was decided meanwhile")
                return True
            self._sleep(POLL_SECONDS)
        return False

    def follow(self, world: World) -> None:
        """As another member of `world`."""
        plan = self._plan_of(world)
        if plan is None:
            return
        planned = plan.world_for(world.me.uid)
        if planned is None:
            raise FormationFailed("rank 0 plans without this worker")
        self._take_part(plan, planned)
        self._learn_of_place(planned)

    def _plan_of(self, world: World) -> Plan | None:
        """What rank 0 plans to follow `world`; None where this was cancelled. A copy of its notes may lag behind the
        vote. Raises: FormationFailed where there is no plan any more."""
        deadline = self._clock() + HERE_SECONDS
        while not self.is_cancelled:
            text = self._ask(world.members[0], lambda notes: notes.get("plan"), deadline)
            plan = None if text is None else Plan.from_json(text)
            if plan is not None and plan.parent == world.uid:
                return plan
            if self._clock() > deadline:
                raise FormationFailed("rank 0 has no plan any more")
            self._sleep(POLL_SECONDS)
        return None

    def accept(self, plan: Plan, planned: World) -> None:
        """As a newcomer. Blocks for as long as a step of the others takes besides."""
        self._mark("here", planned, "here")
        self._wait_for("go", planned, None, math.inf, GO_POLL_SECONDS)
        if self.is_cancelled:
            return
        self._take_part(plan, planned)
        self._learn_of_place(planned)

    def _take_part(self, plan: Plan, planned: World) -> None:
        self.plan, self.world = plan, planned
        formed = self._form(planned)
        self._reach("formed", planned)
        self.is_place_shared = None if self._job.place.sees(planned.uid) else False
        self.formed = formed
        self._mark("formed", planned, BLIND if self.is_place_shared is False else SEES)

    def _learn_of_place(self, planned: World) -> None:
        found = self._wait_for("shared", planned, None)
        if found:
            self._note_place(planned, found[0] == "1")

    def _note_place(self, planned: World, is_shared: bool) -> None:
        self.is_place_shared = is_shared
        self._job.place.note(planned.uid, is_shared=is_shared)

    def _wait_for(
        self,
        name: str,
        planned: World,
        ranks: Sequence[int] | None,
        seconds: float = MARKS_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> list[str]:
        """What stands beside rank 0, for each of these ranks or for all together; [] where this was cancelled."""
        key, rank_0 = f"{name}/{planned.key}", planned.members[0]
        keys = [key] if ranks is None else [f"{key}/{rank}" for rank in ranks]
        deadline = self._clock() + seconds
        while None in (found := self._ask(rank_0, lambda notes: notes.get_many(keys), self._clock() + MARKS_SECONDS)):
            if self.is_cancelled:
                return []
            if self._clock() > deadline:
                missing = [index for index, text in enumerate(found) if text is None]
                error = _Missing(f"no {', '.join(keys[index] for index in missing)} in {seconds:.0f} s")
                error.ranks = [] if ranks is None else [ranks[index] for index in missing]
                raise error
            self._sleep(poll_seconds)
        return [text for text in found if text is not None]

    def _mark(self, name: str, planned: World, text: str) -> None:
        self._put(planned.members[0], f"{name}/{planned.key}/{planned.rank}", text)

    def _put(self, member: Member, key: str, text: str) -> None:
        self._ask(member, lambda notes: notes.put(key, text), self._clock() + HERE_SECONDS)

    def _ask(self, member: Member, question: Callable[[SharedStore], Answer], deadline: float) -> Answer:
        """As `insist`, until `deadline`, or until this is cancelled."""
        return insist(self._job, member, question, lambda: self.is_cancelled or self._clock() > deadline, self._sleep)


def mark(job: PeerJob, name: str, planned: World, is_over: Callable[[], bool], sleep: Callable[[float], None]) -> None:
    """Tell rank 0 how far this member is. Blocks and raises as `insist`."""
    key = f"{name}/{planned.key}/{planned.rank}"
    insist(job, planned.members[0], lambda notes: notes.put(key, name), is_over, sleep)


def insist(
    job: PeerJob,
    member: Member,
    question: Callable[[SharedStore], Answer],
    is_over: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Answer:
    """What comes of it beside `member`, again and again where there is no answer: who gave up for one lost message
    would leave the others in a group that never stands. Blocks for a short timeout each time.

    Raises: StoreUnreachable where `is_over` says so. What that raises.
    """
    while True:
        try:
            return job.ask_beside(member, question)
        except StoreUnreachable:
            if is_over():
                raise
        sleep(POLL_SECONDS)
