"""The schedule of a drill, and its settings: pure functions of a seed, or read from a file."""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.errors import UsageError, first_line
from elastic_train.tools.drills.catalogue import FAULTS
from elastic_train.tools.drills.jobs import JOBS, PACED, DrillJob
from elastic_train.tools.program import BUNDLED_PROGRAM, Program

if TYPE_CHECKING:
    from elastic_train.tools.drills.trace import AvailabilityTrace

DEFAULT_FAULTS = ("kill", "join", "hang", "stop", "kill-rank-0")
JOIN_WEIGHT = 3
"""how much likelier a join is than each single fault, if a node is missing"""


@dataclass(frozen=True)
class Planned:
    """One fault of a schedule."""

    at: float
    """the earliest time, in seconds after the job's first settled world"""
    fault: str


@dataclass(frozen=True)
class Settings:
    """The settings of a drill."""

    run_dir: Path
    seed: int
    plan: Sequence[Planned]
    flags: Sequence[str]
    """the worker's, without --run-dir"""
    num_nodes: int
    num_workers: int
    """per node"""
    global_batch_size: int
    peer_timeout: float
    """seconds, from the flags"""
    last_step: int | None
    """of the bundled job, whose pace the drill sets; None for a user's job"""
    wants_network: bool
    backend: str
    """c10d or etcd3"""
    etcd_endpoint: str | None
    """of an existing cluster; None: the drill starts its own"""
    why_no_network: str | None = None
    """what this machine lacks for network namespaces, if the drill would use them"""
    program: Program = BUNDLED_PROGRAM
    job: DrillJob = JOBS[PACED]
    """a bundled job; a user's job has the limits of the paced one"""
    trace: AvailabilityTrace | None = None
    """the trace to replay; None: faults wait for one another"""


def default_plan(seed: int, duration: float, num_nodes: int) -> list[Planned]:
    """The five faults of a drill without flags, in an order that the seed chooses, evenly over `duration` seconds."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(DEFAULT_FAULTS, len(DEFAULT_FAULTS))
        if fits(order, num_nodes):
            share = duration / (len(order) + 1)  # equal gaps, also before the first and after the last
            return [Planned(share * number, name) for number, name in enumerate(order, 1)]


def random_plan(seed: int, faults: Sequence[str], duration: float, every: float, num_nodes: int) -> list[Planned]:
    """Draw a fault from `faults` every `every` seconds; also joins while a node is missing, so that it never runs out.

    Raises: UsageError: none of these faults can be injected into a job of so many nodes.
    """
    rng = random.Random(seed)
    present, plan = num_nodes, []
    others = [name for name in faults if name != "join"]
    for index in range(max(1, int(duration / every))):
        possible = [name for name in others if present >= FAULTS[name].least_nodes()]
        weights = [1.0] * len(possible)
        if present < num_nodes:
            possible, weights = [*possible, "join"], [*weights, float(JOIN_WEIGHT)]
        if not possible:
            raise UsageError(f"--faults {','.join(faults)}: none of them leaves a node of {num_nodes}")
        name = rng.choices(possible, weights)[0]
        present += FAULTS[name].size
        plan.append(Planned((index + 1) * every, name))
    return plan


def fits(order: Sequence[str], num_nodes: int) -> bool:
    """Return whether this order always leaves a node, and a vacant place for each join."""
    present = num_nodes
    for name in order:
        present += FAULTS[name].size
        if not 1 <= present <= num_nodes:
            return False
    return True


def read_scenario(path: Path) -> list[Planned]:
    """Read a schedule from a TOML file of tables `[[fault]]` with `at` (seconds) and `name`.

    Raises:
        UsageError: it cannot be read, or has other contents.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--scenario {path} cannot be read: {first_line(error)}") from error
    try:
        written = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--scenario {path} is no TOML: {error}") from error
    tables = written.get("fault")
    if set(written) != {"fault"} or not isinstance(tables, list) or not tables:
        raise UsageError(f"--scenario {path}: write [[fault]] tables with at = SECONDS and name = NAME each, no more")
    plan = [_planned(f"--scenario {path}: fault {number}", table) for number, table in enumerate(tables, 1)]
    unknown = sorted({planned.fault for planned in plan} - set(FAULTS))
    if unknown:
        raise UsageError(f"--scenario {path}: no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return sorted(plan, key=lambda planned: planned.at)


def _planned(which: str, table: object) -> Planned:
    keys = set(table) if isinstance(table, dict) else set()
    if not isinstance(table, dict) or keys != {"at", "name"}:
        odd = ", ".join(sorted(keys ^ {"at", "name"})) or repr(table)
        raise UsageError(f"{which}: write at = SECONDS and name = NAME, nothing else; check {odd}")
    at, name = table["at"], table["name"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
        raise UsageError(f"{which}: at = {at!r} is no number of seconds from the first step on")
    if not isinstance(name, str):
        raise UsageError(f"{which}: name = {name!r} is no name")
    return Planned(float(at), name)
