"""The checks of an audit: pure functions over a run's history, one per promise of the contract.

Each returns what it looked at and what is wrong, in words with numbers, so that a person can go and look. A check
that has nothing to look at raises Skip: nothing is passed off as true.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.tools.audit.end_checks import check_end, check_phases, check_state
from elastic_train.tools.audit.fault_checks import check_faults, check_incidents
from elastic_train.tools.audit.finding import Found
from elastic_train.tools.audit.history import History
from elastic_train.tools.audit.loss_checks import check_losses
from elastic_train.tools.audit.progress_checks import check_generations, check_ledger, check_steps
from elastic_train.tools.audit.remains_checks import check_leftovers, check_snapshots

CHECKS: tuple[tuple[str, str, Callable[[History], Found]], ...] = (
    ("end", "the job reached its end", check_end),
    ("faults", "every fault was really injected", check_faults),
    ("losses", "nobody was lost into whose node no fault was injected", check_losses),
    ("ledger", "every sample exactly once per epoch", check_ledger),
    ("steps", "committed steps never decrease", check_steps),
    ("generations", "one membership per generation, in a chain", check_generations),
    ("incidents", "every incident within its limit, no committed step lost but by a restart", check_incidents),
    ("phases", "the phases sum to the wall", check_phases),
    ("state", "the final weights agree", check_state),
    ("snapshots", "snapshots are whole, none that is torn was restored", check_snapshots),
    ("leftovers", "nothing is left behind", check_leftovers),
)
