"""The one table of all benchmarks: rows of ours against theirs, for people and as JSON.

Nothing here imports torch before it needs it.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from elastic_train.system import num_cores, processor_facts
from elastic_train.wording import aligned

HEAD = ("case", "ours", "theirs", "unit", "ratio", "spread")
LEFT = (0, 3)
"""columns of words, aligned to the left"""


@dataclass(frozen=True)
class BenchRow:
    """One case of a benchmark."""

    case: str
    ours: float
    """median, in `unit`"""
    theirs: float
    """median, in `unit`"""
    unit: str
    ratio: float
    """median ratio of ours to theirs over the pairs: 1.0 is equal and above 1.0 is better"""
    spread: float
    """interquartile range of the pairs' ratios"""

    @classmethod
    def of_rates(cls, case: str, ours: Sequence[float], theirs: Sequence[float], unit: str) -> BenchRow:
        """Make a row of rates (more is better) that were measured in pairs, one right after the other."""
        ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
        our, their, ratio = (statistics.median(values) for values in (ours, theirs, ratios))
        return cls(case, our, their, unit, ratio, iqr(ratios))

    @classmethod
    def of_costs(cls, case: str, ours: Sequence[float], theirs: Sequence[float], unit: str) -> BenchRow:
        """Make a row of seconds or bytes (less is better) that were measured in pairs."""
        turned = cls.of_rates(case, theirs, ours, unit)
        return replace(turned, ours=turned.theirs, theirs=turned.ours)

    @classmethod
    def within(cls, case: str, ours: Sequence[float], limit: float, unit: str = "s") -> BenchRow:
        """Make a row of costs (less is better) beside the limit of their median; `spread` is in `unit`."""
        median = statistics.median(ours)
        return cls(case, median, limit, unit, limit / max(median, 1e-6), iqr(ours))


def iqr(values: Sequence[float]) -> float:
    """Interquartile range; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def report(bench: str, rows: Sequence[BenchRow]) -> dict[str, Any]:
    """The contents of `elastic-train bench NAME --json FILE`."""
    import torch

    return {
        "bench": bench,
        "machine": machine(),
        "torch": str(torch.__version__),
        "rows": [asdict(row) for row in rows],
    }


def machine() -> str:
    """Processor, usable cores and system, in one line."""
    model = processor_facts().get("model name") or platform.processor() or platform.machine()
    cores = num_cores()
    return f"{model}, {cores} core{'s' if cores > 1 else ''}, {platform.system()} {platform.release()}"


def show(found: dict[str, Any], file: TextIO | None = None) -> None:
    """Print a report as an aligned table."""
    file = sys.stdout if file is None else file
    cells = [
        (row["case"], _number(row["ours"]), _number(row["theirs"]), row["unit"], f"{row['ratio']:.3f}",
         f"{row['spread']:.3f}")
        for row in found["rows"]
    ]  # fmt: skip
    title = f"bench {found['bench']}: {found['machine']}, torch {found['torch']}"
    print(title, file=file)
    print("\n".join(aligned([HEAD, *cells], left=LEFT)), file=file)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
