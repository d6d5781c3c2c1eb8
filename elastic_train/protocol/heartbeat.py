"""What a member says of itself with every ping and answer: one line of a size that does not grow with the world.

`-{} [3, 118, "reduce", 0.031, 10.2, 0.044, 7, 512]`: whether its world is over (`!`, or `=` where all ended it at the
step of a vote) and whose fault that is; generation, reductions begun in this world, activity, its seconds, and how many
it may last by the member's own account; and for how long, as far as it has heard, nobody has been outside of the
reduction, by which heartbeat (rank, count). Each member passes on the least age of its neighbours', so that all know
whether somebody is still to come though nobody sees everybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_train.protocol.ranks import from_runs, to_runs
from elastic_train.rules import Activity, Beat
from elastic_train.world import World


@dataclass(frozen=True)
class Heartbeat:
    generation: int
    num_reductions: int
    activity: Activity
    seconds: float
    """that the activity has lasted, by the member's own clock"""
    limit: float = 0.0
    """seconds that it may last"""
    age: float = 0.0
    """seconds since anybody was outside of the reduction, as far as it has heard"""
    witness: tuple[int, int] = (-1, 0)
    """(rank, count) of the heartbeat that said so"""

    @property
    def beat(self) -> Beat:
        return Beat(self.generation, self.activity, self.seconds, self.limit)

    def to_line(self, head: str) -> str:
        times = [round(seconds, 3) for seconds in (self.seconds, self.limit, self.age)]
        return f"{head} {json.dumps([self.generation, self.num_reductions, self.activity, *times, *self.witness])}"

    @staticmethod
    def from_line(line: str) -> Heartbeat:
        """Raises: ValueError."""
        generation, number, activity, seconds, limit, age, rank, count = json.loads(line.partition(" ")[2])
        times = (float(seconds), float(limit), float(age))
        return Heartbeat(int(generation), int(number), Activity(activity), *times, (int(rank), int(count)))


def head_of(world: World | None, verdicts: Mapping[int, str] | None, *, is_by_vote: bool = False) -> str:
    """The first word of the line: `-{}`, or `!` and who is out of the world that is over, by what befell them; `={}`
    where nothing befell anybody and a vote has ended it.

    Args:
        verdicts: why, by rank, as `describe` makes them; None where the world is not over.
    """
    if verdicts is None:
        return "-{}"
    if is_by_vote and not verdicts:
        return "={}"
    if world is None:
        return "!{}"
    ranks: dict[str, list[int]] = {}
    for rank, why in sorted(verdicts.items()):
        ranks.setdefault(why.removeprefix(describe(world, rank, "")), []).append(rank)
    text = json.dumps({what: to_runs(those) for what, those in ranks.items()}, separators=(",", ":"))
    return "!" + text.replace(" ", "\\u0020")


def verdicts_of(world: World, line: str) -> dict[int, str] | None:
    """What `head_of` said; None where the world is not over. Raises: ValueError."""
    if line[:1] not in ("!", "="):
        return None
    told: dict[str, str] = json.loads(line.partition(" ")[0][1:])
    return {rank: describe(world, rank, what) for what, runs in told.items() for rank in from_runs(runs)}


def has_ended_by_vote(line: str) -> bool:
    """Whether all end the world at the same step, and nobody else's part in that may be broken off."""
    return line[:1] == "="


def describe(world: World, rank: int, what: str) -> str:
    """A verdict, for a person."""
    return f"{world.members[rank].name} (rank {rank}) {what}"


SILENT = "was silent for"


def is_silence(why: str) -> bool:
    """Whether a verdict is that a member was not heard, by one that could not reach it."""
    return SILENT in why


@dataclass
class LastOutside:
    """When anybody was last outside of the reduction, by hearsay: the newest moment that a member has heard of.

    A moment travels as an age, for no two machines' clocks are compared; on its way it seems to grow younger by what a
    message takes. So that none grows younger for ever as it goes round: a heartbeat's moment is the oldest that was
    heard of it, no older heartbeat of the same member counts after it, and those of others only from `slack` on.
    """

    at: float
    slack: float = 0.0
    """seconds, more than a message takes; by so many may the moment be too old, for each member that passed it on"""
    witness: tuple[int, int] = (-1, 0)

    def hear(self, witness: tuple[int, int], at: float) -> None:
        if witness == self.witness:
            self.at = min(self.at, at)
        elif witness[0] == self.witness[0]:
            if witness > self.witness and at > self.at:
                self.witness, self.at = witness, at
        elif at > self.at + self.slack:
            self.witness, self.at = witness, at
