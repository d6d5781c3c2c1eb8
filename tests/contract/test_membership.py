"""What every form of the job must do for membership: begin, join, lose, leave, and decide once."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_train.branches import BRANCH, Branch
from elastic_train.elastic.barriers import Barriers, Surroundings, Waits
from elastic_train.elastic.claims import arbiter_of
from elastic_train.errors import FormationFailed, JobFailed, Refused
from elastic_train.protocol import known_worlds
from elastic_train.protocol.agreement import Agreement, Decision, Denied, LeftBehind, Liveness, Presence, Wait
from elastic_train.protocol.finder import Size
from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.known_worlds import LEFT, Admitted
from elastic_train.protocol.peers import PeerJob
from elastic_train.protocol.plan import Plan, Preparation, mark
from elastic_train.protocol.store import append
from elastic_train.rules import ITEMS
from elastic_train.world import Member, World, to_json
from tests.contract.forms import FORMS, MIN_NODES, PATIENCE, PEER_TIMEOUT, Form, PeersInMemory, eventually, member


def begin(form: Form) -> tuple[list[PeerJob], list[World]]:
    """The first world of MIN_NODES workers, each with its job, by rank."""
    jobs = {number: form.job(number) for number in range(MIN_NODES)}
    worlds: dict[int, World] = {}

    def look() -> bool:
        for number, job in jobs.items():
            if number not in worlds and job.entrance.find():
                place = job.look_from_queue(Waiting(form.member(number), 1))
                if isinstance(place, Admitted):
                    assert not place.came_later
                    job.enter(place.world, place.facts, None)
                    job.entrance.leave()
                    worlds[number] = place.world
        return len(worlds) == MIN_NODES

    assert eventually(form, look), "it begins"
    by_rank = sorted(worlds, key=lambda number: worlds[number].rank)
    return [jobs[number] for number in by_rank], [worlds[number] for number in by_rank]


def agreement(
    form: Form,
    job: PeerJob,
    world: World,
    status: dict[int, Liveness],
    newcomers: Sequence[Member] = (),
    reach: Callable[[str, World], None] = lambda _point, _world: None,
    is_early: Callable[[], bool] = lambda: False,
) -> Agreement:
    contacts: Any = SimpleNamespace(
        watched={*range(len(world.members))} - {world.rank},
        watch_too=lambda _ranks: None,
        is_heard=lambda _member: True,
        is_gone=lambda _member: False,
    )
    return Agreement(
        job,
        world,
        Presence(world.generation),
        contacts,
        status=lambda rank: status.get(rank, Liveness.ALIVE),
        newcomers=lambda: newcomers,
        facts={"token": "t"},
        draw_uid=form.draw_uid,
        reach=reach,
        is_early=is_early,
    )


def agree(
    form: Form,
    jobs: list[PeerJob],
    worlds: list[World],
    ranks: Sequence[int],
    status: dict[int, Liveness] | None = None,
    newcomers: Sequence[Member] = (),
    reach: Callable[[str, World], None] = lambda _point, _world: None,
) -> Decision:
    """What `ranks` decide, each of them the same."""
    parts = {rank: agreement(form, jobs[rank], worlds[rank], status or {}, newcomers, reach) for rank in ranks}
    found: dict[int, Decision] = {}

    def look() -> bool:
        for rank, part in parts.items():
            part.asks_others = True
            outcome = part.look()
            if isinstance(outcome, Decision):
                found[rank] = outcome
        return len(found) == len(parts)

    assert eventually(form, look), f"they decide: {found}"
    assert len(set(map(Decision.to_json, found.values()))) == 1
    return next(iter(found.values()))


def test_a_job_begins_with_one_list(form: Form) -> None:
    _, worlds = begin(form)
    assert [world.rank for world in worlds] == [0, 1, 2]
    assert all(world.uid == worlds[0].uid and world.members == worlds[0].members for world in worlds)


def test_two_that_contradict_each_other_do_not_begin_together_whatever_the_first_one_says(form: Form) -> None:
    """It has no digest of its items, because its loader processes read them; two others have one."""
    says = {0: {}, 1: {ITEMS: "cats"}, 2: {ITEMS: "dogs"}}
    jobs = {number: form.job(number) for number in says}
    worlds: list[World] = []

    def look() -> bool:
        for number, job in jobs.items():
            with suppress(Refused):
                if job.entrance.find():
                    member = replace(form.member(number), agreement=says[number])
                    place = job.look_from_queue(Waiting(member, 1))
                    worlds.extend([place.world] if isinstance(place, Admitted) else [])
        return len(worlds) >= 2

    assert eventually(form, look), "it begins"
    assert len({world.uid for world in worlds}) == 1
    numbers = {int(one.uid.removeprefix("uid")) for one in worlds[0].members}
    assert numbers in ({0, 1}, {0, 2})
    [its] = [says[number] for number in numbers - {0}]
    assert json.loads(jobs[0].facts.find("agreement") or "") == its, "the one left reads what it is refused for"


def test_a_newcomer_is_admitted(form: Form) -> None:
    _, worlds, (_, world) = joined(form)
    assert world.rank == 3
    assert world.uid == worlds[0].uid


def joined(form: Form) -> tuple[list[PeerJob], list[World], tuple[PeerJob, World]]:
    """A first world that has trained, and the newcomer of the one after it; all are in that."""
    jobs, worlds = begin(form)
    for job, world in zip(jobs, worlds, strict=True):
        job.settle(world)
    newcomer = form.job(7)
    assert eventually(form, newcomer.entrance.find)
    ready: list[Member] = []

    def look() -> bool:
        newcomer.look_from_queue(Waiting(form.member(7), 1))
        ready[:] = [waiting.member for waiting in jobs[0].queue() if waiting.member.uid == "uid7"]
        return bool(ready)

    assert eventually(form, look), "it is seen in the queue"
    decision = agree(form, jobs, worlds, [0, 1, 2], newcomers=ready)
    following = []
    for job, world in zip(jobs, worlds, strict=True):
        after = decision.world_for(world.me.uid, world)
        assert after is not None
        job.enter(after, decision.facts, decision)
        following.append(after)
    places: list[Admitted | str] = []

    def is_admitted() -> bool:
        places[:] = [newcomer.look_from_queue(Waiting(form.member(7), 1))]
        return isinstance(places[0], Admitted)

    assert eventually(form, is_admitted)
    [place] = places
    assert isinstance(place, Admitted)
    assert place.came_later
    newcomer.enter(place.world, place.facts, None)
    return jobs, following, (newcomer, place.world)


@pytest.mark.parametrize("is_early", [False, True])
def test_who_has_waited_for_a_job_that_cannot_be_reached_begins_another_one(is_early: bool) -> None:
    """Two of one name would never find each other. It may have come before the first world, which had no place."""
    form = PeersInMemory()
    jobs, worlds = begin(form)
    token = jobs[0].facts.create("job_token", "the first")
    form.finds = [("host", 0)]
    newcomer = form.job(7)
    newcomer.entrance._size = Size(1, 8, 0.0, silence=0.0)
    if is_early:
        form._stores["host", 0].delete("begun")
    assert eventually(form, newcomer.entrance.find)
    jobs[0].tend(worlds[0])
    for _ in range(9):
        newcomer.look_from_queue(Waiting(form.member(7), 1))
        form.pass_time()
    assert newcomer.facts.create("job_token", "mine") == token
    jobs[0].facts.create("run_uid", "r")
    assert newcomer.facts.find("run_uid") == "r"
    for number in range(MIN_NODES):
        form.kill(number)
    cast(Any, newcomer.finder)._is_first = True
    places: list[Admitted | str] = []

    def look() -> bool:
        places[:] = [newcomer.look_from_queue(Waiting(form.member(7), 1))]
        return isinstance(places[0], Admitted)

    assert eventually(form, look), "it begins"
    [place] = places
    assert isinstance(place, Admitted)
    newcomer.enter(place.world, place.facts, None)
    assert newcomer.facts.find("job_token") not in (None, token, "mine")
    assert newcomer.facts.find("run_uid") is None, "the run that it begins has another name"


def test_a_newcomer_says_all_that_it_has_read_of_the_job_not_only_what_came_with_its_world() -> None:
    form = PeersInMemory()
    jobs, _worlds = begin(form)
    jobs[0].facts.create("run_uid", "r")
    newcomer = form.job(7)
    assert eventually(form, newcomer.entrance.find)
    assert newcomer.facts.find("run_uid") == "r"
    newcomer.enter(World(0, 1, (form.member(7),)), {"token": "t"}, None)
    assert newcomer.facts.known == {"run_uid": "r", "token": "t"}
    assert {name: newcomer._own.get(f"fact/{name}") for name in newcomer.facts.known} == newcomer.facts.known


@pytest.mark.parametrize("dead", [{0}, {2}, {0, 1}, {1, 2}])
def test_the_others_go_on_without_the_dead(form: Form, dead: set[int]) -> None:
    jobs, worlds = begin(form)
    for rank in dead:
        form.kill(worlds[rank].me.pid)
    rest = [rank for rank in range(3) if rank not in dead]
    decision = agree(form, jobs, worlds, rest, dict.fromkeys(dead, Liveness.DEAD))
    assert decision.ranks == tuple(rest)
    assert decision.lost == tuple(sorted(dead))
    assert set(decision.dead) == {worlds[rank].me.uid for rank in dead}


def test_whoever_was_suspended_waits_for_those_who_could_not_reach_it(form: Form) -> None:
    """They have reported that meanwhile, and one of a pair that is cut off is left out; soon their reports change."""
    jobs, worlds = begin(form)
    form.kill(worlds[0].me.pid)
    dead = {0: Liveness.DEAD}
    jobs[2].announce_presence(worlds[2], to_json(Presence(worlds[2].generation, unreachable=(1,))))
    thawed = agreement(form, jobs[1], worlds[1], dead, is_early=lambda: True)

    def look() -> bool:
        found = thawed.look()
        assert isinstance(found, Wait)
        return found == Wait((2,))

    assert eventually(form, look)
    assert look(), "as long as that may be of before"
    jobs[2].announce_presence(worlds[2], to_json(Presence(worlds[2].generation)))
    assert agree(form, jobs, worlds, [1, 2], dead).ranks == (1, 2)


def test_who_leaves_is_not_lost(form: Form) -> None:
    jobs, worlds = begin(form)
    jobs[1].announcements.announce_leaving(worlds[1])
    decision = agree(form, jobs, worlds, [0, 2])
    assert (decision.ranks, decision.left, decision.lost) == ((0, 2), (1,), ())


def test_who_is_left_out_learns_it(form: Form) -> None:
    jobs, worlds = begin(form)
    decision = agree(form, jobs, worlds, [0, 1], {2: Liveness.UNKNOWN})
    assert decision.lost == (2,)
    late = agreement(form, jobs[2], worlds[2], {})
    late.asks_others = True
    found = late.look()
    assert isinstance(found, Decision)
    assert found == decision
    assert found.world_for(worlds[2].me.uid, worlds[2]) is None


def test_who_has_heard_that_the_job_cannot_go_on_proposes_nothing(form: Form) -> None:
    jobs, worlds = begin(form)
    for job, world in zip(jobs[1:], worlds[1:], strict=True):
        job.announce_presence(world, to_json(Presence(world.generation)))
    jobs[2].announcements.announce(worlds[2], "fatal", "no parallel()")
    assert eventually(form, lambda: jobs[0].heard("fatal") is not None)
    with pytest.raises(JobFailed, match=re.escape("no parallel()")):
        agreement(form, jobs[0], worlds[0], {}).look()
    assert [job.decided(world, [0, 1, 2]) for job, world in zip(jobs, worlds, strict=True)] == [None] * 3


def test_who_comes_back_does_not_wait_in_its_own_queue() -> None:
    """Rank 0 was left out. The store that it had lives as long as its process, and is what a newcomer finds first."""
    form = PeersInMemory()
    jobs, worlds = begin(form)
    decision = agree(form, jobs, worlds, [1, 2], {0: Liveness.UNKNOWN})
    for rank in (1, 2):
        following = decision.world_for(worlds[rank].me.uid, worlds[rank])
        assert following is not None
        jobs[rank].enter(following, decision.facts, decision)
    jobs[0].stand_down()  # it may save its state for minutes before it closes
    finder = cast(Any, jobs[0].finder)
    finder.shown = ()
    jobs[0].tend(None)
    assert finder.shown == (), "its sign would lead newcomers to it"
    form.finds = [member.store for member in worlds[0].members if member.store is not None]
    back = form.job(9)
    assert eventually(form, back.entrance.find)
    back.look_from_queue(Waiting(form.member(9), 1))
    assert [job.queue() for job in (jobs[0], jobs[2])] == [[], []]
    assert [waiting.member.uid for waiting in jobs[1].queue()] == ["uid9"]


def test_who_is_ready_for_a_world_is_seen_by_those_who_are_not(form: Form) -> None:
    jobs, worlds = begin(form)
    assert [job.announcements.not_ready(world) for job, world in zip(jobs, worlds, strict=True)] == [(0, 1, 2)] * 3
    jobs[2].announcements.announce_ready(worlds[2])
    assert [job.announcements.not_ready(world) for job, world in zip(jobs, worlds, strict=True)] == [(0, 1)] * 3


@pytest.mark.parametrize("says", ["nothing", "ready", "finished"])
def test_a_world_is_begun_where_a_member_is_ready_for_it_or_has_finished(form: Form, says: str) -> None:
    jobs, worlds = begin(form)
    if says == "ready":
        jobs[2].announcements.announce_ready(worlds[2])
    if says == "finished":
        for job, world in zip(jobs, worlds, strict=True):
            job.finish(world, "{}", ())
    limits, nobody = Waits(10.0, 10.0, 10.0), cast("Any", None)
    barriers = [Barriers(job, nobody, limits, Surroundings(), lambda: None) for job in jobs]
    found, pairs = [says != "nothing"] * 3, [*zip(barriers, worlds, strict=True)]
    assert eventually(form, lambda: [one._is_begun(world) for one, world in pairs] == found)


def test_a_job_is_closed_whose_store_is_gone() -> None:
    form = PeersInMemory()
    jobs, worlds = begin(form)
    form.kill(worlds[0].me.pid)
    jobs[0].close()


@pytest.mark.parametrize("name", FORMS)
def test_a_member_keeps_little_of_the_worlds_that_are_over(name: str, request: pytest.FixtureRequest) -> None:
    form = FORMS[name](request)
    assert isinstance(form, PeersInMemory)
    jobs, worlds = begin(form)
    past, sizes = [], []
    for number in range(24):
        for rank, (job, world) in enumerate(zip(jobs, worlds, strict=True)):
            job.announcements.announce_ready(world)
            append(job._own, f"{world.key}/{LEFT}", str(9 + rank))
            for prefix in ("group", "ahead", "formed"):  # of gloo, and of a plan
                job._own.put(f"{prefix}/{world.key}/{rank}", "x")
            job._own.put(f"queue/{job._own.add('queue/count', 1)}", Waiting(member(50 + number, ("h", 1)), 1).to_json())
            job.queue()
            job.settle(world)
            job.tend(world)
        sizes.append([len(job._own.keys()) for job in jobs])
        past.append((worlds, agree(form, jobs, worlds, [0, 1, 2])))
        following = [past[-1][1].world_for(world.me.uid, world) for world in worlds]
        worlds = [world for world in following if world is not None]
        for job, world in zip(jobs, worlds, strict=True):
            job.enter(world, past[-1][1].facts, past[-1][1])
    assert sizes[-1] == sizes[-2] == sizes[-3], "what is kept does not grow"
    assert max(sizes[-1]) < 80
    for number in (-1, -2, -known_worlds.KEPT_DECISIONS):
        slept_in, decision = past[number][0][2], past[number][1]
        jobs[2]._own.delete(f"{slept_in.key}/next")
        late = agreement(form, jobs[2], slept_in, {})
        late.asks_others = True
        assert late.look() == decision, "who slept in one of these is told at once"
    started = time.monotonic()
    late = agreement(form, jobs[2], past[0][0][2], {})
    late.asks_others = True
    assert isinstance(late.look(), LeftBehind), "who slept longer is told that the others have gone on"
    assert time.monotonic() - started < PATIENCE / 2, "nobody waits for a key that is gone"
    form.close()


def test_newcomers_without_all_who_have_the_state_decide_nothing(form: Form) -> None:
    jobs, worlds, newcomer = joined(form)
    with_state = dict.fromkeys(range(3), Liveness.UNKNOWN)
    alone = agreement(form, newcomer[0], newcomer[1], with_state)
    assert isinstance(alone.look(), Wait | LeftBehind)
    decision = agree(form, jobs, worlds, [0, 1, 2], {3: Liveness.UNKNOWN})
    assert decision.ranks == (0, 1, 2), "those with the state do"


def test_newcomers_decide_when_a_step_was_done_with_them(form: Form) -> None:
    """They have the state as well, and the others may have died as they like."""
    _, worlds, newcomer = joined(form)
    newcomer[0].settle(newcomer[1])
    for rank in range(3):
        form.kill(worlds[rank].me.pid)
    dead = dict.fromkeys(range(3), Liveness.DEAD)
    assert agree(form, [newcomer[0]] * 4, [newcomer[1]] * 4, [3], dead).ranks == (3,)


def test_one_of_three_without_the_silent_waits_where_nobody_arbitrates() -> None:
    form = PeersInMemory()
    jobs, worlds = begin(form)
    found = agreement(form, jobs[2], worlds[2], {0: Liveness.UNKNOWN, 1: Liveness.UNKNOWN}).look()
    assert found == Wait(votes=(worlds[0].me.uid, worlds[1].me.uid))


def test_a_claim_hands_the_job_to_no_world_without_the_state(tmp_path: Path) -> None:
    """Rank 0, which has the state, may propose a world that leaves it out."""
    form = PeersInMemory()
    form.arbiter = arbiter_of(tmp_path, None)
    jobs, worlds, newcomer = joined(form)
    for voters in jobs[0].worlds.voters:
        jobs[0].place.show(voters.world, is_decided=False)
        assert jobs[0].place.sees(voters.world)
        jobs[0].place.note(voters.world, is_shared=True)
    jobs[0].facts.known["job_token"] = "token"
    proposals = [Decision(9, "after", ranks).to_json() for ranks in ((newcomer[1].rank,), (0, newcomer[1].rank))]
    holding = frozenset({worlds[0].me.uid})
    [without, within] = [partial(jobs[0].decide, worlds[0], one, [0], holding=holding) for one in proposals]
    without()  # from now on its claim would be enough
    form.clock.now += 2 * PEER_TIMEOUT
    assert isinstance(without(), Denied)
    assert within() == proposals[1]


def split(
    *, answering: bool = False, has_state: bool = True, min_nodes: int = 1
) -> tuple[Decision | Wait, list[PeerJob], list[World]]:
    """What one of three that hears nothing of the others finds after a peer timeout, where sides go on."""
    form = PeersInMemory()
    form.goes_on = True
    jobs, worlds = begin(form)
    if has_state:
        jobs[2].settle(worlds[2])
    worlds = [
        replace(world, members=tuple(replace(one, min_nodes=min_nodes) for one in world.members)) for world in worlds
    ]
    part = agreement(form, jobs[2], worlds[2], {0: Liveness.UNKNOWN, 1: Liveness.UNKNOWN}, [form.member(7)])
    part._is_heard = lambda _rank: answering
    votes = (worlds[0].me.uid, worlds[1].me.uid)
    assert part.look() == Wait(votes=votes)
    form.clock.now += PEER_TIMEOUT - 1.0
    assert part.look() == Wait(votes=votes), "they may answer yet"
    form.clock.now += 1.0
    found = part.look()
    assert isinstance(found, Decision | Wait)
    return found, jobs, worlds


def test_one_of_three_goes_on_as_a_branch() -> None:
    decision, jobs, worlds = split()
    assert isinstance(decision, Decision)
    assert (decision.ranks, decision.new) == ((2,), ()), "newcomers have no state"
    stores = tuple(world.me.store for world in worlds[:2])
    assert Branch.from_json(decision.facts[BRANCH]) == Branch(decision.uid, 2, stores)
    world = decision.world_for(worlds[2].me.uid, worlds[2])
    assert world is not None
    jobs[2].enter(world, decision.facts, decision)
    after = Decision(9, "after", (0,), facts=decision.facts)
    assert jobs[2].decide(world, after.to_json(), [0]) == after.to_json(), "by its own votes"


@pytest.mark.parametrize("why", [{"answering": True}, {"has_state": False}, {"min_nodes": 2}])
def test_no_side_goes_on_without_those_that_answer_nor_without_state_or_nodes(why: dict[str, Any]) -> None:
    found, _, worlds = split(**why)
    assert found == Wait(votes=(worlds[0].me.uid, worlds[1].me.uid))


def decide(job: PeerJob, world: World, uid: str, reachable: Sequence[int]) -> str | Denied:
    return job.decide(world, Decision(1, uid, tuple(reachable)).to_json(), reachable)


@pytest.mark.parametrize("reachable", [(0, 1), (0, 2), (0, 1, 2)])
def test_two_proposers_decide_the_same(form: Form, reachable: tuple[int, ...]) -> None:
    jobs, worlds = begin(form)
    first = decide(jobs[0], worlds[0], "a", reachable)
    second = decide(jobs[1], worlds[1], "b", (1, 2))
    if isinstance(second, Denied):  # its ballot was older
        second = decide(jobs[1], worlds[1], "b", (1, 2))
    assert first == second


def interleaved(at: int) -> list[str | Denied] | None:
    """What three proposers are told, the second one before the first one's operation number `at`; None where it has
    fewer."""
    form = PeersInMemory()
    jobs, worlds = begin(form)
    calls = 0
    outcomes: list[str | Denied] = []

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            outcomes.append(decide(jobs[1], worlds[1], "b", (1, 2)))

    form.interrupt = interrupt
    outcomes.append(decide(jobs[0], worlds[0], "a", (0, 1)))
    form.interrupt = lambda: None
    outcomes += [decide(jobs[2], worlds[2], "c", (2, 1)) for _ in range(3)]
    return outcomes if calls >= at else None


def test_two_proposers_decide_the_same_however_they_interleave() -> None:
    for at in range(1, 200):
        outcomes = interleaved(at)
        if outcomes is None:
            assert at > 10
            return
        decided = {outcome for outcome in outcomes if not isinstance(outcome, Denied)}
        assert len(decided) == 1, f"interrupted before operation {at}"
    raise AssertionError("it never ends")


# --- joins that are prepared ------------------------------------------------------------------------------------------


class Groups:
    """Process groups of planned worlds: each stands when all have come."""

    def __init__(self, size: int, seconds: float = PATIENCE) -> None:
        self._all, self._seconds = threading.Barrier(size), seconds

    def form(self, world: World) -> str:
        try:
            self._all.wait(self._seconds)
        except threading.BrokenBarrierError:
            raise FormationFailed("not all have come") from None
        return world.uid


def plan_with(form: Form, jobs: list[PeerJob], worlds: list[World], number: int) -> tuple[PeerJob, Plan]:
    """A newcomer that rank 0 has seen in the queue, and the plan with it, written down beside rank 0."""
    newcomer = form.job(number)
    assert eventually(form, newcomer.entrance.find)
    newcomer.look_from_queue(Waiting(form.member(number), 1))
    ready: list[Member] = []

    def look() -> bool:
        ready[:] = [waiting.member for waiting in jobs[0].queue() if waiting.member.uid == f"uid{number}"]
        return bool(ready)

    assert eventually(form, look), "it is seen in the queue"
    decision = Decision(worlds[0].generation + 1, form.draw_uid(), (0, 1, 2), new=tuple(ready), facts={"token": "t"})
    plan = Plan(worlds[0].uid, worlds[0].members, decision)
    jobs[0].ask_beside(worlds[0].me, lambda beside: beside.put("plan", plan.to_json()))
    return newcomer, plan


def planned(plan: Plan, member: Member) -> World:
    found = plan.world_for(member.uid)
    assert found is not None
    return found


def prepare(
    form: Form,
    jobs: list[PeerJob],
    worlds: list[World],
    newcomer: PeerJob,
    plan: Plan,
    groups: Groups,
    reach: Callable[[str, World], None] = lambda _point, _world: None,
) -> list[Preparation]:
    """Every member's part; the newcomer's is the last. Blocks until all are through."""
    parts = [Preparation(job, groups.form, time.monotonic, time.sleep, reach) for job in (*jobs, newcomer)]
    lead, *follow, accept = parts
    new = plan.decision.new[0]

    def as_newcomer() -> None:
        assert eventually(form, lambda: newcomer.told("plan") is not None)
        told = Plan.from_json(newcomer.told("plan") or "")
        assert told == plan
        accept.run(lambda: accept.accept(told, planned(told, new)))
        if accept.failure is None:
            mark(newcomer, "ready", planned(told, new), lambda: True, time.sleep)

    with ThreadPoolExecutor(len(parts)) as threads:
        running = [threads.submit(lead.run, lambda: lead.lead(worlds[0], plan, planned(plan, worlds[0].me)))]
        running.append(threads.submit(as_newcomer))
        assert eventually(form, lambda: lead.is_due), "the newcomer answers"
        lead.may_form = True  # as after the vote
        for part, world in zip(follow, worlds[1:], strict=True):
            running.append(threads.submit(part.run, lambda part=part, world=world: part.follow(world)))
        for one in running:
            one.result()
    for part in parts:
        assert part.crash is None
    return parts


def test_a_join_is_prepared_while_the_others_train(form: Form) -> None:
    jobs, worlds = begin(form)
    newcomer, plan = plan_with(form, jobs, worlds, 7)
    parts = prepare(form, jobs, worlds, newcomer, plan, Groups(4))
    assert [part.failure for part in parts] == [None] * 4
    assert [part.formed for part in parts] == [plan.decision.uid] * 4
    assert parts[0].is_decided
    assert parts[0].is_ready

    def is_admitted() -> bool:
        place = newcomer.look_from_queue(Waiting(plan.decision.new[0], 1))
        return isinstance(place, Admitted) and place.world.uid == plan.decision.uid

    assert eventually(form, is_admitted)
    decision = agree(form, jobs, worlds, [0, 1, 2])
    assert decision == plan.decision, "whoever agrees in the plain way finds the same"


def test_a_drill_may_strike_at_every_point_of_a_join(form: Form) -> None:
    jobs, worlds = begin(form)
    newcomer, plan = plan_with(form, jobs, worlds, 7)
    points: list[tuple[str, int, str]] = []
    prepare(
        form,
        jobs,
        worlds,
        newcomer,
        plan,
        Groups(4),
        lambda point, world: points.append((point, world.rank, world.uid)),
    )
    old, new = worlds[0].uid, plan.decision.uid
    assert sorted(points) == [*(("formed", rank, new) for rank in range(4)), ("planned", 0, new), ("proposed", 0, old)]
    assert (points[0][0], points[-1][0]) == ("planned", "proposed")


def test_a_drill_may_strike_who_proposes(form: Form) -> None:
    jobs, worlds = begin(form)
    points: list[tuple[str, int]] = []
    agree(form, jobs, worlds, [0, 1, 2], reach=lambda point, world: points.append((point, world.rank)))
    assert points == [("proposed", 0)]


def test_a_plan_whose_group_does_not_form_leaves_no_trace(form: Form) -> None:
    jobs, worlds = begin(form)
    newcomer, plan = plan_with(form, jobs, worlds, 7)
    parts = prepare(form, jobs, worlds, newcomer, plan, Groups(5, seconds=0.5))
    assert all(part.failure is not None for part in parts)
    assert not parts[0].is_decided
    assert agree(form, jobs, worlds, [0, 1, 2]).uid != plan.decision.uid


def test_a_plan_that_was_given_up_invites_nobody(form: Form) -> None:
    jobs, worlds = begin(form)
    newcomer, plan = plan_with(form, jobs, worlds, 7)
    lead = Preparation(jobs[0], Groups(4).form, time.monotonic, time.sleep, lambda _point, _world: lead.cancel())
    lead.run(lambda: lead.lead(worlds[0], plan, planned(plan, worlds[0].me)))
    assert (lead.failure, lead.crash) == (None, None)
    assert newcomer.told("plan") is None


def test_a_plan_loses_against_what_was_decided_before(form: Form) -> None:
    jobs, worlds = begin(form)
    newcomer, plan = plan_with(form, jobs, worlds, 7)
    decided = agree(form, jobs, worlds, [0, 1, 2])
    parts = prepare(form, jobs, worlds, newcomer, plan, Groups(4))
    assert not parts[0].is_decided
    assert parts[0].failure == "another world was decided meanwhile"
    assert decided.uid != plan.decision.uid


def test_a_member_may_hear_of_the_plan_a_moment_after_the_vote(form: Form) -> None:
    """What it reads may be a copy: of the world before, or of nothing yet."""
    jobs, worlds = begin(form)
    _, plan = plan_with(form, jobs, worlds, 7)

    def put(key: str, text: str) -> None:
        jobs[0].ask_beside(worlds[0].me, lambda beside: beside.put(key, text))

    put("plan", replace(plan, parent="the one before").to_json())
    put(f"shared/{planned(plan, worlds[1].me).key}", "0")
    has_looked = threading.Event()

    def sleep(seconds: float) -> None:
        has_looked.set()
        time.sleep(seconds)

    part = Preparation(jobs[1], Groups(1).form, time.monotonic, sleep)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(part.run, lambda: part.follow(worlds[1]))
        assert has_looked.wait(PATIENCE)
        put("plan", plan.to_json())
        running.result()
    assert part.failure is None
    assert part.formed == plan.decision.uid
