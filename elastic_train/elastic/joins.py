"""How a worker comes into its job, and how those inside admit it: the join queue, the choice, the preparation."""

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
"""its workers in the join queue"""
WHY_SECONDS = 1.0
"""after which it asks for that again"""
IN_QUEUE = "in the join queue: a job is running, whose members admit this node between two steps"
SETTLE_SECONDS = 0.5
"""nodes that become ready within so short a time are admitted together"""
ENTRY_MOVED = "the last world's claims were lost with the job's entry in etcd; now they count again"
MOST_FAILED_PLANS = 2
"""in one world; then newcomers are admitted in the plain way, for which everybody stops"""


class Arrival:
    """One worker's way in: it finds the job, waits in the join queue, and makes ready for the world that admits it.
    For the training thread alone.

    Args:
        check: raises Stopped where this worker was told to stop.
        log: prints a line for the person at this node, of what is being waited for.
        begin_timeout: seconds until this worker has to be in a world, where nobody else looks after that.
        too_late: says what was not done in that time.
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
        """Find the job, or the place where it begins. Blocks until there is one.

        Raises:
            Stopped: this worker was told to stop. StoreUnreachable, FormationFailed: there never will be one.
            JobFinished: the others have reached the end.
        """
        reports = self._report_times()
        while not self._job.entrance.find():
            self._check()
            self._pause(reports, f"waiting for the job at {self._job.finder.describe()}")

    def wait_in_queue(self, mine: Waiting, look: Callable[[], None]) -> Admitted:
        """Stand in the join queue until the job admits this worker. Blocks as long as others train without it.

        Args:
            look: called again and again meanwhile.

        Raises:
            JobFinished: the others reached the end meanwhile.
            FormationFailed, StoreUnreachable: it does not come about.
            Stopped: this worker was told to stop.
            What `look` raises.
        """
        reports, why, ask_at, has_told = self._report_times(), None, 0.0, self._job.entrance.is_first
        while True:
            self._check()
            self._watcher.do(Activity.FORM)
            place = self._job.look_from_queue(mine)
            if isinstance(place, Admitted):
                self._job.entrance.leave()
                return place
            look()
            if not has_told:  # it has said nothing while it was imported and built
                has_told = True
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
        """Between two looks. Raises: FormationFailed where the time to begin is over. JobFinished."""
        now = self._around.monotonic()
        if now > self._begin_by:
            raise FormationFailed(self._too_late)
        if reports.are_due(now):
            if self._job.entrance.host_store is None:
                self._around.require_unfinished()
            self._log(waiting_for)
        self._around.sleep(QUEUE_POLL_SECONDS)

    def report_ready(self, world: World) -> None:
        """As a newcomer of a world that was prepared: the others may come.

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
        """For a newcomer that waits for the others, who train on for a step or two.

        Raises:
            FormationFailed: one of them is lost.
            JobFinished: they have reached the end.
            Stopped: this worker was told to stop.
        """
        if self._job.is_over():
            raise JobFinished("the job reached its end while this node was being admitted")
        require_whole(self._watcher)
        self._check()


class Joins:
    """Newcomers of the next world, seen from inside: rank 0 chooses them, and every member prepares their world beside
    the present one (protocol/plan.py).

    For two threads: the watcher's calls `consider`, the training thread all else. There is no lock: what is assigned is
    one reference.

    Args:
        uid: of this worker.
        max_nodes, answering, form: as `Membership`'s.
        is_superseded: whether this is rank 0 of a side that stops, and the others of its world are told.
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
        self._world: World | None = None
        """the present one"""
        self._ready: tuple[tuple[str, ...], float] = ((), 0.0)
        """uids of the workers that were seen ready, and since when it is these"""
        self._admits: tuple[Member, ...] = ()
        """newcomers for the next world, chosen by rank 0's watcher, where nothing is prepared for them"""
        self._plan: Plan | None = None
        """the same where it is prepared"""
        self._num_failed_plans = 0
        self._preparation: Preparation | None = None
        self._has_said_now = False
        """whether the present world ends for newcomers for whom nothing is prepared"""
        self._absent: tuple[Member, ...] = ()
        """newcomers that did not answer when they were invited: left out of the next plan where others are ready"""
        self.admissible: Callable[[World, list[Node]], list[Node]] = lambda _world, nodes: nodes
        """those of some nodes that are ready which need not wait for anything else"""
        self.why_closed_in: Callable[[World], str | None] = lambda _world: None
        """why nobody can be admitted to a world that begins, "" where it takes a first step to know"""
        self.why_closed: str | None = None
        """why nobody can be admitted to the present world, "" until that is known; the training thread sets it"""

    def enter(self, world: World) -> None:
        """This worker is a member of `world` from now on."""
        self.why_closed = self.why_closed_in(world)
        self._plan, self._num_failed_plans, self._admits, self._has_said_now, self._world = None, 0, (), False, world
        self._absent = ()
        self.keep_preparation(world)

    # --- in a step ----------------------------------------------------------------------------------------------------

    def vote(self) -> int:
        """What this member says of newcomers in the step in hand: 0, SOON or NOW (protocol/plan.py).

        Raises: what ended the thread that prepares them, if that was a bug.
        """
        plan = self._plan  # read before what prepares it, which the watcher's thread sets first
        preparation = self._preparation
        if preparation is not None and preparation.crash is not None:
            raise preparation.crash
        if self._admits:
            self._has_said_now = True
            return NOW
        if plan is None:
            return NOW if self.why_outlived() is not None else 0
        is_stale = self._world is None or plan.parent != self._world.uid  # that world has ended otherwise
        if preparation is None or is_stale or (preparation.failure is not None and not preparation.is_decided):
            absent = () if preparation is None else preparation.absent
            self._job.entrance.drop(absent)  # until they come again
            self._absent = (*absent, *(one for one in self._absent if one not in plan.decision.new))
            self._num_failed_plans += preparation is not None and not preparation.absent
            self._plan = None
            self.keep_preparation(None)
            return 0
        if preparation.is_ready:
            return NOW
        return SOON if preparation.is_due else 0

    def follow_vote(self, world: World, vote: int) -> None:
        """After the commit of a step: `vote` is what rank 0 said in it. Never blocks."""
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
        """Whether the present world should end: newcomers are to be admitted in the plain way, or others go on."""
        return bool(self._admits) or self.why_outlived() is not None

    def why_outlived(self) -> str | None:
        """Why the present world should end for no newcomer's sake, for a person; None where it need not."""
        world = self._world
        has_moved = world is not None and world.rank == 0 and self._job.place.has_moved(world.uid)
        return "another side goes on" if self._is_superseded() else ENTRY_MOVED if has_moved else None

    def newcomers(self, world: World) -> tuple[Member, ...]:
        """Those whom the next world of `world` admits, where nothing is prepared for them."""
        inside = {member.uid for member in world.members}
        return tuple(member for member in self._admits if member.uid not in inside)

    def consider(self, world: World) -> None:
        """Choose whom the next world admits, when somebody is ready. Rank 0's watcher calls it."""
        if self._plan is not None:
            return
        inside = {member.node for member in world.members}
        ready_now = ready_nodes(self._job.queue(), world.members)
        nodes = self.admissible(world, fitting_nodes(ready_now, self._job.facts.known.get("agreement")))
        if (why := self.why_closed) is not None:
            for node in nodes if why else ():
                self.news.tell_once(node, why)
            nodes = []
        for chosen in ([node for node in nodes if without_nodes_of(self._absent, node)], nodes):
            back = [node for node in chosen if node[0].node in inside]  # to others of their nodes, which needs no room
            new = [node for node in chosen if node[0].node not in inside]
            room = self._room(world, len(new))
            for node in new[room:]:
                self.news.tell_no_room(node, len(inside), self._max_nodes)
            ready = tuple(member for node in (*back, *new[:room]) for member in node)
            if ready:  # else those are tried again that were absent
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
        if self._world is not world or self.why_closed is not None:  # by now
            return
        if admits and self._can_prepare(world, admits):
            self._prepare(world, admits)
        else:
            self._admits = admits

    def _room(self, world: World, wanted: int) -> int:
        """For how many nodes. Nobody else takes notice of a spare that is gone."""
        workers, spares = world.members[: world.world_size], world.members[world.world_size :]
        room = self._max_nodes - len({member.node for member in world.members})
        if wanted > room and spares:
            room = self._max_nodes - len({member.node for member in (*workers, *self._answering(spares))})
        return max(0, room)

    def _can_prepare(self, world: World, newcomers: tuple[Member, ...]) -> bool:
        """Whether the next world's group can be formed beside the present one: gloo's can, and spares take no part."""
        if self._has_said_now or self._admits or self._num_failed_plans >= MOST_FAILED_PLANS:
            return False
        workers = (*world.members, *newcomers)
        has_spares = replace(world, members=workers).num_spares > 0
        # Below --min-nodes nobody trains, and there is no step to vote in.
        is_ready = world.num_nodes >= world.min_nodes and all(worker.forms_ahead for worker in workers)
        return is_ready and not has_spares and common_backend(workers) == "gloo"

    def _prepare(self, world: World, newcomers: tuple[Member, ...]) -> None:
        """Plan the next world, and begin with it as rank 0. The plan is written down beside it, where the others
        look."""
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
        """As a newcomer: take part in what rank 0 plans, beside the waiting for it. Raises: what ended the thread that
        did, if that was a bug."""
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
        """Of the next world, which was prepared; None where none was. Asked when rank 0 has voted NOW: what another
        member has prepared is decided then. Rank 0's own vote may have been for newcomers for whom nothing is prepared,
        and a plan that it has begun since is not ready."""
        preparation = self._preparation
        if preparation is None or (self._plan is not None and not preparation.is_ready):
            return None
        return preparation.plan

    def announce_leaving(self, reason: str) -> None:
        """Tell the world that is prepared, which may be decided with this worker in it; if nobody answers, it will lose
        this one as a peer."""
        preparation = self._preparation
        if preparation is not None and preparation.world is not None:
            with suppress(StoreUnreachable):
                self._job.announcements.announce(preparation.world, f"left/{preparation.world.rank}", reason)

    def take_formed(self, world: World) -> FormedGroup | None:
        """The process group of `world`, where it was formed ahead. It is the caller's from now on."""
        preparation, self._preparation = self._preparation, None
        if preparation is None or preparation.world is None or preparation.world.uid != world.uid:
            return None
        self._job.place.note(world.uid, is_shared=preparation.is_place_shared)
        formed: FormedGroup | None = preparation.formed
        return formed

    def keep_preparation(self, world: World | None) -> None:
        """Let go of what was prepared, unless it is for this world."""
        preparation = self._preparation
        if preparation is None:
            return
        if world is None or preparation.world is None or preparation.world.uid != world.uid:
            self._preparation = None
            self._around.start("release", preparation.cancel)  # a group takes its time to end

    def _begin_preparation(self) -> Preparation:
        assert self._form is not None, "asked before"
        self.keep_preparation(None)
        around = self._around
        self._preparation = Preparation(self._job, self._form, around.monotonic, around.sleep, around.reach)
        return self._preparation
