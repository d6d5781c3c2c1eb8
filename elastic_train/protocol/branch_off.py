"""How a side without enough votes goes on as a branch (branches.py), where that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic_train.branches import BRANCH, MOST_OTHERS, Branch
from elastic_train.protocol.agreement import Decision, Denied
from elastic_train.protocol.arbiter import Arbitration, silent_members
from elastic_train.protocol.ballots import Ballots, Round, uids
from elastic_train.protocol.known_worlds import KnownWorlds
from elastic_train.world import to_json


class BranchOff:
    """Going on beyond the laws, when nothing was heard for one more peer timeout of those whose votes are missing.

    For the training thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ballots: Ballots,
        known: KnownWorlds,
        arbitration: Arbitration,
        *,
        peer_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._ballots, self._known, self._arbitration = ballots, known, arbitration
        self._peer_timeout, self._clock = peer_timeout, clock
        self._silent_since: tuple[str, tuple[str, ...], float] | None = None
        """uid of the world, of whom nothing is heard, and since when it is these"""

    def decide(self, round_: Round) -> str | Denied:
        """As `Ballots.decide`, which goes by the laws, where these allow it."""
        outcome = self._ballots.decide(round_)
        if not isinstance(outcome, Denied) or not outcome.votes or outcome.gone_on is not None:
            return outcome
        return self._go_on_without(round_) or outcome

    def _go_on_without(self, denied: Round) -> str | Denied | None:
        """Those that are missing. None where that may not be, or would not help."""
        world, worlds = denied.world, self._known.voters_without(denied.dead)
        silent = silent_members(worlds, uids(world, denied.reachable))
        without = [one.without(silent) for one in worlds]
        has_state = self._known.has_state and set(without[0].members) - without[0].dead
        # A member that answers and takes no part may go on in a moment; with an arbiter, so may those that are silent.
        is_awaited = not set(silent).isdisjoint(denied.answering) or self._arbitration.is_needed(worlds)
        if not silent or not has_state or is_awaited:
            self._silent_since = None
            return None
        now, before = self._clock(), self._silent_since
        if before is None or before[:2] != (world.uid, silent):
            before = self._silent_since = (world.uid, silent, now)
        if now - before[2] <= self._peer_timeout:
            return None
        decision = self._branch_without(silent, Decision.from_json(denied.proposal))
        members = decision.members_after(world)
        if len({member.node for member in members}) < max(member.min_nodes for member in members):
            return None  # it would not train
        gone = denied.dead | frozenset(silent)
        return self._ballots.decide_by_votes(
            Round(denied.clients, world, without, decision.to_json(), denied.reachable, gone)
        )

    def _branch_without(self, silent: Sequence[str], decision: Decision) -> Decision:
        """Newcomers wait for the world after it: each who is in the first one has been in the parent."""
        known = {member.uid: member.store for one in self._known.past.values() for member in one.members}
        others = [store for uid in silent if (store := known.get(uid)) is not None]
        before = Branch.from_json(decision.facts.get(BRANCH))
        others += () if before is None else before.others
        branch = Branch(decision.uid, min(decision.ranks), tuple(others[:MOST_OTHERS]))
        facts = {**decision.facts, BRANCH: to_json(branch)}
        return replace(decision, new=(), dead=(*decision.dead, *silent), facts=facts)
