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

from elastic_train.errors import FormationFailed, JobFinished, LeftOut, StoreUnreachable
from elastic_train.liveness import Watcher
from elastic_train.process_group import GroupSockets
from elastic_train.protocol.agreement import Agreement, Decided, Decision, Fatal, LeftBehind, Presence, Status, Wait
from elastic_train.protocol.job import Admitted, Job, Over
from elastic_train.protocol.join_queue import Waiting, ready_nodes, without_nodes_of
from elastic_train.rules import Activity, Failure, disagreement, judge_error, require_agreement
from elastic_train.world import Member, World

POLL_SECONDS = 0.003
QUEUE_POLL_SECONDS = 0.03
SPARE_POLL_SECONDS = 0.01
"""between two looks of a spare; a part of what a recovery takes that waits for it"""
WORD_SECONDS = 10.0
"""between two lines to the person who waits with us"""
ASK_SECONDS = 1.0
"""after which a member that was told nothing asks the others"""
SETTLE_SECONDS = 0.5
"""nodes that become ready within so short a time are admitted together"""
SETTLED_REDUCTIONS = 2
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
        begin_timeout: seconds until the first world has to stand, where nobody else looks after that.
        sockets: those of the process group, which the watcher breaks off.
        group_store: where the process group of a world meets; raises FormationFailed where its rank 0 is dead.
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
        sockets: GroupSockets,
        group_store: Callable[[World], Store],
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
        self._begin_timeout, self._begin_by = begin_timeout, surroundings.monotonic() + begin_timeout
        self.sockets = sockets
        self._group_store = group_store
        self._me: Member | None = None
        self._world: World | None = None
        self._facts: dict[str, str] = {}
        self._num_reductions = 0
        self._ready: tuple[tuple[str, ...], float] = ((), 0.0)
        """uids of the workers that were seen ready, and since when it is these"""
        self._admits: tuple[Member, ...] = ()
        """newcomers for the next world, chosen by rank 0's watcher"""
        self.came_later = False
        """whether others of this job trained before this worker was admitted"""
        self.at_last: Callable[[], str] = lambda: "there is nothing to save"
        """called before the process ends without its training thread; returns what a person should know then"""
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
            raise FormationFailed(
                f"not all workers came within {self._begin_timeout:.0f} s (--formation-timeout); the log of one that "
                "is missing says why"
            )

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

    # --- worlds -------------------------------------------------------------------------------------------------------

    def first_world(self, me: Member) -> World:
        """Stand in the join queue until the job admits this worker. Blocks as long as others train without it.

        Args:
            me: without uid and addresses, which are filled in.

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
            now = self._around.monotonic()
            self._require_time_to_begin(now)
            if now > next_word:
                next_word = now + 3 * WORD_SECONDS
                self._say(place.text)
            self._around.sleep(QUEUE_POLL_SECONDS)

    def next_world(self, world: World, *, has_formed: bool) -> tuple[World, Change]:
        """Agree with the survivors of `world`, whose process group is gone, on what follows. Blocks until each old
        member has come or is out, and as long as this side may not go on without those that are silent.

        Args:
            has_formed: whether the process group stood; if it never did, two members may be cut off from each other.

        Raises:
            LeftOut: the others went on without this worker.
            Stopped: this worker was told to stop meanwhile.
            FormationFailed: the job cannot go on, or has waited for `wait_timeout`.
            StoreUnreachable: the store is gone, and the job with it.
        """
        started = self._around.monotonic()
        watcher = self.watcher
        watcher.announce_broken()
        watcher.leave()
        self._expect_answer()
        found = self._agree(world, has_formed, started)
        if isinstance(found, Fatal):
            raise FormationFailed(found.why)
        decision = found.decision
        fatal = self.job.heard(world, "fatal")  # whoever ended the job may be among the dead of this decision
        if fatal is not None:
            raise FormationFailed(fatal)
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
        patience = 3 * self._limits.peer_timeout + 2 * self.watcher.slowest_step
        if world.is_spare:  # it knows nothing of how long a step takes, and leaves that to those who do
            patience *= 10
        patient_since = started

        def has_run_out(factor: float) -> bool:
            return self._around.monotonic() - patient_since > factor * patience

        agreement = self._agreement(world, has_formed, has_run_out)
        waits_since: float | None = None
        next_word = started + WORD_SECONDS
        while True:
            found = agreement.look()
            if isinstance(found, Decided | Fatal):
                return found
            if isinstance(found, LeftBehind):
                raise LeftOut(f"the others went on as generation {found.generation} without this worker")
            self.watcher.check()
            now = self._around.monotonic()
            if found.votes or now - started > 2 * self._limits.peer_timeout:
                self._check()  # not before: the others may decide a world with this member, which then leaves by vote
            if found.votes:  # they may come back: nothing but their silence counts against them from now on
                patient_since, self.watcher.verdicts = now, {}
                agreement = self._agreement(world, has_formed, has_run_out)
            agreement.asks_others = bool(found.votes) or now - started > ASK_SECONDS
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
        unreachable: tuple[int, ...] = ()
        if not is_anybody_known_dead and (watcher.reason is not None or not has_formed):
            unreachable = watcher.unreachable(world)

        def status(rank: int) -> Status:
            # Who has come and is to propose waits itself for those who have not: it is given up after them.
            factor = 1.0 if rank not in agreement.present else 2.0 if rank < world.rank else math.inf
            return watcher.status(world.members[rank], rank, has_run_out(factor))

        agreement = Agreement(
            self.job,
            world,
            Presence(world.generation, unreachable),
            status=status,
            is_heard=lambda rank: watcher.is_heard(world.members[rank]),
            newcomers=lambda: self._newcomers(world),
            facts=self._facts,
            draw_uid=self._around.draw_uid,
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

    def wait_for_workers(self, world: World) -> None:
        """Wait until all who train are about to make the process group, so that making it takes milliseconds, and
        until those whom this world has left out have stopped.

        Between the agreed list and this point a member may have to wait for a disk. A death here is seen at once; while
        the group is made it would cost gloo's timeout.

        Raises:
            FormationFailed: one died, or has not come within the peer timeout.
        """
        while (seconds := self.job.seconds_to_wait(world, self.watcher.links.answered())) > 0:
            self._check_whole()
            self._around.sleep(min(seconds, 0.05))
        try:
            self._wait_at_rank_0(world)
        except StoreUnreachable as error:
            raise FormationFailed(f"{world.members[0].name} (rank 0) does not answer") from error

    def _wait_at_rank_0(self, world: World) -> None:
        """Raises: as `wait_for_workers`; StoreUnreachable where rank 0 does not answer."""
        clock, peer_timeout = self._around.monotonic, self._limits.peer_timeout
        store, prefix = self.job.world_store(world), f"{self.job.world_key(world)}/ready"
        store.put(f"{prefix}/{world.rank}", "")
        missing = [rank for rank in range(world.world_size) if rank != world.rank]
        deadline = clock() + 2 * peer_timeout
        while missing:
            values = store.get_many([f"{prefix}/{rank}" for rank in missing])
            missing = [rank for rank, value in zip(missing, values, strict=True) if value is None]
            if not missing:
                return
            self._check_whole()
            if clock() > deadline:
                ranks = ", ".join(map(str, missing))
                raise FormationFailed(f"rank {ranks} did not come to the process group in {2 * peer_timeout:.0f} s")
            self._around.sleep(POLL_SECONDS)

    def _check_whole(self) -> None:
        self.watcher.check()
        if self.watcher.reason is not None:
            raise FormationFailed(f"a member was lost before the process group was made: {self.watcher.reason}")

    # --- within a world -----------------------------------------------------------------------------------------------

    def note_reduction(self) -> None:
        """A reduction is about to begin: those before it have finished. After the second one the world is settled."""
        self._num_reductions += 1
        if self._num_reductions == SETTLED_REDUCTIONS + 1 and self._world is not None:
            self.job.settle(self._world)

    def leave(self, world: World, reason: str) -> None:
        """Tell the others that this worker leaves on purpose, so that nobody waits for it or looks for it."""
        self.job.announce(world, f"left/{world.rank}", reason)
        if not world.is_spare:  # nobody's step needs a spare
            self.watcher.announce_broken()

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

    @property
    def is_join_due(self) -> bool:
        """Whether members are to be admitted at the next step boundary."""
        return bool(self._admits)

    @property
    def can_take_in(self) -> bool:
        """Whether `next_world` would find members that are ready to join, or that are lost; for a world that waits,
        and that the watcher expects."""
        return self.is_join_due or self.watcher.reason is not None

    def consider_admission(self, world: World) -> None:
        """Choose whom the next world admits, when somebody is ready. Rank 0's watcher calls it."""
        room = self._max_nodes - len({member.node for member in world.members})
        reference = self._facts.get("agreement")
        inside = {member.uid for member in world.members}
        nodes = [
            node
            for node in ready_nodes(self.job.queue(), inside)
            if reference is None or all(disagreement(one.agreement, json.loads(reference)) is None for one in node)
        ]
        ready = tuple(member for node in nodes[: max(0, room)] for member in node)
        uids, now = tuple(member.uid for member in ready), self._around.monotonic()
        if uids != self._ready[0]:
            self._ready = (uids, now)
        if not ready or now - self._ready[1] < SETTLE_SECONDS:
            self._admits = ()
            return
        answering = self._answering(ready)
        gone = [member for member in ready if member not in answering]
        self.job.drop(gone)
        if self._world is world:
            self._admits = without_nodes_of(gone, ready)

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
        self.job.tend(world, is_spokesman=is_spokesman)
        if world is not None and is_spokesman:
            self.consider_admission(world)

    def finish(self, world: World) -> None:
        """At the end of training: tell those in the join queue."""
        if world.rank == 0:
            with suppress(StoreUnreachable):  # the run is finished all the same
                self.job.finish(world)

    def close(self) -> None:
        self.watcher.stop()
        self.job.close(self._me)


def new_token() -> str:
    """A name that no other job has."""
    return uuid.uuid4().hex[:12]


def versions() -> dict[str, str]:
    """What must be the same on all members for them to talk to each other and to train alike."""
    from elastic_train import __version__

    return {"torch": str(torch.__version__), "elastic_train": __version__}
