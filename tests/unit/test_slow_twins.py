"""Every slow test is in the table of tests/README.md, beside what holds the same at every run."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = [line.strip("| ").split(" | ") for line in (TESTS / "README.md").read_text().splitlines() if line[:3] == "| `"]


SOME, ALL_OF_IT = "some of its parameters", "all of it"


def slowness_in(path: Path) -> dict[str, str]:
    """What of each test is marked `slow`; "" for nothing."""
    tree, found = ast.parse(path.read_text()), {}
    of_file = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
    of_file = [mark for value in of_file for mark in (value.elts if isinstance(value, ast.List) else [value])]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [*of_file, *node.decorator_list]
            is_whole = any(is_slow_mark(mark) for mark in marks)
            is_part = any(is_slow_mark(inner) for mark in marks for inner in ast.walk(mark))
            found[f"{path.relative_to(TESTS)}::{node.name}"] = ALL_OF_IT if is_whole else SOME if is_part else ""
    return found


def is_slow_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "slow"


TABLE = {name: what for path in TESTS.rglob("test_*.py") for name, what in slowness_in(path).items()}


def named_in(cell: str) -> list[str]:
    return re.findall(r"`([\w/*]+\.py::[\w*]+)`", cell)


def test_every_slow_test_is_in_a_row() -> None:
    patterns = [pattern for slow, _twins in ROWS for pattern in named_in(slow)]
    slow = {name for name, what in TABLE.items() if what}
    assert len(slow) > 100
    assert {name for name in slow if not any(fnmatchcase(name, one) for one in patterns)} == set()
    assert [one for one in patterns if not any(fnmatchcase(name, one) for name in slow)] == [], "no slow test there"


def test_what_holds_the_same_is_there_and_not_slow() -> None:
    for _slow, twins in ROWS:
        for pattern in named_in(twins):
            assert any(fnmatchcase(name, pattern) and what != ALL_OF_IT for name, what in TABLE.items()), pattern
