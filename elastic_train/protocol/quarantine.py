"""Hosts that die unannounced again and again: when one has died, and how long it waits in the join queue after that.

What is known of deaths is in the run's incidents, which travel with its state: so whoever is rank 0 knows, after any
death and any restart. Times are seconds of the run (`PhaseClock`); only after a restart does the wall clock count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_train.world import Member, World

MOST_DEATHS = 3
WINDOW_SECONDS = 600.0
"""within which so many deaths are too many; and of good conduct after a quarantine, by which all before is forgiven"""
SHORTEST_WAIT = 60.0
LONGEST_WAIT = 1800.0
"""seconds; each death without good conduct before it doubles the wait"""


@dataclass(frozen=True)
class Quarantine:
    """Of one host."""

    deaths: int
    """that have led to it"""
    seconds: float
    """from the last of them on"""
    until: float
    """in seconds of the run"""


def describe_deaths(number: object) -> str:
    """Why a host is in quarantine."""
    return f"it died unannounced {number} times, less than {WINDOW_SECONDS / 60:.0f} min apart"


def quarantine_after(deaths: Iterable[float]) -> Quarantine | None:
    """What the deaths of a host, at these seconds of the run, have led to; None where they are few or forgiven. It may
    be over."""
    recent: list[float] = []
    found: Quarantine | None = None
    for at in sorted(deaths):
        if found is not None and at - found.until > WINDOW_SECONDS:
            found, recent = None, []
        if found is not None:
            seconds = min(2 * found.seconds, LONGEST_WAIT)
            found = Quarantine(found.deaths + 1, seconds, at + seconds)
            continue
        recent = [*(one for one in recent if at - one <= WINDOW_SECONDS), at]
        if len(recent) >= MOST_DEATHS:
            found = Quarantine(len(recent), SHORTEST_WAIT, at + SHORTEST_WAIT)
    return found


def quarantines(incidents: Iterable[Mapping[str, Any]], now: float) -> dict[str, Quarantine]:
    """Those that last at `now`, in seconds of the run, by host. None is longer from now on than as a whole, though a
    run that goes on from an older snapshot has gone back in time."""
    deaths: dict[str, list[float]] = {}
    for one in incidents:
        for host in one.get("dead_hosts", ()):
            deaths.setdefault(host, []).append(float(one["run_seconds"]))
    found = {host: quarantine_after(times) for host, times in deaths.items()}
    return {
        host: replace(one, until=min(one.until, now + one.seconds))
        for host, one in found.items()
        if one is not None and now < one.until
    }


class Deaths:
    """Tells the deaths of hosts from other losses, for one worker, whatever worlds it goes through."""

    def __init__(self) -> None:
        self._remains: frozenset[str] = frozenset()
        """uids of workers whose node has lost another one: its agent is about to end them, which is no second death"""

    def note(self, lost: Collection[Member], going_on: Collection[Member]) -> list[str]:
        """The hosts that have died where a world has lost these members, and these of it go on. A host lives where
        another one of its nodes does."""
        lost = [member for member in lost if member.uid not in self._remains]
        nodes = {member.node for member in lost}
        living = {member.host for member in going_on if member.node not in nodes}
        self._remains = frozenset(
            member.uid for member in going_on if member.node in nodes or member.uid in self._remains
        )
        return sorted({member.host for member in lost} - living)


def waits(node: Sequence[Member], world: World, step: int) -> bool:
    """Whether a node whose host is in quarantine waits for its end, while `world` trains. Where that has fewer nodes
    than it needs, where it has another node of that host, and where the one in the queue has come further, it does not.

    Args:
        step: how many the members of `world` have committed.
    """
    is_needed = world.num_nodes < world.min_nodes
    is_alive = any(member.host == node[0].host for member in world.members)
    has_newer = any(member.newest is not None and member.newest[1] > step for member in node)
    return not (is_needed or is_alive or has_newer)
