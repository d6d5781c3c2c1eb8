"""Schedules that a naive majority rule gets wrong (membership.md): the real code gets them right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from elastic_train.elastic.barriers import Surroundings
from elastic_train.errors import JobFinished
from elastic_train.protocol.neighbours import STANDARD, Topology
from tests.simulation import directed, entrances
from tests.simulation.checks import lacks_given_up
from tests.simulation.faults import RING
from tests.simulation.plan import Fault, Plan
from tests.simulation.simulator import Simulation

FORMS = pytest.mark.parametrize("lease", [None, 60.0], ids=["peers", "etcd"])


def run(plan: Plan) -> Simulation:
    simulation = Simulation(plan)
    simulation.run()
    assert not simulation.failures, simulation.describe()
    return simulation


def num_begun(simulation: Simulation) -> int:
    """How often a world has begun from the start, and not from what somebody had kept."""
    return len({note.split()[-1] for note in simulation.notes if "begins from the start" in note})


def last_steps(simulation: Simulation) -> dict[str, int]:
    """By host: the last committed step of the last process there."""
    return {one.process.host: one.last_step for one in simulation.workers}


def test_1_late_proof_is_silence() -> None:
    simulation = run(directed.late_proof())
    assert {worker.activity for worker in simulation.workers[:2]} == {"agrees"}, "they wait"


@pytest.mark.parametrize("lease", [None, 60.0], ids=["peers", "etcd"])
def test_2_voters_without_the_state_begin_nothing(lease: float | None) -> None:
    simulation = run(directed.voters_without_state(lease))
    assert len(simulation.starts) == 1


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.2, 0.3, 0.36, 0.38])
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_2_others_go_on_where_all_who_had_the_state_are_gone(hosts: int, delay: float) -> None:
    """Up to the moment in which the death would be proven in time."""
    simulation = run(directed.only_holder_dies(hosts, delay))
    assert [worker.activity for worker in simulation.living] == ["trains"] * (hosts - 1)
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1


def test_2_they_wait_where_somebody_is_silent_who_may_have_got_the_state() -> None:
    plan = directed.only_holder_dies(4, 0.1)
    [killed] = plan.faults
    faults = (killed, (killed[0], "freeze", 1))
    simulation = run(replace(plan, faults=faults, seconds=plan.seconds + 5.0))
    assert [worker.activity for worker in simulation.workers[2:]] == ["agrees"] * 2


@FORMS
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("delay", [0.2, 0.35, 0.4, 0.45, 0.6, 0.9])
def test_2_newcomers_claim_without_the_silent_holder_once_they_have_the_state(
    hosts: int, delay: float, lease: float | None
) -> None:
    """That is from the first step on, which they have committed together; no member knows yet that all have done so."""
    newcomers = run(directed.holder_falls_silent(hosts, delay, lease)).workers[1:]
    have_state = delay > 0.6 or newcomers[0].last_step > 0
    assert {worker.activity for worker in newcomers} == {"trains" if have_state else "agrees"}


@pytest.mark.parametrize("at", [1.0, 1.33, 1.39, 1.45])
def test_3_expelled_behind_its_back(at: float) -> None:
    run(directed.expelled_behind_its_back(at))
    run(directed.expelled_and_slow(at))


@pytest.mark.parametrize("delay", [0.2, 0.6, 1.1, 1.6, 2.2])
def test_3_whoever_has_entered_too_early_has_committed_nothing(delay: float) -> None:
    run(directed.entered_and_frozen(delay))


def test_who_was_left_out_is_back_soon_after_the_heal() -> None:
    """By the addresses that it knows: the endpoint's host is gone for good."""
    simulation = run(directed.left_out_without_a_signpost())
    back = [worker for worker in simulation.living if worker.kept is not None]
    assert [worker.process.host for worker in back] == ["h3"]
    assert back[0].member.name == simulation.workers[3].member.name, "the same process"
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1


@FORMS
@pytest.mark.parametrize("later", [0.04, 0.08, 0.12, 0.16, 0.2, 0.24])
def test_who_may_have_got_the_state_is_waited_for(lease: float | None, later: float) -> None:
    """Who proposes has no state, and votes enough: all that had the state for sure are dead."""
    assert num_begun(run(directed.heir_falls_silent(lease, later))) == 1


@FORMS
@pytest.mark.parametrize("later", [0.05, 0.15, 0.25])
def test_who_was_left_out_and_is_back_brings_the_state(lease: float | None, later: float) -> None:
    """To a side that has none: it goes on with what was kept, and at once."""
    simulation = run(directed.heir_is_back(lease, later))
    assert num_begun(simulation) == 1, simulation.describe()
    assert [worker.activity for worker in simulation.living] == ["trains"] * 2, simulation.describe()


@pytest.mark.parametrize("away", [4.9, 5.1, 5.3])
def test_who_has_the_state_hands_the_job_to_nobody_without_it(away: float) -> None:
    simulation = run(directed.heir_proposes_a_world_without_it(away))
    assert num_begun(simulation) == 1, simulation.describe()


@FORMS
def test_who_is_back_as_a_spare_brings_no_state(lease: float | None) -> None:
    """So it is waited for, as a member that has the state, until it can train."""
    assert num_begun(run(directed.heir_is_back_as_a_spare(lease))) == 1


@pytest.mark.parametrize("made", [directed.heir_is_back_beside_a_branch, directed.heir_is_back_and_leaves])
def test_who_is_back_keeps_no_side_waiting_that_may_go_on(made: Callable[[], Plan]) -> None:
    simulation = run(made())
    assert "trains" in [worker.activity for worker in simulation.living], simulation.describe()


@FORMS
def test_a_vote_that_was_given_up_unheard_keeps_nobody_waiting(lease: float | None) -> None:
    """Who gave it up is back in the queue of the one who waits for it, and its entry there says what it was."""
    made = directed.voter_that_is_left_out_unheard(lease)
    simulation = run(
        replace(made, recovers_at=None, seconds=12.0, faults=(*made.faults, (made.recovers_at, "heal_all")))
    )
    assert not lacks_given_up(simulation)
    assert [worker.activity for worker in simulation.living] == ["trains"] * 2, simulation.describe()


@pytest.mark.parametrize("turn", range(60))
def test_4_the_collector_dies_between_any_two_operations(turn: int) -> None:
    run(directed.moving_register(0.005 * turn))


def test_5_a_host_that_comes_back_begins_nothing() -> None:
    simulation = run(directed.first_host_comes_back())
    assert len(simulation.starts) == 1
    worlds = {worker.world.uid for worker in simulation.living if worker.world is not None}
    assert len(worlds) == 1, "it has joined"


@FORMS
@pytest.mark.parametrize("seed", range(1, 4))
def test_5_who_was_left_out_and_is_cut_off_then_begins_nothing(seed: int, lease: float | None) -> None:
    """It waits for the members that it knows; their silence proves nothing."""
    simulation = run(replace(entrances.left_out_and_cut_off(16.0, seed), lease=lease))
    assert_one_job(simulation)


@FORMS
@pytest.mark.parametrize("heals_at", [7.0, 12.0])
@pytest.mark.parametrize("cut_at", [3.1, 3.3, 3.5, 3.8])
def test_5_who_was_in_the_queue_and_is_cut_off_begins_nothing(
    cut_at: float, heals_at: float, lease: float | None
) -> None:
    assert_one_job(run(replace(entrances.cut_off_in_the_queue(cut_at, heals_at), lease=lease)))


def assert_one_job(simulation: Simulation) -> None:
    """All are in one world, and nothing was begun but that."""
    assert len(simulation.starts) == 1, simulation.describe()
    [members] = {worker.world.uids for worker in simulation.living if worker.world is not None}
    assert sorted(members) == sorted(worker.uid for worker in simulation.living)
    assert len(members) == len(simulation.plan.hosts)


@pytest.mark.parametrize(("ending", "wait_timeout", "at"), [("kill", 600.0, 3.3), ("power_off", 10.0, 13.3)])
def test_5_who_is_alone_in_the_queue_begins(ending: str, wait_timeout: float, at: float) -> None:
    """At once where all who have trained are proven dead; else at --wait-timeout."""
    simulation = run(entrances.alone_in_the_queue(ending, wait_timeout))
    [began] = [float(note[:8]) for note in simulation.notes if f"{simulation.workers[-1]} enters" in note]
    assert at - 0.4 < began < at + 5.0, simulation.describe()


def test_who_waits_for_silent_members_in_vain_gives_up_at_wait_timeout() -> None:
    gone = tuple((1.0, "power_off", host) for host in range(3))
    made = replace(directed.plan(4, *gone, recovers_at=0.0), recovers_at=None, seconds=15.0, wait_timeout=5.0)
    simulation = Simulation(made)
    simulation.run()
    [failure] = simulation.failures
    assert "h0/0/1, h1/0/2, h2/0/3 did not answer for 5 s (--wait-timeout), and without them" in failure
    [ended] = [float(note[:8]) for note in simulation.notes if "ends: error" in note]
    assert 8.0 < ended < 9.0, "silent for 2 s, and waited for"


def test_who_waits_for_silent_members_ends_where_these_have_finished_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As their run directory shows. It has saved its state before it looks."""

    def require_unfinished() -> None:
        raise JobFinished("the run was finished without this node")

    around = partial(Surroundings, require_unfinished=require_unfinished)
    monkeypatch.setattr("tests.simulation.worker.Surroundings", around)
    gone = tuple((1.0, "power_off", host) for host in range(3))
    simulation = run(replace(directed.plan(4, *gone, recovers_at=0.0), recovers_at=None, seconds=15.0))
    worker = simulation.workers[-1]
    assert worker.waits_for_votes is not None, "this is what saves the state"
    [ended] = [float(note[:8]) for note in simulation.notes if "ends: finished" in note]
    assert 4.0 < ended < 6.0, "silent for 2 s, and looked again a second later"


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_newcomer_goes_on_to_the_side_that_trains(seed: int) -> None:
    """The other one waits for votes, and shows itself first."""
    simulation = run(entrances.newcomer_of_two_sides(seed))
    newcomer = simulation.workers[-1]
    entered = [float(note[:8]) for note in simulation.notes if f"{newcomer} enters" in note]
    assert entered, simulation.describe()
    assert entered[0] < newcomer.began_at + 4.0
    assert newcomer.last_step == simulation.workers[1].last_step


@pytest.mark.parametrize("endpoints", [1, 3])
def test_a_newcomer_does_not_wait_for_one_that_begins_nothing(endpoints: int) -> None:
    """Which leads it to those who train, as it knows them."""
    simulation = run(entrances.newcomer_beside_one_that_holds_back(endpoints))
    assert simulation.workers[-1].activity == "trains", simulation.describe()
    assert simulation.workers[-1].last_step == simulation.workers[1].last_step


@pytest.mark.parametrize("starts_at", [1.2, 2.0, 2.8])
def test_a_newcomer_leaves_a_side_that_comes_to_lack_votes(starts_at: float) -> None:
    simulation = run(entrances.newcomer_of_two_sides(starts_at=starts_at))
    assert simulation.workers[-1].activity == "trains", simulation.describe()


def judged_second_jobs(plan: Plan) -> tuple[list[str], list[str]]:
    """Hosts of the members that have stopped since another job was met, and of those that train in one world."""
    simulation = run(plan)
    assert len(simulation.starts) == 2, "a second job was begun"
    stopped = [worker for worker in simulation.workers if worker.process.ending == "second job"]
    living = simulation.living
    assert len({worker.world.uid for worker in living if worker.world is not None}) == 1, simulation.describe()
    for worker in stopped:
        this, other = str(worker.error).split(", stops for the one at ")
        assert f"at step {worker.last_step} of the main line on {worker.process.host}" in this
        assert any(f"of the main line on {one.process.host}" in other for one in living)
    return [worker.process.host for worker in stopped], [worker.process.host for worker in living]


@pytest.mark.parametrize("heals_at", [8.7, 8.8, 8.9, 9.0, 9.2, 12.0])
@pytest.mark.parametrize("seed", range(1, 5))
def test_5_a_second_job_stops_when_it_meets_the_first(heals_at: float, seed: int) -> None:
    assert judged_second_jobs(directed.second_job(heals_at, seed=seed)) == (["h0"], ["h1", "h2"])


@pytest.mark.parametrize("seed", range(1, 5))
def test_5_of_two_jobs_that_meet_the_one_with_fewer_steps_stops(seed: int) -> None:
    assert judged_second_jobs(directed.second_job_that_comes_further(seed)) == (["h1", "h2"], ["h0"])


def test_6_of_two_machines_the_lowest_rank_goes_on() -> None:
    assert last_steps(run(directed.two_machines(loses=1)))["h0"] > 10
    simulation = run(directed.two_machines(loses=0))
    assert [worker.activity for worker in simulation.living] == ["agrees"]


def test_7_a_restarted_container_is_somebody_else() -> None:
    simulation = run(directed.restarted_container())
    assert len(simulation.starts) == 1


def test_a_silent_majority_is_left_behind_by_a_claim() -> None:
    for silent in ((0,), (0, 1)):
        hosts = len(silent) + 1
        assert last_steps(run(directed.silent_with_directory(hosts, silent)))[f"h{hosts - 1}"] > 15


def test_two_halves_claim_and_one_of_them_has_it() -> None:
    simulation = run(replace(directed.halves(), directories=(0, 0, 0, 0), recovers_at=10.0))
    assert last_steps(simulation)["h0"] > 10


def test_a_directory_that_was_copied_is_no_arbiter() -> None:
    simulation = run(directed.copied_directory())
    files = simulation.directory.files
    assert not [name for one in files.values() for name in one if name == "claim-job-0"], "of the world of both"


def test_a_claim_whose_reply_was_lost_stands() -> None:
    for number in (1, 2, 3):
        simulation = run(directed.lost_claims(number))
        assert max(last_steps(simulation).values()) > 15


def test_while_the_directory_is_silent_a_side_waits_for_the_silent() -> None:
    faults = [(1.1, "stall", 1, 2)]
    simulation = Simulation(replace(directed.silent_with_directory(3, (0,), *faults), recovers_at=None))
    simulation.run()
    assert not simulation.failures, simulation.describe()
    assert {worker.activity for worker in simulation.living} == {"agrees"}


def test_while_the_directory_is_silent_a_side_goes_on_without_the_dead() -> None:
    made = directed.silent_with_directory(3, (), (1.0, "stall", 0, 1, 2), (1.1, "kill", 0))
    assert last_steps(run(made))["h1"] > 10


def test_newcomers_carry_no_job_away() -> None:
    simulation = run(directed.newcomers_and_a_directory())
    assert len(simulation.starts) == 1


@pytest.mark.parametrize("lease", [None, 60.0], ids=["peers", "etcd"])
def test_a_spare_that_hears_nobody_goes_on_with_nothing(lease: float | None) -> None:
    """It has no state, and those who have it train on."""
    simulation = run(replace(directed.spare_without_the_others(), lease=lease))
    assert len(simulation.starts) == 1


@pytest.mark.parametrize("lease", [None, 60.0], ids=["peers", "etcd"])
def test_a_spare_goes_on_when_all_others_are_dead(lease: float | None) -> None:
    plan = replace(directed.spare_without_the_others(), faults=((1.0, "kill", 0), (1.0, "kill", 1)), lease=lease)
    simulation = Simulation(replace(plan, recovers_at=None))
    simulation.run()
    assert simulation.workers[2].last_step > 0, simulation.describe()


def test_a_spare_that_hears_the_others_again_stands_by_again() -> None:
    """They have trained on in its world all the time; it sees the end of that, and another cut."""
    cuts = [(at + after, what, *sides) for at in (1.0, 9.0) for after, what, *sides in directed.CUT_OFF_SPARE]
    plan = replace(directed.spare_without_the_others(), faults=tuple(cuts), recovers_at=17.0)
    simulation = run(plan)
    assert [worker.activity for worker in simulation.workers] == ["trains", "trains", "stands by"]
    assert len(simulation.worlds) == 1
    ending = run(replace(plan, max_steps=simulation.workers[0].last_step // 2))
    assert [worker.process.ending for worker in ending.workers] == ["finished"] * 3


@FORMS
def test_a_spare_that_does_not_hear_one_of_the_others_ends_with_them(lease: float | None) -> None:
    simulation = run(directed.spare_without_one_of_the_others(lease))
    assert [worker.process.ending for worker in simulation.workers] == ["finished"] * 3, simulation.describe()


@pytest.mark.parametrize(("seed", "lease"), [(3, None), (13, 60.0)], ids=["peers", "etcd"])
def test_a_spare_does_not_propose_beside_one_that_can_claim(seed: int, lease: float | None) -> None:
    """Another spare would be bound to the vote that it asks for, and follow no claim."""
    simulation = run(directed.spares_beside_a_claim(seed, lease))
    assert [worker.activity for worker in simulation.living] == ["trains", *["stands by"] * 3]
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1


def test_of_spares_that_do_not_hear_each_other_one_waits() -> None:
    """Nobody else is left: each would go on alone."""
    simulation = run(directed.spares_without_each_other())
    assert [worker.activity for worker in simulation.living] == ["trains", "stands by"], simulation.describe()
    assert [told.members for told in simulation.worlds.values() if told.generation == 1 and told.commits] == [("u2",)]


def test_a_spare_that_has_stood_by_again_is_left_out_for_the_first_time() -> None:
    """So it does not wait before it comes back, and has the whole of --wait-timeout for that."""
    simulation = run(directed.spare_left_out_twice())
    left_out = [worker for worker in simulation.workers if worker.process.ending == "left_out"]
    assert [worker.process.host for worker in left_out] == ["h4", "h4"], simulation.describe()
    assert [worker.num_fruitless_after for worker in left_out] == [0, 0]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_spare_that_wakes_up_after_the_only_worker_is_gone_learns_that_the_others_have_gone_on(leaves: bool) -> None:
    """They still say that they were present, and that the worker is dead. No voter is left to tell of a decision."""
    simulation = run(directed.spare_frozen_until_the_others_have_gone_on(leaves))
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1
    assert [worker.activity for worker in simulation.living].count("trains") == 1


@FORMS
@pytest.mark.parametrize("at", [1.15, 1.2, 1.25])
def test_who_waits_for_nodes_in_a_world_that_is_over_goes_on_to_the_others(at: float, lease: float | None) -> None:
    simulation = run(directed.frozen_as_it_is_to_wait_for_nodes(at, lease))
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1
    assert [worker.activity for worker in simulation.living] == ["waits"] * 3


@pytest.mark.parametrize("plan", [directed.cut_off_until_the_end, directed.spare_cut_off_until_the_end])
def test_who_is_told_that_the_job_is_over_ends(plan: Callable[[], Plan]) -> None:
    simulation = run(plan())
    assert {worker.process.ending for worker in simulation.workers} == {"finished"}, simulation.describe()


def test_who_lacks_the_last_step_makes_it_alone_where_the_job_is_over() -> None:
    """It waits for no other nodes, though it needs them to train."""
    simulation = run(directed.lacks_the_last_step())
    assert [(worker.process.ending, worker.last_step) for worker in simulation.workers[:2]] == [("finished", 4)] * 2
    assert len(simulation.worlds) == 2, "the step had not ended on both"


@pytest.mark.parametrize("frozen_at", [1.0, *(1.0 + directed.TIMEOUT + 0.001 * turn for turn in range(40))])
def test_who_sleeps_until_its_claim_is_removed_learns_that_the_job_has_gone_on(frozen_at: float) -> None:
    """Also who sleeps between any two operations of its own claim."""
    simulation = run(directed.forgotten_claim(frozen_at))
    endings = [worker.process.ending for worker in simulation.workers[:2]]
    assert endings in (["left_out", None], [None, "left_out"])
    worlds = {worker.world.uid for worker in simulation.living if worker.world is not None}
    assert len(worlds) == 1


def test_two_halves_go_on_and_one_remains() -> None:
    simulation = run(directed.halves_that_go_on())
    branches = {told.branch for told in simulation.worlds.values() if told.commits}
    assert len(branches) == 2, "a branch beside the line of the law"
    last = {one.uid: one.world for one in simulation.living}
    assert {world.uid for world in last.values() if world is not None} == {
        max(simulation.worlds.values(), key=lambda told: told.generation).uid
    }, simulation.describe()
    assert len(last) == 4


def test_a_spare_that_has_become_all_of_its_side_goes_on_and_is_found() -> None:
    simulation = run(directed.spare_that_is_left())
    alone = {told.members[0] for told in simulation.worlds.values() if told.commits and len(told.members) == 1}
    assert alone == {"u2", "u4"}, "it has gone on with the step that it was given"
    assert len({one.world.uid for one in simulation.living if one.world is not None}) == 1


def test_a_branch_whose_spare_is_gone_stops_all_the_same() -> None:
    simulation = run(directed.branch_with_a_spare_that_is_gone())
    assert len({told.branch for told in simulation.worlds.values() if told.commits}) == 2, simulation.describe()
    assert len({one.world.uid for one in simulation.living if one.world is not None}) == 1, simulation.describe()


@pytest.mark.parametrize(("most", "frozen"), [(3, (0,)), (None, (0, 4))], ids=["spares", "voters"])
def test_no_two_branches_have_a_member_in_common(most: int | None, frozen: tuple[int, ...]) -> None:
    simulation = run(directed.branches_with_a_common_member(most, frozen))
    first, second = (told for told in simulation.worlds.values() if told.generation == 1 and told.entered_at < 11.4)
    assert all((first.commits, second.commits))
    assert not set(first.members) & set(second.members), simulation.describe()
    assert any(worker.activity == "trains" for worker in simulation.living), "of two sides that meet one goes on"


def test_who_waits_for_one_that_trains_elsewhere_asks_it() -> None:
    run(directed.world_that_one_never_entered())


def test_who_joins_a_side_that_stops_is_told_too() -> None:
    run(directed.superseded_while_one_joins())


@pytest.mark.parametrize("delay", [0.17, 0.22, 0.3, 0.4, 0.5])
def test_who_has_not_voted_beside_a_silent_directory_claims_nothing_else(delay: float) -> None:
    run(directed.votes_beside_a_silent_directory(delay))


def test_a_newcomer_that_dies_keeps_no_other_from_joining() -> None:
    run(directed.newcomer_beside_one_that_dies())


@pytest.mark.parametrize("lease", [None, 60.0], ids=["peers", "etcd"])
@pytest.mark.parametrize("seed", range(1, 5))
def test_of_two_that_cannot_hear_each_other_one_goes(seed: int, lease: float | None) -> None:
    assert last_steps(run(directed.two_that_cannot_hear_each_other(seed, lease)))["h0"] > 50


@pytest.mark.parametrize("founders", [1, 2], ids=["alone", "both"])
def test_who_was_suspended_learns_that_others_have_gone_on(founders: int) -> None:
    """Those in the queue have begun a second job when its lease was over; it has come further when the two meet."""
    simulation = run(directed.suspended_until_others_go_on(founders))
    assert [worker.process.ending for worker in simulation.workers[:founders]] == ["second job"] * founders
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1
    assert len(simulation.living) == 2, "those of the queue"


LONGEST = 10.0
"""more seconds than what one has written in etcd stays there without it"""


@pytest.mark.parametrize(
    "faults",
    [
        ((2.0, "lose_store", (2,)), (2.0 + LONGEST, "find_store", (2,))),
        ((2.0, "lose_store", (2,), "from"), (2.0 + LONGEST, "find_store", (2,))),
        ((2.0, "freeze", 2), (2.0 + LONGEST, "thaw_before_it_reads", 2)),
        ((2.0, "lose_store", (2,), "from"), (3.0, "freeze", 2), (2.5 + LONGEST, "find_store", (2,)),
         (3.0 + LONGEST, "thaw_before_it_reads", 2)),
    ],
    ids=["cut off", "hears nothing", "suspended", "suspended with what it has not read"],
)  # fmt: skip
def test_who_knows_nothing_in_the_queue_does_not_take_the_others_for_dead(faults: tuple[Fault, ...]) -> None:
    """It alone is away from etcd, which those who train reach all the time."""
    simulation = run(directed.alone_without_the_store(*faults))
    assert [worker.process.ending for worker in simulation.workers] == [None] * 3
    assert len({worker.world.uid for worker in simulation.workers if worker.world is not None}) == 1
    assert [worker.activity for worker in simulation.workers] == ["trains"] * 3, "it has joined"


@pytest.mark.parametrize("found_at", [4.0, 18.0])
def test_who_waits_for_nodes_without_etcd_is_found_there_again(found_at: float) -> None:
    """Its lease has run out, or not."""
    simulation = run(directed.waits_without_the_store(found_at))
    assert [worker.process.ending for worker in simulation.workers[:2]] == [None, "killed"]
    assert [worker.activity for worker in simulation.living] == ["trains"] * 2, simulation.describe()
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1


AWAY = (1.0, "lose_store", (0, 1, 2))


@pytest.mark.parametrize(
    ("hosts", "faults", "left"),
    [(1, (), 1), (3, (), 3), (3, (AWAY, (1.2, "kill", 1)), 2)],
    ids=["one trains", "all train", "two are left"],
)
def test_a_suspension_without_etcd_ends_nobody(hosts: int, faults: tuple[Fault, ...], left: int) -> None:
    simulation = run(directed.suspended_without_the_store(hosts, *faults))
    assert [(worker.activity, worker.process.ending) for worker in simulation.living] == [("trains", None)] * left
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1


@FORMS
@pytest.mark.parametrize("at", [2.0 + 0.01 * turn for turn in range(10)])
def test_a_job_that_is_suspended_as_a_whole_goes_on_in_its_world(at: float, lease: float | None) -> None:
    simulation = run(directed.all_suspended(at, lease))
    assert [worker.activity for worker in simulation.workers] == ["trains"] * 3
    assert len(simulation.worlds) == 1


def test_a_second_job_in_etcd_stops_for_the_one_that_has_come_further() -> None:
    """Etcd had heard nothing of it for longer than its lease."""
    simulation = run(directed.begins_beside_those_without_etcd())
    assert [worker.process.ending for worker in simulation.workers] == [None, None, "killed", "second job"]
    assert [worker.activity for worker in simulation.living] == ["trains"] * 2


def test_where_rank_0_alone_is_away_from_etcd_a_newcomer_finds_the_others() -> None:
    """It could not show the job for more than two leases, and then for as long as it likes."""
    simulation = run(directed.first_without_the_store())
    assert [worker.process.ending for worker in simulation.workers] == [None, None, None, "killed", None]
    assert len(simulation.starts) == 1
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1
    entered = [note for note in simulation.notes if note[9:].startswith(f"{simulation.workers[4]} enters")]
    assert float(entered[0][:8]) < 30.0, "rank 0 is still away"


@pytest.mark.parametrize("seed", [1, 2, 194600465])
def test_a_spare_decides_nothing_by_votes_alone_where_others_may_claim(seed: int) -> None:
    """It has the votes, and does not know whether the members of its world see etcd."""
    simulation = run(directed.spare_with_votes_and_without_etcd(seed))
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1
    assert len(simulation.living) == 5


OUTAGE = ((2.0, "lose_store", (0, 1, 2)), (10.0, "find_store", (0, 1, 2)))
"""longer than the entry lasts"""


@pytest.mark.parametrize("faults", [OUTAGE, ((10.0, "empty_store"),)], ids=["an outage", "it comes back empty"])
def test_where_etcd_has_lost_the_entry_the_members_meet_in_a_new_one(faults: tuple[Fault, ...]) -> None:
    """Nobody waits for one that falls silent some seconds later; of two one goes on by a claim."""
    off = ((15.0, "power_off", 2), (22.0, "power_off", 0))
    simulation = run(directed.loses_the_entry(*faults, *off, seconds=32.0))
    worlds = list(simulation.worlds.values())
    assert [len(told.members) for told in worlds] == [3, 3, 2, 1], simulation.describe()
    assert worlds[1].entered_at < 15.0
    assert all(told.commits for told in worlds)
    told_by = [note[9:].partition("@")[0] for note in simulation.notes if "claims were lost" in note]
    assert told_by == [worlds[0].members[0]], "rank 0 says why, and nobody joins"


@pytest.mark.parametrize("faults", [OUTAGE, ((5.9, "empty_store"),)], ids=["an outage", "it comes back empty"])
def test_before_they_have_met_there_they_wait_for_who_is_silent(faults: tuple[Fault, ...]) -> None:
    """It may have gone on by a claim that is lost."""
    simulation = run(directed.loses_the_entry(*faults, (6.0, "power_off", 2), seconds=30.0))
    assert [worker.activity for worker in simulation.living] == ["agrees"] * 2


@pytest.mark.parametrize("at", [5.7, 5.99])
def test_a_world_that_forms_right_after_the_loss_ends_for_another_entry(at: float) -> None:
    """It follows one whose successor could be claimed in the lost entry, so its name was shown there."""
    off = ((6.0, "kill", 2), (20.0, "power_off", 0))
    simulation = run(directed.loses_the_entry((at, "empty_store"), *off, seconds=36.0))
    worlds = list(simulation.worlds.values())
    assert [len(told.members) for told in worlds] == [3, 2, 2, 1], simulation.describe()
    assert worlds[2].entered_at < 12.0
    assert all(told.commits for told in worlds)


def test_a_world_that_forms_before_all_have_found_the_new_entry_ends_too() -> None:
    """The last of them finds it when a world without the third stands."""
    late = ((4.9, "lose_store", (3,)), (5.0, "empty_store"), (5.6, "kill", 2), (7.0, "find_store", (3,)))
    simulation = run(directed.loses_the_entry(*late, (20.0, "power_off", 0), hosts=4, seconds=36.0))
    worlds = list(simulation.worlds.values())
    assert [len(told.members) for told in worlds] == [4, 3, 3, 2], simulation.describe()
    assert worlds[2].entered_at < 12.0
    assert all(told.commits for told in worlds)


def test_who_has_voted_for_what_it_cannot_claim_any_more_goes_on_with_the_others() -> None:
    """Each side of a cut for its own decision, right after the loss."""
    run(directed.votes_without_an_entry())


def test_after_a_short_outage_they_go_on_without_who_is_silent() -> None:
    away = ((2.0, "lose_store", (0, 1, 2)), (6.0, "find_store", (0, 1, 2)))
    simulation = run(directed.loses_the_entry(*away, (3.0, "power_off", 2), seconds=15.0))
    assert [len(told.members) for told in simulation.worlds.values()] == [3, 2]
    assert [worker.activity for worker in simulation.living] == ["trains"] * 2


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_what_was_claimed_in_a_lost_entry_holds(hosts: int) -> None:
    simulation = run(directed.claimed_before_the_loss(hosts))
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1


@pytest.mark.parametrize("without", [(0,), (0, 1)])
def test_who_has_no_etcd_leaves_it_to_the_others_to_propose(without: tuple[int, ...]) -> None:
    """It works all the time, and is in."""
    faults = ((2.0, "lose_store", without), (3.0, "power_off", 3))
    simulation = run(directed.loses_the_entry(*faults, hosts=4, seconds=20.0))
    [_, after] = simulation.worlds.values()
    assert after.members == tuple(worker.uid for worker in simulation.workers[:3])
    assert after.entered_at < 3.0 + directed.TIMEOUT * (1 + 2.5 * len(without)), simulation.describe()
    assert after.commits


def test_nobody_is_invited_to_follow_a_world_that_is_over() -> None:
    run(directed.two_plans_for_one_newcomer())


@FORMS
def test_a_newcomer_that_cannot_form_ahead_joins_with_the_others(lease: float | None) -> None:
    simulation = Simulation(replace(directed.two_newcomers(lease=lease), recovers_at=3.0))
    cannot = simulation.workers[2]
    cannot.member = replace(cannot.member, forms_ahead=False)
    simulation.run()
    assert not simulation.failures, simulation.describe()
    assert [len(told.members) for told in simulation.worlds.values()] == [2, 4]


@FORMS
def test_a_newcomer_that_stands_still_keeps_no_other_out(lease: float | None) -> None:
    """Its watcher keeps its place in the queue."""
    simulation = Simulation(directed.two_newcomers((0.3, "stick", 2), (12.0, "unstick", 2), lease=lease))
    simulation.run()
    assert not simulation.failures, simulation.describe()
    entered = [note for note in simulation.notes if note[9:].startswith(f"{simulation.workers[3]} enters")]
    assert float(entered[0][:8]) < 5.0


def test_a_spare_does_not_stand_by_in_a_world_that_is_over() -> None:
    run(directed.spare_that_comes_late())


def test_a_side_that_may_not_go_on_says_so_once() -> None:
    """Two of four without the lowest rank: each proposes in its turn, and is refused by the other; they wait since the
    first time."""
    simulation = Simulation(directed.pair_without_the_lowest_rank())
    told: list[str] = []

    def note(why: str | None, host: str) -> None:
        if why is not None:
            told.append(host)

    for worker in simulation.workers:
        worker.membership.survivors.may_not_go_on = partial(note, host=worker.process.host)
    simulation.run()
    assert not simulation.failures, simulation.describe()
    assert sorted(told) == ["h0", "h1", "h2", "h3"]


@pytest.mark.parametrize("topology", [STANDARD, RING], ids=["dense", "sparse"])
def test_a_lost_answer_ends_no_join_that_is_prepared(topology: Topology) -> None:
    run(directed.unanswered_in_a_join(topology))


def test_a_spare_that_was_frozen_as_the_first_world_began_stands_by_in_it() -> None:
    simulation = run(directed.spare_that_missed_the_beginning())
    assert len({worker.world.uid for worker in simulation.living if worker.world is not None}) == 1
    assert sum(worker.world is not None for worker in simulation.living) == 5


def test_who_was_cut_off_in_the_queue_keeps_no_other_out_of_it() -> None:
    run(directed.hole_in_the_queue())


@pytest.mark.parametrize("topology", [STANDARD, RING], ids=["dense", "sparse"])
def test_a_spare_does_not_wait_in_a_world_that_all_have_left(topology: Topology) -> None:
    run(directed.spare_of_a_world_that_is_over(topology))


# --- a host that dies again and again ---------------------------------------------------------------------------------

DIED_AT = 9.0
"""the third time, some milliseconds before the others know"""


def seconds_in_queue(simulation: Simulation) -> float:
    """Of the last worker, from its start to its first world; all train in one world at the end."""
    last = simulation.workers[-1]
    [entered] = [note for note in simulation.notes if note[9:].startswith(f"{last} enters generation")]
    worlds = {worker.world.uid for worker in simulation.living if worker.world is not None}
    assert len(worlds) == 1, simulation.describe()
    assert last.world is not None
    assert len(last.world.members) == len(simulation.living)
    return float(entered[:8]) - last.began_at


@FORMS
def test_a_host_that_dies_for_the_third_time_waits_a_minute(lease: float | None) -> None:
    simulation = run(directed.dies_again_and_again(3, recovers_at=DIED_AT + 62.0, lease=lease))
    assert 60.0 <= 0.5 + seconds_in_queue(simulation) < 62.0
    told = [note for note in simulation.notes if "died unannounced 3 times" in note]
    assert len(told) == 2, simulation.describe()
    assert " warns: " in told[0], "rank 0"
    assert f"{simulation.workers[-1]} is told: h2 waits " in told[1]
    assert simulation.workers[0].last_step > 250, "the others train"


@FORMS
def test_a_host_that_dies_for_the_second_time_does_not_wait(lease: float | None) -> None:
    assert seconds_in_queue(run(directed.dies_again_and_again(2, recovers_at=DIED_AT, lease=lease))) < 2.0


def test_a_host_waits_for_nothing_where_that_was_not_asked_for() -> None:
    plan = replace(directed.dies_again_and_again(3, recovers_at=DIED_AT + 4.0), quarantine=False)
    assert seconds_in_queue(run(plan)) < 2.0


@FORMS
def test_a_new_rank_0_knows_of_the_deaths(lease: float | None) -> None:
    """Also one that has come later than the first of them."""
    plan = directed.dies_again_and_again(3, recovers_at=DIED_AT + 62.0, hosts=4, lease=lease)
    killed = [(DIED_AT + 10.0, "kill", 0), (DIED_AT + 10.5, "back", 0, False), (DIED_AT + 20.0, "kill", 1),
              (DIED_AT + 30.0, "kill", 2)]  # fmt: skip
    simulation = Simulation(replace(plan, faults=(*plan.faults, *killed), num_endpoints=2))
    simulation.run()
    assert not simulation.failures, simulation.describe()
    last = next(worker for worker in simulation.living if worker.process.host == "h3")
    [entered] = [note for note in simulation.notes if note[9:].startswith(f"{last} enters generation")]
    assert 60.0 <= float(entered[:8]) - DIED_AT < 62.0
    assert len([note for note in simulation.notes if " warns: h3 waits" in note]) == 4, "each rank 0 that there was"


@FORMS
def test_without_enough_nodes_nobody_waits(lease: float | None) -> None:
    """One of the others dies ten seconds later, and the one that is left may not train alone."""
    plan = directed.dies_again_and_again(3, recovers_at=DIED_AT + 14.0, trains_with=2, lease=lease)
    simulation = run(replace(plan, faults=(*plan.faults, (DIED_AT + 10.0, "kill", 1))))
    assert 9.5 <= seconds_in_queue(simulation) < 11.5
    assert simulation.workers[-1].last_step > 60, simulation.describe()


@FORMS
def test_of_two_that_are_both_needed_neither_waits(lease: float | None) -> None:
    plan = directed.dies_again_and_again(3, hosts=2, recovers_at=DIED_AT + 4.0, trains_with=2, lease=lease)
    assert seconds_in_queue(run(plan)) < 2.0


@FORMS
def test_who_has_come_further_than_the_others_does_not_wait_there(lease: float | None) -> None:
    ahead = (DIED_AT + 0.5, "back_ahead", 2)
    plan = directed.dies_again_and_again(3, ahead, recovers_at=DIED_AT + 4.0, lease=lease)
    assert seconds_in_queue(run(plan)) < 2.0


def test_where_all_others_die_the_one_that_waited_begins_anew() -> None:
    """Nobody knows of its deaths any more, and nobody else is there."""
    killed = [(DIED_AT + 5.0, "kill", 0), (DIED_AT + 5.0, "kill", 1)]
    plan = directed.dies_again_and_again(3, recovers_at=DIED_AT + 20.0, lease=3.0)
    simulation = Simulation(replace(plan, faults=(*plan.faults, *killed), recovers_at=None, seconds=DIED_AT + 20.0))
    simulation.run()
    [last] = simulation.living
    assert last.last_step > 10, simulation.describe()
