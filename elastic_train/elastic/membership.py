"""One worker's membership in its job: it finds the job, agrees with the other members, watches them, and leaves.

One class serves every rendezvous backend. What the workers share, in stores of their own, is behind `PeerJob`.
Nothing here opens a connection. The job, the pings, clock, sleep and randomness are arguments, so that the simulator in
tests/ drives this very code.
"""

from __future__ import annotations

import json
import math
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import PrefixStore, Store

from elastic_train.branches import BRANCH, POSITION, Branch, Branches, Position, id_of, id_on
from elastic_train.elastic.barriers import Barriers, Surroundings, Waits
from elastic_train.elastic.formed_group import FormedGroup
from elastic_train.elastic.joins import Arrival, Joins
from elastic_train.elastic.next_world import Survivors
from elastic_train.errors import LeftOut, SecondJob, StoreUnreachable, Superseded
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.known_worlds import SETTLED_REDUCTIONS
from elastic_train.protocol.liveness import Watcher
from elastic_train.protocol.other_sides import SUPERSEDED, OtherSides
from elastic_train.protocol.peers import PeerJob
from elastic_train.rules import require_agreement, seconds_to_form
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.version import PROTOCOL, VERSION
from elastic_train.world import Member, World, from_json

FIND_ATTEMPTS = 5
AT_LAST_SECONDS = 120.0
"""limit for saving the state of a worker whose process is about to end"""
END_SECONDS = 15.0
"""limit for threads that still form a group which is no longer needed; gloo gives up after ten seconds"""


@dataclass(frozen=True)
class Change:
    """How one world became the next."""

    lost: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    why_left: str | None = None
    """the error that made a member leave, as it reported it"""
    joined: tuple[Member, ...] = ()
    """newcomers that were admitted"""
    reason: str | None = None
    """why the world ended, where a watcher thread ended it"""
    seconds_meet: float = 0.0


class OwnSide:
    """This member's side of the run, where there may be several sides. It reports how far this side has come, and
    learns that this side must stop.

    Used by two threads: the watcher thread calls `tend`, the training thread all else. No lock is needed: each
    assignment replaces one reference.

    Args:
        other_sides: looks for other sides; None where nobody joins.
        facts: what the job has agreed on, as far as this member knows; the mapping grows.
    """

    def __init__(self, other_sides: OtherSides | None, facts: Mapping[str, str]) -> None:
        self._other_sides, self._facts = other_sides, facts
        self._world: World | None = None
        self._stands = False
        self._has_others = self.may_branch
        """whether there may be other sides"""
        self.progress: Callable[[], tuple[Branches, int] | None] = lambda: None
        """branches and committed steps of this worker's state, for any thread; None while it has none"""

    @property
    def may_branch(self) -> bool:
        """Whether a side may go on as a branch in this job."""
        return self._other_sides is not None and self._other_sides.may_branch

    @property
    def branch(self) -> Branch | None:
        """The branch of this member's world; None on the main line."""
        text = self._facts.get(BRANCH)
        return None if text is None else Branch.from_json(text)

    def enter(self, world: World) -> None:
        """Note that this worker is now a member of `world`."""
        self._world = world

    def tend(self, *, stands: bool) -> None:
        """Do background tasks, on the watcher thread.

        Args:
            stands: whether this member's world has a process group.
        """
        world, other_sides, self._stands = self._world, self._other_sides, stands
        if other_sides is None or world is None:
            return
        other_jobs = other_sides.finder.other_jobs()
        self._has_others |= bool(other_jobs)
        if self._has_others:
            other_sides.tend(world, self._position, self.branch, other_jobs)

    def is_superseded(self) -> bool:
        """Return whether this is rank 0 of a side that stops, and has notified the other members of its world."""
        world = self._world
        if self._other_sides is None or not self._has_others or world is None or world.rank > 0:
            return False
        return self._other_sides.has_notified(world)

    def require_no_better(self) -> None:
        """Raise Superseded where another branch has precedence over this one, SecondJob where another job of this
        run id has."""
        if self._other_sides is None or self._other_sides.own.get(SUPERSEDED) is None:
            return
        mine = self._position()
        winner = self._other_sides.winner(mine)
        if winner is None:
            return
        if winner.run == self._facts.get("run_uid") and winner.id != id_on(self.branch):
            raise Superseded(winner)
        raise SecondJob("which has no state yet" if mine is None else f"at {mine.name}", winner)

    def _position(self) -> Position | None:
        world, branch, progress = self._world, self.branch, self.progress()
        if world is None or world.is_spare or progress is None or world.me.store is None:
            return None
        branches, step = progress
        if id_of(branches) != id_on(branch):
            return None  # the world has not synced its members to one state yet
        rank = -1 if branch is None else branch.rank
        run, job = self._facts.get("run_uid"), self._facts.get("job_token")
        return Position(branches, step, world.me.host, world.me.store, rank, run, job, self._stands)


class Membership:
    """The membership of one worker, created once. Its methods are for the training thread; each says whether it blocks.

    Callers that need only a part hold that part: `arrival`, `joins`, `side`, `survivors`, `barriers`.

    Args:
        job: what the workers share, in their stores.
        watcher: not yet started.
        limits: the timeouts of its waits.
        uid: of this process.
        address: (IP, port) at which it answers pings.
        store_address: (IP, port) of the store that it serves.
        local_world_size: workers of this node.
        max_nodes: how many nodes the job may have.
        check: raises Stopped where this worker was told to stop.
        log: prints a line for the user of this node: what is being waited for.
        answering: returns those of some members that answer a probe.
        order: this worker's rank, where a launcher has given one.
        begin_timeout: seconds within which this worker has to be in a world, where nothing else limits that.
        too_late: the error message after that time.
        sockets: those of the process group; the watcher thread closes them to abort the group.
        group_store: returns the store in which the process group of a world meets, with that timeout; raises
            FormationFailed where the world's rank 0 is dead.
        form: makes the process group of a world beside the present one, on any thread; None where that is impossible.
        other_sides: as `OwnSide`'s.
    """

    def __init__(
        self,
        job: PeerJob,
        watcher: Watcher,
        limits: Waits,
        *,
        uid: str,
        address: tuple[str, int],
        store_address: tuple[str, int],
        local_world_size: int,
        max_nodes: int,
        check: Callable[[], None],
        log: Callable[[str], None],
        answering: Callable[[tuple[Member, ...]], tuple[Member, ...]],
        order: int = 0,
        begin_timeout: float = math.inf,
        too_late: str = "",
        sockets: GroupSockets,
        group_store: Callable[[World, timedelta], Store],
        form: Callable[[World], FormedGroup] | None = None,
        other_sides: OtherSides | None = None,
        surroundings: Surroundings,
    ) -> None:
        self.job, self.watcher, self.sockets = job, watcher, sockets
        self.uid, self.address, self.store_address = uid, address, store_address
        self._local_world_size, self._order = local_world_size, order
        self._clock, self._finish, self._group_store = surroundings.monotonic, surroundings.finish, group_store
        self._num_reductions = self._num_unformed = 0
        """reductions in the present world; earlier worlds in a row that had the same members and no step"""
        self.has_settled = False
        """whether a world with this worker in it was settled, or had it as a spare, which is in no reduction"""
        self.came_later = False
        """whether others of this job trained before this worker was admitted"""
        self.awaited: str | None = None
        """uid of the run of the newest job in whose join queue this worker has waited in vain"""
        self.at_last: Callable[[], str] = lambda: "there is nothing to save"
        """called before the process ends without its training thread; returns a line for the user"""
        self.arrival = Arrival(
            job, watcher, surroundings, check=check, log=log, begin_timeout=begin_timeout, too_late=too_late
        )
        self.side = OwnSide(other_sides, job.facts.known)
        self.joins = Joins(
            job, surroundings, uid=uid, max_nodes=max_nodes, answering=answering, form=form,
            is_superseded=self.side.is_superseded,
        )  # fmt: skip
        self.survivors = Survivors(
            job, watcher, limits, surroundings, newcomers=self.joins.newcomers, check=check, log=log,
            require_no_better=self.side.require_no_better, leave=partial(self.leave, is_by_vote=False),
            holds_state=lambda: self.side.progress() is not None,
        )  # fmt: skip
        self.barriers = Barriers(job, watcher, limits, surroundings, check)

    # --- the job ------------------------------------------------------------------------------------------------------

    def agreed_once(self, name: str, proposal: str) -> str:
        """Return the first `proposal` that any member of this job ever made under `name`; later ones are ignored."""
        for _ in range(FIND_ATTEMPTS - 1):
            with suppress(StoreUnreachable):
                return self.job.facts.create(name, proposal)
            self.arrival.find()  # the host of the join queue is gone: find another one
        return self.job.facts.create(name, proposal)

    def published(self, name: str) -> str | None:
        """Return what a member has published under `name` with `agreed_once`; None where none has."""
        return self.job.facts.find(name)

    # --- worlds -------------------------------------------------------------------------------------------------------

    def first_world(self, me: Member, require: Callable[[Position], None] = lambda _theirs: None) -> World:
        """Wait in the join queue until the job admits this worker. Blocks as long as the job trains without it.

        Args:
            me: without uid and addresses; they are filled in here.
            require: raises Refused where this worker may not join members at that position.

        Raises:
            Refused: this worker's flags, data or versions are not those of the run; names both values.
            JobFinished: the job reached its end meanwhile.
            FormationFailed, StoreUnreachable: no world with this worker comes about.
        """
        me = replace(me, address=self.address, store=self.store_address, uid=self.uid)

        def look() -> None:
            reference = self.published("agreement")
            if reference is not None:
                require_agreement(me.agreement, json.loads(reference))
                self.awaited = self.published("run_uid")  # at each look: that job may have begun after this worker came
            if self.side.may_branch and (said := self.job.facts.host_says(POSITION)) is not None:
                require(from_json(Position, said))
            self.joins.consider_invitation()

        place = self.arrival.wait_in_queue(Waiting(me, self._local_world_size, self._order), look)
        self.came_later = place.came_later
        self.awaited = None if place.came_later else self.awaited
        self._enter(place.world, place.facts, None)
        return place.world

    def next_world(
        self, world: World, *, has_formed: bool, is_by_vote: bool = False, is_planned: bool = False
    ) -> tuple[World, Change]:
        """Agree with the survivors of `world`, whose process group is gone, on the next world. Blocks until each old
        member has come or is out, and as long as this side may not go on without silent ones. Returns at once where
        the next world is already agreed on; and `world` itself, where a spare had only lost contact with it.

        Args:
            has_formed: whether the process group stood; if it never did, two members may be cut off from each other.
            is_by_vote: whether all members that train have ended the world at the step of a vote.
            is_planned: whether the vote was to admit newcomers.

        Raises:
            LeftOut: the job went on without this worker. Superseded, SecondJob: as `OwnSide.require_no_better`.
            Stopped: this worker was told to stop meanwhile.
            FormationFailed: the job cannot go on, or has waited for `wait_timeout`.
            StoreUnreachable: the store is gone, and the job with it.
        """
        started, watcher, joins = self._clock(), self.watcher, self.joins
        prepared = joins.prepared if is_planned else None
        if prepared is not None:  # rank 0 has voted NOW, so the prepared world is decided
            watcher.leave()
            self.side.require_no_better()
            return self._follow(world, prepared.decision, started)
        joins.keep_preparation(None)  # after a loss the survivors may differ by a step
        watcher.announce_broken(is_by_vote=is_by_vote)
        watcher.leave()
        self.side.require_no_better()
        decision = self.survivors.decide(world, has_formed=has_formed, started=started)
        if decision is None:
            self._enter(world, {}, None)  # discards what was reported of its end
            return world, Change()
        return self._follow(world, decision, started)

    def _follow(self, world: World, decision: Decision, started: float) -> tuple[World, Change]:
        watcher = self.watcher
        following = decision.world_for(world.me.uid, world)
        if following is None:
            self.job.release(world, decision)
            why = f": {watcher.reason}" if watcher.reason else ""
            error = LeftOut(f"the others went on as generation {decision.generation} without this worker{why}")
            error.by = decision.uid
            raise error
        reason = watcher.reason or "; ".join(watcher.verdicts.values()) or self.joins.why_outlived()
        self._enter(following, decision.facts, decision)
        return following, Change(
            lost=tuple(world.members[rank] for rank in decision.lost),
            left=tuple(world.members[rank] for rank in decision.left),
            joined=decision.new,
            why_left=self.survivors.why_left(world, decision, self.side.progress()),
            reason=reason,
            seconds_meet=self._clock() - started,
        )

    def _enter(self, world: World, facts: Mapping[str, str], decision: Decision | None) -> None:
        before = self.job.world
        self.job.enter(world, facts, decision)
        self.watcher.adopt(world)
        is_again = before is not None and not self._num_reductions and before.uids == world.uids
        self._num_unformed, self._num_reductions = self._num_unformed + 1 if is_again else 0, 0
        self.has_settled |= world.is_spare
        self.side.enter(world)
        self.joins.enter(world)

    def group_store(self, world: World) -> Store:
        """Return the store in which the process group of `world` meets: that of its rank 0, below a prefix of this
        world alone. The connection is new, so that the watcher can close it.

        Raises:
            FormationFailed: rank 0 is dead.
        """
        return PrefixStore(f"group/{world.key}", self._group_store(world, self.forming_timeout))

    @property
    def forming_timeout(self) -> timedelta:
        """The timeout of making the process group of the present world."""
        assert self.job.world is not None, "it is in one"
        return timedelta(seconds=seconds_to_form(self.job.world.world_size, self._num_unformed))

    # --- within a world -----------------------------------------------------------------------------------------------

    def vote(self) -> int:
        """Return this member's vote on newcomers in a reduction that is about to begin; those before it have finished.
        After two the world is settled. Raises: as `Joins.vote`."""
        self._num_reductions += 1
        if self._num_reductions == SETTLED_REDUCTIONS + 1 and self.job.world is not None:
            self.job.settle(self.job.world)
            self.has_settled = True
        return self.joins.vote()

    def leave(self, world: World, *, is_by_vote: bool = True) -> None:
        """Tell the other members that this worker leaves on purpose, so that they neither wait for it nor probe it."""
        self.job.announcements.announce_leaving(world)
        self.joins.announce_leaving()
        if not world.is_spare:  # no step needs a spare
            self.watcher.announce_broken(is_by_vote=is_by_vote)

    def tend(self, world: World | None) -> None:
        """Do background tasks, on the watcher thread."""
        self.job.tend(world, headless=self.watcher.headless)
        self.side.tend(stands=world is not None)
        if world is not None and world.rank == 0:
            self.joins.consider(world)

    def give_up(self, why: str, warn: Callable[[str], None]) -> None:
        """End the process from the watcher thread, when the training thread cannot be reached any more."""
        try:
            warn(why)
            # On a thread of its own: a disk or a GPU may never answer.
            saver = threading.Thread(target=lambda: warn(self.at_last()), name="at-last", daemon=True)
            saver.start()
            saver.join(AT_LAST_SECONDS)
        finally:
            os._exit(1)

    def close(self) -> None:
        """Stop all threads and close all connections. Blocks while a thread forms a group, END_SECONDS at most."""
        self.watcher.thread.stop()
        self.joins.keep_preparation(None)
        self.sockets.release()
        self.job.close()
        self._finish(END_SECONDS)


def new_token() -> str:
    """Return a name that no other job has."""
    return uuid.uuid4().hex[:12]


def versions() -> dict[str, str]:
    """What must be equal on all members so that they understand each other and train alike."""
    return {"torch": str(torch.__version__), "elastic_train": VERSION, "elastic_train's protocol": str(PROTOCOL)}
