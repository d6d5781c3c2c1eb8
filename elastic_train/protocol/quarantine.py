"""The quarantine of hosts that die unannounced again and again: how long such a host waits in the join queue.

Deaths are recorded in the run's incidents, which travel with its state: so any rank 0 knows them, after any death and
any restart. Times are seconds of the run (`PhaseClock`); only after a restart does the wall clock count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_train.world import Member, World

MOST_DEATHS = 3
WINDOW_SECONDS = 600.0
"""window in which MOST_DEATHS are too many; also the time without a death after a quarantine that clears the record"""
SHORTEST_WAIT = 60.0
LONGEST_WAIT = 1800.0
"""seconds; each further death before the record is cleared doubles the wait"""


@dataclass(frozen=True)
class Quarantine:
    """The quarantine of one host."""

    deaths: int
    """number of deaths that have led to it"""
    seconds: float
    """length, from the last of these deaths"""
    until: float
    """end, in seconds of the run"""


def describe_deaths(number: object) -> str:
    """Return the reason why a host is in quarantine, as text."""
    return f"it died unannounced {number} times, less than {WINDOW_SECONDS / 60:.0f} min apart"


def quarantine_after(deaths: Iterable[float]) -> Quarantine | None:
    """Return the quarantine after the deaths of a host, at these seconds of the run; None if they are few or cleared.
    It may be over already."""
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
    """Return the quarantines that last at `now`, in seconds of the run, by host. None lasts longer from now on than its
    length, even if the run went back in time to an older snapshot."""
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
    """Tells the deaths of hosts from other losses, for one worker through all its worlds."""

    def __init__(self) -> None:
        self._remains: frozenset[str] = frozenset()
        """uids of workers whose node has lost another worker: the agent is about to end them, which is no new death"""

    def note(self, lost: Collection[Member], going_on: Collection[Member]) -> list[str]:
        """Return the hosts that have died, given the members that a world has lost and those that go on. A host lives
        if another node of it goes on."""
        lost = [member for member in lost if member.uid not in self._remains]
        nodes = {member.node for member in lost}
        living = {member.host for member in going_on if member.node not in nodes}
        self._remains = frozenset(
            member.uid for member in going_on if member.node in nodes or member.uid in self._remains
        )
        return sorted({member.host for member in lost} - living)


def waits(node: Sequence[Member], world: World, step: int) -> bool:
    """Return whether a node in the join queue waits for the end of its host's quarantine while `world` trains. It does
    not if the world has too few nodes, if another node of that host trains, or if the node has a newer snapshot.

    Args:
        step: committed steps of `world`.
    """
    is_needed = world.num_nodes < world.min_nodes
    is_alive = any(member.host == node[0].host for member in world.members)
    has_newer = any(member.newest is not None and member.newest[1] > step for member in node)
    return not (is_needed or is_alive or has_newer)
