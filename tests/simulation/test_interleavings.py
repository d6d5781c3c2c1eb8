"""A world has one successor, in whatever order its members act, and whatever messages are lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from elastic_train.protocol import ballots
from elastic_train.protocol.ballots import Ballot, Ballots, Register, Round, Vote
from tests.simulation.explorer import Explorer, Setting

FIRST_CUT_OFF = frozenset({frozenset({0, 1})})
ENDS_CUT_OFF = frozenset({frozenset({0, 2})})

TWO = Setting((2, 2), apart=frozenset({0}), lost=1, late=1)
TWO_FROZEN = Setting((2, 2), apart=frozenset({0}), freezes=1)
TOLD_DIFFERENTLY = Setting((2, 2), shared=(None, False))
TOLD_DIFFERENTLY_AND_CUT = Setting((1, 1, 1), shared=(None, False, False), cuts=ENDS_CUT_OFF)
TWO_CLAIM_UNHEARD = Setting((1, 1, 1), cuts=FIRST_CUT_OFF, apart=frozenset({2}), lost=1)
CLAIMED_AND_DEAD = Setting((0, 1, 1), apart=frozenset({2}), deaths=1, lost=1, late=1)

SETTINGS = {
    "two": TWO,
    "two-frozen": TWO_FROZEN,
    "told-differently": TOLD_DIFFERENTLY,
    "told-differently-and-cut": TOLD_DIFFERENTLY_AND_CUT,
    "two-claim-unheard": TWO_CLAIM_UNHEARD,
    "claimed-and-dead": CLAIMED_AND_DEAD,
}
LARGER = {
    "two": Setting((2, 2), lost=2, late=2),
    "two-apart": Setting((2, 2), apart=frozenset({0}), lost=2, late=1),
    "two-dead": Setting((2, 2), lost=2, late=1, deaths=1),
    "dead": Setting((1, 1, 1), apart=frozenset({2}), deaths=1),
    "lost": Setting((1, 1, 1), apart=frozenset({2}), lost=1),
    "late": Setting((1, 1, 1), apart=frozenset({2}), lost=1, late=1),
    "frozen": Setting((1, 1, 1), apart=frozenset({2}), freezes=1),
    "cut": Setting((1, 1, 1), cuts=FIRST_CUT_OFF, lost=1, late=1),
    "told-differently": Setting((1, 1, 1), shared=(None, False, False)),
    "two-told-nothing": Setting((1, 1, 1), shared=(None, None, False), cuts=ENDS_CUT_OFF, lost=1),
    "one-told-nothing": Setting((1, 1, 1), shared=(None, True, True), cuts=ENDS_CUT_OFF, lost=1),
}


def explore(setting: Setting, record_property: Callable[[str, object], None]) -> None:
    found = Explorer(setting).explore()
    assert not found.violation, "\n".join((found.violation, *found.history))
    assert found.num_ends > 10
    record_property("histories", f"{found.num_states:>7} states of {setting}")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_world_has_one_successor(name: str, record_property: Callable[[str, object], None]) -> None:
    explore(SETTINGS[name], record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LARGER)
def test_a_world_has_one_successor_in_larger_settings(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    explore(LARGER[name], record_property)


# --- planted errors ---------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def a_claim_is_followed_without_a_vote(patch: Patch) -> None:
    patch.setattr(Ballots, "_has_voted", lambda *_arguments: True)


def who_is_told_follows_without_a_vote(patch: Patch) -> None:
    right = Ballots._has_voted

    def has_voted(self: Ballots, *arguments: Any) -> bool:
        return sys._getframe(1).f_code.co_name == "decided" or right(self, *arguments)

    patch.setattr(Ballots, "_has_voted", has_voted)


def votes_of_all_are_not_marked(patch: Patch) -> None:
    right = ballots.accept

    def accept(register: Register, ballot: Ballot, decision: str, _vote: Vote) -> Register:
        return right(register, ballot, decision)

    patch.setattr(ballots, "accept", accept)


def nobody_votes_for_a_claim(patch: Patch) -> None:
    right = Ballots._accept

    def accept(self: Ballots, round_: Round, ballot: Any, voters: list[int], chosen: str) -> set[int]:
        is_before_claim = voters == [round_.world.rank] and not round_.needs_all
        return set(voters) if is_before_claim else right(self, round_, ballot, voters, chosen)

    patch.setattr(Ballots, "_accept", accept)
    a_claim_is_followed_without_a_vote(patch)


def two_claims_are_one(patch: Patch) -> None:
    patch.setattr(ballots, "is_open", lambda _registers: False)


def refusals_count_as_votes(patch: Patch) -> None:
    right = Ballots._accept

    def accept(self: Ballots, round_: Round, ballot: Any, voters: list[int], chosen: str) -> set[int]:
        right(self, round_, ballot, voters, chosen)
        return set(voters)

    patch.setattr(Ballots, "_accept", accept)


def votes_of_all_do_without_the_silent(patch: Patch) -> None:
    patch.setattr(ballots, "silent_members", lambda *_arguments: ())


FOUND_IN: list[tuple[Callable[[Patch], None], Setting]] = [
    (a_claim_is_followed_without_a_vote, CLAIMED_AND_DEAD),
    (who_is_told_follows_without_a_vote, CLAIMED_AND_DEAD),
    (votes_of_all_are_not_marked, CLAIMED_AND_DEAD),
    (nobody_votes_for_a_claim, TWO),
    (two_claims_are_one, TWO_CLAIM_UNHEARD),
    (refusals_count_as_votes, TOLD_DIFFERENTLY_AND_CUT),
    (votes_of_all_do_without_the_silent, TWO_FROZEN),
]


@pytest.mark.parametrize(("plant", "setting"), FOUND_IN, ids=lambda one: getattr(one, "__name__", ""))
def test_a_planted_error_is_found(plant: Callable[[Patch], None], setting: Setting, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert Explorer(setting).explore().violation.startswith("two decisions")
