"""The bill of a whole run, by the prices of the trace that a drill has replayed, if it has some."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from elastic_train.observe.bill import newest_with_bill
from elastic_train.runlog.goodput import bill
from elastic_train.runlog.reader import Line, dict_of, float_of, int_of
from elastic_train.tools.audit.history import History


def bill_of_run(history: History) -> Line | None:
    """Return the bill. If the trace has prices, each node costs its own from start to end; else it is the run's own."""
    told = dict_of(newest_with_bill(history.final_result, history.events), "bill") or None
    stays = (history.drill.settings.get("trace") or []) if history.drill is not None else []
    if history.drill is None or told is None or not any(stay.get("price") is not None for stay in stays):
        return told
    lives = node_lives(history.drill.nodes)
    zero = float(history.drill.settings.get("trace_began") or min((started for _, started, _ in lives), default=0.0))
    speed = float(history.drill.settings.get("speed") or 1.0)
    first = min(float(stay["from"]) for stay in stays)
    prices = defaultdict(list)
    for stay in stays:
        prices[stay["place"]].append(((float(stay["from"]) - first) / speed, float(stay["price"])))
    paid = sum(seconds for _, _, seconds in lives)
    cost = sum(_price_at(prices[node], started - zero) * seconds / 3600 for node, started, seconds in lives)
    kept, samples = float_of(dict_of(told, "node_seconds"), "kept") or 0.0, int_of(told, "kept_samples") or 0
    return bill(paid=paid, kept=kept, samples=samples, price=cost / paid * 3600 if paid else None)


def _price_at(prices: Sequence[tuple[float, float]], moment: float) -> float:
    """The price of the stay (time, price) that began nearest to a start: a stay has no start if its node ran on."""
    return min(prices, key=lambda stay: abs(stay[0] - moment), default=(0.0, 0.0))[1]


def node_lives(lines: Sequence[Line]) -> list[tuple[str, float, float]]:
    """(node, when it started, seconds) of each life in a drill's nodes.jsonl; without lives whose end is missing."""
    started: dict[str, float] = {}
    lives = []
    for line in lines:
        node = str(line["node"])
        if line["what"] == "started":
            started[node] = float(line["time"])
        elif line["what"] == "ended" and node in started:
            began = started.pop(node)
            lives.append((node, began, float(line["time"]) - began))
    return lives
