"""The cost of a run so far, and the kept part of it, for people."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_train.runlog.reader import Line, dict_of, float_of, time_of


def newest_with_bill(result: Line | None, events: Iterable[Line]) -> Line:
    """Return result.json if it has a bill, else the newest event that has one; empty if there is none. The `step` of
    the line is the last counted one."""
    if result is not None and dict_of(result, "bill"):
        return result
    return max((line for line in events if dict_of(line, "bill")), key=time_of, default={})


def describe_bill(told: Line | None) -> str | None:
    """`7,200 node-seconds paid, 50% kept; 3.00 in all, 6.00 per million kept samples`; None if nothing was paid."""
    paid, kept, cost, each = _amounts(told)
    if not paid or kept is None:
        return None
    text = f"{paid:,.0f} node-seconds paid, {kept / paid:.0%} kept"
    text += "" if cost is None else f"; {_money(cost)} in all"
    return text + ("" if each is None else f", {_money(each)} per million kept samples")


def figures_of_bill(told: Line | None) -> tuple[tuple[str, str, str], ...]:
    """Return (name, label, text) of each figure of a page; the text is empty if there is no value."""
    paid, kept, _, each = _amounts(told)
    return (
        ("paid", "node-seconds paid", "" if paid is None else f"{paid:,.0f}"),
        ("kept", "node-seconds kept", "" if kept is None else f"{kept:,.0f}"),
        ("cost", "per million kept samples", "" if each is None else _money(each)),
    )


def _amounts(told: Line | None) -> tuple[float | None, float | None, float | None, float | None]:
    """Return (node-seconds paid, node-seconds kept, cost, cost per million kept samples); None for a missing one."""
    line = told or {}
    seconds, each = dict_of(line, "node_seconds"), float_of(line, "cost_per_million_samples")
    return float_of(seconds, "paid"), float_of(seconds, "kept"), float_of(line, "cost"), each


def _money(amount: float) -> str:
    """Format an amount: two decimals, or three digits if it is below 1."""
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"
