"""A side without enough votes goes on as a branch (branches.py), if that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from elastic_train.branches import BRANCH, MOST_OTHERS, Branch
from elastic_train.protocol.agreement import Decision, Denied
from elastic_train.protocol.arbiter import Arbitration, silent_members
from elastic_train.protocol.ballots import Ballots, Register, Round, Vote, newest, uids
from elastic_train.protocol.known_worlds import KnownWorlds
from elastic_train.world import to_json


class BranchRound(Round):
    """One attempt at a branch. All its members must vote, this one last, so that no member is in two branches: a member
    that waits may hear two sides that do not hear each other, even if it has no vote in either."""

    def taken(self, registers: Mapping[int, Register]) -> set[int]:
        """Return the ranks that have accepted a decision without this member."""
        mine = self.world.rank
        held = {rank: one.decision for rank, one in registers.items() if one.decision is not None and rank != mine}
        return {rank for rank, text in held.items() if mine not in Decision.from_json(text).ranks}

    def accepted(self, promises: Mapping[int, Register]) -> str | Denied | None:
        """As `Round.accepted`, but ignores other members' votes for all. Denied if a voter is silent, or is taken."""
        if len(promises) < len(self.voters) or self.taken(promises):
            return Denied()
        mine = self.world.rank
        return newest([one for rank, one in promises.items() if rank == mine or one.vote is not Vote.ALL])


class BranchOff:
    """Goes on beyond the laws when the members whose votes are missing were silent for one more peer timeout.

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
        """uid of the world, uids of the silent members, and the moment since when exactly these are silent"""

    def decide(self, round_: Round) -> str | Denied:
        """As `Ballots.decide`; if the laws do not allow a decision, go on as a branch once that is allowed."""
        outcome = self._ballots.decide(round_)
        if not isinstance(outcome, Denied) or not outcome.votes or outcome.gone_on is not None:
            return outcome
        return self._go_on_without(round_) or outcome

    def _go_on_without(self, denied: Round) -> str | Denied | None:
        """Decide a branch without the silent members. None if that is not allowed yet, or if it could not train."""
        world, worlds = denied.world, self._known.voters_without(denied.dead)
        silent = silent_members(worlds, uids(world, denied.reachable))
        # A member that answers but takes no part may go on in a moment; with an arbiter, a silent member may too.
        is_awaited = not set(silent).isdisjoint(denied.answering) or self._arbitration.is_needed(worlds)
        if not silent or is_awaited:
            self._silent_since = None
            return None
        now, before = self._clock(), self._silent_since
        if before is None or before[:2] != (world.uid, silent):
            before = self._silent_since = (world.uid, silent, now)
        if now - before[2] <= self._peer_timeout:
            return None
        attempt = BranchRound(
            denied.clients, world, worlds, "", denied.reachable, denied.dead, holding=denied.holding, needs_all=True
        )
        taken = attempt.taken(attempt.change_registers(attempt.reachable, lambda register: register))
        side = [rank for rank in attempt.reachable if rank not in taken]
        decision = self._branch_of(side, attempt, Decision.from_json(denied.proposal))
        members = decision.members_after(world)
        if not members or len({member.node for member in members}) < max(member.min_nodes for member in members):
            return None  # the branch would not train
        gone = denied.dead | set(decision.dead)
        # In a world that is not settled yet its members may have the state as well.
        if not denied.holding and not (self._known.has_state and self._known.holders(gone)):
            return None
        without = [one.without(gone) for one in worlds]
        return self._ballots.decide_by_votes(
            replace(attempt, worlds=without, proposal=decision.to_json(), reachable=side, dead=gone)
        )

    def _branch_of(self, side: Collection[int], attempt: BranchRound, decision: Decision) -> Decision:
        """Return `decision` for a branch of `side`, without newcomers: all its first members are of the parent."""
        inside = uids(attempt.world, side)
        silent = silent_members(attempt.worlds, inside)
        known = {member.uid: member.store for one in self._known.past.values() for member in one.members}
        # Spares too: they may be in another branch, as its last members.
        left = [uid for uid in (*silent, *known) if uid in known and uid not in inside and uid not in decision.dead]
        others = tuple(store for uid in dict.fromkeys(left) if (store := known[uid]) is not None)
        before = Branch.from_json(decision.facts.get(BRANCH))
        others += () if before is None else before.others
        ranks = tuple(rank for rank in decision.ranks if rank in side)
        branch = Branch(decision.uid, min(ranks, default=0), tuple(others[:MOST_OTHERS]))
        lost = tuple(sorted({*decision.lost, *decision.ranks} - set(ranks)))
        facts, dead = {**decision.facts, BRANCH: to_json(branch)}, (*decision.dead, *silent)
        return replace(decision, ranks=ranks, new=(), lost=lost, dead=dead, facts=facts)
