"""From one world to the next: what the members of a world agree on at its end, and where they wait for each other."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from elastic_train.errors import FormationFailed, LeftOut, StoreUnreachable
from elastic_train.protocol.agreement import Agreement, Decided, Decision, Fatal, LeftBehind, Liveness, Presence, Wait
from elastic_train.protocol.job import Job
from elastic_train.protocol.liveness import Watcher
from elastic_train.rules import Failure, judge_error, seconds_to_form
from elastic_train.world import Member, World

POLL_SECONDS = 0.001
READY_POLL_SECONDS = 0.00005
"""the same for each member of a world while all of them ask rank 0, which answers some 20,000 times a second"""
SPARE_POLL_SECONDS = 0.01
"""between two looks of a spare; a part of what a recovery takes that waits for it"""
REPORT_SECONDS = 10.0
"""before the first line to the person who waits with us"""
ASK_SECONDS = 1.0
"""after which a member that was told nothing asks the others"""
ASK_AGAIN_SECONDS = 0.001
"""and again, for each member of the world: all of them may ask the same ones"""
PROOF_SECONDS = 0.5
"""that the proposer of a large world waits for others to prove a death that it sees"""


class Limits(Protocol):
    """What the configuration says of waiting."""

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
    finish: Callable[[float], None] = lambda _seconds: None
    """waits so long at most for all that was started to end"""
    reach: Callable[[str, World], None] = lambda _point, _world: None
    """told at the points of an agreement and a join at which a drill may inject a fault, on any thread"""


@dataclass(frozen=True)
class Lacking:
    """Votes without which a side may not go on."""

    since: float
    """when it first lacked any, by the monotonic clock"""
    votes: tuple[str, ...]
    """uids, of the last time that it asked"""


class ReportTimes:
    """When the person who waits with us is told what for: first after REPORT_SECONDS, then every `pause` seconds."""

    def __init__(self, began: float, pause: float = REPORT_SECONDS) -> None:
        self._next, self._pause = began + REPORT_SECONDS, pause

    def are_due(self, now: float) -> bool:
        """The caller tells it then."""
        if now <= self._next:
            return False
        self._next = now + self._pause
        return True


class Survivors:
    """Agreement of the members that a world has left: whose error ended it, and who is in the next one. For the
    training thread alone; it keeps nothing between two worlds.

    Args:
        facts: what the job has agreed on, as far as this member knows; it grows.
        newcomers: those whom the next world of this one admits, where nothing was prepared for them.
        check: raises Stopped where this worker was told to stop.
        require_no_better: raises Superseded where another side goes before this one.
        log: prints a line for the person at this node, of what is being waited for.
    """

    def __init__(
        self,
        job: Job,
        watcher: Watcher,
        limits: Limits,
        around: Surroundings,
        *,
        facts: dict[str, str],
        newcomers: Callable[[World], tuple[Member, ...]],
        check: Callable[[], None],
        require_no_better: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        self._job, self._watcher, self._limits, self._around = job, watcher, limits, around
        self._facts, self._newcomers = facts, newcomers
        self._check, self._require_no_better, self._log = check, require_no_better, log
        self.may_not_go_on: Callable[[str], None] = lambda _why: None
        """called once when this side waits for votes; the state should be saved then"""

    def judge(self, error_text: str, is_communication: bool, step: int, world: World) -> Failure:
        """Find out whose error ended `step`. An own error is announced: where others have it at the same step, it is
        the job's."""
        if is_communication:
            return Failure.PEER
        node = "/".join(map(str, world.me.node))  # two workers of one node are one witness: its disk may be broken
        key = f"failed-{step}"
        first = self._job.heard(world, key)
        if first is None:
            mine = json.dumps([node, step, error_text])
            with suppress(StoreUnreachable):  # rank 0 is gone: members that have heard of it have copies
                first = self._job.world_store(world).create(f"{self._job.world_key(world)}/{key}", mine)
            first = first or mine
            self._job.announce(world, key, first)
        first_node, failed_step, _ = json.loads(first)
        verdict = judge_error(False, step, (str(first_node), int(failed_step)), node)
        if verdict is Failure.JOB:
            self.announce_fatal(world, f"step {step} fails on every member that tries it: {error_text}")
        return verdict

    def announce_fatal(self, world: World, why: str) -> None:
        """The job cannot go on: a member that agrees on another world reads this and ends."""
        self._job.announce(world, "fatal", why)

    def decide(self, world: World, *, has_formed: bool, started: float) -> Decision | None:
        """What follows `world`; None where this spare of it has not heard those who train, and they still do. Blocks,
        and takes `has_formed`, as `Membership.next_world`; `started` when that did.

        Raises:
            LeftOut, Superseded, Stopped, FormationFailed, StoreUnreachable: as `Membership.next_world`.
        """
        expect_answer(self._job, self._watcher)
        found = self._agree(world, has_formed, started)
        if isinstance(found, Fatal):
            raise FormationFailed(found.why)
        fatal = self._job.heard(world, "fatal")  # the member that ended the job may be among its dead
        if fatal is not None:
            raise FormationFailed(fatal)
        return None if found is None else found.decision

    def _agree(self, world: World, has_formed: bool, started: float) -> Decided | Fatal | None:
        limit = 3 * self._limits.peer_timeout + 2 * self._watcher.pace.slowest_step
        if world.is_spare:  # it knows nothing of how long a step takes, and leaves that to those who do
            limit *= 10
        counted_from = started

        def has_run_out(factor: float) -> bool:
            return self._around.monotonic() - counted_from > factor * limit

        agreement = self._agreement(world, has_formed, has_run_out)
        lacking: Lacking | None = None
        # Where some did not come and nobody was lost, they may have gone on before this member came.
        is_late = not has_formed and self._watcher.reason is None
        reports, next_ask = ReportTimes(started), started if is_late else started + ASK_SECONDS
        while True:
            found = agreement.look()
            if isinstance(found, Decided | Fatal):
                return found
            if isinstance(found, LeftBehind):
                raise LeftOut(f"the others went on as generation {found.generation} without this worker")
            if world.is_spare and self._watcher.contacts.are_training(world):
                return None
            self._watcher.thread.check()
            now = self._around.monotonic()
            if now - counted_from > limit / 2:
                proposer = found.ranks[0] if found.ranks else None
                if self._watcher.is_anybody_at_work(world, proposer, limit / 2):
                    counted_from = now
            if found.votes or now - started > 2 * self._limits.peer_timeout:
                self._check()  # not before: the others may decide a world with this member, which then leaves by vote
            if found.votes:  # they may come back: nothing but their silence counts against them from now on
                self._require_no_better()
                counted_from = now
                self._watcher.forgive()
                agreement = self._agreement(world, has_formed, has_run_out)
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
            is_refused = not found.votes and not found.ranks  # its ballot was too old, and the next one is not
            self._around.sleep(POLL_SECONDS if lacking is None or is_refused else 1.0)

    def _agreement(self, world: World, has_formed: bool, has_run_out: Callable[[float], bool]) -> Agreement:
        watcher, contacts = self._watcher, self._watcher.contacts
        is_anybody_known_dead = bool(watcher.verdicts) or any(map(contacts.is_refused, world.members))
        unreachable = contacts.lost_neighbours(world)
        if not is_anybody_known_dead and (watcher.reason is not None or not has_formed):
            unreachable = contacts.unreachable(world)

        def status(rank: int) -> Liveness:
            is_over = has_run_out(1.0)
            if is_over and agreement.has_come(rank):
                # It may be to propose, and wait itself for those who have not come: it is given up after them.
                is_over = rank < world.rank and has_run_out(2.0)
            return contacts.status(world.members[rank], watcher.verdicts.get(rank), is_over)

        proven_by = self._around.monotonic() + PROOF_SECONDS
        agreement = Agreement(
            self._job,
            world,
            Presence(world.generation, unreachable),
            status=status,
            is_heard=lambda rank: contacts.is_heard(world.members[rank]),
            newcomers=lambda: self._newcomers(world),
            facts=self._facts,
            draw_uid=self._around.draw_uid,
            watched=lambda: contacts.watched,
            watch_too=contacts.watch_too,
            witnesses=lambda rank: contacts.witnesses(world, rank) if self._around.monotonic() < proven_by else (),
            reach=self._around.reach,
        )
        return agreement

    def _note_votes(self, world: World, found: Wait, lacking: Lacking | None) -> Lacking | None:
        """The votes that this side lacks; None where it lacks none. Who has none at the moment may only have left the
        proposal to another one."""
        if not found.votes:
            return lacking
        if lacking is None:
            names = ", ".join(self._names(world, found.votes))
            self.may_not_go_on(f"{names} cannot be reached and may train on: waiting for contact")
        return Lacking(self._around.monotonic() if lacking is None else lacking.since, found.votes)

    def _names(self, world: World, uids: tuple[str, ...]) -> list[str]:
        names = {member.uid: member.name for member in world.members}
        return [names.get(uid, uid) for uid in uids]

    def _describe(self, world: World, found: Wait) -> str:
        if found.votes:
            return ", ".join(self._names(world, found.votes))
        return "rank " + ", ".join(map(str, found.ranks)) if found.ranks else "the others"


class Forming:
    """How long a process group may take to form. For the training thread alone."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._num_failed = 0
        """worlds of the same members in a row that ended before their first step"""

    def enter(self, world: World, *, has_stepped: bool) -> None:
        """This worker is a member of `world` from now on, and has had steps in the one before, or none."""
        is_again = self._world is not None and not has_stepped and self._world.uids == world.uids
        self._world, self._num_failed = world, self._num_failed + 1 if is_again else 0

    @property
    def timeout(self) -> timedelta:
        """For that of the present world."""
        assert self._world is not None, "it is in one"
        return timedelta(seconds=seconds_to_form(self._world.world_size, self._num_failed))


class Barriers:
    """Where the members of a world wait for each other: before its process group, as spares, at the end of training.
    For the training thread alone; it keeps nothing between two waits.

    Args:
        check: raises Stopped where this worker was told to stop.
    """

    def __init__(
        self, job: Job, watcher: Watcher, limits: Limits, around: Surroundings, check: Callable[[], None]
    ) -> None:
        self._job, self._watcher, self._limits = job, watcher, limits
        self._around, self._check = around, check

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
            raise no_answer(world) from error

    def _wait_at_rank_0(self, world: World) -> None:
        """Raises: as `wait_for_workers`; StoreUnreachable where rank 0 does not answer."""
        clock, peer_timeout = self._around.monotonic, self._limits.peer_timeout
        self._job.say_ready(world)
        deadline = clock() + 2 * peer_timeout
        while not self._job.are_ready(world):
            require_whole(self._watcher)
            if clock() > deadline:
                ranks = ", ".join(map(str, self._job.not_ready(world)))
                raise FormationFailed(f"rank {ranks} did not come to the process group in {2 * peer_timeout:.0f} s")
            self._around.sleep(max(POLL_SECONDS, world.world_size * READY_POLL_SECONDS))

    def wait_for_left_out(self, world: World) -> None:
        """Until those whom this world has left out have stopped (law 2)."""
        while (seconds := self._job.seconds_to_wait(world, self._watcher.links.answered())) > 0:
            require_whole(self._watcher)
            self._around.sleep(min(seconds, 0.05))

    def stand_by(self, world: World) -> str | None:
        """Wait, as a spare of `world`, until it ends. Returns what `announce_finished` was given; None where a member
        was lost or left and the others agree on the next world.

        Raises:
            Stopped: this worker was told to stop.
            StoreUnreachable: the store is gone, and the job with it.
        """
        while True:
            self._watcher.thread.check()
            if self._watcher.store_silence.is_too_long:  # what is read below may be a copy
                expect_answer(self._job, self._watcher)
            # The watcher breaks the world off, too, where the store is gone and a peer with it.
            is_broken = self._watcher.reason is not None
            finished = self._job.heard(world, "finished")  # after it: who finished and went looks lost
            if finished is not None or is_broken:
                return finished
            self._check()
            self._around.sleep(SPARE_POLL_SECONDS)

    def announce_finished(self, world: World, result: str) -> None:
        """Tell the spares of the present world that the run is through, and with what."""
        with suppress(StoreUnreachable):  # the run is finished all the same
            self._job.announce(world, "finished", result)

    def end_together(self, world: World) -> None:
        """Until all who train are through with their last collective: one whose peer closes its sockets meanwhile would
        take it for dead. Blocks for as long as --peer-timeout at most.
        """
        clock, key = self._around.monotonic, f"{self._job.world_key(world)}/through"
        deadline = clock() + self._limits.peer_timeout
        with suppress(StoreUnreachable):  # then rank 0 has seen all, and is gone
            store = self._job.world_store(world)
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
        return member is not None and self._watcher.contacts.is_refused(member)

    def finish(self, world: World) -> None:
        """At the end of training: tell those in the join queue."""
        if world.rank == 0:
            with suppress(StoreUnreachable):  # the run is finished all the same
                self._job.finish(world)


def expect_answer(job: Job, watcher: Watcher) -> None:
    """Ask a store that all need, and that the watcher finds silent. Raises: StoreUnreachable."""
    if watcher.store_silence.is_felt:
        job.expect_answer(watcher.store_silence.seconds)
        watcher.store_silence.note_answer()


def require_whole(watcher: Watcher) -> None:
    """Raises: FormationFailed where a member is lost."""
    watcher.thread.check()
    if watcher.reason is not None:
        raise FormationFailed(f"a member was lost before the process group was made: {watcher.reason}")


def no_answer(world: World) -> FormationFailed:
    """The error of who gets no answer from rank 0."""
    return FormationFailed(f"{world.members[0].name} (rank 0) does not answer")
