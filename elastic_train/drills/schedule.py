"""When a drill does what: pure functions of a seed, or a file that says so."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.errors import UsageError

DEFAULT_FAULTS = ("kill", "join", "hang", "stop", "kill-rank-0")
LEAST_NODES = 1
JOIN_WEIGHT = 3
"""how much likelier a join is than each single harm where a node is missing"""


@dataclass(frozen=True)
class Planned:
    """One fault of a schedule."""

    at: float
    """seconds after the job's first settled world, at the earliest"""
    fault: str


def default_plan(seed: int, duration: float, num_nodes: int, sizes: Mapping[str, int]) -> list[Planned]:
    """The five faults of a drill without flags, in an order that the seed chooses, evenly over `duration` seconds."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(DEFAULT_FAULTS, len(DEFAULT_FAULTS))
        if fits(order, num_nodes, sizes):
            return spread(order, duration)


def random_plan(
    seed: int,
    faults: Sequence[str],
    duration: float,
    every: float,
    num_nodes: int,
    sizes: Mapping[str, int],
    least: Mapping[str, int],
) -> list[Planned]:
    """A fault every `every` seconds from `faults`; joins wherever a node is missing, so that it can go on for ever.

    Args:
        least: how many nodes there must be for each.

    Raises:
        UsageError: no fault of these can ever strike a job of so many nodes.
    """
    rng = random.Random(seed)
    present, plan = num_nodes, []
    harmful = [name for name in faults if name != "join"]
    for index in range(max(1, int(duration / every))):
        possible = [name for name in harmful if present >= least[name]]
        weights = [1.0] * len(possible)
        if present < num_nodes:
            possible, weights = [*possible, "join"], [*weights, float(JOIN_WEIGHT)]
        if not possible:
            raise UsageError(f"--faults {','.join(faults)}: none of them leaves a node of {num_nodes}")
        name = rng.choices(possible, weights)[0]
        present += sizes[name]
        plan.append(Planned((index + 1) * every, name))
    return plan


def fits(order: Sequence[str], num_nodes: int, sizes: Mapping[str, int]) -> bool:
    """Whether in this order there is always a node left, and always a vacant place for who joins."""
    present = num_nodes
    for name in order:
        present += sizes[name]
        if not LEAST_NODES <= present <= num_nodes:
            return False
    return True


def spread(order: Sequence[str], duration: float) -> list[Planned]:
    """Evenly, the first and the last as far from the ends as from each other."""
    return [Planned(duration * (index + 1) / (len(order) + 1), name) for index, name in enumerate(order)]


def read_scenario(path: Path, known: Sequence[str]) -> list[Planned]:
    """A schedule from a TOML file of tables `[[fault]]` with `at` (seconds) and `name`.

    Raises:
        UsageError: it cannot be read, or has something else in it.
    """
    try:
        tables = tomllib.loads(path.read_text())["fault"]
        plan = [Planned(float(table["at"]), str(table["name"])) for table in tables]
    except OSError as error:
        raise UsageError(f"--scenario {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--scenario {path}: write [[fault]] tables with at = SECONDS and name = NAME: {error}"
        ) from error
    unknown = sorted({planned.fault for planned in plan} - set(known))
    if unknown or not plan:
        raise UsageError(f"--scenario {path}: no fault {', '.join(unknown) or 'in it'}; there are {', '.join(known)}")
    return sorted(plan, key=lambda planned: planned.at)
