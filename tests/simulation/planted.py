"""Errors that the histories must find: each breaks the real code at one place."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from elastic_train.branches import Position
from elastic_train.elastic.barriers import Barriers
from elastic_train.protocol import ballots, contacts, laws, peers
from elastic_train.protocol.agreement import Decision, Denied
from elastic_train.protocol.arbiter import ArbiterSilent, Arbitration, Claim, Claims
from elastic_train.protocol.branch_off import BranchOff, BranchRound
from elastic_train.protocol.join_queue import Entrance
from elastic_train.protocol.neighbours import Hearing
from elastic_train.protocol.other_sides import OtherSides
from elastic_train.protocol.store import Clients, KeyValueStore
from elastic_train.world import Member, World
from tests.simulation.etcd import EtcdServer
from tests.simulation.process import Machines
from tests.simulation.ring_parts import Commit
from tests.simulation.simulator import Simulation
from tests.simulation.worker import Worker

Patch = pytest.MonkeyPatch


def newcomers_vote_at_once(patch: Patch) -> None:
    right = peers.PeerJob.decide

    def decide(self: peers.PeerJob, *arguments: Any, **named: Any) -> str | Denied:
        self.worlds.voters = self.worlds.voters[-1:]
        return right(self, *arguments, **named)

    patch.setattr(peers.PeerJob, "decide", decide)


def late_deaths_count(patch: Patch) -> None:
    patch.setattr(contacts, "is_dead_in_time", lambda _seconds, _peer_timeout: True)


def an_age_starts_at_acceptance(patch: Patch) -> None:
    watch = Hearing.watch

    def watch_and_trust(self: Hearing, *arguments: Any) -> None:
        watch(self, *arguments)
        for heard in self.watched.values():
            heard.pinged_at = self._outer_clock()

    patch.setattr(Hearing, "watch", watch_and_trust)


def nobody_waits_for_the_left_out(patch: Patch) -> None:
    # The right one is called all the same: with fewer operations the seed would tell another history.
    right = peers.PeerJob.seconds_to_wait
    patch.setattr(peers.PeerJob, "seconds_to_wait", lambda *arguments: min(0.0, right(*arguments)))


def it_waits_for_the_left_out_at_the_first_commit(patch: Patch) -> None:
    """Instead of before it enters the first reduction: what it has sent there may end that for others."""
    commit = Simulation.note_commit

    def wait_and_commit(self: Simulation, worker: Worker, world: World, parent: Commit | None) -> Commit:
        while (seconds := worker.job.seconds_to_wait(world, worker.watcher.links.answered())) > 0:
            worker.process.sleep(min(seconds, 0.05))
        return commit(self, worker, world, parent)

    patch.setattr(Barriers, "wait_for_left_out", lambda _self, _world: None)
    patch.setattr(Simulation, "note_commit", wait_and_commit)


def both_halves_win_a_tie(patch: Patch) -> None:
    def is_enough(voters: laws.Voters, side: Iterable[str]) -> bool:
        return 2 * len(set(voters.living) & set(side)) >= len(voters.living)

    patch.setattr(laws, "_is_enough", is_enough)


def a_decision_is_not_collected(patch: Patch) -> None:
    def forget(register: ballots.Register, ballot: ballots.Ballot) -> ballots.Register:
        return replace(register, promised=ballot, ballot=None) if ballot > register.promised else register

    patch.setattr(ballots, "promise", forget)


def a_listener_has_no_uid(patch: Patch) -> None:
    def of(self: Clients, member: Member) -> KeyValueStore:
        if member.uid == self._uid:
            return self.own
        assert member.store is not None
        return self.at(member.store)

    patch.setattr(Clients, "of", of)
    patch.setattr(Machines, "checks_uid", False)


def it_begins_beside_a_running_job(patch: Patch) -> None:
    patch.setattr(Entrance, "_follow", lambda _self, _address: None)
    it_begins_beside_a_job_that_it_knows(patch)  # it is called, besides


def it_begins_beside_a_job_that_it_knows(patch: Patch) -> None:
    patch.setattr(Entrance, "_may_another_run", lambda _self: False)


def it_waits_beside_those_who_lack_votes(patch: Patch) -> None:
    right = peers.PeerJob.tend

    def tend(self: peers.PeerJob, world: World | None, **named: Any) -> None:
        right(self, world, **named)
        self._own.put("rests", "")

    patch.setattr(peers.PeerJob, "tend", tend)


def a_claim_is_judged_by_its_return_code(patch: Patch) -> None:
    def put(self: Claims, name: str, text: str) -> str:
        try:
            self._folder.create(name, text, is_durable=True)
        except FileExistsError as error:  # of a repeated one, though it was made
            raise ArbiterSilent(str(error)) from error
        except OSError:  # it may have been made
            pass
        return text

    patch.setattr(Claims, "_put", put)


def a_newcomer_claims_alone(patch: Patch) -> None:
    right = ballots.Ballots._decide_by_claim

    def decide(self: ballots.Ballots, round_: Any) -> str | Denied:
        kept, self._known.voters = self._known.voters, self._known.voters[-1:]
        try:
            return right(self, round_)
        finally:
            self._known.voters = kept

    patch.setattr(ballots.Ballots, "_decide_by_claim", decide)


def a_claim_in_etcd_replaces_another_one(patch: Patch) -> None:
    """Nor is one found."""
    right = EtcdServer._found
    patch.setattr(EtcdServer, "_found", lambda *asked: [one for one in right(*asked) if b"/claim-" not in one.key])


def a_world_claims_in_the_newest_entry(patch: Patch) -> None:
    """Also one that saw another one, in which somebody may have claimed."""
    right = Arbitration.claim

    def claim(self: Arbitration, *arguments: Any) -> Claim | None:
        assert self._find_place is not None, "all have etcd"
        self._places = dict.fromkeys(self._places, self._find_place())
        return right(self, *arguments)

    patch.setattr(Arbitration, "claim", claim)


def newer_claims_are_not_counted(patch: Patch) -> None:
    right = Claims._outdated_by
    patch.setattr(Claims, "_outdated_by", lambda *arguments: (right(*arguments), None)[1])


def newer_claims_are_counted_too_early(patch: Patch) -> None:
    put, outdated_by = Claims._put, Claims._outdated_by
    counted: dict[Claims, str | None] = {}

    def count_and_put(self: Claims, name: str, text: str) -> str:
        if name.startswith("claim-job-"):
            counted[self] = outdated_by(self, "job", int(name.removeprefix("claim-job-")))
        return put(self, name, text)

    def counted_before(self: Claims, job: str, generation: int) -> str | None:
        return counted.pop(self) if self in counted else outdated_by(self, job, generation)

    patch.setattr(Claims, "_put", count_and_put)
    patch.setattr(Claims, "_outdated_by", counted_before)


def a_branch_has_no_id(patch: Patch) -> None:
    right = BranchOff._branch_of

    def branch_of(self: BranchOff, side: Collection[int], attempt: BranchRound, decision: Decision) -> Decision:
        return replace(right(self, side, attempt, decision), facts=decision.facts)

    patch.setattr(BranchOff, "_branch_of", branch_of)


def branches_never_meet(patch: Patch) -> None:
    patch.setattr(OtherSides, "_judge_branches", lambda _self, *_arguments: None)


def the_side_with_more_steps_stops(patch: Patch) -> None:
    right = Position.goes_before
    patch.setattr(Position, "goes_before", lambda self, other: self.step != other.step and not right(self, other))


def jobs_never_meet(patch: Patch) -> None:
    patch.setattr(OtherSides, "_judge_jobs", lambda _self, *_arguments: None)


ALL = (
    jobs_never_meet,
    branches_never_meet,
    the_side_with_more_steps_stops,
    a_branch_has_no_id,
    newcomers_vote_at_once,
    late_deaths_count,
    an_age_starts_at_acceptance,
    nobody_waits_for_the_left_out,
    it_waits_for_the_left_out_at_the_first_commit,
    both_halves_win_a_tie,
    a_decision_is_not_collected,
    a_listener_has_no_uid,
    it_begins_beside_a_running_job,
    it_begins_beside_a_job_that_it_knows,
    it_waits_beside_those_who_lack_votes,
    a_claim_is_judged_by_its_return_code,
    a_newcomer_claims_alone,
    a_claim_in_etcd_replaces_another_one,
    a_world_claims_in_the_newest_entry,
    newer_claims_are_not_counted,
    newer_claims_are_counted_too_early,
)
