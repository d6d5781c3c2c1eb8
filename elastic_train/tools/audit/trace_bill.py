"""The bill of a whole run, by the prices of the trace that a drill has replayed, where it had some."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from elastic_train.observe.bill import newest_bill
from elastic_train.runlog.goodput import bill
from elastic_train.runlog.reader import Line, dict_of, float_of, int_of
from elastic_train.tools.audit.history import History


def bill_of_run(history: History) -> Line | None:
    """Of a trace with prices each node costs its own, from its start to its end; else as the run itself tells."""
    told = newest_bill(history.result, history.events)
    stays = (history.drill.settings.get("trace") or []) if history.drill is not None else []
    if history.drill is None or told is None or not any(stay.get("price") is not None for stay in stays):
        return told
    lives = node_lives(history.drill.nodes)
    prices = defaultdict(list)
    for stay in stays:
        prices[stay["place"]].append(float(stay["price"]))
    paid = sum(seconds for _, _, seconds in lives)
    cost = sum(prices[node][number] * seconds / 3600 for node, number, seconds in lives if number < len(prices[node]))
    kept, samples = float_of(dict_of(told, "node_seconds"), "kept") or 0.0, int_of(told, "kept_samples") or 0
    return bill(paid=paid, kept=kept, samples=samples, price=cost / paid * 3600 if paid else None)


def node_lives(lines: Sequence[Line]) -> list[tuple[str, int, float]]:
    """(node, its how many-th start, seconds) of what a drill's nodes.jsonl says; without those whose end is missing."""
    started: dict[str, float] = {}
    counts: Counter[str] = Counter()
    lives = []
    for line in lines:
        node = str(line["node"])
        if line["what"] == "started":
            started[node] = float(line["time"])
        elif line["what"] == "ended" and node in started:
            lives.append((node, counts[node], float(line["time"]) - started.pop(node)))
            counts[node] += 1
    return lives
