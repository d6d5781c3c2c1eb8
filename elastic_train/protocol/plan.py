"""A join that is prepared while the world trains: the next world's process group stands before any member stops.

1. Rank 0 chooses newcomers and sends them the plan. When they have answered, it votes SOON with its next step.
2. The commit of that step informs every member. Each begins a `Preparation` on a thread of its own; rank 0 tells the
   newcomers to begin.
3. All form the group of the planned world, and write a mark into rank 0's store.
4. When rank 0 has read all marks, it makes the plan the decision on the successor of the world: the agreement of every
   other change (agreement.py), only earlier.
5. Each member reads whether all members see the place for claims (arbiter.py): the marks of step 3 report that.
6. The newcomers find that they are admitted, make ready, and write a second mark. Rank 0 votes NOW: the step that
   carries this vote is the last of the old world.

A plan that fails before 4 leaves no trace. After 4 it is the decision, whatever happens: a death meanwhile is found out
in the world that follows, as in every world.
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
from elastic_train.protocol.store import Answer, KeyValueStore
from elastic_train.world import Member, Reach, World, to_json, value_of

HERE_SECONDS = 2.0
"""time that rank 0 waits for an answer of the newcomers"""
MARKS_SECONDS = 10.0
"""time that rank 0 waits for the marks of all; training goes on meanwhile"""
POLL_SECONDS = 0.005
GO_POLL_SECONDS = 0.02
"""poll interval of a newcomer, which polls rank 0's store for as long as a step takes"""
SEES, BLIND = "sees", "blind"
"""the two marks, by whether the member sees the place for claims"""


@dataclass(frozen=True)
class Plan:
    """The plan of the next world."""

    parent: str
    """uid of the world that it follows"""
    old: tuple[Member, ...]
    """the members of that world"""
    decision: Decision

    def to_json(self) -> str:
        return to_json({**vars(self), "decision": self.decision.to_fields()})

    @staticmethod
    def from_json(text: str) -> Plan:
        told: dict[str, Any] = json.loads(text)
        old = value_of(tuple[Member, ...], told["old"])
        return Plan(str(told["parent"]), old, Decision.from_fields(told["decision"]))

    def world_for(self, uid: str) -> World | None:
        """Return the planned world, without spares, as the member `uid` sees it; None if that member is not in it."""
        return self.decision.world_for(uid, World(0, self.decision.generation - 1, self.old))


class _Missing(FormationFailed):
    """The marks of some ranks did not come."""

    ranks: Sequence[int]
    """the ranks"""


class Preparation:
    """One member's part in one plan. A thread of its own calls one of `lead`, `follow` and `accept`, which block, once.

    Args:
        form: makes the process group of a world. Blocks until all members have; raises FormationFailed.
        reach: called at `planned`, `formed` and `proposed`; drills inject faults there.
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
        """the planned world"""
        self.plan: Plan | None = None
        self.is_place_shared: bool | None = False
        """whether all members of the planned world see the place for claims; None if this one does, and has not learned
        about the others"""
        self.formed: Any = None
        """the group of the planned world, once it stands"""
        self.is_decided = self.is_ready = False
        """for rank 0: whether the plan is the decision; whether the old world may end"""
        self.absent: tuple[Member, ...] = ()
        """newcomers that did not answer"""
        self.is_due = False
        """for rank 0: whether the newcomers have answered, so that rank 0 may vote SOON"""
        self.may_form = False
        """for rank 0: set once it has voted SOON"""
        self.failure: str | None = None
        self.crash: Exception | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the plan: the world has ended otherwise. From any thread."""
        self.is_cancelled, self.formed = True, None

    def run(self, part: Callable[[], None]) -> None:
        """Run one of the methods below. Its error is kept in `failure`, or in `crash` if it is a bug."""
        try:
            part()
        except (StoreUnreachable, FormationFailed) as error:
            self.failure = str(error)
        except Exception as error:  # this ends the thread; the training thread raises the error
            self.crash = error
        finally:
            self._job.stop_planning()
            if self.is_cancelled:
                self.formed = None

    def lead(self, world: World, plan: Plan, planned: World) -> None:
        """Take part as rank 0 of `world`."""
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
        with suppress(FormationFailed, StoreUnreachable):  # the plan is the decision all the same
            self._wait_for("ready", planned, range(len(plan.old), planned.world_size))
        self.is_ready = True

    def _invite(self, plan: Plan, planned: World) -> None:
        """Send the plan to the newcomers and wait for them. Raises: FormationFailed if one does not answer."""
        for member in plan.decision.new:
            if self.is_cancelled:  # while a directory or a store was slow: the newcomer may follow a later plan by now
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
        """Try until the plan is known to be the decision: a call without an answer may have decided it. Return False if
        the plan was cancelled. Raises: FormationFailed if another world was decided."""
        while not self.is_cancelled:
            with suppress(StoreUnreachable):
                if not self._job.decide_ahead(world, plan.decision):
                    raise FormationFailed("another world was decided meanwhile")
                return True
            self._sleep(POLL_SECONDS)
        return False

    def follow(self, world: World) -> None:
        """Take part as another member of `world`."""
        plan = self._plan_of(world)
        if plan is None:
            return
        planned = plan.world_for(world.me.uid)
        if planned is None:
            raise FormationFailed("rank 0 plans without this worker")
        self._take_part(plan, planned)
        self._learn_of_place(planned)

    def _plan_of(self, world: World) -> Plan | None:
        """Return rank 0's plan for the successor of `world`; None if this was cancelled. Polls: the plan may appear in
        rank 0's store after the vote. Raises: FormationFailed if there is no plan any more."""
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
        """Take part as a newcomer. Also blocks for the rest of a step of the members."""
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
        """Wait for marks at rank 0, one of each of `ranks` or one of all (None); return them, or [] if cancelled."""
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

    def _ask(self, member: Member, question: Callable[[KeyValueStore], Answer], deadline: float) -> Answer:
        """As `insist`, until `deadline` or until this is cancelled."""
        return insist(self._job, member, question, lambda: self.is_cancelled or self._clock() > deadline, self._sleep)


def mark(job: PeerJob, name: str, planned: World, is_over: Callable[[], bool], sleep: Callable[[float], None]) -> None:
    """Write a mark of this member into rank 0's store. Blocks and raises as `insist`."""
    key = f"{name}/{planned.key}/{planned.rank}"
    insist(job, planned.members[0], lambda notes: notes.put(key, name), is_over, sleep)


def insist(
    job: PeerJob,
    member: Member,
    question: Callable[[KeyValueStore], Answer],
    is_over: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Answer:
    """Ask the store of `member`, again and again until it answers, and return the answer. A member that gave up after
    one lost message would leave the others in a group that never stands. Each try blocks for a short timeout.

    Raises: StoreUnreachable once `is_over` returns True; any error of `is_over`.
    """
    while True:
        try:
            return job.ask_beside(member, question)
        except StoreUnreachable:
            if is_over():
                raise
        sleep(POLL_SECONDS)
