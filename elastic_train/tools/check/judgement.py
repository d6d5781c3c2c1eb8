"""The judgement: each rule looks at what was gathered and says what it finds, for the person who starts the job.

A rule is a pure function. `Level.BREAKS` is for what would end the job, keep it from starting, or cost it what it
promises; `Level.MATTERS` for what will be slow or fragile; the others only tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastic_train.tools.check import node_rules, world_rules
from elastic_train.tools.check.advice import Finding, Level
from elastic_train.tools.check.facts import Gathered

RULES: tuple[Callable[[Gathered], list[Finding]], ...] = (
    world_rules.world_is_the_one_asked_for,
    world_rules.versions_are_equal,
    world_rules.torch_is_known,
    world_rules.store_is_usable,
    world_rules.names_resolve,
    world_rules.addresses_are_usable,
    world_rules.everybody_reaches_everybody,
    world_rules.clocks_agree,
    node_rules.gpus_are_visible_and_not_shared,
    node_rules.state_can_be_built,
    node_rules.snapshot_directory_is_one,
    node_rules.there_is_room,
    node_rules.grace_is_long_enough,
)


def judge(gathered: Gathered) -> list[Finding]:
    """Every rule, in the order in which a person would look."""
    return [finding for rule in RULES for finding in rule(gathered)]


def is_passed(findings: Iterable[Finding]) -> bool:
    return not any(finding.level is Level.BREAKS for finding in findings)
