"""The decisions of membership, as pure functions over values: tested exhaustively, acted on elsewhere.

Which side may go on after a loss is decided in `protocol/`: `laws.py` counts votes, `arbiter.py` keeps claims,
`branch_off.py` lets a side go on without enough votes, `other_sides.py` decides which of two sides stops.
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
"""votes of rank 0 in a step when newcomers are to join (protocol/plan.py); all other ranks vote 0"""


@dataclass(frozen=True)
class Verdict:
    """The members of the next world, and the members whose reports are still missing."""

    members: tuple[int, ...]
    """ranks in the world before, ascending; final only if `waiting_for` is empty"""
    waiting_for: tuple[int, ...]


def next_members(
    size: int, joined: Mapping[int, Collection[int]], left: Collection[int], dead: Collection[int]
) -> Verdict:
    """Return which of `size` old ranks are in the next world.

    It waits for each rank that has not joined, left or died. Of members that cannot reach each other some are left out.

    Args:
        joined: for each rank that has asked to be in it, the ranks that it could not reach.
    """
    gone = set(left) | set(dead)
    waiting_for = tuple(rank for rank in range(size) if rank not in joined and rank not in gone)
    candidates = [rank for rank in range(size) if rank in joined and rank not in gone]
    edges = {(rank, other) for rank in candidates for other in joined[rank]}
    return Verdict(tuple(connected(candidates, edges)), waiting_for)


def connected(members: Sequence[int], unreachable: Collection[tuple[int, int]]) -> list[int]:
    """Return the members without those that must go so that all the rest reach each other.

    One member goes at a time: the one that is cut off from the most others; of several, the highest rank. A pair counts
    as cut off if one of the two cannot reach the other.
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
    """Return one more than the largest generation that any member has seen; 0 if no member has seen one."""
    return max((generation for generation in seen if generation is not None), default=-1) + 1


def common_backend(members: Sequence[Member]) -> str:
    """Return the backend of all members; gloo if their backends differ, or if two of them share a GPU (`gpu_of`): NCCL
    needs a GPU for each member, and gloo carries CUDA tensors too."""
    gpus = [member.gpu for member in members if member.gpu is not None]
    backends = {member.backend for member in members}
    return backends.pop() if len(backends) == 1 and len(set(gpus)) == len(gpus) else "gloo"


def freshest(steps: Sequence[int]) -> int:
    """Return the rank whose state all members take over: the most committed steps; of several, the lowest rank."""
    return max(range(len(steps)), key=lambda rank: (steps[rank], -rank))


def apart(steps: Sequence[int], hashes: Sequence[Mapping[str, int]]) -> dict[int, list[str]]:
    """Return the ranks with the freshest step whose `hashes` (by name) differ from those of the `freshest` rank, each
    with the names of the hashes that differ."""
    source = freshest(steps)
    found: dict[int, list[str]] = {}
    for rank, step in enumerate(steps):
        if step == steps[source] and hashes[rank] != hashes[source]:
            names = hashes[rank].keys() | hashes[source].keys()
            found[rank] = sorted(name for name in names if hashes[rank].get(name) != hashes[source].get(name))
    return found


def right_hashes(found: Sequence[tuple[int, int]]) -> frozenset[int] | None:
    """Return the right ones among the members' (kind of machine, hash of the state); None if that cannot be told.

    The hash of a strict majority is right. Kinds of machines may round differently, so each kind is counted alone. A
    kind without a majority is decided by another kind's hash, if some of its members have that hash.
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
"""prefix of the entries that members compare of their data, see data_identity.py"""
NAMES = f"{DATA_BY}names"
"""entry of members whose data set lists files or labels"""
ITEMS = f"{DATA_BY}items"
"""entry of the members that may read items: --num-workers decides that, and may differ between nodes"""
LENGTHS = {
    f"{name}_length": f"the {kind} set has {{ours}} samples here and {{theirs}}"
    for name, kind in (("train", "training"), ("test", "test"))
}


def disagreement(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first entry that differs as (name, our value, their value); None if all are equal. The task comes
    first, and what it trains before flags, which differ as a consequence. `ITEMS` counts only if both sides have it."""
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name.startswith("--"), name != "task", name)):
        if ours.get(name) != theirs.get(name) and (name != ITEMS or (name in ours and name in theirs)):
            return name, ours.get(name), theirs.get(name)
    return None


def agreeing(members: Sequence[Member], reference: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Member, ...]]:
    """Return the union of the agreement texts, and the members compatible with `reference` and with each other. If two
    members differ in an entry that the reference lacks, the first counts. For the first members of a job only: later
    ones are compared with this union, and not with each other."""
    common, found = dict(reference), []
    for one in members:
        if disagreement(common, one.agreement) is None:
            common = {**one.agreement, **common}
            found.append(one)
    return common, tuple(found)


def require_agreement(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise Refused at the first entry that differs from the run's, naming both values."""
    found = disagreement(ours, theirs)
    if found is not None:
        name, our_value, their_value = found
        words = LENGTHS.get(name, "{name} is {ours!r} here and {theirs!r}")
        differs = words.format(name=name, ours=our_value, theirs=their_value)
        raise Refused(
            f"{differs} on the run: this worker is refused; "
            "give all members the same, or another job --rdzv-id, --rdzv-endpoint and --run-dir of its own"
        )


class Activity(StrEnum):
    """The activity of a member's training thread, as its heartbeat reports it."""

    FORM = "form"
    """agreement, restoring, sending the state"""
    COMPUTE = "compute"
    """its own work: loading data, forward, backward, an optimizer step, a snapshot"""
    REDUCE = "reduce"
    """inside a collective, where it may be waiting for its peers"""
    STEP = "step"
    """the passes of a step whose collectives cannot be told from computing: it may wait for its peers or compute"""

    @property
    def is_inside(self) -> bool:
        """Whether the thread may be waiting for its peers."""
        return self in (Activity.REDUCE, Activity.STEP)


@dataclass(frozen=True)
class MemberActivity:
    """The activity of a member, as its heartbeat reports it."""

    generation: int
    activity: Activity
    seconds: float
    """age of the activity by the member's own clock"""
    limit: float
    """seconds that the activity may last by the member's own estimate (heartbeat.py)"""

    @property
    def is_late(self) -> bool:
        return self.seconds > self.limit


def stalled(activities: Mapping[int, MemberActivity], generation: int) -> frozenset[int]:
    """Return the ranks whose training thread keeps the other members waiting although their heartbeats come.

    Such a member has been outside of the collective for longer than its limit, and another member has waited inside for
    longer than that limit. A member inside the collective is never to blame.
    """
    present = {rank: one for rank, one in activities.items() if one.generation == generation}
    longest = max((one.seconds for one in present.values() if one.activity.is_inside), default=0.0)
    return frozenset(
        rank for rank, one in present.items() if not one.activity.is_inside and one.is_late and longest > one.limit
    )


def is_cut_off(activities: Mapping[int, MemberActivity], generation: int) -> bool:
    """Return whether a collective cannot end though all members are in it: two of them cannot reach each other."""
    return bool(activities) and all(
        one.generation == generation and one.activity.is_inside and one.is_late for one in activities.values()
    )


class Failure(StrEnum):
    """The kind of an error that ended a step."""

    PEER = "peer"
    """a peer was lost: agree on the next world and go on"""
    OWN = "own"
    """the error is this worker's own: it leaves, and the other members go on without it"""
    JOB = "job"
    """the error is the job's, since another member had an error at the same step: all stop"""


def seconds_before_return(num_fruitless: int, peer_timeout: float) -> float:
    """Return the seconds that a member waits before it comes back to a job that has gone on without it. Else a member
    that only some others can reach would end each of their worlds.

    Args:
        num_fruitless: how often in a row it was left out before a world with it was settled.
    """
    return 0.0 if num_fruitless == 0 else min(60.0, peer_timeout * 2.0 ** min(num_fruitless - 1, 10))


def seconds_to_form(world_size: int, num_failed: int = 0) -> float:
    """Return the seconds that the members of a world may take to make its process group, after which it has failed. A
    member that dies while the group is made, within milliseconds, costs this time.

    Gloo connects each member to every other, and each asks rank 0's store for every address. The store serves one
    request after the other, 36 microseconds each (measured with 128 members: 0.6 s of its processor, 2 s in all where
    they shared two cores). Allowed are one second plus about three times that: 1 s for 2 to 30 members, 2.6 s for 128,
    27 s for 512. A machine may be busier, so each failure of the same members doubles the time, up to sixteen times.

    Args:
        num_failed: how often in a row these very members have failed to make a group.
    """
    return (1.0 + 1e-4 * world_size**2) * 2.0 ** min(num_failed, 4)
