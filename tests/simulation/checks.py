"""Laws for a history: one chain of worlds, no lost step, and no side waits that a law lets go on."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tests.simulation.worker import AHEAD_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.ring_parts import Commit
    from tests.simulation.simulator import Simulation, Told
    from tests.simulation.worker import Worker

JUDGED_SECONDS = 1.0
"""before a side stops, as it has fewer steps than another one"""
AGREE_SECONDS = 0.5
"""after a member's end, in which the others go on without it"""
JOIN_SECONDS = 7.0
"""after the last fault: one that hears all who train is in their world"""
BRANCH_SECONDS = 5.0
"""that members wait for the others before they train as a branch, which a newcomer can join"""
QUEUE_SECONDS = 2.5
"""that one who was left out may stand in the queue: it has to find the job, and its join is prepared"""


def check_chain(simulation: Simulation) -> None:
    """The committed worlds form one chain, those of each branch do; only a provisional step is computed again."""
    _complete_parents(simulation)
    for branch in {told.branch for told in simulation.worlds.values()}:
        _check_chain_of(simulation, branch)


def _check_chain_of(simulation: Simulation, branch: str) -> None:
    worlds = simulation.worlds
    committed = [told for told in worlds.values() if told.commits and told.branch == branch]
    lines = {told.uid: _line(worlds, told) for told in committed}
    for told in committed:
        if simulation.starts.get(told.uid) and not simulation.plan.begins_twice:
            simulation.fail(
                f"a committed step is lost: {told.uid} began from the start beside {simulation.starts[told.uid]}"
            )
    committed.sort(key=lambda told: (lines[told.uid][-1], len(lines[told.uid])))
    for before, after in pairwise(committed):
        if before.uid not in lines[after.uid]:
            if lines[before.uid][-1] != lines[after.uid][-1]:
                continue  # a second beginning: that is judged above
            simulation.fail(f"no chain: {before.uid} and {after.uid} have committed")
            return
        if after.uid in simulation.starts:
            continue  # that is judged above
        last, first = before.commits[-1], after.commits[0]
        if first.parent is not last and first.parent is not last.parent:
            parent = "nothing" if first.parent is None else f"step {first.parent.step} of {first.parent.world}"
            simulation.fail(
                f"a committed step is lost: {after.uid} goes on from {parent}, {before.uid} had come to {last.step}"
            )


def _complete_parents(simulation: Simulation) -> None:
    """Worlds that only newcomers have entered: by the decisions that anybody has read."""
    for parent, uid in simulation.form.decisions():
        if uid in simulation.worlds and simulation.worlds[uid].parent is None:
            simulation.worlds[uid].parent = parent


def _line(worlds: dict[str, Told], told: Told) -> list[str]:
    line = [told.uid]
    while told.parent is not None:
        line.append(told.parent)
        if told.parent not in worlds:
            break
        told = worlds[told.parent]
    return line


def what_is_not_well(simulation: Simulation) -> str | None:
    """Long after a full heal."""
    living = simulation.living
    for worker in living:
        is_over = "over" in worker.process.memory.values
        if worker.wants_to_leave or is_over:
            return f"does not end: {worker} {worker.activity}, told {'that the job is over' if is_over else 'to stop'}"
    trainers = [worker for worker in living if worker.activity != "queues" and worker.world is not None]
    if not trainers:
        return None
    given_up = _what_is_given_up(simulation, trainers)
    if given_up is not None:
        return given_up
    worlds = {worker.world.uid for worker in trainers if worker.world is not None}
    now = simulation.kernel.now
    committed_by = now - simulation.plan.work.commit_seconds
    is_training = any(worker.committed_at > committed_by for worker in trainers)
    may_go_on = any(simulation.form.may_go_on(worker, trainers) for worker in trainers)
    is_short = len({worker.member.node for worker in trainers}) < simulation.plan.trains_with
    if len(worlds) == 1 and (is_training or (is_short and may_go_on)):
        queue = [worker for worker in living if worker not in trainers and _can_join(simulation, worker, trainers)]
        return f"still in the queue after a heal: {_states(living)}" if queue else None
    if not may_go_on and lacks_given_up(simulation):
        return f"waits for votes that were given up: {_states(living)}"
    if not may_go_on or _is_short_without_strangers(simulation, trainers):
        return None
    has_signpost = simulation.form.has_signpost()
    waiting = [worker for worker in trainers if worker.committed_at <= committed_by]
    if is_training and not has_signpost and not any(simulation.form.may_go_on(worker, trainers) for worker in waiting):
        return None  # those who train are strangers to them, and nobody is left who could show the way
    if all(worker.last_step == 0 for worker in trainers):
        # Nobody gave them the state: they wait for one who has it, and who is not in their queue.
        return f"a kept state waits in the queue: {_states(living)}" if any(one.kept for one in living) else None
    return f"not together after a heal: {_states(living)}"


def _is_short_without_strangers(simulation: Simulation, trainers: list[Worker]) -> bool:
    """Whether those in the newest world are too few to train, without members of other worlds that do not know them and
    that nobody shows the way."""
    if simulation.form.has_signpost():
        return False
    worlds = {id(one): {member.uid for member in one.world.members} for one in trainers if one.world is not None}
    newest = worlds[id(_newest_of(trainers))]
    acquainted = [one for one in trainers if not newest.isdisjoint(worlds[id(one)])]
    return len({worker.member.node for worker in acquainted}) < simulation.plan.trains_with


def _newest_of(trainers: list[Worker]) -> Worker:
    return max(trainers, key=lambda one: one.world.generation if one.world else -1)


def lacks_given_up(simulation: Simulation) -> bool:
    """Whether a side waits for the votes of members that were left out, and came back as others, and for no more: for
    votes that nobody can give."""
    side = [worker for worker in simulation.living if worker.activity != "queues" and worker.world is not None]
    lacking = simulation.form.missing_votes(_newest_of(side), side)
    back = {uid for worker in simulation.living for uid, _ in worker.member.was}
    return bool(lacking) and lacking <= back


def _what_is_given_up(simulation: Simulation, trainers: list[Worker]) -> str | None:
    """A state that a living worker gave up (it came back, or stands by) though the line on which these go on had not
    come so far by then."""
    newest = max((one.commit for one in trainers if _trains(one) and one.commit), key=_age, default=None)
    line = {id(one): one for one in _way_to(newest)}
    beginning = next(reversed(line), None)
    for worker in simulation.living:
        kept, since = _given_up(simulation, worker)
        if kept is None or kept.parent is None or id(kept) in line or id(kept.parent) in line:
            continue  # a last step is provisional
        if id(list(_way_to(kept))[-1]) != beginning:
            continue  # how a job begins anew is judged by itself
        # Two sides train on while they judge by what they have published.
        judged = next((one for one in _way_to(kept) if one.at < since - JUDGED_SECONDS), None)
        theirs = next((one.step for one in line.values() if one.at <= since), 0)
        if judged is not None and id(judged) not in line and judged.step > theirs:
            return f"a kept state is lost: {worker} gave up step {kept.step}, those who go on had {theirs}: {trainers}"
    return None


def _given_up(simulation: Simulation, worker: Worker) -> tuple[Commit | None, float]:
    """The newest state of a worker that it does not train from, and when it ceased to."""
    if worker.commit is None or worker.world is None or _trains(worker):
        return worker.kept, worker.gave_up_at
    return worker.commit, simulation.worlds[worker.world.uid].entered_at


def _trains(worker: Worker) -> bool:
    return worker.world is not None and worker.activity != "queues" and not worker.world.is_spare


def _age(commit: Commit) -> tuple[float, int]:
    return commit.at, commit.step


def _way_to(commit: Commit | None) -> Iterator[Commit]:
    """It and those before it, the newest first."""
    while commit is not None:
        yield commit
        commit = commit.parent


def _can_join(simulation: Simulation, newcomer: Worker, trainers: list[Worker]) -> bool:
    """Whether one in the queue has a way to those who train, and the other workers of its node are there."""
    if any(worker.process.ending == "finished" for worker in simulation.workers):
        return False
    formed_at = max(told.entered_at for told in simulation.worlds.values())  # its join is prepared after another one
    if simulation.kernel.now - max(newcomer.began_at, formed_at) < QUEUE_SECONDS:
        return False
    host = newcomer.process.host
    hosts = {one.address[0] for trainer in trainers if trainer.world is not None for one in trainer.world.members}
    if host not in hosts and len(hosts) >= simulation.plan.max_nodes:
        return False
    there = {one.member.local_rank for one in simulation.living if one.process.host == host}
    return len(there) == simulation.plan.workers_of(host) and simulation.form.finds(newcomer, trainers)


def _states(workers: list[Worker]) -> str:
    return ", ".join(f"{worker} {worker.activity} in {worker.world and worker.world.uid}" for worker in workers)


def check_nobody_expelled(simulation: Simulation) -> None:
    """Where workers only die, leave and come: nobody who works is left out, and no world ends without a reason."""
    for worker in simulation.workers:
        if worker.process.ending == "left_out":
            simulation.fail(f"a worker that works was expelled: {worker} {worker.error}")
    faults = [fault[1] for fault in simulation.plan.faults]
    if set(faults) <= {"kill"} and simulation.plan.founders == len(simulation.plan.hosts):
        generation = max(told.generation for told in simulation.worlds.values())
        if generation > len(faults):  # a vote may need a second world: some are still reading it when others go
            simulation.fail(f"{generation + 1} worlds, though only {len(faults)} were killed")


def check_sides(simulation: Simulation) -> None:
    """A while after the last fault: a side that may go on does. Only where all cuts are whole."""
    network = simulation.network
    if any((target, source) not in network.cuts for source, target in network.cuts):
        return
    if any(worker.process.ending == "finished" for worker in simulation.workers):
        return
    if simulation.directory.has_stalled:
        return
    # Each lost answer is waited for; and while one side is away from etcd another one may claim.
    of_its_own_pace = ("stick", "back", "lose", "empty_store")
    if not simulation.plan.is_formed or any(fault[1].startswith(of_its_own_pace) for fault in simulation.plan.faults):
        return
    running = [worker for worker in simulation.living if worker.process.is_running]
    left = {worker.uid for worker in running}
    while left:
        first = next(worker for worker in running if worker.uid in left)
        side = [one for one in running if (first.process.host, one.process.host) not in network.cuts]
        if any((a.process.host, b.process.host) in network.cuts for a in side for b in side):
            return
        left -= {worker.uid for worker in side}
        _check_side(simulation, side)


def could_not_know(simulation: Simulation, worker: Worker) -> bool:
    """Whether who begins a job knew of no running one, and could not be called by it."""
    if worker.job.entrance._known is not None:
        return False
    others = [one for one in simulation.living if one is not worker and one.world is not None]
    return not any(_hear_each_other(simulation, worker, one) for one in others)


def _hear_each_other(simulation: Simulation, one: Worker, other: Worker) -> bool:
    hosts, network = (one.process.host, other.process.host), simulation.network
    return other.process.is_running and network.is_open(*hosts) and network.is_open(*reversed(hosts))


def check_queue(simulation: Simulation) -> None:
    """A while after the last fault: nobody is idle in a queue who hears all members of a side that trains. Who finds no
    queue, since the only endpoint is frozen, say, waits."""
    now, plan = simulation.kernel.now, simulation.plan
    if now - simulation.last_fault_at < JOIN_SECONDS or not plan.is_formed or simulation.directory.has_stalled:
        return
    trainers = [one for one in simulation.living if one.committed_at > now - plan.work.commit_seconds]
    newcomers = [one for one in simulation.living if one.activity == "queues" and one.process.is_running]
    for newcomer in (one for one in newcomers if one.job.entrance.host_store is not None):
        sides: dict[str, list[Worker]] = {}
        for one in trainers:
            if one.world is not None:
                sides.setdefault(one.world.uid, []).append(one)
        for uid, side in sides.items():
            later = simulation.worlds[uid].generation + 1
            ahead = [one for one in simulation.living if one.world is not None and one.world.generation == later]
            candidates = [*newcomers, *ahead]
            cut_off = [one for one in candidates if not all(_hear_each_other(simulation, one, other) for other in side)]
            # The side may be forming a group with one that is cut off, or it has waited before it went on as a branch.
            limit = JOIN_SECONDS + AHEAD_SECONDS * bool(cut_off) + BRANCH_SECONDS * plan.goes_on
            since = max(newcomer.began_at, simulation.worlds[uid].last_entered_at)
            if newcomer not in cut_off and now - since > limit and _can_join(simulation, newcomer, side):
                simulation.fail(f"idle in the queue beside those who train: {newcomer}, {_states(side)}")


def _check_side(simulation: Simulation, side: list[Worker]) -> None:
    trainers = [worker for worker in side if worker.activity != "queues" and worker.world is not None]
    plan = simulation.plan
    if len({worker.member.node for worker in trainers}) < max(1, plan.trains_with):
        return
    if _is_short_without_strangers(simulation, trainers):
        return
    now = simulation.kernel.now
    if any(worker.committed_at > now - simulation.plan.work.commit_seconds for worker in trainers):
        return
    if any(now - worker.process.ended_at < AGREE_SECONDS for worker in simulation.workers):
        return  # they go on without it, and are about to
    entered_at = max(told.last_entered_at for told in simulation.worlds.values())
    if now - entered_at < simulation.plan.silence_seconds + simulation.plan.work.commit_seconds:
        return  # who fell silent after its last word is found out only now
    if simulation.form.may_go_on(_newest_of(trainers), trainers):
        simulation.fail(f"a side that may go on does not: {_states(side)}")
