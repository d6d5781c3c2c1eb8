"""Errors that the histories must find: each breaks the real code at one place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from elastic_train import liveness
from elastic_train.protocol import laws, peers, registers
from elastic_train.protocol.clients import Clients
from elastic_train.protocol.entrance import Entrance
from elastic_train.protocol.job import Denied
from elastic_train.protocol.store import KeyValueStore
from elastic_train.world import Member
from tests.simulation.links import SimLinks
from tests.simulation.process import Address, Machines

Patch = pytest.MonkeyPatch


def newcomers_vote_at_once(patch: Patch) -> None:
    right = peers.PeerJob.decide

    def decide(self: peers.PeerJob, *arguments: Any, **named: Any) -> str | Denied:
        self._worlds = self._worlds[-1:]
        return right(self, *arguments, **named)

    patch.setattr(peers.PeerJob, "decide", decide)


def late_deaths_count(patch: Patch) -> None:
    patch.setattr(liveness, "is_dead_in_time", lambda _seconds, _peer_timeout: True)


def an_age_starts_at_acceptance(patch: Patch) -> None:
    watch = SimLinks.watch

    def watch_and_trust(self: SimLinks, members: Iterable[tuple[str, Address]], epoch: str) -> None:
        watch(self, members, epoch)
        for peer in self._peers.values():
            peer.heard.pinged_at = self._process.clock()

    patch.setattr(SimLinks, "watch", watch_and_trust)


def nobody_waits_for_the_left_out(patch: Patch) -> None:
    # The right one is called all the same: with fewer operations the seed would tell another history.
    right = peers.PeerJob.seconds_to_wait
    patch.setattr(peers.PeerJob, "seconds_to_wait", lambda *arguments: min(0.0, right(*arguments)))


def both_halves_win_a_tie(patch: Patch) -> None:
    def is_enough(voters: laws.Voters, side: Iterable[str]) -> bool:
        return 2 * len(set(voters.living) & set(side)) >= len(voters.living)

    patch.setattr(laws, "_is_enough", is_enough)


def a_decision_is_not_collected(patch: Patch) -> None:
    def forget(register: registers.Register, ballot: registers.Ballot) -> registers.Register:
        return replace(register, promised=ballot, ballot=None) if ballot > register.promised else register

    patch.setattr(registers, "promise", forget)


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


ALL = (
    newcomers_vote_at_once,
    late_deaths_count,
    an_age_starts_at_acceptance,
    nobody_waits_for_the_left_out,
    both_halves_win_a_tie,
    a_decision_is_not_collected,
    a_listener_has_no_uid,
    it_begins_beside_a_running_job,
)
