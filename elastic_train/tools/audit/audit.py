"""`elastic-train audit RUN_DIR`: were the promises kept? One check per promise of the contract.

A check is a pure function over a run's history, in the `*_checks.py` of its theme. It returns what it looked at and
what is wrong, in words with numbers, so that a person can look it up. A check that has nothing to look at raises Skip,
so that it does not count as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_train.observe.bill import describe_bill
from elastic_train.tools.audit.end_checks import check_end, check_phases, check_state, is_live
from elastic_train.tools.audit.fault_checks import check_faults, check_incidents
from elastic_train.tools.audit.finding import Found, Skip
from elastic_train.tools.audit.history import History, mixed_branches
from elastic_train.tools.audit.lives import host_of
from elastic_train.tools.audit.loss_checks import check_losses
from elastic_train.tools.audit.lost_time import lost_time, span_of
from elastic_train.tools.audit.progress_checks import check_generations, check_ledger, check_steps
from elastic_train.tools.audit.remains_checks import check_leftovers, check_snapshots
from elastic_train.tools.audit.trace_bill import bill_of_run
from elastic_train.tools.audit.unwritten import NOT_WRITTEN
from elastic_train.wording import count

SHOWN_FINDINGS = 5
CHECKS: tuple[tuple[str, str, Callable[[History], Found]], ...] = (
    ("end", "the job reached its end", check_end),
    ("faults", "every fault was really injected", check_faults),
    ("losses", "no worker was lost on a node without an injected fault", check_losses),
    ("ledger", "every sample exactly once per epoch", check_ledger),
    ("steps", "committed steps never decrease", check_steps),
    ("generations", "one membership per generation, in a chain", check_generations),
    ("incidents", "every incident within its limit, no committed step lost but by a restart", check_incidents),
    ("phases", "the phases sum to the wall", check_phases),
    ("state", "the final weights agree", check_state),
    ("snapshots", "snapshots are whole, none that is torn was restored", check_snapshots),
    ("leftovers", "nothing is left behind", check_leftovers),
)
"""in the order in which a person would ask"""


class CheckOutcome(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    promise: str
    verdict: CheckOutcome
    detail: str
    """what was looked at, or why the check was skipped"""
    findings: tuple[str, ...] = ()
    """what is wrong; empty unless the check failed"""


@dataclass(frozen=True)
class Audit:
    """All checks of one run."""

    checks: tuple[Check, ...]
    is_of_a_live_run: bool = False
    """whether the run has yet to end"""
    elsewhere: tuple[str, ...] = ()
    """workers without a file here: they may have written into another directory. Empty for a drill, where check_end
    reports them"""
    unseen: tuple[str, ...] = ()
    """what was missing and could not be checked, with counts"""

    @property
    def passed(self) -> bool:
        """Whether nothing failed and something was checked."""
        verdicts = {check.verdict for check in self.checks}
        return CheckOutcome.FAIL not in verdicts and CheckOutcome.PASS in verdicts

    @property
    def verdict(self) -> str:
        """PASS or FAIL."""
        return "PASS" if self.passed else "FAIL"

    @property
    def reasons(self) -> list[str]:
        """One line per finding, the check's name first."""
        return [f"{check.name}: {finding}" for check in self.checks for finding in check.findings]

    @property
    def notes(self) -> list[str]:
        """What a reader of the verdict should know."""
        notes = ["the run is still running: this says nothing of its end"] if self.is_of_a_live_run else []
        if self.elsewhere:
            some = ", ".join(self.elsewhere[:SHOWN_FINDINGS])
            notes.append(
                f"of {count(len(self.elsewhere), 'worker')} of this run ({some}) there is no file here: this tells of "
                "a part of it; where nodes have run directories of their own, give all of them, RUN_DIR..."
            )
        return [*notes, f"not looked at: {', '.join(self.unseen)}"] if self.unseen else notes


def audit_history(history: History) -> Audit:
    """Run every check; only report the branches if the run directory mixes two of them."""
    mixed = mixed_branches(history)
    if mixed is not None:
        promise = "one line of training"
        return Audit((Check("branches", promise, CheckOutcome.FAIL, "nothing else was looked at", (mixed,)),))
    checks = tuple(_run(name, promise, check, history) for name, promise, check in CHECKS)
    elsewhere = history.elsewhere if history.drill is None else ()
    return Audit(checks, is_live(history), elsewhere, tuple(_unseen(history, elsewhere)))


def _unseen(history: History, elsewhere: Sequence[str]) -> Iterator[str]:
    if elsewhere:
        nodes = {host_of(member) for world in history.worlds for member in world.members}
        yield f"{len(set(map(host_of, elsewhere)))} of {len(nodes)} nodes' files not here"
    if history.begins_after:
        yield f"the first {count(history.begins_after, 'step')} not here"
    if num_lines := history.unwritten.num_lines:
        yield f"{count(num_lines, 'line')} {NOT_WRITTEN}"


def _run(name: str, promise: str, check: Callable[[History], Found], history: History) -> Check:
    try:
        detail, findings = check(history)
    except Skip as missing:
        return Check(name, promise, CheckOutcome.SKIPPED, str(missing))
    findings = tuple(findings)
    if len(findings) > SHOWN_FINDINGS:
        findings = (*findings[:SHOWN_FINDINGS], f"and {len(findings) - SHOWN_FINDINGS} more")
    return Check(name, promise, CheckOutcome.FAIL if findings else CheckOutcome.PASS, detail, findings)


def describe(found: Audit, history: History) -> list[str]:
    """Lines for a terminal: one for each check, one for the goodput, and one for the bill."""
    width = max(len(check.name) for check in found.checks)
    lines = [
        f"{check.name:<{width}}  {check.verdict:<7}  {'broken: ' if check.verdict is CheckOutcome.FAIL else ''}"
        f"{check.promise}: {check.detail}"
        for check in found.checks
    ]
    lost = lost_time(history)
    if lost.wall:
        causes = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in lost.by_cause.items())
        lines.append(
            f"{'goodput':<{width}}  {lost.ratio:<7.3f}  {lost.useful:.1f} of {lost.wall:.1f} s {span_of(history)}; "
            f"lost: {causes}"
        )
    told = describe_bill(bill_of_run(history))
    return lines if told is None else [*lines, f"{'bill':<{width}}  {told}"]


def conclude(found: Audit) -> list[str]:
    """Lines below the checks: how much could not be checked, and PASS, or FAIL with the reasons."""
    lines = []
    num_skipped = sum(check.verdict is CheckOutcome.SKIPPED for check in found.checks)
    if num_skipped:
        lines.append(f"{num_skipped} of {len(found.checks)} checks were skipped: there was nothing to look at")
    lines += found.notes
    if found.passed:
        return [*lines, found.verdict]
    return [*lines, found.verdict, *(f"  {reason}" for reason in found.reasons or ["nothing could be checked"])]
