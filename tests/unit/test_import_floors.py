"""Who imports whom: read from the source with `ast`, nothing is imported."""

from __future__ import annotations

import ast
import sys
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


def imported_modules(path: Path) -> set[str]:
    """Everything that is imported when the module itself is, dotted; imports for type checkers alone do not count."""
    found: set[str] = set()
    for node in module_level(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide who imports whom"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from module_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from module_level(handler.body)


def own_imports() -> dict[str, set[str]]:
    return {name: (imported_modules(path) & SOURCES.keys()) - {name} for name, path in SOURCES.items()}


def everything_below(name: str) -> set[str]:
    graph, found, open_names = own_imports(), set(), [name]
    while open_names:
        for other in graph[open_names.pop()] - found:
            found.add(other)
            open_names.append(other)
    return found


def test_there_are_no_cycles() -> None:
    graph = {name: imports - {"elastic_train"} for name, imports in own_imports().items()}
    assert len(graph) > 20
    assert any(graph.values())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("above", ["recovery", "membership", "liveness", "protocol.agreement", "torchrun"])
def test_the_loop_cannot_reach_what_is_above_it(above: str) -> None:
    assert f"elastic_train.{above}" not in everything_below("elastic_train.train")


PROTOCOL = sorted(name for name in SOURCES if name.startswith("elastic_train.protocol"))


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_protocol_stands_below_those_who_use_it(name: str) -> None:
    above = {f"elastic_train.{one}" for one in ("liveness", "membership", "connect", "process_group", "recovery")}
    assert not everything_below(name) & above


def test_a_membership_connects_nowhere_itself() -> None:
    """The simulator drives it on links and stores of its own."""
    below = everything_below("elastic_train.membership")
    assert "elastic_train.protocol.agreement" in below
    assert not below & {f"elastic_train.{name}" for name in ("connect", "protocol.signposts", "etcd_members", "etcd")}
    assert "elastic_train.membership" in everything_below("elastic_train.connect")


def test_nothing_but_the_entry_points_and_benchmarks_imports_recovery() -> None:
    above = {name for name, imports in own_imports().items() if "elastic_train.recovery" in imports}
    assert {name for name in above if not name.startswith("elastic_train.bench.")} <= {
        "elastic_train.__main__",
        "elastic_train.cli",
        "elastic_train.own_loop",
    }


@pytest.mark.parametrize(
    "name", ["rules", "world", "errors", "protocol/laws", "protocol/agreement", "protocol/join_queue"]
)
def test_the_protocol_itself_does_not_import_torch(name: str) -> None:
    assert not {module for module in imported_modules(PACKAGE / f"{name}.py") if module.split(".")[0] == "torch"}


@pytest.mark.parametrize("name", ["torchrun", "__init__"])
def test_what_every_agent_loads_is_light(name: str) -> None:
    heavy = {"torch", "torchvision", "numpy", "rich"}
    names = {f"elastic_train.{name}".removesuffix(".__init__")}
    names |= everything_below(next(iter(names)))
    for module in names:
        assert not {imported.split(".")[0] for imported in imported_modules(SOURCES[module])} & heavy, module


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (("rendezvous",), {"torch"}),
        (("__main__", "recovery"), {"torch", "numpy", "simple_parsing"}),
    ],
    ids=["agent", "worker"],
)
def test_a_newcomer_waits_for_no_import_but_these(names: tuple[str, ...], allowed: set[str]) -> None:
    """Of others' packages; tests/integration/test_startup.py sees what functions import before the first step."""
    roots = {f"elastic_train.{name}" for name in names}
    below = roots.union(*map(everything_below, roots))
    found = {module.split(".")[0] for name in below for module in imported_modules(SOURCES[name])}
    assert found - sys.stdlib_module_names - {"elastic_train"} <= allowed


def test_only_few_modules_know_torchs_elastic_package() -> None:
    """One answers its launcher; two implement its public interface of a rendezvous."""
    knowing = {f"elastic_train.{name}" for name in ("torchrun", "rendezvous", "etcd_rendezvous")}
    for name, path in SOURCES.items():
        if name not in knowing:
            assert "torch.distributed.elastic" not in path.read_text(), name
