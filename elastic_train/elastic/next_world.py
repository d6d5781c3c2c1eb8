"""From one world to the next: what its members agree on at its end, and what nodes in the join queue are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastic_train.branches import Branches
from elastic_train.elastic.barriers import Surroundings, Waits
from elastic_train.elastic.process_group import is_communication_error
from elastic_train.errors import (
    ElasticTrainError,
    FormationFailed,
    JobFailed,
    JobFinished,
    LeftOut,
    StoreUnreachable,
    TrainingDiverged,
    UsageError,
    kind_and_line,
)
from elastic_train.protocol.agreement import Agreement, Decision, LeftBehind, Liveness, Presence, Wait
from elastic_train.protocol.heartbeat import AwakeTime
from elastic_train.protocol.join_queue import ready_nodes
from elastic_train.protocol.liveness import Watcher
from elastic_train.protocol.peers import PeerJob
from elastic_train.rules import Failure
from elastic_train.world import Member, World

WHY_IT_WAITS = "why-it-waits"
"""key of the reason why a worker in the join queue waits, where there is more to it than that the job trains"""
REPORT_SECONDS = 10.0
"""until the first line to the user who waits"""
ASK_SECONDS = 1.0
"""until a member that was told nothing asks the other members"""
ASK_AGAIN_SECONDS = 0.001
"""until it asks again, for each member of the world: all of them may ask the same ones"""
CONTACT_SECONDS = 2.5
"""after this member was suspended: a member that hears it again has reported that by then; it looks once a second"""
PROOF_SECONDS = 0.5
"""for which the proposer of a large world waits for other members to prove a death that it sees"""


@dataclass(frozen=True)
class Lacking:
    """Votes without which a side may not go on."""

    since: float
    """when a vote was first missing, by the monotonic clock"""
    votes: tuple[str, ...]
    """uids of the missing voters, at the last look"""


class QueueNews:
    """Reports from rank 0 to the nodes in the join queue, on its watcher thread. Nothing here blocks, and a worker that
    does not answer gets no report."""

    def __init__(self, job: PeerJob, around: Surroundings) -> None:
        self._job, self._around = job, around
        self._know: set[tuple[str, str]] = set()
        """uids of newcomers, and what each was told by `send_once`"""

    def send(self, node: Sequence[Member], why: str) -> None:
        """Tell a node's workers in the join queue why they are not admitted."""

        def put() -> None:
            for member in node:
                with suppress(StoreUnreachable):
                    self._job.ask_beside(member, lambda beside: beside.put(WHY_IT_WAITS, why))

        self._around.start("why", put)

    def send_to_all(self, world: World, why: str) -> None:
        """Tell all nodes that wait to be admitted to `world`."""
        for node in ready_nodes(self._job.queue(), world.members):
            self.send(node, why)

    def send_once(self, node: Sequence[Member], why: str, about: str | None = None) -> bool:
        """Call `send` and return True, unless the node was told this, or anything with the same `about`, before."""
        told = {(member.uid, about or why) for member in node}
        is_news = not told <= self._know
        if is_news:
            self._know |= told
            self.send(node, why)
        return is_news

    def send_no_room(self, node: Sequence[Member], num_inside: int, max_nodes: int) -> None:
        """Tell a node once that the job has no room for it."""
        full = f"{num_inside} of at most {max_nodes} nodes train: this one waits for a place"
        whose = "the --nnodes MIN:MAX of those that train says how many, not this node's"
        self.send_once(node, f"{full} ({whose}; start all of them again to change it)", about="room")


class ReportTimes:
    """Times of the lines to the user who waits: first after REPORT_SECONDS, then every `pause` seconds."""

    def __init__(self, began: float, pause: float = REPORT_SECONDS) -> None:
        self._next, self._pause = began + REPORT_SECONDS, pause

    def are_due(self, now: float) -> bool:
        """Return whether a line is due; the caller then prints it."""
        if now <= self._next:
            return False
        self._next = now + self._pause
        return True


class Survivors:
    """Agreement of a world's members at its end: whose error ended it, and which members the next world has. For the
    training thread alone; nothing is kept between two worlds.

    Args:
        newcomers: those that the next world admits, where no plan was prepared for them.
        check: raises Stopped where this worker was told to stop.
        require_no_better: raises Superseded where another side has precedence over this one.
        holds_state: whether this worker has the run's state.
        leave: `Membership.leave`, of a worker that no vote has ended.
        log: prints a line for the user of this node: what is being waited for.
    """

    def __init__(
        self,
        job: PeerJob,
        watcher: Watcher,
        limits: Waits,
        around: Surroundings,
        *,
        newcomers: Callable[[World], tuple[Member, ...]],
        check: Callable[[], None],
        require_no_better: Callable[[], None],
        holds_state: Callable[[], bool],
        leave: Callable[[World], None],
        log: Callable[[str], None],
    ) -> None:
        self._job, self._watcher, self._limits, self._around = job, watcher, limits, around
        self._newcomers, self._check, self._log = newcomers, check, log
        self._require_no_better, self._holds_state, self._leave = require_no_better, holds_state, leave
        self.may_not_go_on: Callable[[str | None], None] = lambda _why: None
        """called at each look while this side waits for votes, with the reason at the first; it should save the state,
        and not block for long: other members may wait for this one"""

    def judge(self, error: Exception, step: int, world: World) -> Failure:
        """Judge whose error ended `step`, and announce it unless a lost peer caused it. An error of the trained code is
        the job's where another node has one in the same step."""
        if isinstance(error, ElasticTrainError) and not isinstance(error, FormationFailed):
            if isinstance(error, TrainingDiverged | UsageError):  # raised on all that train; a spare must not go on
                with suppress(StoreUnreachable):
                    self._announce_fatal(world, str(error))
            return Failure.JOB
        if is_communication_error(error):
            return Failure.PEER
        node, text = "/".join(map(str, world.me.node)), kind_and_line(error)
        key = f"failed-{step}"
        with suppress(StoreUnreachable):  # where no other member can be told, it is this worker's own
            first = self._job.heard(key)
            if first is None:
                mine = json.dumps([node, step, text])
                with suppress(StoreUnreachable):  # rank 0 is gone; members that have heard of the error have copies
                    first = self._job.world_store(world).create(f"{world.key}/{key}", mine)
                first = first or mine
                self._job.announcements.announce(world, key, first)
            if json.loads(first)[0] != node:  # two workers of one node are one witness: its disk may be broken
                self._announce_fatal(world, f"step {step} fails on every member that tries it: {text}")
                return Failure.JOB
            self._leave(world)  # so that the other members do not wait for this worker
        return Failure.OWN

    def why_left(self, world: World, decision: Decision, progress: tuple[Branches, int] | None) -> str | None:
        """Return the error that a member which has left `world` reported for itself; None where none did.

        Args:
            progress: as `OwnSide.progress` gives it; members may differ by a step.
        """
        step = 0 if progress is None else progress[1]
        nodes = {"/".join(map(str, world.members[rank].node)) for rank in decision.left}
        with suppress(StoreUnreachable):
            for failed_step in (step + 1, step, step + 2) if nodes else ():
                told = self._job.heard(f"failed-{failed_step}")
                node, _, text = ("", 0, "") if told is None else json.loads(told)
                if node in nodes:
                    return f"its error in step {failed_step}: {text}"
        return None

    def _announce_fatal(self, world: World, why: str) -> None:
        """Announce that the job cannot go on: a member that agrees on another world reads this and ends."""
        self._job.announcements.announce(world, "fatal", why)

    def decide(self, world: World, *, has_formed: bool, started: float) -> Decision | None:
        """Return the successor of `world`; None where this spare had lost contact with members that still train in it,
        or have finished. Blocks like `Membership.next_world`, with its `has_formed`; `started` is when that began.

        Raises:
            LeftOut, Superseded, Stopped, FormationFailed, StoreUnreachable: as `Membership.next_world`; JobFailed.
            JobFinished: the job reached its end without this worker.
        """
        found = self._agree(world, has_formed, started)
        fatal = self._job.heard("fatal")  # the member that ended the job may be among its dead
        if fatal is not None:
            raise JobFailed(fatal)
        return found

    def _agree(self, world: World, has_formed: bool, started: float) -> Decision | None:
        limit = 3 * self._limits.peer_timeout + 2 * self._watcher.pace.slowest_step
        if world.is_spare:  # it does not know how long a step takes; those that train give up a member first
            limit *= 10
        counted_from = started

        def has_run_out(factor: float) -> bool:
            return self._around.monotonic() - counted_from > factor * limit

        awake, early_until = AwakeTime(self._around.monotonic, CONTACT_SECONDS), started + CONTACT_SECONDS

        def is_early() -> bool:
            return self._is_before(early_until)

        agreement = self._agreement(world, has_formed, has_run_out, is_early)
        lacking: Lacking | None = None
        # Where some members did not come and none was lost, they may have gone on before this one came.
        is_late = not has_formed and self._watcher.reason is None
        reports, next_ask = ReportTimes(started), started if is_late else started + ASK_SECONDS
        while True:
            if awake.look() > 0:  # it was suspended meanwhile
                early_until = self._around.monotonic() + CONTACT_SECONDS
            if world.is_spare and self._goes_on(world):
                return None
            found = agreement.look()
            awake.restart()
            if isinstance(found, Decision):
                return found
            if isinstance(found, LeftBehind):
                raise LeftOut(f"the others went on as generation {found.generation} without this worker")
            self._watcher.thread.check()
            now = self._around.monotonic()
            if now - counted_from > limit / 2:
                proposer = found.ranks[0] if found.ranks else None
                if self._watcher.is_anybody_at_work(world, proposer, limit / 2):
                    counted_from = now
            if found.votes or now - started > 2 * self._limits.peer_timeout:
                self._check()  # not before: the others may admit this member to a world, which it then leaves by vote
            if found.votes:  # those members may come back: from now on only their silence counts against them
                self._require_no_better()
                if self._job.is_over():
                    raise JobFinished("the job reached its end without this worker")
                counted_from = now
                self._watcher.forgive()
                agreement = self._agreement(world, has_formed, has_run_out, is_early)
            agreement.asks_others = bool(found.votes) or now >= next_ask
            if now >= next_ask:
                next_ask = now + len(world.members) * ASK_AGAIN_SECONDS
            lacking = self._note_votes(world, found, lacking)
            if lacking is not None and now - lacking.since > self._limits.wait_timeout:
                names = ", ".join(self._names(world, lacking.votes))
                raise FormationFailed(
                    f"{names} did not answer for {self._limits.wait_timeout:.0f} s (--wait-timeout), and without them "
                    "this side may not go on"
                )
            if reports.are_due(now):
                self._log(f"waiting for {self._describe(world, found)}, {now - started:.0f} s so far")
            is_refused = not found.votes and not found.ranks  # its ballot was too old; the next one will not be
            self._around.sleep(self._around.poll_seconds if lacking is None or is_refused else 1.0)

    def _goes_on(self, world: World) -> bool:
        """Whether `world`, which this spare takes for broken, goes on, or has finished: then its members are gone."""
        return self._job.is_over() or self._watcher.contacts.are_training(world)

    def _is_before(self, time: float) -> bool:
        return self._around.monotonic() < time

    def _agreement(
        self, world: World, has_formed: bool, has_run_out: Callable[[float], bool], is_early: Callable[[], bool]
    ) -> Agreement:
        watcher, contacts = self._watcher, self._watcher.contacts
        is_anybody_known_dead = bool(watcher.verdicts) or any(map(contacts.is_refused, world.members))
        unreachable = contacts.lost_neighbours(world)
        if not is_anybody_known_dead and (watcher.reason is not None or not has_formed):
            unreachable = contacts.unreachable(world)

        def status(rank: int) -> Liveness:
            is_over = has_run_out(1.0)
            if is_over and agreement.has_come(rank):
                # It may have come as a proposer that waits for missing members: it is given up after those.
                is_over = rank < world.rank and has_run_out(2.0)
            return contacts.status(world.members[rank], watcher.verdicts.get(rank), is_over)

        proven_by = self._around.monotonic() + PROOF_SECONDS
        agreement = Agreement(
            self._job,
            world,
            Presence(world.generation, unreachable, holds_state=self._holds_state()),
            contacts,
            status=status,
            newcomers=lambda: self._newcomers(world),
            facts=self._job.facts.known,
            draw_uid=self._around.draw_uid,
            witnesses=lambda rank: contacts.witnesses(world, rank) if self._is_before(proven_by) else (),
            is_early=is_early,
            reach=self._around.reach,
        )
        return agreement

    def _note_votes(self, world: World, found: Wait, lacking: Lacking | None) -> Lacking | None:
        """Return the votes that this side lacks; None where it lacks none. A look without missing votes changes
        nothing: this side may only have left the proposal to another member."""
        if not found.votes:
            return lacking
        if lacking is None:
            names = ", ".join(self._names(world, found.votes))
            contacts = self._watcher.contacts
            heard = {one.uid for one in world.members if contacts.is_heard(one) and not contacts.is_refused(one)}
            are_heard = heard.issuperset(found.votes)
            what = "can be heard, but do not answer," if are_heard else "cannot be reached"
            self.may_not_go_on(f"{names} {what} and may train on: waiting for contact")
        else:
            self.may_not_go_on(None)
            self._around.require_unfinished()  # those others may have gone for good
        return Lacking(self._around.monotonic() if lacking is None else lacking.since, found.votes)

    def _names(self, world: World, uids: tuple[str, ...]) -> list[str]:
        names = {member.uid: member.name for member in world.members}
        return [names.get(uid, uid) for uid in uids]

    def _describe(self, world: World, found: Wait) -> str:
        if found.votes:
            return ", ".join(self._names(world, found.votes))
        return "rank " + ", ".join(map(str, found.ranks)) if found.ranks else "the others"
