"""Each planted error is found by a directed history that the real code survives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.contract import test_membership as contract
from tests.simulation import directed, planted
from tests.simulation.entrances import cut_off_in_the_queue, left_out_and_cut_off, newcomer_of_two_sides
from tests.simulation.plan import Plan
from tests.simulation.simulator import failures_of

AS_IT_CLAIMS = 1.027 + directed.TIMEOUT


def newcomer_that_is_looked_at() -> Plan:
    """Before the cut is healed."""
    made = newcomer_of_two_sides()
    return replace(made, recovers_at=made.seconds)


FOUND_BY: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Plan], str]] = [
    (planted.newcomers_vote_at_once, directed.voters_without_state, "a committed step is lost"),
    (planted.late_deaths_count, directed.late_proof, "no chain"),
    (planted.an_age_starts_at_acceptance, directed.accepted_late, "no chain"),
    (planted.nobody_waits_for_the_left_out, lambda: directed.expelled_behind_its_back(1.06), "no chain"),
    (planted.it_waits_for_the_left_out_at_the_first_commit, lambda: directed.entered_and_frozen(0.7), "no chain"),
    (planted.both_halves_win_a_tie, directed.halves, "no chain"),
    (planted.a_listener_has_no_uid, directed.restarted_container, "ends with an error"),
    (planted.it_begins_beside_a_running_job, directed.first_host_comes_back, "a committed step is lost"),
    (planted.it_begins_beside_a_job_that_it_knows, lambda: left_out_and_cut_off(14.0), "a committed step is lost"),
    (planted.it_begins_beside_a_job_that_it_knows, lambda: cut_off_in_the_queue(3.5, 9.0), "a committed step is lost"),
    (planted.it_waits_beside_those_who_lack_votes, newcomer_that_is_looked_at, "idle in the queue"),
    (planted.a_claim_is_judged_by_its_return_code, lambda: directed.lost_claims(3), "no chain"),
    (planted.jobs_never_meet, lambda: directed.second_job(9.0), "not together after a heal"),
    (planted.branches_never_meet, directed.halves_that_go_on, "not together after a heal"),
    (planted.the_side_with_more_steps_stops, directed.halves_that_go_on, "a kept state is lost"),
    (planted.a_branch_has_no_id, directed.halves_that_go_on, "no chain"),
    (planted.a_newcomer_claims_alone, directed.newcomers_and_a_directory, "a committed step is lost"),
    (planted.a_claim_in_etcd_replaces_another_one, directed.halves_with_etcd, "no chain"),
    (planted.a_world_claims_in_the_newest_entry, directed.claimed_before_the_loss, "no chain"),
    (planted.newer_claims_are_not_counted, lambda: directed.forgotten_claim(1.0), "no chain"),
    (planted.newer_claims_are_counted_too_early, lambda: directed.forgotten_claim(AS_IT_CLAIMS), "no chain"),
]


@pytest.mark.parametrize(("plant", "make", "what"), FOUND_BY, ids=lambda one: getattr(one, "__name__", ""))
def test_a_planted_error_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], make: Callable[[], Plan], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make()
    assert failures_of(plan) == []
    plant(monkeypatch)
    assert any(what in failure for failure in failures_of(plan))


def test_a_decision_that_is_not_collected_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No history of a few faults tells: a commit needs all members of a world besides. The contract does."""
    planted.a_decision_is_not_collected(monkeypatch)
    with pytest.raises(AssertionError, match="interrupted before operation"):
        contract.test_two_proposers_decide_the_same_however_they_interleave()
