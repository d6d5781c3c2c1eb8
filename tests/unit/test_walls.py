"""The walls of the package: who may import whom, read from the source with `ast`; nothing is imported.

Imports inside functions count as well, and so does the package itself: what is imported late is still depended on.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import elastic_train

PACKAGE = Path(elastic_train.__file__).parent
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
ENTRIES = {"elastic_train", *(f"elastic_train.{name}" for name in ("__main__", "check", "cli", "torchrun"))}
"""the public names and the programs: they import whatever they need, and nobody imports them"""
VOCABULARY = {
    f"elastic_train.{name}"
    for name in (
        "branches",
        "config",
        "errors",
        "preemption",
        "rules",
        "snapshot_interval",
        "stopping",
        "system",
        "version",
        "wording",
        "world",
    )
}
FLOORS = (
    {"runlog"},
    {"training", "protocol", "storage"},
    {"rendezvous", "observe", "notices"},
    {"elastic"},
    {"tools.audit", "tools.check", "tools.program"},
    {"tools.drills"},
    {"tools.bench"},
    {"tools.submit"},
    {"tools.commands"},
)
"""folders, from the lowest; one imports from lower ones alone, and never from its siblings"""


def imported_modules(path: Path, *, with_late: bool) -> set[str]:
    """Everything that a module imports, dotted; imports for type checkers alone do not count.

    Args:
        with_late: count imports inside functions.
    """
    found: set[str] = set()
    for node in imports_in(ast.parse(path.read_text()).body, with_late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide who imports whom"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names & SOURCES.keys() else {str(node.module)}
    return found


def imports_in(body: list[ast.stmt], with_late: bool) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not with_late:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from imports_in(getattr(node, name, []), with_late)
        for handler in getattr(node, "handlers", []):
            yield from imports_in(handler.body, with_late)
        for case in getattr(node, "cases", []):
            yield from imports_in(case.body, with_late)


def own_imports(*, with_late: bool) -> dict[str, set[str]]:
    return {
        name: (imported_modules(path, with_late=with_late) & SOURCES.keys()) - {name} for name, path in SOURCES.items()
    }


AT_ONCE, ALL = own_imports(with_late=False), own_imports(with_late=True)


def everything_below(name: str) -> set[str]:
    """What is imported when a module is."""
    found, open_names = set(), [name]
    while open_names:
        for other in AT_ONCE[open_names.pop()] - found:
            found.add(other)
            open_names.append(other)
    return found


def folder_of(name: str) -> str:
    """The folder's dotted name in FLOORS; "" in the vocabulary."""
    if name in VOCABULARY:
        return ""
    within = name.removeprefix("elastic_train.")
    [folder] = [f for floor in FLOORS for f in floor if within == f or within.startswith(f"{f}.")]
    return folder


def floor_of(folder: str) -> int:
    return 0 if folder == "" else 1 + next(number for number, floor in enumerate(FLOORS) if folder in floor)


INSIDE = sorted(
    name for name in SOURCES.keys() - ENTRIES - {"elastic_train.tools"} if not name.startswith("elastic_train.examples")
)


@pytest.mark.parametrize("name", INSIDE)
def test_a_folder_imports_from_lower_ones_alone(name: str) -> None:
    mine = folder_of(name)
    for other in ALL[name]:
        assert other not in ENTRIES, f"{other} is for those outside"
        theirs = folder_of(other)
        assert theirs == mine or floor_of(theirs) < floor_of(mine), f"{name} imports {other}"


def test_there_are_no_cycles() -> None:
    assert len(ALL) > 100
    try:
        TopologicalSorter({name: imports for name, imports in ALL.items() if name != "elastic_train"}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_examples_use_public_names_alone() -> None:
    for name in SOURCES:
        if name.startswith("elastic_train.examples."):
            assert ALL[name] <= {"elastic_train"}


def test_no_file_has_the_name_of_another() -> None:
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_class_has_the_name_of_another() -> None:
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


FILE, CLASS, FUNCTION = 400, 250, 60
"""lines at most"""


def test_nothing_is_longer_than_it_may_be() -> None:
    found = []
    for name, path in SOURCES.items():
        text = path.read_text()
        lengths = [(name, len(text.splitlines()), FILE)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
                lengths.append((f"{name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, limit))
        found += [f"{what}: {length} lines of {limit}" for what, length, limit in lengths if length > limit]
    assert found == []


def test_a_membership_connects_nowhere_itself() -> None:
    """The simulator drives it on links and stores of its own."""
    below = everything_below("elastic_train.elastic.membership")
    assert "elastic_train.protocol.agreement" in below
    assert "elastic_train.protocol.signposts" not in below
    assert not {name for name in below if name.startswith("elastic_train.rendezvous")}
    assert "elastic_train.elastic.membership" in everything_below("elastic_train.elastic.connect")


def test_nothing_but_the_entry_points_and_benchmarks_imports_run() -> None:
    above = {name for name, imports in ALL.items() if "elastic_train.elastic.run" in imports}
    assert {name for name in above if not name.startswith("elastic_train.tools.bench.")} <= {
        "elastic_train.__main__",
        "elastic_train.cli",
        "elastic_train.elastic.own_loop",
    }


@pytest.mark.parametrize(
    "name", ["rules", "world", "errors", "branches", "protocol.laws", "protocol.agreement", "protocol.join_queue"]
)
def test_the_protocol_itself_does_not_import_torch(name: str) -> None:
    imported = imported_modules(SOURCES[f"elastic_train.{name}"], with_late=False)
    assert not {module for module in imported if module.split(".")[0] == "torch"}


@pytest.mark.parametrize("name", ["elastic_train", "elastic_train.rendezvous.hook"])
def test_what_every_agent_loads_is_light(name: str) -> None:
    heavy = {"torch", "torchvision", "numpy", "rich"}
    for module in {name} | everything_below(name):
        imported = imported_modules(SOURCES[module], with_late=False)
        assert not {one.split(".")[0] for one in imported} & heavy, module


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (("rendezvous.handler",), {"torch"}),
        (("__main__", "elastic.run"), {"torch", "numpy", "simple_parsing"}),
    ],
    ids=["agent", "worker"],
)
def test_a_newcomer_waits_for_no_import_but_these(names: tuple[str, ...], allowed: set[str]) -> None:
    """Of others' packages; tests/integration/test_startup.py sees what functions import before the first step."""
    roots = {f"elastic_train.{name}" for name in names}
    below = roots.union(*map(everything_below, roots))
    found = {module.split(".")[0] for name in below for module in imported_modules(SOURCES[name], with_late=False)}
    assert found - sys.stdlib_module_names - {"elastic_train"} <= allowed


def test_only_few_modules_know_torchs_elastic_package() -> None:
    """One answers its launcher; two implement its public interface of a rendezvous."""
    knowing = {f"elastic_train.rendezvous.{name}" for name in ("hook", "handler", "etcd_handler")}
    for name, path in SOURCES.items():
        if name not in knowing:
            assert "torch.distributed.elastic" not in path.read_text(), name


MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""functions of torch that make a tensor on the default device, which a user may set to a GPU"""


def test_what_trains_says_on_which_device_it_makes_a_tensor() -> None:
    """A message on the CPU would become NCCL's under `torch.set_default_device("cuda")`, and pinned memory an error."""
    found = []
    for name, path in SOURCES.items():
        if name.startswith(("elastic_train.tools", "elastic_train.examples")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
                is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if is_torch and "device" not in [keyword.arg for keyword in node.keywords]:
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
