"""Branches: what a run becomes where sides that do not hear each other all train on (`--on-split go-on`).

The side that the laws let go on keeps to the main line. Every other side that goes on is a branch. A branch has a
random id, which its world's decision carries as a fact; its state says where it left the line before it. When two sides
find each other, the one with fewer committed steps stops. Two jobs of one run id are sides as well: a host that came
back, cut off from the running job, may have begun another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elastic_train.world import Address, from_json

BRANCH = "branch"
"""the fact"""

POSITION = "position"
"""key in a member's own store"""
MOST_OTHERS = 16
"""that a branch remembers"""

Branches = tuple[tuple[str, int], ...]
"""Those that a state has gone through, the oldest first: the id of each, and the committed steps when it began."""
MOST_RESTARTS = 64
"""that a state remembers, the newest"""


@dataclass(frozen=True)
class Branch:
    """What all members of a branch know of it, newcomers too."""

    id: str
    rank: int = 0
    """the lowest that one of its first members had in the world before"""
    others: tuple[Address, ...] = ()
    """stores of members that it has gone on without"""

    @staticmethod
    def from_json(text: str | None) -> Branch | None:
        return from_json(Branch, text) if text else None


def id_on(branch: Branch | None) -> str:
    """As `id_of`, of a state that such a world has."""
    return "" if branch is None else branch.id


@dataclass(frozen=True)
class Position:
    """How far one side has come, as each of its members says it to those that it may meet."""

    branches: Branches
    step: int
    """committed"""
    host: str
    store: Address
    """of the member that says so"""
    rank: int = -1
    """as Branch.rank; that of the main line is below all"""
    run: str | None = None
    """uid of the run"""
    job: str | None = None
    """token of the job: another one where a second job of the same run id was begun"""
    stands: bool = True
    """whether its world stands; else its members agree on the next one, or wait since they may not go on"""

    @property
    def id(self) -> str:
        return id_of(self.branches)

    @property
    def name(self) -> str:
        """For a person."""
        return f"step {self.step} of {describe(self.branches)} on {self.host}"

    def is_of(self, other: Position) -> bool:
        """Whether the two are of one side."""
        return (self.run, self.job, self.id) == (other.run, other.job, other.id)

    def is_beside(self, other: Position) -> bool:
        """Whether the two are branches of one run."""
        return self.run == other.run and self.id != other.id

    def goes_before(self, other: Position) -> bool:
        """Whether `other` stops where the two meet.

        The one with fewer committed steps does. The same rule is for two jobs of one run id: no clock tells which of
        them began later, and a job that has just begun, at step 0, stops for every other. Equals are told apart by the
        jobs' random tokens, so that all judge alike.
        """
        return (self.step, -self.rank, self.job or "") > (other.step, -other.rank, other.job or "")


def branches_of(value: Iterable[Any]) -> Branches:
    """What JSON, or a saved state, has made of them."""
    return tuple((str(name), int(step)) for name, step in value)


def id_of(branches: Branches) -> str:
    """Of the branch that such a state is on; "" for the main line."""
    return branches[-1][0] if branches else ""


def describe(branches: Branches) -> str:
    return f"branch {id_of(branches)}" if branches else "the main line"


def restarted(restarts: Branches, name: str, step: int) -> Branches:
    """Those of a state that is begun again at `step`."""
    return (*restarts, (name, step))[-MOST_RESTARTS:]


def is_on(branches: Branches, step: int, line: Branches) -> bool:
    """Whether a state of `branches` and `step` committed steps is on the way to one of `line`, or beyond it on the same
    branch. The same of restarts: what a line does not remember of them is on its way, where it came before."""
    if branches and branches[-1] not in line:
        return len(line) == MOST_RESTARTS and step <= line[0][1]
    later = line[line.index(branches[-1]) + 1 :] if branches else line
    return not later or step <= later[0][1]


def parting_step(one: Branches, other: Branches) -> int:
    """Committed steps that two lines have in common, which are not the same."""
    common = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(one), len(other)) if common is None else common
    return min(line[common][1] for line in (one, other) if len(line) > common)
