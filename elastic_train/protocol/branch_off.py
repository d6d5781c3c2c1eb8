"""How a side without enough votes goes on as a branch (branches.py), where that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from elastic_train.branches import BRANCH, MOST_OTHERS, POSITION, Branch
from elastic_train.protocol.agreement import Decision, Denied
from elastic_train.protocol.arbiter import Arbitration, silent_members
from elastic_train.protocol.ballots import Ballots, Register, Round, Vote, newest, uids
from elastic_train.protocol.known_worlds import KnownWorlds
from elastic_train.world import to_json


class BranchRound(Round):
    """One attempt at a branch, by all who are to be in it, the own vote last: so no two branches have one member. A
    member that waits may hear two sides that do not hear each other, and it need not have a vote in either."""

    def taken(self, registers: Mapping[int, Register]) -> set[int]:
        """Ranks that have accepted to go on without this member."""
        mine = self.world.rank
        held = {rank: one.decision for rank, one in registers.items() if one.decision is not None and rank != mine}
        return {rank for rank, text in held.items() if mine not in Decision.from_json(text).ranks}

    def accepted(self, promises: Mapping[int, Register]) -> str | Denied | None:
        """Nothing that all were to accept, and this member has not. Denied where one has gone over meanwhile."""
        if len(promises) < len(self.voters) or self.taken(promises):
            return Denied()
        mine = self.world.rank
        return newest([one for rank, one in promises.items() if rank == mine or one.vote is not Vote.ALL])


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
        # A member that answers and takes no part may go on in a moment; with an arbiter, so may those that are silent.
        is_awaited = not set(silent).isdisjoint(denied.answering) or self._arbitration.is_needed(worlds)
        if not silent or is_awaited:
            self._silent_since = None
            return None
        now, before = self._clock(), self._silent_since
        if before is None or before[:2] != (world.uid, silent):
            before = self._silent_since = (world.uid, silent, now)
        if now - before[2] <= self._peer_timeout:
            return None
        attempt = BranchRound(denied.clients, world, worlds, "", denied.reachable, denied.dead, needs_all=True)
        taken = attempt.taken(attempt.change_registers(attempt.reachable, lambda register: register))
        side = [rank for rank in attempt.reachable if rank not in taken]
        decision = self._branch_of(side, attempt, Decision.from_json(denied.proposal))
        members = decision.members_after(world)
        if not members or len({member.node for member in members}) < max(member.min_nodes for member in members):
            return None  # it would not train
        gone = denied.dead | set(decision.dead)
        # Of a world that nobody has settled yet, its members have it as well.
        has_state = self._known.has_state and self._known.holders(gone)
        if not has_state and denied.clients.own.get(POSITION) is None:
            return None
        without = [one.without(gone) for one in worlds]
        return self._ballots.decide_by_votes(
            replace(attempt, worlds=without, proposal=decision.to_json(), reachable=side, dead=gone)
        )

    def _branch_of(self, side: Collection[int], attempt: BranchRound, decision: Decision) -> Decision:
        """Newcomers wait for the world after it: each who is in the first one has been in the parent."""
        inside = uids(attempt.world, side)
        silent = silent_members(attempt.worlds, inside)
        known = {member.uid: member.store for one in self._known.past.values() for member in one.members}
        # Spares, too: they may be in another branch, and be all that is left of it.
        left = [uid for uid in (*silent, *known) if uid in known and uid not in inside and uid not in decision.dead]
        others = tuple(store for uid in dict.fromkeys(left) if (store := known[uid]) is not None)
        before = Branch.from_json(decision.facts.get(BRANCH))
        others += () if before is None else before.others
        ranks = tuple(rank for rank in decision.ranks if rank in side)
        branch = Branch(decision.uid, min(ranks, default=0), tuple(others[:MOST_OTHERS]))
        lost = tuple(sorted({*decision.lost, *decision.ranks} - set(ranks)))
        facts, dead = {**decision.facts, BRANCH: to_json(branch)}, (*decision.dead, *silent)
        return replace(decision, ranks=ranks, new=(), lost=lost, dead=dead, facts=facts)
