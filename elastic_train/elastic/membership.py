"""One worker's part in the membership of its job: it finds the job, agrees with the others, watches them, and leaves.

One class for every way in which workers meet. What they share is behind `protocol.job.Job`: stores of the members
themselves under c10d and in fixed worlds, etcd, or memory. Nothing here connects anywhere; the job, the pings, clock,
sleep and randomness are arguments, so that the simulator in tests/ drives this very code.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.distributed import PrefixStore, Store

from elastic_train.branches import BRANCH, POSITION, Branch, Branches, Position, id_of
from elastic_train.elastic.formed_group import FormedGroup
from elastic_train.errors import FormationFailed, JobFinished, LeftOut, StoreUnreachable, Superseded
from elastic_train.protocol.agreement import Agreement, Decided, Decision, Fatal, LeftBehind, Liveness, Presence, Wait
from elastic_train.protocol.encounters import Encounters
from elastic_train.protocol.job import Admitted, Job, Over
from elastic_train.protocol.join_queue import Waiting, ready_nodes, without_nodes_of
from elastic_train.protocol.liveness import Watcher
from elastic_train.protocol.plan import Plan, Preparation, mark
from elastic_train.rules import (
    NOW,
    SOON,
    Activity,
    Failure,
    common_backend,
    disagreement,
    judge_error,
    next_generation,
    require_agreement,
)
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.version import VERSION
from elastic_train.world import Member, World

POLL_SECONDS = 0.001
READY_POLL_SECONDS = 0.00005
"""the same for each member of a world while all of them ask rank 0, which answers some 20,000 times a second"""
QUEUE_POLL_SECONDS = 0.03
SPARE_POLL_SECONDS = 0.01
"""between two looks of a spare; a part of what a recovery takes that waits for it"""
WORD_SECONDS = 10.0
"""between two lines to the person who waits with us"""
ASK_SECONDS = 1.0
"""after which a member that was told nothing asks the others"""
ASK_AGAIN_SECONDS = 0.001
"""and again, for each member of the world: all of them may ask the same ones"""
SETTLE_SECONDS = 0.5
"""nodes that become ready within so short a time are admitted together"""
SETTLED_REDUCTIONS = 2
MOST_FAILED_PLANS = 2
"""in one world; then newcomers are admitted in the plain way, for which everybody stops"""
PROOF_SECONDS = 0.5
"""that the proposer of a large world waits for others to prove a death that it sees"""
FIND_ATTEMPTS = 5
AT_LAST_SECONDS = 120.0
"""for saving the state of a worker that is about to be ended"""


@dataclass(frozen=True)
class Change:
    """How one world became the next."""

    lost: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    joined: tuple[Member, ...] = ()
    """admitted in place"""
    reason: str | None = None
    """why the world ended, where a watcher ended it"""
    seconds_meet: float = 0.0


class Limits(Protocol):
    """What the configuration says of waiting."""

    @property
    def formation_timeout(self) -> float: ...
    @property
    def peer_timeout(self) -> float: ...
    @property
    def wait_timeout(self) -> float: ...


@dataclass(frozen=True)
class Surroundings:
    """Everything that a member needs of the machine; the simulator has its own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw_uid: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    start: Callable[[str, Callable[[], None]], None] = lambda name, task: threading.Thread(
        target=task, name=name, daemon=True
    ).start()


class Membership:
    """Created once per worker. Its methods are for the training thread; they block as they say.

    Args:
        job: what the workers share.
        watcher: not yet started.
        limits: `formation_timeout`, `peer_timeout` and `wait_timeout`, in seconds.
        uid: of this process.
        address: where its pings are answered.
        store_address: of the store that it serves.
        local_world_size: workers of this node.
        max_nodes: how many nodes the job may have.
        max_world_size: how many members a step has work for; further ones are spares. The same on all members.
        check: raises Stopped where this worker was told to stop.
        say: tells the person in front of this node what is being waited for.
        answering: which of some members answer a probe.
        order: this worker's place among the others, where a launcher has given one.
        begin_timeout: seconds until this worker has to be in a world, where nobody else looks after that.
        too_late: says what was not done in that time.
        sockets: those of the process group, which the watcher breaks off.
        group_store: where the process group of a world meets; raises FormationFailed where its rank 0 is dead.
        form: makes the process group of a world beside the present one, on any thread; None where that cannot be.
        encounters: looks for other branches of the run; None where a side never goes on as one.
    """

    def __init__(
        self,
        job: Job,
        watcher: Watcher,
        limits: Limits,
        *,
        uid: str,
        address: tuple[str, int],
        store_address: tuple[str, int],
        local_world_size: int,
        max_nodes: int,
        max_world_size: int | None,
        check: Callable[[], None],
        say: Callable[[str], None],
        answering: Callable[[tuple[Member, ...]], tuple[Member, ...]],
        order: int = 0,
        begin_timeout: float = math.inf,
        too_late: str = "",
        sockets: GroupSockets,
        group_store: Callable[[World], Store],
        form: Callable[[World], FormedGroup] | None = None,
        encounters: Encounters | None = None,
        surroundings: Surroundings = Surroundings(),
    ) -> None:
        self.job = job
        self.watcher = watcher
        self.uid, self.address, self.store_address = uid, address, store_address
        self._limits = limits
        self._local_world_size, self._order = local_world_size, order
        self._max_nodes, self._max_world_size = max_nodes, max_world_size
        self._check, self._say, self._answering = check, say, answering
        self._around = surroundings
        self._too_late, self._begin_by = too_late, surroundings.monotonic() + begin_timeout
        self.sockets = sockets
        self._group_store, self._form, self._encounters = group_store, form, encounters
        self._me: Member | None = None
        self._world: World | None = None
        self._facts: dict[str, str] = {}
        self._num_reductions = 0
        self._ready: tuple[tuple[str, ...], float] = ((), 0.0)
        """uids of the workers that were seen ready, and since when it is these"""
        self._admits: tuple[Member, ...] = ()
        """newcomers for the next world, chosen by rank 0's watcher, where nothing is prepared for them"""
        self._plan: Plan | None = None
        """the same where it is prepared"""
        self._num_failed_plans = 0
        self._preparation: Preparation | None = None
        self._absent: tuple[Member, ...] = ()
        """newcomers that did not answer when they were invited"""
        self.has_settled = False
        """whether a world with this worker in it was settled"""
        self.came_later = False
        """whether others of this job trained before this worker was admitted"""
        self.at_last: Callable[[], str] = lambda: "there is nothing to save"
        """called before the process ends without its training thread; returns what a person should know then"""
        self.progress: Callable[[], tuple[Branches, int] | None] = lambda: None
        """branches and committed steps of this worker's state, for any thread; None while it has none"""
        self.may_not_go_on: Callable[[str], None] = lambda _why: None
        """called once when this side waits for votes; the state should be saved then"""

    # --- the job ------------------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Find the job, or the place where it begins. Blocks until there is one.

        Raises:
            Stopped: this worker was told to stop. StoreUnreachable, FormationFailed: there never will be one.
        """
        next_word = self._around.monotonic() + WORD_SECONDS
        while not self.job.find():
            self._check()
            now = self._around.monotonic()
            self._require_time_to_begin(now)
            if now > next_word:
                next_word = now + 3 * WORD_SECONDS
                self._say(f"waiting for the job at {self.job.where()}")
            self._around.sleep(QUEUE_POLL_SECONDS)

    def _require_time_to_begin(self, now: float) -> None:
        if now > self._begin_by:
            raise FormationFailed(self._too_late)

    def agreed_once(self, name: str, proposal: str) -> str:
        """The first `proposal` that any member of this job ever made under `name`; all later ones read it."""
        for attempts_left in reversed(range(FIND_ATTEMPTS)):
            try:
                self._facts[name] = self.job.create_fact(name, proposal)
                break
            except StoreUnreachable:  # the host of the join queue is gone: there may be another one
                if attempts_left == 0:
                    raise
                self.find()
        return self._facts[name]

    def published(self, name: str) -> str | None:
        """What a member of this job has made known with `agreed_once`; None where none has."""
        found = self.job.fact(name)
        if found is not None:
            self._facts[name] = found
        return found

    @property
    def branch(self) -> Branch | None:
        """On which this member's world is; None on the main line."""
        return Branch.from_json(self._facts.get(BRANCH))

    # --- worlds -------------------------------------------------------------------------------------------------------

    def first_world(self, me: Member, require: Callable[[Position], None] = lambda _theirs: None) -> World:
        """Stand in the join queue until the job admits this worker. Blocks as long as others train without it.

        Args:
            me: without uid and addresses, which are filled in.
            require: raises Refused where this worker may not join those who are so far.

        Raises:
            Refused: this worker's flags, data or versions are not those of the run; names both values.
            JobFinished: the others reached the end meanwhile.
            FormationFailed, StoreUnreachable: it does not come about.
        """
        self._me = me = replace(me, address=self.address, store=self.store_address, uid=self.uid)
        mine = Waiting(me, self._local_world_size, self._order)
        now = self._around.monotonic()
        next_word = now + WORD_SECONDS
        while True:
            self._check()
            self.watcher.do(Activity.FORM)
            place = self.job.look_from_queue(mine)
            if isinstance(place, Admitted):
                self.job.leave_queue()
                self.came_later = place.came_later
                self._enter(place.world, place.facts, None)
                return place.world
            if isinstance(place, Over):
                raise JobFinished("the job reached its end while this node waited to be admitted")
            reference = self.published("agreement")
            if reference is not None:
                require_agreement(me.agreement, json.loads(reference), "the run")
            if self._encounters is not None and (said := self.job.host_says(POSITION)) is not None:
                require(Position.from_json(said))
            self._consider_invitation()
            now = self._around.monotonic()
            self._require_time_to_begin(now)
            if now > next_word:
                next_word = now + 3 * WORD_SECONDS
                self._say(place.text)
            self._around.sleep(QUEUE_POLL_SECONDS)

    def _consider_invitation(self) -> None:
        """As a newcomer: take part in what rank 0 plans, beside the waiting for it."""
        text = self.job.planned()
        if not text or self._form is None:
            return
        plan = Plan.from_json(text)
        planned, before = plan.world_for(self.uid, None), self._preparation
        if planned is None or (before is not None and before.world is not None and before.world.uid == planned.uid):
            return
        preparation = self._begin_preparation()
        preparation.world = planned
        self._around.start("ahead", lambda: preparation.run(lambda: preparation.accept(plan, planned)))

    def next_world(
        self, world: World, *, has_formed: bool, is_by_vote: bool = False, is_planned: bool = False
    ) -> tuple[World, Change]:
        """Agree with the survivors of `world`, whose process group is gone, on what follows. Blocks until each old
        member has come or is out, and as long as this side may not go on without those that are silent. Returns at once
        where it was agreed on before.

        Args:
            has_formed: whether the process group stood; if it never did, two members may be cut off from each other.
            is_by_vote: whether all who train have ended the world at the step of a vote.
            is_planned: whether that was to admit newcomers.

        Raises:
            LeftOut: the others went on without this worker. Superseded: another branch goes before this one.
            Stopped: this worker was told to stop meanwhile.
            FormationFailed: the job cannot go on, or has waited for `wait_timeout`.
            StoreUnreachable: the store is gone, and the job with it.
        """
        started = self._around.monotonic()
        watcher = self.watcher
        prepared = self._preparation.plan if is_planned and self._preparation is not None else None
        if prepared is not None:  # rank 0 has voted NOW, so it is decided
            watcher.leave()
            self._require_no_better()
            return self._follow(world, prepared.decision, started)
        self._keep_preparation(None)  # after a loss the survivors may differ by a step
        watcher.announce_broken(is_by_vote=is_by_vote)
        watcher.leave()
        self._require_no_better()
        self._expect_answer()
        found = self._agree(world, has_formed, started)
        if isinstance(found, Fatal):
            raise FormationFailed(found.why)
        decision = found.decision
        fatal = self.job.heard(world, "fatal")  # whoever ended the job may be among the dead of this decision
        if fatal is not None:
            raise FormationFailed(fatal)
        return self._follow(world, decision, started)

    def _follow(self, world: World, decision: Decision, started: float) -> tuple[World, Change]:
        watcher = self.watcher
        following = decision.world_for(world.me.uid, world, self._max_world_size)
        if following is None:
            self.job.release(world, decision)
            raise LeftOut(
                f"the others went on as generation {decision.generation} without this worker"
                + (f": {watcher.reason}" if watcher.reason else "")
            )
        reason = watcher.reason or "; ".join(watcher.verdicts.values()) or None
        self._enter(following, decision.facts, decision)
        return following, Change(
            lost=tuple(world.members[rank] for rank in decision.lost),
            left=tuple(world.members[rank] for rank in decision.left),
            joined=decision.new,
            reason=reason,
            seconds_meet=self._around.monotonic() - started,
        )

    def _agree(self, world: World, has_formed: bool, started: float) -> Decided | Fatal:
        patience = 3 * self._limits.peer_timeout + 2 * self.watcher.pace.slowest_step
        if world.is_spare:  # it knows nothing of how long a step takes, and leaves that to those who do
            patience *= 10
        patient_since = started

        def has_run_out(factor: float) -> bool:
            return self._around.monotonic() - patient_since > factor * patience

        agreement = self._agreement(world, has_formed, has_run_out)
        waits_since: float | None = None
        # Where some did not come and nobody was lost, they may have gone on before this member came.
        is_late = not has_formed and self.watcher.reason is None
        next_word, next_ask = started + WORD_SECONDS, started if is_late else started + ASK_SECONDS
        while True:
            found = agreement.look()
            if isinstance(found, Decided | Fatal):
                return found
            if isinstance(found, LeftBehind):
                raise LeftOut(f"the others went on as generation {found.generation} without this worker")
            self.watcher.check()
            now = self._around.monotonic()
            if now - patient_since > patience / 2:
                proposer = found.ranks[0] if found.ranks else None
                if self.watcher.is_anybody_at_work(world, proposer, patience / 2):
                    patient_since = now
            if found.votes or now - started > 2 * self._limits.peer_timeout:
                self._check()  # not before: the others may decide a world with this member, which then leaves by vote
            if found.votes:  # they may come back: nothing but their silence counts against them from now on
                self._require_no_better()
                patient_since = now
                self.watcher.forgive()
                agreement = self._agreement(world, has_formed, has_run_out)
            agreement.asks_others = bool(found.votes) or now >= next_ask
            if now >= next_ask:
                next_ask = now + len(world.members) * ASK_AGAIN_SECONDS
            waits_since = self._note_votes(world, found, waits_since)
            if waits_since is not None and now - waits_since > self._limits.wait_timeout:
                names = ", ".join(self._names(world, found.votes))
                raise FormationFailed(
                    f"{names} did not answer for {self._limits.wait_timeout:.0f} s (--wait-timeout), and without them "
                    "this side may not go on"
                )
            if now > next_word:
                next_word = now + WORD_SECONDS
                self._say(f"waiting for {self._describe(world, found)}, {now - started:.0f} s so far")
            self._around.sleep(1.0 if waits_since is not None else POLL_SECONDS)

    def _expect_answer(self) -> None:
        if self.watcher.is_store_silent:
            self.job.expect_answer(self.watcher.store_silence)
            self.watcher.note_answer()

    def _agreement(self, world: World, has_formed: bool, has_run_out: Callable[[float], bool]) -> Agreement:
        watcher = self.watcher
        is_anybody_known_dead = bool(watcher.verdicts) or any(map(watcher.is_refused, world.members))
        unreachable = watcher.lost_neighbours(world)
        if not is_anybody_known_dead and (watcher.reason is not None or not has_formed):
            unreachable = watcher.unreachable(world)

        def status(rank: int) -> Liveness:
            is_over = has_run_out(1.0)
            if is_over and agreement.has_come(rank):
                # It may be to propose, and wait itself for those who have not come: it is given up after them.
                is_over = rank < world.rank and has_run_out(2.0)
            return watcher.status(world.members[rank], rank, is_over)

        proven_by = self._around.monotonic() + PROOF_SECONDS
        agreement = Agreement(
            self.job,
            world,
            Presence(world.generation, unreachable),
            status=status,
            is_heard=lambda rank: watcher.is_heard(world.members[rank]),
            newcomers=lambda: self._newcomers(world),
            facts=self._facts,
            draw_uid=self._around.draw_uid,
            watched=lambda: watcher.watched,
            watch_too=watcher.watch_too,
            witnesses=lambda rank: watcher.witnesses(world, rank) if self._around.monotonic() < proven_by else (),
        )
        return agreement

    def _note_votes(self, world: World, found: Wait, since: float | None) -> float | None:
        """Since when this side has waited for votes without which it may not go on; None where it does not."""
        if not found.votes:
            return since if found.ranks and since is not None else None
        if since is None:
            names = ", ".join(self._names(world, found.votes))
            self.may_not_go_on(f"{names} cannot be reached and may train on: waiting for contact")
        return self._around.monotonic() if since is None else since

    def _names(self, world: World, uids: tuple[str, ...]) -> list[str]:
        names = {member.uid: member.name for member in world.members}
        return [names.get(uid, uid) for uid in uids]

    def _describe(self, world: World, found: Wait) -> str:
        if found.votes:
            return ", ".join(self._names(world, found.votes))
        return "rank " + ", ".join(map(str, found.ranks)) if found.ranks else "the others"

    def _newcomers(self, world: World) -> tuple[Member, ...]:
        inside = {member.uid for member in world.members}
        return tuple(member for member in self._admits if member.uid not in inside)

    def _enter(self, world: World, facts: Mapping[str, str], decision: Decision | None) -> None:
        self._facts.update(facts)
        self.job.enter(world, self._facts, decision)
        self.watcher.adopt(world)
        self._world, self._admits, self._num_reductions = world, (), 0
        self._plan, self._num_failed_plans = None, 0
        self._keep_preparation(world)

    def wait_for_workers(self, world: World) -> None:
        """Wait until all who train are about to make the process group, so that making it takes milliseconds, and
        until those whom this world has left out have stopped.

        Between the agreed list and this point a member may have to wait for a disk. A death here is seen at once; while
        the group is made it would cost gloo's timeout.

        Raises:
            FormationFailed: one died, or has not come within the peer timeout.
        """
        self.wait_for_left_out(world)
        try:
            self._wait_at_rank_0(world)
        except StoreUnreachable as error:
            raise _no_answer(world) from error

    def _wait_at_rank_0(self, world: World) -> None:
        """Raises: as `wait_for_workers`; StoreUnreachable where rank 0 does not answer."""
        clock, peer_timeout = self._around.monotonic, self._limits.peer_timeout
        self.job.say_ready(world)
        deadline = clock() + 2 * peer_timeout
        while not self.job.are_ready(world):
            self._check_whole()
            if clock() > deadline:
                ranks = ", ".join(map(str, self.job.not_ready(world)))
                raise FormationFailed(f"rank {ranks} did not come to the process group in {2 * peer_timeout:.0f} s")
            self._around.sleep(max(POLL_SECONDS, world.world_size * READY_POLL_SECONDS))

    def wait_for_left_out(self, world: World) -> None:
        """Until those whom this world has left out have stopped (law 2)."""
        while (seconds := self.job.seconds_to_wait(world, self.watcher.links.answered())) > 0:
            self._check_whole()
            self._around.sleep(min(seconds, 0.05))

    def _check_whole(self) -> None:
        self.watcher.check()
        if self.watcher.reason is not None:
            raise FormationFailed(f"a member was lost before the process group was made: {self.watcher.reason}")

    # --- within a world -----------------------------------------------------------------------------------------------

    def note_reduction(self) -> None:
        """A reduction is about to begin: those before it have finished. After the second one the world is settled."""
        self._num_reductions += 1
        self.watcher.num_reductions = self._num_reductions
        if self._num_reductions == SETTLED_REDUCTIONS + 1 and self._world is not None:
            self.job.settle(self._world)
            self.has_settled = True

    def leave(self, world: World, reason: str) -> None:
        """Tell the others that this worker leaves on purpose, so that nobody waits for it or looks for it."""
        self.job.announce(world, f"left/{world.rank}", reason)
        preparation = self._preparation
        if preparation is not None and preparation.world is not None:  # it may be decided, with this worker in it
            self.job.announce(preparation.world, f"left/{preparation.world.rank}", reason)
        if not world.is_spare:  # nobody's step needs a spare
            self.watcher.announce_broken(is_by_vote=reason == "stopped")

    def stand_by(self, world: World) -> str | None:
        """Wait, as a spare of `world`, until it ends. Returns what `announce_finished` was given; None where a member
        was lost or left and the others agree on the next world.

        Raises:
            Stopped: this worker was told to stop.
            StoreUnreachable: the store is gone, and the job with it.
        """
        while True:
            self.watcher.check()
            if self.watcher.is_store_lost:  # what is read below may be a copy
                self._expect_answer()
            # The watcher breaks the world off, too, where the store is gone and a peer with it.
            is_broken = self.watcher.reason is not None
            finished = self.job.heard(world, "finished")  # after it: who finished and went looks lost
            if finished is not None or is_broken:
                return finished
            self._check()
            self._around.sleep(SPARE_POLL_SECONDS)

    def announce_finished(self, world: World, result: str) -> None:
        """Tell the spares of the present world that the run is through, and with what."""
        self.job.announce(world, "finished", result)

    # --- joins --------------------------------------------------------------------------------------------------------

    def join_vote(self) -> int:
        """What this member says of newcomers in the step in hand: 0, SOON or NOW (protocol/plan.py).

        Raises: what ended the thread that prepares them, if that was a bug.
        """
        preparation = self._preparation
        if preparation is not None and preparation.crash is not None:
            raise preparation.crash
        if self._admits:
            return NOW
        if self._plan is None:
            return NOW if self._is_superseded else 0
        is_stale = self._world is None or self._plan.parent != self._world.uid  # that world has ended otherwise
        if preparation is None or is_stale or (preparation.failure is not None and not preparation.is_decided):
            self._num_failed_plans += preparation is not None and not preparation.absent
            self._absent = () if preparation is None else preparation.absent
            self._plan = None
            self._keep_preparation(None)
            return 0
        if preparation.is_ready:
            return NOW
        return SOON if preparation.is_due else 0

    def follow_join_vote(self, world: World, vote: int) -> None:
        """After the commit of a step: `vote` is what rank 0 said in it. Never blocks."""
        if self._plan is not None:
            if vote == SOON and self._preparation is not None:
                self._preparation.may_form = True
        elif vote == 0:
            self._keep_preparation(None)
        elif vote == SOON and self._preparation is None and self._form is not None:
            preparation = self._begin_preparation()
            self._around.start(
                "ahead", lambda: preparation.run(lambda: preparation.follow(world, self._max_world_size))
            )

    def _begin_preparation(self) -> Preparation:
        assert self._form is not None, "asked before"
        self._keep_preparation(None)
        self._preparation = Preparation(self.job, self._form, self._around.monotonic, self._around.sleep)
        return self._preparation

    def _keep_preparation(self, world: World | None) -> None:
        """Let go of what was prepared, unless it is for this world."""
        preparation = self._preparation
        if preparation is None:
            return
        if world is None or preparation.world is None or preparation.world.uid != world.uid:
            self._preparation = None
            self._around.start("release", preparation.cancel)  # a group takes its time to end

    def take_formed(self, world: World) -> FormedGroup | None:
        """The process group of `world`, where it was formed ahead. It is the caller's from now on."""
        preparation, self._preparation = self._preparation, None
        if preparation is None or preparation.world is None or preparation.world.uid != world.uid:
            return None
        self.job.note_place(world, is_shared=preparation.is_place_shared)
        formed: FormedGroup | None = preparation.formed
        return formed

    def is_ready_for(self, world: World) -> None:
        """As a newcomer of a world that was prepared: the others may come.

        Raises: as `check_arrival`.
        """
        self.check_arrival()
        try:
            mark(self.job, "ready", world)
        except StoreUnreachable as error:
            self.check_arrival()
            raise _no_answer(world) from error

    def check_arrival(self) -> None:
        """For a newcomer that waits for the others, who train on for a step or two.

        Raises:
            FormationFailed: one of them is lost.
            JobFinished: they have reached the end.
            Stopped: this worker was told to stop.
        """
        if self.job.is_over():
            raise JobFinished("the job reached its end while this node was being admitted")
        self._check_whole()
        self._check()

    @property
    def can_take_in(self) -> bool:
        """Whether `next_world` would find members that are ready to join, or that are lost; for a world that waits,
        and that the watcher expects."""
        return bool(self._admits) or self.watcher.reason is not None or self._is_superseded

    def consider_admission(self, world: World) -> None:
        """Choose whom the next world admits, when somebody is ready. Rank 0's watcher calls it."""
        if self._plan is not None:
            return
        self.job.drop(self._absent)  # until they come again
        self._absent = ()
        inside = {member.node for member in world.members}
        text = self._facts.get("agreement")
        reference = None if text is None else json.loads(text)
        nodes = [
            node
            for node in ready_nodes(self.job.queue(), world.members)
            if reference is None or all(disagreement(one.agreement, reference) is None for one in node)
        ]
        back = [node for node in nodes if node[0].node in inside]  # to others of their nodes, which take no more room
        new = [node for node in nodes if node[0].node not in inside]
        ready = tuple(member for node in (*back, *new[: max(0, self._max_nodes - len(inside))]) for member in node)
        uids, now = tuple(member.uid for member in ready), self._around.monotonic()
        if uids != self._ready[0]:
            self._ready = (uids, now)
        if not ready or now - self._ready[1] < SETTLE_SECONDS:
            self._admits = ()
            return
        answering = self._answering(ready)
        gone = [member for member in ready if member not in answering]
        self.job.drop(gone)
        admits = without_nodes_of(gone, ready)
        if self._world is world and admits and self._can_prepare(world, admits):
            self._prepare(world, admits)
        elif self._world is world:
            self._admits = admits

    def _can_prepare(self, world: World, newcomers: tuple[Member, ...]) -> bool:
        """Whether the next world's group can be formed beside the present one: gloo's can, and spares take no part."""
        if self._form is None or self._admits or self._num_failed_plans >= MOST_FAILED_PLANS:
            return False
        workers = (*world.members, *newcomers)
        has_spares = world.num_spares > 0 or (self._max_world_size is not None and len(workers) > self._max_world_size)
        # Below --min-nodes nobody trains, and there is no step to vote in.
        return not has_spares and world.num_nodes >= world.min_nodes and common_backend(workers) == "gloo"

    def _prepare(self, world: World, newcomers: tuple[Member, ...]) -> None:
        """Plan the next world, and begin with it as rank 0. The plan is written down beside it, where the others
        look."""
        decision = Decision(
            next_generation([world.generation, *(one.max_generation for one in newcomers)]),
            self._around.draw_uid(),
            ranks=tuple(range(len(world.members))),
            new=newcomers,
            facts=dict(self._facts),
        )
        plan = Plan(world.uid, world.members, decision)
        planned = plan.world_for(self.uid, self._max_world_size)
        assert planned is not None, "it is rank 0"
        self.job.beside(world.me).put("plan", plan.to_json())
        preparation = self._begin_preparation()
        self._plan = plan
        self._around.start("ahead", lambda: preparation.run(lambda: preparation.lead(world, plan, planned)))

    def judge(self, error_text: str, is_communication: bool, step: int, world: World) -> Failure:
        """Whose error it was that ended `step`; an own one is told to the others, who may meet it at the same step."""
        if is_communication:
            return Failure.PEER
        node = "/".join(map(str, world.me.node))  # two workers of one node are one witness: its disk may be broken
        key = f"failed-{step}"
        first = self.job.heard(world, key)
        if first is None:
            mine = json.dumps([node, step, error_text])
            with suppress(StoreUnreachable):  # rank 0 is gone: whoever has heard of it has a copy
                first = self.job.world_store(world).create(f"{self.job.world_key(world)}/{key}", mine)
            first = first or mine
            self.job.announce(world, key, first)
        first_node, failed_step, _ = json.loads(first)
        verdict = judge_error(False, step, (str(first_node), int(failed_step)), node)
        if verdict is Failure.JOB:
            self.announce_fatal(world, f"step {step} fails on every member that tries it: {error_text}")
        return verdict

    def announce_fatal(self, world: World, why: str) -> None:
        """The job cannot go on: whoever agrees on another world reads this and ends."""
        self.job.announce(world, "fatal", why)

    def give_up(self, why: str, warn: Callable[[str], None]) -> None:
        """On the watcher's thread: the training thread cannot be reached any more. Ends the process."""
        try:
            warn(why)
            # On a thread of its own: a disk, or a GPU that waits as well, may never answer.
            saver = threading.Thread(target=lambda: warn(self.at_last()), name="at-last", daemon=True)
            saver.start()
            saver.join(AT_LAST_SECONDS)
        finally:
            os._exit(1)

    def group_store(self, world: World) -> Store:
        """Where the process group of `world` meets: the store of its rank 0, below a prefix that no other world has,
        on a connection of its own, so that it can be broken off.

        Raises:
            FormationFailed: rank 0 is dead.
        """
        return PrefixStore(f"group/{world.key}", self._group_store(world))

    def tend(self, world: World | None, is_spokesman: bool) -> None:
        """Background tasks, on the watcher's thread."""
        self.job.tend(world, is_spokesman=is_spokesman, headless=self.watcher.headless)
        present = self._world
        if self._encounters is not None and present is not None:
            self._encounters.tend(present, self._position, self.branch)
        if world is not None and is_spokesman:
            self.consider_admission(world)

    @property
    def _is_superseded(self) -> bool:
        """Whether this is rank 0 of a side that stops, and the others of its world are told."""
        world = self._world
        return self._encounters is not None and self._encounters.is_told and world is not None and world.rank == 0

    def _require_no_better(self) -> None:
        winner = None if self._encounters is None else self._encounters.winner()
        if winner is not None:
            raise Superseded(winner)

    def _position(self) -> Position | None:
        world, branch, progress = self._world, self.branch, self.progress()
        if world is None or world.is_spare or progress is None or world.me.store is None:
            return None
        branches, step = progress
        if id_of(branches) != ("" if branch is None else branch.id):
            return None  # the world has not brought its members together yet
        rank = -1 if branch is None else branch.rank
        return Position(branches, step, world.me.host, world.me.store, rank, self._facts.get("run_uid"))

    def end_together(self, world: World) -> None:
        """Until all who train are through with their last collective: one whose peer closes its sockets meanwhile would
        take it for dead. Blocks for as long as --peer-timeout at most.
        """
        clock, key = self._around.monotonic, f"{self.job.world_key(world)}/through"
        deadline = clock() + self._limits.peer_timeout
        with suppress(StoreUnreachable):  # then rank 0 has seen all, and is gone
            store = self.job.world_store(world)
            store.put(f"{key}/{world.rank}", "")
            others = {f"{key}/{rank}": member for rank, member in enumerate(world.workers) if rank != world.rank}
            missing = list(others) if world.rank == 0 else [f"{key}/all"]
            while missing and clock() < deadline:
                found = zip(missing, store.get_many(missing), strict=True)
                missing = [one for one, text in found if text is None and not self._is_gone(others.get(one))]
                self._around.sleep(max(POLL_SECONDS, world.world_size * READY_POLL_SECONDS) if missing else 0.0)
            if world.rank == 0:
                store.put(f"{key}/all", "")

    def _is_gone(self, member: Member | None) -> bool:
        return member is not None and self.watcher.is_refused(member)

    def finish(self, world: World) -> None:
        """At the end of training: tell those in the join queue."""
        if world.rank == 0:
            with suppress(StoreUnreachable):  # the run is finished all the same
                self.job.finish(world)

    def close(self) -> None:
        self.watcher.stop()
        self.sockets.release()
        self.job.close(self._me)


def _no_answer(world: World) -> FormationFailed:
    return FormationFailed(f"{world.members[0].name} (rank 0) does not answer")


def new_token() -> str:
    """A name that no other job has."""
    return uuid.uuid4().hex[:12]


def versions() -> dict[str, str]:
    """What must be the same on all members for them to talk to each other and to train alike."""
    return {"torch": str(torch.__version__), "elastic_train": VERSION}
