"""The decisions of membership, as pure functions over values: tested exhaustively, acted on elsewhere.

Who may go on after a loss is decided beside this, in `protocol/`: `laws.py` counts votes, `arbiter.py` claims,
`branch_off.py` goes on all the same, `other_sides.py` says which of two sides stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elastic_train.errors import Refused
from elastic_train.world import Member

SOON, NOW = 1, 2
"""what rank 0 votes in a step where newcomers are to join (protocol/plan.py); all others vote 0"""


@dataclass(frozen=True)
class Verdict:
    """The members of the next world, or those that it still waits for."""

    members: tuple[int, ...]
    """their ranks in the world before, in order; final only if `waiting_for` is empty"""
    waiting_for: tuple[int, ...]


def next_members(
    size: int, joined: Mapping[int, Collection[int]], left: Collection[int], dead: Collection[int]
) -> Verdict:
    """The next world of `size` old ranks, from who has asked to be in it, who has left, and who is known to be dead.

    It waits for everybody who is neither. Of members that cannot reach each other, some are expelled.

    Args:
        joined: for each of those who have asked the ranks that it could not reach.
    """
    gone = set(left) | set(dead)
    waiting_for = tuple(rank for rank in range(size) if rank not in joined and rank not in gone)
    candidates = [rank for rank in range(size) if rank in joined and rank not in gone]
    edges = {(rank, other) for rank in candidates for other in joined[rank]}
    return Verdict(tuple(connected(candidates, edges)), waiting_for)


def connected(members: Sequence[int], unreachable: Collection[tuple[int, int]]) -> list[int]:
    """The members without those that must go for nobody to be cut off from anybody.

    One goes at a time: who is cut off from the most others, the highest rank of several. A pair of which only one sees
    the other is cut off.
    """
    rest = list(members)
    while True:
        broken = dict.fromkeys(rest, 0)
        for one, other in {(min(pair), max(pair)) for pair in unreachable}:
            if one in broken and other in broken and one != other:
                broken[one] += 1
                broken[other] += 1
        worst = max(rest, key=lambda rank: (broken[rank], rank), default=None)
        if worst is None or broken[worst] == 0:
            return rest
        rest.remove(worst)


def next_generation(seen: Collection[int | None]) -> int:
    """One more than the largest generation that any member has seen; 0 where nobody has seen any."""
    return max((generation for generation in seen if generation is not None), default=-1) + 1


def common_backend(members: Sequence[Member]) -> str:
    """NCCL only where every member has a GPU of its own, as NCCL sees it (`gpu_of`); gloo carries CUDA tensors where
    some share one."""
    gpus = [member.gpu for member in members if member.gpu is not None]
    backends = {member.backend for member in members}
    return backends.pop() if len(backends) == 1 and len(set(gpus)) == len(gpus) else "gloo"


def freshest(steps: Sequence[int]) -> int:
    """The rank whose state everybody takes over: the most committed steps, the lowest rank of several."""
    return max(range(len(steps)), key=lambda rank: (steps[rank], -rank))


def apart(steps: Sequence[int], hashes: Sequence[Mapping[str, int]]) -> dict[int, list[str]]:
    """The ranks that have the freshest step, and other `hashes` (by name) than the one whose state everybody takes
    over: what of them differs."""
    source = freshest(steps)
    found: dict[int, list[str]] = {}
    for rank, step in enumerate(steps):
        if step == steps[source] and hashes[rank] != hashes[source]:
            names = hashes[rank].keys() | hashes[source].keys()
            found[rank] = sorted(name for name in names if hashes[rank].get(name) != hashes[source].get(name))
    return found


def right_hashes(found: Sequence[tuple[int, int]]) -> frozenset[int] | None:
    """Of what members' states hash to, as (kind of machine, hash): which are right. None where nobody can tell.

    The strict majority's. Machines of several kinds may round differently, so each kind is asked for itself; where it
    has no majority another kind's may decide, whose state some of it have got.
    """
    right: set[int] = set()
    undecided: list[list[int]] = []
    for kind in {kind for kind, _ in found}:
        hashes = [value for other, value in found if other == kind]
        most, number = Counter(hashes).most_common(1)[0]
        if 2 * number > len(hashes):
            right.add(most)
        else:
            undecided.append(hashes)
    if any(right.isdisjoint(hashes) for hashes in undecided):
        return None
    return frozenset(right)


DATA_BY = "training set by its "
"""begins what members compare of their data, see data_identity.py"""
ITEMS = f"{DATA_BY}items"
"""of those who may read them; --num-workers says who, in which nodes may differ"""
LENGTHS = {
    f"{name}_length": f"the {kind} set has {{ours}} samples here and {{theirs}}"
    for name, kind in (("train", "training"), ("test", "test"))
}


def disagreement(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first entry that differs: (name, our value, their value); None where all agree. The task comes first, and
    what it trains before flags: they differ as well where it does. Who has read no items differs in none."""
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name.startswith("--"), name != "task", name)):
        if ours.get(name) != theirs.get(name) and (name != ITEMS or (name in ours and name in theirs)):
            return name, ours.get(name), theirs.get(name)
    return None


def agreeing(members: Sequence[Member], reference: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Member, ...]]:
    """What they say together, and those who agree with `reference` and with each other. Of two who contradict each
    other where the reference says nothing the first counts. This holds for the first members only: later ones are
    compared with what was said then, and not with each other."""
    common, found = dict(reference), []
    for one in members:
        if disagreement(common, one.agreement) is None:
            common = {**one.agreement, **common}
            found.append(one)
    return common, tuple(found)


def require_agreement(ours: Mapping[str, Any], theirs: Mapping[str, Any], their_name: str) -> None:
    """Raises Refused at the first entry that differs, naming both values."""
    found = disagreement(ours, theirs)
    if found is not None:
        name, our_value, their_value = found
        words = LENGTHS.get(name, "{name} is {ours!r} here and {theirs!r}")
        differs = words.format(name=name, ours=our_value, theirs=their_value)
        raise Refused(
            f"{differs} on {their_name}: this worker is refused; "
            "give all members the same, or another job --rdzv-id, --rdzv-endpoint and --run-dir of its own"
        )


class Activity(StrEnum):
    """What a member's training thread does, as its heartbeat tells."""

    FORM = "form"
    """meeting, restoring, sending the state"""
    COMPUTE = "compute"
    """something of its own: loading data, forward, backward, an optimizer step, a snapshot"""
    REDUCE = "reduce"
    """it is inside a collective, and may be waiting for its peers"""
    STEP = "step"
    """the passes of a step in which nobody knows whether it waits for its peers or computes: it may be either"""

    @property
    def is_inside(self) -> bool:
        """Whether it may be waiting for its peers."""
        return self in (Activity.REDUCE, Activity.STEP)


@dataclass(frozen=True)
class MemberActivity:
    """What a member is at, by its heartbeat."""

    generation: int
    activity: Activity
    seconds: float
    """that it has lasted, by the member's own clock"""
    limit: float
    """seconds that it may last, by the member's own account (heartbeat.py)"""

    @property
    def is_late(self) -> bool:
        return self.seconds > self.limit


def stalled(activities: Mapping[int, MemberActivity], generation: int) -> frozenset[int]:
    """The ranks whose training thread keeps the others waiting though their heartbeats come.

    A member of this generation is outside of the collective for longer than it may be, and another one has waited in
    there for as long. Who is inside is never to blame.
    """
    present = {rank: one for rank, one in activities.items() if one.generation == generation}
    longest = max((one.seconds for one in present.values() if one.activity.is_inside), default=0.0)
    return frozenset(
        rank for rank, one in present.items() if not one.activity.is_inside and one.is_late and longest > one.limit
    )


def is_cut_off(activities: Mapping[int, MemberActivity], generation: int) -> bool:
    """Whether a collective cannot end though everybody takes part in it: two members cannot reach each other."""
    return bool(activities) and all(
        one.generation == generation and one.activity.is_inside and one.is_late for one in activities.values()
    )


class Failure(StrEnum):
    """What an error that ended a step was."""

    PEER = "peer"
    """a peer was lost: meet the others and go on"""
    OWN = "own"
    """this worker's own: it leaves, the others go on without it"""
    JOB = "job"
    """everybody's, for another member met one at the same step: stop all"""


def seconds_before_return(num_fruitless: int, peer_timeout: float) -> float:
    """That a member waits before it comes back to those who have gone on without it. One that only some of them can
    reach would else end each of their worlds.

    Args:
        num_fruitless: how often in a row it was left out before a world with it was settled.
    """
    return 0.0 if num_fruitless == 0 else min(60.0, peer_timeout * 2.0 ** min(num_fruitless - 1, 10))


def seconds_to_form(world_size: int, num_failed: int = 0) -> float:
    """That the members of a world may take to make its process group, before that has failed. A member that dies within
    the milliseconds in which it is made costs so much.

    Gloo connects each member to every other one, and each asks rank 0's store for every address: that serves one after
    the other, 36 microseconds each (measured with 128 members: 0.6 s of its processor, 2 s in all where they shared two
    cores). Allowed are a second, and three times as much: 1 s for 2 to 30 members, 2.6 for 128, 27 for 512. A machine
    may be busier than that, so each failure of the same members doubles it, up to sixteen times.

    Args:
        num_failed: how often in a row these very members have failed to make a group.
    """
    return (1.0 + 1e-4 * world_size**2) * 2.0 ** min(num_failed, 4)
