"""The README shows the examples as they are, and every row of its table names flags that exist."""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def example(name: str) -> str:
    return (ROOT / "elastic_train" / "examples" / name).read_text()


def test_the_task_is_the_one_that_is_tested() -> None:
    assert example("parity_task.py").split('"""\n\n', 1)[1].strip() in README


def test_the_diff_is_that_of_the_examples() -> None:
    plain, elastic = (example(name).splitlines() for name in ("plain_ddp.py", "elastic_ddp.py"))
    changed = [line for line in difflib.unified_diff(plain, elastic, lineterm="", n=0) if line[0] in "+-"][2:]
    shown = README.split("```diff\n")[1].split("```")[0].splitlines()
    assert [line for line in shown if line[:1] in ("+", "-")] == changed
    assert sum(line.startswith("+") and len(line) > 1 for line in changed) <= 10
