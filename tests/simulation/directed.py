"""The schedules of membership.md that a naive rule gets wrong, and those by which planted errors are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_train.protocol.neighbours import Topology
from tests.simulation.plan import Fault, Plan
from tests.simulation.simulator import Simulation
from tests.simulation.work import Work

TIMEOUT = 2.0


def plan(hosts: int, *faults: Fault, recovers_at: float, seed: int = 1, **fields: int) -> Plan:
    return Plan(seed, (1,) * hosts, tuple(faults), recovers_at, peer_timeout=TIMEOUT, **fields)  # type: ignore[arg-type]


def when(plan: Plan, text: str, number: int = 1) -> float:
    """When a note with `text` is written for the `number`-th time."""
    simulation = Simulation(plan)
    simulation.run()
    return [float(note[:8]) for note in simulation.notes if text in note][number - 1]


def late_proof() -> Plan:
    """1: 3 to 5 go on without 1 and 2, and are killed; the cut heals, and 1 and 2 are refused."""
    cut = (1.0, "partition", (0, 1), (2, 3, 4))
    kills = [(6.0, "kill", index) for index in (2, 3, 4)]
    return plan(5, cut, *kills, recovers_at=6.1)


def voters_without_state(lease: float | None = None, after: float = 0.002) -> Plan:
    """2: node 1 has trained alone; three are admitted, and its link fails while the group forms."""
    quiet = replace(plan(4, recovers_at=6.0, founders=1, min_nodes=1), lease=lease)
    at = when(quiet, "enters generation 1") + after
    return replace(quiet, faults=((at, "partition", (0,), (1, 2, 3)),), recovers_at=at + 8.0)


def only_holder_dies(hosts: int, delay: float) -> Plan:
    """All share a directory. One has trained alone, others are admitted, and it is killed before they have had its
    answer in that world."""
    quiet = replace(plan(hosts, recovers_at=6.0, founders=1, min_nodes=1), directories=(0,) * hosts)
    at = when(quiet, "enters generation 1") + delay
    return replace(quiet, faults=((at, "kill", 0),), recovers_at=None, seconds=at + 5.0)


def heir_falls_silent(lease: float | None, later: float) -> Plan:
    """One has trained alone, two others are admitted, and cannot hear each other: the first of these gets no state, the
    second one does, and trains. Then the first one of all is killed."""
    quiet = replace(plan(3, recovers_at=6.0, founders=1, min_nodes=1, num_endpoints=3), lease=lease)
    at = when(quiet, "enters generation 1") + later
    faults = ((at, "cut", 1, 2), (at + 1.15 * TIMEOUT, "kill", 0))
    return replace(quiet, faults=faults, recovers_at=at + 1.15 * TIMEOUT + 3.0)


def heir_is_back(lease: float | None, later: float) -> Plan:
    """The same, but the second one is left out: the first one hears that, and has not got the state when the only one
    that has it is killed. Then it hears the second one, which is back in its queue."""
    quiet = replace(plan(3, recovers_at=6.0, founders=1, min_nodes=1, num_endpoints=3), lease=lease)
    at = when(quiet, "enters generation 1") + later
    faults = ((at, "cut", 1, 2), (at + 1.35 * TIMEOUT, "kill", 0), (at + 1.35 * TIMEOUT, "heal_all"))
    return replace(quiet, faults=faults, recovers_at=at + 1.35 * TIMEOUT + 4.0)


def heir_proposes_a_world_without_it(away: float) -> Plan:
    """All share a directory, which the first of two that cannot hear each other does not see for a while; so the second
    one, which alone has the state by then, proposes."""
    quiet = replace(plan(3, recovers_at=6.0, founders=1, min_nodes=1, num_endpoints=3), directories=(0,) * 3)
    at = when(quiet, "enters generation 1") + 0.07
    faults = ((at, "cut", 1, 2), (at + 1.9, "stall", 2), (at + 2.34, "kill", 0), (at + 3.12, "heal_all"))
    return replace(quiet, faults=(*faults, (at + away, "unstall")), recovers_at=at + 5.7)


def heir_is_back_as_a_spare(lease: float | None) -> Plan:
    """Two train, and two are spares. One that trains freezes, and is left out; the other one is killed; then the first
    one thaws, and is back, behind the spares."""
    faults = ((3.0, "freeze", 1), (5.224 if lease is None else 5.232, "kill", 0), (5.528, "thaw", 1))
    return replace(
        plan(4, recovers_at=11.52, max_world_size=2, min_nodes=1, num_endpoints=4), faults=faults, lease=lease
    )


def heir_is_back_beside_a_branch() -> Plan:
    """By --on-split go-on. The side that holds the state goes on, though one that was left out stands in a queue."""
    quiet = replace(plan(4, recovers_at=None, founders=1, min_nodes=1, num_endpoints=4), goes_on=True)
    return replace(quiet, faults=((1.835, "partition", (3,), (1,)), (4.236, "power_off", 0)), seconds=20.236)


def heir_is_back_and_leaves() -> Plan:
    """Who was left out gives its vote up, is back in the queue, and leaves."""
    faults = ((1.792, "partition", (1,), (2,)), (3.907, "kill", 0), (3.995, "heal_all"), (4.054, "leave", 3))
    return replace(plan(3, recovers_at=12.05, founders=1, min_nodes=1, num_endpoints=3), faults=faults)


def holder_falls_silent(hosts: int, later: float, lease: float | None = None) -> Plan:
    """All share a directory, or use etcd. One has trained alone, others are admitted, and it freezes a moment later."""
    quiet = replace(plan(hosts, recovers_at=6.0, founders=1, min_nodes=1), lease=lease)
    quiet = quiet if lease else replace(quiet, directories=(0,) * hosts)
    at = when(quiet, "enters generation 1") + later
    return replace(quiet, faults=((at, "freeze", 0),), recovers_at=None, seconds=at + 3 * TIMEOUT + 2.5)


def expelled_behind_its_back(at: float = 1.0) -> Plan:
    """3: a stuck trainer is voted out while its watcher answers; the others commit and are killed; it wakes."""
    stuck = plan(3, (at, "stick", 2), recovers_at=30.0)
    killed_at = when(stuck, "enters generation 1") + 0.8
    kills = [(killed_at, "kill", 0), (killed_at, "kill", 1)]
    return plan(3, (at, "stick", 2), *kills, (killed_at + 0.1, "unstick", 2), recovers_at=killed_at + 4.0)


def expelled_and_slow(at: float = 1.0) -> Plan:
    """3 again, later: the others have waited for it to stop, and have committed."""
    stuck = plan(3, (at, "stick", 2), recovers_at=30.0)
    killed_at = when(stuck, "enters generation 1") + TIMEOUT + 1.0
    kills = [(killed_at, "kill", 0), (killed_at, "kill", 1)]
    return plan(3, (at, "stick", 2), *kills, (killed_at + 0.1, "unstick", 2), recovers_at=killed_at + 4.0)


def entered_and_frozen(delay: float) -> Plan:
    """The stuck one has the lowest rank. When the others have had the time to enter their first reduction without it,
    one dies and one freezes; the stuck one goes on alone, and then the frozen one wakes."""
    at = when(plan(3, (1.0, "stick", 0), recovers_at=30.0), "enters generation 1") + delay
    faults = [(1.0, "stick", 0), (at, "kill", 1), (at, "freeze", 2), (at, "unstick", 0), (at + 6.0, "thaw", 2)]
    return plan(3, *faults, recovers_at=at + 8.0)


def moving_register(delay: float = 0.09) -> Plan:
    """4: who collects the votes dies while others have read the decision and some have not."""
    return plan(4, (1.0, "freeze", 3), (1.0 + TIMEOUT + delay, "kill", 0), recovers_at=8.0)


def two_machines(loses: int) -> Plan:
    """6: of two machines one loses power."""
    return plan(2, (1.0, "power_off", loses), recovers_at=1.0 + TIMEOUT + 1.0)


def restarted_container() -> Plan:
    """7: a process with the name, the pid and the address of the old one."""
    faults = [(1.0, "kill", 2), (1.002, "back", 2, True)]
    return replace(plan(3, *faults, recovers_at=3.0), has_equal_names=True)


def accepted_late(delay: float = 0.19) -> Plan:
    """A member that was frozen when it was told a list accepts it when the others have gone on without it."""
    faults = [(1.0, "kill", 3), (1.0 + delay, "freeze", 2), (7.0, "thaw", 2), (7.4, "kill", 0), (7.4, "kill", 1)]
    return plan(4, *faults, recovers_at=11.0)


def left_out_without_a_signpost() -> Plan:
    """One of four is cut off for a while, and the endpoint's host dies meanwhile."""
    faults = [(1.0, "partition", (0, 1, 2), (3,)), (1.0 + 2 * TIMEOUT, "kill", 0)]
    return plan(4, *faults, recovers_at=2.0 + 2 * TIMEOUT)


CUT_OFF_SPARE: tuple[Fault, ...] = ((0.0, "partition", (0, 1), (2,)), (2 * TIMEOUT, "heal_all"))


def spare_without_the_others() -> Plan:
    """Two train, and a spare does not hear them any more for a while."""
    return plan(3, (1.0, "partition", (0, 1), (2,)), recovers_at=2.0 + 2 * TIMEOUT, max_world_size=2)


def spare_without_one_of_the_others(lease: float | None) -> Plan:
    """Two train to the end, and a spare does not hear one of them any more."""
    made = plan(3, (1.0, "partition", (1,), (2,)), recovers_at=10.0, max_world_size=2, max_steps=25)
    return replace(made, lease=lease)


def spares_beside_a_claim(seed: int, lease: float | None) -> Plan:
    """The only one of five that trains is killed, and comes back. A spare that trains since then claims the world with
    it, without another spare, which has lost its power. No spare has seen where claims are kept."""
    faults = ((1.7, "kill", 0), (2.8, "back", 0, False), (3.45, "power_off", 3))
    made = replace(plan(5, *faults, recovers_at=0.0, seed=seed, max_world_size=1, num_endpoints=2), lease=lease)
    return replace(made, directories=() if lease else (0,) * 5, recovers_at=None, seconds=8.0)


def spares_without_each_other() -> Plan:
    """The only worker is killed while the two spares do not hear each other; later they do."""
    faults = ((1.0, "partition", (1,), (2,)), (1.5, "kill", 0), (10.0, "heal_all"))
    return plan(3, *faults, recovers_at=14.0, max_world_size=1)


def spare_left_out_twice() -> Plan:
    """A spare is frozen while another node is killed; and again, when it stands by once more."""
    faults = (
        (1.0, "freeze", 4),
        (3.5, "kill", 1),
        (7.0, "thaw", 4),
        (14.0, "freeze", 5),
        (16.5, "kill", 2),
        (20.0, "thaw", 5),
    )
    return plan(5, *faults, recovers_at=24.0, max_world_size=2)


def spare_frozen_until_the_others_have_gone_on(leaves: bool) -> Plan:
    """The only worker is killed, or leaves, while a spare is frozen; the other spares go on."""
    faults = ((1.0, "freeze", 1), (1.5, "leave" if leaves else "kill", 0), (1.5 + 2 * TIMEOUT, "thaw", 1))
    return plan(4, *faults, recovers_at=6.0 + 2 * TIMEOUT, max_world_size=1)


def frozen_as_it_is_to_wait_for_nodes(at: float, lease: float | None) -> Plan:
    """Of four that need each other one is killed, and one of the others is frozen until they wait without it, too."""
    faults = ((1.0, "kill", 3), (at, "freeze", 2), (8.0, "thaw", 2))
    return replace(plan(4, *faults, recovers_at=14.0), trains_with=4, lease=lease)


def cut_off_until_the_end() -> Plan:
    """Two of five workers cannot be told of the first world, as their host is cut off until the others have trained to
    the end."""
    faults = ((1.5, "partition", (0,), (2, 1)),)
    made = Plan(290100540, (2, 2, 1), faults, 9.0, TIMEOUT, is_formed=False, num_endpoints=3)
    return replace(made, max_steps=12, lease=60.0)


def spare_cut_off_until_the_end() -> Plan:
    """Who begins the job cannot reach one of three, a spare of the first world, until the others have trained to the
    end. The other one that trains reaches it."""
    made = Plan(1, (1,) * 3, ((1.5, "partition", (0,), (2,)),), 9.0, TIMEOUT, is_formed=False, num_endpoints=3)
    return replace(made, max_world_size=2, max_steps=8, lease=60.0)


def lacks_the_last_step() -> Plan:
    """Of three that need each other one is killed in the reduction of the last step, which does not end on rank 1."""
    quiet = replace(plan(3, recovers_at=4.0), max_steps=4, trains_with=3, work=Work(busy=(2, 3, 0.5)))
    simulation = Simulation(quiet)
    simulation.run()
    at = simulation.workers[0].committed_at
    faults = ((at - 0.1, "cut", 2, 1), (at + 0.1, "kill", 2))
    return replace(quiet, faults=faults, recovers_at=9.0)


def first_host_comes_back() -> Plan:
    """5: the host of the first endpoint is killed, and comes back while the others train."""
    return plan(3, (1.0, "kill", 0), (1.5, "back", 0, False), recovers_at=6.0, min_nodes=1)


def second_job(heals_at: float, *faults: Fault, seed: int = 1) -> Plan:
    """The first endpoint's host is killed and cut off, comes back, and begins a second job; then it hears the others
    again."""
    cut = (4.0, "partition", (0,), (1, 2))
    faults = ((4.0, "kill", 0), cut, (4.5, "back", 0, False), *faults, (heals_at, "heal_all"))
    made = plan(3, *faults, recovers_at=heals_at + 0.1, seed=seed, min_nodes=1)
    return replace(made, is_formed=False, begins_twice=True)


def second_job_that_comes_further(seed: int = 1) -> Plan:
    """The same, and the first job is suspended meanwhile, for so long that it has fewer steps."""
    frozen = [(4.5 + 0.001 * host, "freeze", host) for host in (1, 2)]
    woken = [(19.9, "thaw", host) for host in (1, 2)]
    return second_job(20.0, *frozen, *woken, seed=seed)


def halves() -> Plan:
    """Four in two halves."""
    return plan(4, (1.0, "partition", (0, 3), (1, 2)), recovers_at=1.0 + TIMEOUT + 2.5)


def silent_with_directory(hosts: int, silent: tuple[int, ...], *faults: Fault, **fields: int) -> Plan:
    """Some lose their power for good, among them the lowest rank; the others share a run directory."""
    off = [(1.0, "power_off", host) for host in silent]
    made = plan(hosts, *off, *faults, recovers_at=1.0 + 3 * TIMEOUT + 2.5)
    return replace(made, directories=(0,) * hosts, **fields)  # type: ignore[arg-type]


def copied_directory() -> Plan:
    """Each of two has a copy of the run directory, and they are cut off from each other."""
    cut = (1.0, "partition", (0,), (1,))
    return replace(plan(2, cut, recovers_at=1.0 + 3 * TIMEOUT + 2.5), directories=(0, 1))


def lost_claims(number: int = 2) -> Plan:
    """Two halves, and neither is told whether its claim was made; with 3 the first one of each is not."""
    faults = [(0.9, "lose_claims", host, number) for host in range(4)]
    made = plan(4, *faults, (1.0, "partition", (0, 1), (2, 3)), recovers_at=1.0 + 3 * TIMEOUT + 2.5)
    return replace(made, directories=(0, 0, 0, 0))


def newcomers_and_a_directory() -> Plan:
    """One has trained alone; three are admitted, and it freezes before it gives them the state."""
    quiet = replace(plan(4, recovers_at=6.0, founders=1, min_nodes=1), directories=(0, 0, 0, 0))
    at = when(quiet, "sees the directory in generation 1")
    return replace(quiet, faults=((at, "freeze", 0),), recovers_at=at + 3 * TIMEOUT + 2.5)


def forgotten_claim(frozen_at: float) -> Plan:
    """Two machines are cut off from each other, and the first one sleeps; the other one goes on, and loses two of its
    workers one by one, until the claim of the first world is removed. Then the first one wakes up."""
    at = 4.0 + 2 * TIMEOUT
    kills = [(at, "kill", 3), (at + 3.0, "kill", 2)]
    cut = (1.0, "partition", (0,), (1,))
    made = plan(2, cut, (frozen_at, "freeze", 0), *kills, (at + 6.0, "thaw", 0), recovers_at=at + 8.5 + 3 * TIMEOUT)
    return replace(made, hosts=(1, 3), directories=(0, 0))


def halves_with_etcd() -> Plan:
    """The same for long enough that the side without the lowest rank comes to claim."""
    return replace(halves(), lease=60.0, recovers_at=8.0)


def spare_with_votes_and_without_etcd(seed: int) -> Plan:
    """Three train. The two nodes that have etcd go on by a claim; of the others only a spare has not asked it yet."""
    faults = ((0.75, "partition", (1, 3), (0, 2, 4)), (1.25, "lose_store", (0, 2, 4)))
    return replace(plan(5, *faults, recovers_at=13.2, seed=seed, max_world_size=3), lease=60.0)


def halves_that_go_on() -> Plan:
    """Four in two halves, and both train on until they hear each other again."""
    faults = [(1.0, "partition", (0, 1), (2, 3)), (5.0 + 3 * TIMEOUT, "heal_all")]
    made = plan(4, *faults, recovers_at=9.0 + 3 * TIMEOUT)
    return replace(made, goes_on=True)


def spare_that_is_left() -> Plan:
    """Of three that train and their spare rank 0 dies, and the spare's node is cut off; from there the others leave."""
    faults = ((0.77, "kill", 0), (0.77, "leave", 2), (0.78, "partition", (1,), (0,)))
    return Plan(1, (2, 2), faults, 9.3, TIMEOUT, max_world_size=3, goes_on=True)


def branch_with_a_spare_that_is_gone() -> Plan:
    """Two and three train on without each other. The spare of the three loses its power before they meet."""
    faults = ((1.0, "partition", (0, 2), (1, 3, 4)), (9.0, "power_off", 4), (12.0, "heal_all"))
    return replace(plan(5, *faults, recovers_at=18.0, max_world_size=2), goes_on=True)


def branches_with_a_common_member(most: int | None, frozen: tuple[int, ...]) -> Plan:
    """Two that cannot hear each other, where all others hear both; without the frozen ones neither has the votes."""
    made = plan(5, *((1.2, "freeze", one) for one in frozen), (2.9, "partition", (1,), (2,)), recovers_at=11.4)
    return replace(made, max_world_size=most, goes_on=True)


def world_that_one_never_entered() -> Plan:
    """The main line goes on with a member that cannot hear it, and that goes on alone: each is there, and answers."""
    cut = (5.896021276095011, "partition", (1, 2), (0,))
    kills = [(5.808524771108455, "kill", 0), (7.409403235677591, "kill", 4)]
    faults = ((1.1096979325937646, "freeze", 2), kills[0], cut, kills[1], (7.829737779944937, "heal_all"))
    return Plan(920, (2, 2, 1), faults, 16.329737779944935, TIMEOUT, is_formed=False, num_endpoints=2, goes_on=True)


def superseded_while_one_joins() -> Plan:
    """A branch of one meets the main line in the step that takes in a newcomer."""
    faults = ((3.185506141284009, "cut", 4, 1), (3.2106425130670733, "partition", (0,), (1, 2, 4, 3)))
    return Plan(4403, (1,) * 5, faults, 12.583023922124204, TIMEOUT, num_endpoints=2, goes_on=True)


def votes_beside_a_silent_directory(delay: float) -> Plan:
    """A node dies, and rank 0 does not see the directory; of those that it asks for their votes, one is cut off, and
    sees it."""
    faults = [(1.0, "stall", 0), (1.1, "kill", 3), (1.1 + delay, "partition", (0, 1, 3), (2,))]
    return replace(plan(4, *faults, recovers_at=1.1 + delay + 4.5 * TIMEOUT), directories=(0, 0, 0, 0))


def newcomer_beside_one_that_dies() -> Plan:
    """Two are to be admitted together, and one of them has another first world, and dies in it."""
    faults = (
        (1.126428401690441, "freeze", 2),
        (1.4092880772503305, "partition", (3,), (1,)),
        (5.307115843191063, "partition", (3,), (0,)),
    )
    return Plan(7873, (1,) * 4, faults, 13.807115843191063, TIMEOUT, is_formed=False, num_endpoints=2, goes_on=True)


def pair_without_the_lowest_rank() -> Plan:
    """Split 1-2-1 for a minute; nobody may go on."""
    return plan(4, (1.0, "partition", (0,), (1, 3), (2,)), recovers_at=60.0)


def unanswered_in_a_join(topology: Topology) -> Plan:
    """A newcomer is invited, and one answer of rank 0's store is lost."""
    faults = (
        (4.35796177211058, "kill", 4),
        (4.692353667212346, "leave", 1),
        (5.2946260762957635, "back", 4, True),
        (6.35796177211058, "lose_replies", 0, 1),
    )
    return Plan(2002132, (1,) * 5, faults, 9.857961772110581, TIMEOUT, is_formed=False, topology=topology)


def hole_in_the_queue() -> Plan:
    """The link fails while a newcomer puts itself into the queue, for 50 ms."""
    faults = (
        (2.7543322615103696, "kill", 0),
        (2.7543322615103696, "kill", 1),
        (3.2884022104050645, "back", 1, False),
        (4.4908379092553075, "partition", (2,), (3, 1, 4, 0, 6, 5)),
        (4.542607996556636, "heal_all"),
    )
    return Plan(2026440, (1,) * 7, faults, 8.042607996556637, TIMEOUT, num_endpoints=2, directories=(0,) * 7)


def spare_of_a_world_that_is_over(topology: Topology) -> Plan:
    """One hears of the first world as its spare when the others are in the next one."""
    faults = (
        (0.508136567961661, "power_off", 3),
        (2.399443680352832, "partition", (0,), (2,)),
        (4.659947160329415, "freeze", 0),
        (6.75848878333399, "thaw", 0),
    )
    fields = {"is_formed": False, "max_world_size": 3, "num_endpoints": 2, "topology": topology}
    return Plan(2004082, (1,) * 7, faults, 10.258488783333991, TIMEOUT, **fields)  # type: ignore[arg-type]


def spare_that_missed_the_beginning() -> Plan:
    """Of the five of the first world one is frozen when they are told, and whom the beginner could not reach is no
    concern of those who train: a spare is in no agreement of theirs."""
    faults = ((1.838879394521485, "freeze", 1), (3.838879394521485, "freeze", 2), (5.7147113468188655, "thaw", 1))
    return Plan(
        7064495, (2, 2, 1), faults, 11.075135542116918, TIMEOUT,
        is_formed=False, trains_with=1, max_world_size=3, num_endpoints=3,
    )  # fmt: skip


def two_that_cannot_hear_each_other(seed: int, lease: float | None) -> Plan:
    """One of five is killed, and one of the others is not heard by another one from then on: the world after it breaks
    before it stands, again and again, in which nobody has been silent for long."""
    made = plan(5, (1.0, "kill", 4), (1.001, "cut", 3, 2), recovers_at=20.0, seed=seed)
    return replace(made, lease=lease)


def suspended_until_others_go_on(founders: int) -> Plan:
    """All who train are frozen while two wait in the queue, for so long that those begin."""
    frozen = [(0.1, "freeze", index) for index in range(founders)]
    woken = [(10.0, "thaw", index) for index in range(founders)]
    made = plan(founders + 2, *frozen, *woken, recovers_at=16.0, founders=founders, min_nodes=1)
    return replace(made, lease=3.0, begins_twice=True)


def alone_without_the_store(*faults: Fault) -> Plan:
    """Two train in long steps, and one in the queue knows nothing of etcd for longer than a lease."""
    made = replace(plan(3, *faults, founders=2, min_nodes=1, recovers_at=0.0), recovers_at=None, seconds=130.0)
    return replace(made, lease=3.0, stall_timeout=100.0, work=Work(step=30.0))


def waits_without_the_store(found_at: float) -> Plan:
    """Of two that need each other one is killed, and the other one loses etcd while it waits for a node."""
    faults = ((1.0, "kill", 1), (2.0, "lose_store", (0,)), (found_at, "find_store", (0,)))
    made = plan(2, *faults, (found_at + 1.0, "back", 1, False), recovers_at=found_at + 5.0, min_nodes=2, trains_with=2)
    return replace(made, lease=3.0)


def suspended_without_the_store(hosts: int, *faults: Fault) -> Plan:
    """All are frozen for longer than etcd's lease, and wake up where it is away for some more seconds."""
    frozen = [(2.0 + 0.001 * host, "freeze", host) for host in range(hosts)]
    woken = [(17.0 + 0.001 * host, "thaw", host) for host in range(hosts)]
    store = [(2.1, "lose_store", tuple(range(hosts))), (23.0, "find_store", tuple(range(hosts)))]
    ordered = sorted([*faults, *frozen, *woken, *store], key=lambda fault: fault[0])
    return replace(plan(hosts, *ordered, recovers_at=24.0), lease=12.0)


def all_suspended(at: float, lease: float | None) -> Plan:
    """A whole job is suspended for much longer than any timeout."""
    frozen = [(at + 0.0001 * host, "freeze", host) for host in range(3)]
    woken = [(at + 15.0 + 0.0001 * host, "thaw", host) for host in range(3)]
    return replace(plan(3, *frozen, *woken, recovers_at=at + 20.0), lease=lease)


def begins_beside_those_without_etcd() -> Plan:
    """One of three is killed, the others lose etcd, and it comes back when their lease is over."""
    away = ((2.0, "lose_store", (0, 1)), (13.0, "find_store", (0, 1)))
    made = plan(3, (1.0, "kill", 2), *away, (8.0, "back", 2, False), recovers_at=14.0, min_nodes=1)
    return replace(made, lease=3.0, begins_twice=True)


def first_without_the_store() -> Plan:
    """One of four is killed, rank 0 loses etcd, and the killed one comes back when rank 0's leases are over."""
    away = ((2.0, "lose_store", (0,)), (30.0, "find_store", (0,)))
    made = plan(4, (1.0, "kill", 3), *away, (11.0, "back", 3, False), recovers_at=30.0, min_nodes=1)
    return replace(made, lease=3.0)


def loses_the_entry(*faults: Fault, hosts: int = 3, seconds: float) -> Plan:
    return replace(plan(hosts, *faults, recovers_at=0.0), recovers_at=None, seconds=seconds, lease=3.0)


def claimed_before_the_loss(hosts: int = 4) -> Plan:
    """Half of them lose the others and etcd; these go on by a claim, etcd comes back empty, and the half hears it."""
    half = tuple(range(hosts // 2))
    faults = (
        (2.0, "partition", half, tuple(range(hosts // 2, hosts))),
        (2.0, "lose_store", half),
        (8.0, "empty_store"),
        (8.5, "find_store", half),
    )
    return replace(plan(hosts, *faults, recovers_at=20.0), lease=3.0)


def votes_without_an_entry() -> Plan:
    """Etcd comes back empty; before they meet in a new entry, two sides cannot hear each other for a while."""
    return replace(plan(4, (1.0, "empty_store"), (1.5, "partition", (0, 1), (2, 3)), recovers_at=14.0), lease=3.0)


def two_plans_for_one_newcomer() -> Plan:
    """Two of seven are cut off, and the others' directory is silent; so the plan to take the two back is written while
    the world that it follows breaks, and they are invited by it after they were by that of the next world."""
    faults = (
        (0.3143292386844227, "partition", (6, 0), (5, 2, 3, 4, 1)),
        (2.6076843307077517, "stall", 0, 6, 4, 2, 1, 5),
        (2.7259861282795854, "freeze", 5),
        (2.825929399341906, "kill", 5),
        (2.835929399341906, "heal_all"),
        (4.607684330707752, "unstall"),
    )
    made = plan(7, *faults, recovers_at=10.107684330707752, seed=2000958)
    sparse = Topology(dense=2, degree=2, spare_degree=2)
    return replace(made, num_endpoints=2, directories=(0, 0, 0, 0, 0, 0, 1), topology=sparse)


def two_newcomers(*faults: Fault, lease: float | None) -> Plan:
    """Two have trained without them for half a minute when all must be in one world."""
    made = plan(4, *faults, recovers_at=30.0, founders=2, min_nodes=1)
    return replace(made, lease=lease)


def spare_that_comes_late() -> Plan:
    """The fourth of four is frozen as it waits to be admitted, and wakes as a spare of a world that is over; the two
    that it pings train in the next one."""
    freeze, kill = (0.36884887525049653, "freeze", 3), (4.531352308215328, "kill", 2)
    sparse = Topology(dense=2, degree=2, spare_degree=2)
    return Plan(
        6000137, (2, 2), (freeze, kill), 12.041352308215327, TIMEOUT,
        is_formed=False, max_world_size=3, num_endpoints=3, topology=sparse,
    )  # fmt: skip


def dies_again_and_again(times: int, *faults: Fault, hosts: int = 3, recovers_at: float, **fields: Any) -> Plan:
    """The last host is killed, and comes back 0.5 s later, so often; the last time as `faults` say."""
    deaths = [(1.0 + 4.0 * turn, "kill", hosts - 1 + turn) for turn in range(times)]
    returns = [(at + 0.5, "back", hosts - 1, False) for at, *_ in deaths[: len(deaths) - bool(faults)]]
    made = plan(hosts, *deaths, *returns, *faults, recovers_at=recovers_at, min_nodes=1)
    return replace(made, quarantine=True, **fields)


def voter_that_is_left_out_unheard(lease: float | None) -> Plan:
    """Two that cannot reach each other: one is left out, and gives its vote up, which the third alone hears, and dies
    before the world of the two is settled."""
    return replace(plan(3, (0.0, "cut", 1, 0), (2.9, "kill", 2), recovers_at=6.4), lease=lease)
