"""How a worker joins its job, and how the members admit it: the join queue, the choice, the preparation."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from elastic_train.elastic.barriers import Surroundings, no_answer, require_whole
from elastic_train.elastic.formed_group import FormedGroup
from elastic_train.elastic.next_world import REPORT_SECONDS, WHY_IT_WAITS, QueueNews, ReportTimes
from elastic_train.errors import FormationFailed, JobFinished, StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.join_queue import Waiting, fitting_nodes, ready_nodes, without_nodes_of
from elastic_train.protocol.known_worlds import Admitted
from elastic_train.protocol.liveness import Watcher
from elastic_train.protocol.peers import PeerJob
from elastic_train.protocol.plan import HERE_SECONDS, Plan, Preparation, mark
from elastic_train.rules import NOW, SOON, Activity, common_backend, next_generation
from elastic_train.world import Member, World

QUEUE_POLL_SECONDS = 0.03
Node = tuple[Member, ...]
"""the workers of one node that are in the join queue"""
WHY_SECONDS = 1.0
"""between two looks of a newcomer at why it waits"""
IN_QUEUE = "in the join queue: a job is running, whose members admit this node between two steps"
SETTLE_SECONDS = 0.5
"""nodes that become ready within so short a time are admitted together"""
ENTRY_MOVED = "the last world's claims were lost with the job's entry in etcd; now they count again"
MOST_FAILED_PLANS = 2
"""in one world; after them newcomers are admitted without a plan, and training stops meanwhile"""


class Arrival:
    """One worker's way into the job: it finds the job, waits in the join queue, and prepares for the world that admits
    it. For the training thread alone.

    Args:
        check: raises Stopped where this worker was told to stop.
        log: prints a line for the user of this node: what is being waited for.
        begin_timeout: seconds within which this worker has to be in a world, where nothing else limits that.
        too_late: the error message after that time.
    """

    def __init__(
        self,
        job: PeerJob,
        watcher: Watcher,
        around: Surroundings,
        *,
        check: Callable[[], None],
        log: Callable[[str], None],
        begin_timeout: float = math.inf,
        too_late: str = "",
    ) -> None:
        self._job, self._watcher, self._around = job, watcher, around
        self._check, self._log = check, log
        self._too_late, self._begin_by = too_late, around.monotonic() + begin_timeout

    def find(self) -> None:
        """Find the job, or the place where it begins. Blocks until either is found.

        Raises:
            Stopped: this worker was told to stop. StoreUnreachable, FormationFailed: none will be found.
            JobFinished: the job has reached its end.
        """
        reports = self._report_times()
        while not self._job.entrance.find():
            self._check()
            self._pause(reports, f"waiting for the job at {self._job.finder.describe()}")

    def wait_in_queue(self, mine: Waiting, look: Callable[[], None]) -> Admitted:
        """Wait in the join queue until the job admits this worker. Blocks as long as the job trains without it.

        Args:
            look: called again and again meanwhile.

        Raises:
            JobFinished: the job reached its end meanwhile.
            FormationFailed, StoreUnreachable: no world with this worker comes about.
            Stopped: this worker was told to stop.
            What `look` raises.
        """
        reports, why, ask_at, has_reported = self._report_times(), None, 0.0, self._job.entrance.is_first
        while True:
            self._check()
            self._watcher.do(Activity.FORM)
            place = self._job.look_from_queue(mine)
            if isinstance(place, Admitted):
                self._job.entrance.leave()
                return place
            look()
            if not has_reported:  # until now, while it imported and built, it printed nothing
                has_reported = True
                self._log(IN_QUEUE)
            if self._around.monotonic() >= ask_at:
                ask_at = self._around.monotonic() + WHY_SECONDS
                told = self._job.told(WHY_IT_WAITS)
                if told is not None and told != why:
                    why = told
                    self._log(why)
            self._pause(reports, place)

    def _report_times(self) -> ReportTimes:
        return ReportTimes(self._around.monotonic(), 3 * REPORT_SECONDS)

    def _pause(self, reports: ReportTimes, waiting_for: str) -> None:
        """Pause between two looks. Raises: FormationFailed where `begin_timeout` is over. JobFinished."""
        now = self._around.monotonic()
        if now > self._begin_by:
            raise FormationFailed(self._too_late)
        if reports.are_due(now):
            if self._job.entrance.host_store is None:
                self._around.require_unfinished()
            self._log(waiting_for)
        self._around.sleep(QUEUE_POLL_SECONDS)

    def report_ready(self, world: World) -> None:
        """Report, as a newcomer of a prepared world, that the members may come.

        Raises: as `check`. FormationFailed: rank 0 does not answer.
        """
        self.check()
        deadline = self._around.monotonic() + HERE_SECONDS

        def is_over() -> bool:
            self.check()
            return self._around.monotonic() > deadline

        try:
            mark(self._job, "ready", world, is_over, self._around.sleep)
        except StoreUnreachable as error:
            self.check()
            raise no_answer(world) from error

    def check(self) -> None:
        """For a newcomer that waits while the members train on for a step or two.

        Raises:
            FormationFailed: a member is lost.
            JobFinished: the job has reached its end.
            Stopped: this worker was told to stop.
        """
        if self._job.is_over():
            raise JobFinished("the job reached its end while this node was being admitted")
        require_whole(self._watcher)
        self._check()


class Joins:
    """Newcomers of the next world, as seen by the members: rank 0 chooses them, and every member prepares their world
    beside the present one (protocol/plan.py).

    Used by two threads: the watcher thread calls `consider`, the training thread all else. No lock is needed: each
    assignment replaces one reference.

    Args:
        uid: of this worker.
        max_nodes, answering, form: as `Membership`'s.
        is_superseded: whether this is rank 0 of a side that stops, and has notified the other members of its world.
    """

    def __init__(
        self,
        job: PeerJob,
        around: Surroundings,
        *,
        uid: str,
        max_nodes: int,
        answering: Callable[[tuple[Member, ...]], tuple[Member, ...]],
        form: Callable[[World], FormedGroup] | None,
        is_superseded: Callable[[], bool],
    ) -> None:
        self._job, self._around, self._uid = job, around, uid
        self._max_nodes, self.news = max_nodes, QueueNews(job, around)
        self._answering, self._form, self._is_superseded = answering, form, is_superseded
        self._ready: tuple[tuple[str, ...], float] = ((), 0.0)
        """uids of the workers that are ready, and since when the list is unchanged"""
        self._admits: tuple[Member, ...] = ()
        """newcomers for the next world without a plan, chosen on rank 0's watcher thread"""
        self._plan: Plan | None = None
        """newcomers for the next world with a plan, chosen there too"""
        self._num_failed_plans = 0
        self._preparation: Preparation | None = None
        self._has_said_now = False
        """whether this rank has voted to end the present world for newcomers without a plan"""
        self._absent: tuple[Member, ...] = ()
        """newcomers that did not answer an invitation: left out of the next plan if there are others"""
        self.admissible: Callable[[World, list[Node]], list[Node]] = lambda _world, nodes: nodes
        """returns those of some ready nodes that may be admitted now"""
        self.why_closed_in: Callable[[World], str | None] = lambda _world: None
        """returns why a world that begins admits no newcomer; "" if only its first step can tell"""
        self.why_closed: str | None = None
        """why the present world admits no newcomer, "" until that is known; the training thread sets it"""

    def enter(self, world: World) -> None:
        """Note that this worker is now a member of `world`."""
        self.why_closed = self.why_closed_in(world)
        self._plan, self._num_failed_plans, self._admits, self._has_said_now, self._absent = None, 0, (), False, ()
        self.keep_preparation(world)

    # --- in a step ----------------------------------------------------------------------------------------------------

    def vote(self) -> int:
        """Return this member's vote on newcomers in the step in hand: 0, SOON or NOW (protocol/plan.py).

        Raises: the error that ended the preparing thread, if that was a bug.
        """
        plan = self._plan  # read before the preparation: the watcher thread sets that first
        preparation = self._preparation
        if preparation is not None and preparation.crash is not None:
            raise preparation.crash
        if self._admits:
            self._has_said_now = True
            return NOW
        if plan is None:
            return NOW if self.why_outlived() is not None else 0
        is_stale = self._job.world is None or plan.parent != self._job.world.uid  # that world has ended in another way
        if preparation is None or is_stale or (preparation.failure is not None and not preparation.is_decided):
            absent = () if preparation is None else preparation.absent
            self._job.entrance.drop(absent)  # until they queue again
            self._absent = (*absent, *(one for one in self._absent if one not in plan.decision.new))
            self._num_failed_plans += preparation is not None and not preparation.absent
            self._plan = None
            self.keep_preparation(None)
            return 0
        if preparation.is_ready:
            return NOW
        return SOON if preparation.is_due else 0

    def follow_vote(self, world: World, vote: int) -> None:
        """Act on rank 0's `vote`, after the commit of its step. Never blocks."""
        self.why_closed = self.why_closed or None
        if self._plan is not None:
            if vote == SOON and self._preparation is not None:
                self._preparation.may_form = True
        elif vote == 0:
            self.keep_preparation(None)
        elif vote == SOON and self._preparation is None:
            preparation = self._begin_preparation()
            self._around.start("ahead", lambda: preparation.run(lambda: preparation.follow(world)))

    # --- the choice ---------------------------------------------------------------------------------------------------

    @property
    def is_end_due(self) -> bool:
        """Whether the present world should end: to admit newcomers without a plan, or because another side goes on."""
        return bool(self._admits) or self.why_outlived() is not None

    def why_outlived(self) -> str | None:
        """Return why the present world should end, other than for newcomers; None where it need not."""
        world = self._job.world
        has_moved = world is not None and world.rank == 0 and self._job.place.has_moved(world.uid)
        return "another side goes on" if self._is_superseded() else ENTRY_MOVED if has_moved else None

    def newcomers(self, world: World) -> tuple[Member, ...]:
        """Return the newcomers that the next world after `world` admits without a plan."""
        inside = {member.uid for member in world.members}
        return tuple(member for member in self._admits if member.uid not in inside)

    def consider(self, world: World) -> None:
        """Choose the newcomers of the next world, if any are ready. Runs on rank 0's watcher thread."""
        if self._plan is not None:
            return
        inside = {member.node for member in world.members}
        ready_now = ready_nodes(self._job.queue(), world.members)
        nodes = self.admissible(world, fitting_nodes(ready_now, self._job.facts.known.get("agreement")))
        if (why := self.why_closed) is not None:
            for node in nodes if why else ():
                self.news.send_once(node, why)
            nodes = []
        for chosen in ([node for node in nodes if without_nodes_of(self._absent, node)], nodes):
            back = [node for node in chosen if node[0].node in inside]  # workers of nodes that train: they need no room
            new = [node for node in chosen if node[0].node not in inside]
            room = self._room(world, len(new))
            for node in new[room:]:
                self.news.send_no_room(node, len(inside), self._max_nodes)
            ready = tuple(member for node in (*back, *new[:room]) for member in node)
            if ready:  # else try the absent ones again
                break
        uids, now = tuple(member.uid for member in ready), self._around.monotonic()
        if uids != self._ready[0]:
            self._ready = (uids, now)
        if not ready or now - self._ready[1] < SETTLE_SECONDS:
            self._admits = ()
            return
        answering = self._answering(ready)
        gone = [member for member in ready if member not in answering]
        self._job.entrance.drop(gone)
        admits = without_nodes_of(gone, ready)
        if self._job.world is not world or self.why_closed is not None:  # both may have changed meanwhile
            return
        if admits and self._can_prepare(world, admits):
            self._prepare(world, admits)
        else:
            self._admits = admits

    def _room(self, world: World, wanted: int) -> int:
        """Return for how many new nodes there is room. Probes the spares: nothing else notices one that is gone."""
        workers, spares = world.members[: world.world_size], world.members[world.world_size :]
        room = self._max_nodes - len({member.node for member in world.members})
        if wanted > room and spares:
            room = self._max_nodes - len({member.node for member in (*workers, *self._answering(spares))})
        return max(0, room)

    def _can_prepare(self, world: World, newcomers: tuple[Member, ...]) -> bool:
        """Whether the next world's group can be formed beside the present one: it takes gloo, and no spares."""
        if self._has_said_now or self._admits or self._num_failed_plans >= MOST_FAILED_PLANS:
            return False
        workers = (*world.members, *newcomers)
        has_spares = replace(world, members=workers).num_spares > 0
        # Below --min-nodes no member trains, and there is no step to vote in.
        is_ready = world.num_nodes >= world.min_nodes and all(worker.forms_ahead for worker in workers)
        return is_ready and not has_spares and common_backend(workers) == "gloo"

    def _prepare(self, world: World, newcomers: tuple[Member, ...]) -> None:
        """Plan the next world, and begin to prepare it as rank 0. The plan is stored beside rank 0, where the other
        members look."""
        decision = Decision(
            next_generation([world.generation, *(one.max_generation for one in newcomers)]),
            self._around.draw_uid(),
            ranks=tuple(range(len(world.members))),
            new=newcomers,
            facts=dict(self._job.facts.known),
        )
        plan = Plan(world.uid, world.members, decision)
        planned = plan.world_for(self._uid)
        assert planned is not None, "it is rank 0"
        self._job.ask_beside(world.me, lambda beside: beside.put("plan", plan.to_json()))
        preparation = self._begin_preparation()
        self._plan = plan
        self._around.start("ahead", lambda: preparation.run(lambda: preparation.lead(world, plan, planned)))

    # --- the preparation ----------------------------------------------------------------------------------------------

    def consider_invitation(self) -> None:
        """As a newcomer: join the preparation that rank 0 has planned, on a thread beside the wait in the queue.
        Raises: the error that ended such a thread, if that was a bug."""
        text = self._job.told("plan")
        if not text:
            return
        plan = Plan.from_json(text)
        planned, before = plan.world_for(self._uid), self._preparation
        if before is not None and before.crash is not None:
            raise before.crash
        if planned is None or (before is not None and before.world is not None and before.world.uid == planned.uid):
            return
        preparation = self._begin_preparation()
        preparation.world = planned
        self._around.start("ahead", lambda: preparation.run(lambda: preparation.accept(plan, planned)))

    @property
    def prepared(self) -> Plan | None:
        """The prepared plan of the next world; None where there is none. Ask when rank 0 has voted NOW: that decides
        what another member has prepared. Rank 0's vote may have been for newcomers without a plan; it may have a newer
        plan that is not ready."""
        preparation = self._preparation
        if preparation is None or (self._plan is not None and not preparation.is_ready):
            return None
        return preparation.plan

    def announce_leaving(self) -> None:
        """Tell the prepared world that this worker leaves, as it may be decided with this worker in it. If no store
        answers, that world will lose this worker as a peer."""
        preparation = self._preparation
        if preparation is not None and preparation.world is not None:
            with suppress(StoreUnreachable):
                self._job.announcements.announce_leaving(preparation.world)

    def take_formed(self, world: World) -> FormedGroup | None:
        """Return the process group of `world` if it was formed ahead. The caller owns it from now on."""
        preparation, self._preparation = self._preparation, None
        if preparation is None or preparation.world is None or preparation.world.uid != world.uid:
            return None
        self._job.place.note(world.uid, is_shared=preparation.is_place_shared)
        formed: FormedGroup | None = preparation.formed
        return formed

    def keep_preparation(self, world: World | None) -> None:
        """Release what was prepared, unless it is for `world`."""
        preparation = self._preparation
        if preparation is None:
            return
        if world is None or preparation.world is None or preparation.world.uid != world.uid:
            self._preparation = None
            self._around.start("release", preparation.cancel)  # ending a group takes time

    def _begin_preparation(self) -> Preparation:
        assert self._form is not None, "asked before"
        self.keep_preparation(None)
        around = self._around
        self._preparation = Preparation(self._job, self._form, around.monotonic, around.sleep, around.reach)
        return self._preparation
