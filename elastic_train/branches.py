"""Branches: the parts of a run whose sides do not hear each other and all train on (`--on-split go-on`).

The side that the laws let go on keeps to the main line. Every other side that goes on is a branch. A branch has a
random id, which the decision of its world carries as a fact; its state records where it left the line before it. When
two sides find each other, the side with fewer committed steps stops. Two jobs of one run id are sides as well: a host
that came back, cut off from the running job, may have begun another job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elastic_train.world import Address, from_json

BRANCH = "branch"
"""name of the fact"""

POSITION = "position"
"""key in a member's own store"""
MOST_OTHERS = 16
"""stores of the other side that a branch remembers"""

Branches = tuple[tuple[str, int], ...]
"""Branches that a state has gone through, the oldest first: the id of each, and the committed steps when it began."""
MOST_RESTARTS = 64
"""newest restarts that a state remembers"""


@dataclass(frozen=True)
class Branch:
    """A branch as all its members know it, newcomers too."""

    id: str
    rank: int = 0
    """lowest rank that its first members had in the world before"""
    others: tuple[Address, ...] = ()
    """stores of members that it has gone on without"""

    @staticmethod
    def from_json(text: str | None) -> Branch | None:
        return from_json(Branch, text) if text else None


def id_on(branch: Branch | None) -> str:
    """Return the id of a branch; "" for the main line."""
    return "" if branch is None else branch.id


@dataclass(frozen=True)
class Position:
    """The position of one side, which each of its members publishes for other sides."""

    branches: Branches
    step: int
    """committed steps"""
    host: str
    store: Address
    """of the member that publishes it"""
    rank: int = -1
    """as Branch.rank; the main line has -1, below all branches"""
    run: str | None = None
    """uid of the run"""
    job: str | None = None
    """token of the job; a second job of the same run id has another token"""
    stands: bool = True
    """whether its world stands; else its members agree on the next one, or wait because they may not go on"""

    @property
    def id(self) -> str:
        return id_of(self.branches)

    @property
    def name(self) -> str:
        """A description for messages."""
        return f"step {self.step} of {describe(self.branches)} on {self.host}"

    def is_of(self, other: Position) -> bool:
        """Return whether both positions are of one side."""
        return (self.run, self.job, self.id) == (other.run, other.job, other.id)

    def is_beside(self, other: Position) -> bool:
        """Return whether the positions are of two branches of one run."""
        return self.run == other.run and self.id != other.id

    def goes_before(self, other: Position) -> bool:
        """Return whether the side of `other` stops when the two sides find each other.

        The side with fewer committed steps stops. The rule also holds for two jobs of one run id: no clock tells which
        of them began later, and a job that has just begun, at step 0, stops for every other. The jobs' random tokens
        break a tie, so that all members judge alike.
        """
        return (self.step, -self.rank, self.job or "") > (other.step, -other.rank, other.job or "")


def branches_of(value: Iterable[Any]) -> Branches:
    """Return the branches that JSON or a saved state holds."""
    return tuple((str(name), int(step)) for name, step in value)


def id_of(branches: Branches) -> str:
    """Return the id of the branch that a state is on; "" for the main line."""
    return branches[-1][0] if branches else ""


def describe(branches: Branches) -> str:
    return f"branch {id_of(branches)}" if branches else "the main line"


def restarted(restarts: Branches, name: str, step: int) -> Branches:
    """Return the restarts of a state after one more restart, at `step`."""
    return (*restarts, (name, step))[-MOST_RESTARTS:]


def is_on(branches: Branches, step: int, line: Branches) -> bool:
    """Return whether a state of `branches` and `step` committed steps is on the way to a state of `line`, or beyond it
    on the same branch. Also for restarts: an earlier one that `line` has forgotten counts as on its way."""
    if branches and branches[-1] not in line:
        return len(line) == MOST_RESTARTS and step <= line[0][1]
    later = line[line.index(branches[-1]) + 1 :] if branches else line
    return not later or step <= later[0][1]


def parting_step(one: Branches, other: Branches) -> int:
    """Return the number of committed steps that two different lines have in common."""
    common = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(one), len(other)) if common is None else common
    return min(line[common][1] for line in (one, other) if len(line) > common)
