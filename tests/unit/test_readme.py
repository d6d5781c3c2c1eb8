"""The pages show the examples as they are, and whatever they say to type can be typed: every flag, every command."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from simple_parsing.docstring import get_attribute_docstring
from torch.distributed.run import get_args_parser

from elastic_train.cli import make_parser
from elastic_train.config import (
    SHARED,
    Config,
    JobFlags,
    NodeFlags,
    PlaceFlags,
    StepFlags,
    TaskFlags,
    flag,
    parse,
)
from elastic_train.examples.parity_task import Flags

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "elastic_train").rglob("README.md"))]
TEXT = "\n\n".join(page.read_text() for page in PAGES)
FRONT = PAGES[0].read_text()

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OF_OTHER_PROGRAMS = {"--ntasks-per-node", "--signal", "--logdir", "--dport", "--auto-compaction-retention"}
"""srun's two, tensorboard's, iptables', etcd's"""
OF_NEW_TORCHRUN = {"--shutdown-timeout"}
"""since torch 2.15; pages say so"""
PLACEHOLDERS = {"bf16|fp16": "bf16"}


def example(name: str) -> str:
    return (ROOT / "elastic_train" / "examples" / name).read_text()


def test_the_task_is_the_one_that_is_tested() -> None:
    assert example("parity_task.py").split('"""\n\n', 1)[1].strip() in TEXT


def test_the_task_of_the_front_page_is_one() -> None:
    names: dict[str, Any] = {}
    exec(FRONT.split("```python\n")[1].split("```")[0], names)
    task = names["Parity"]()
    inputs, labels = zip(*(task.train_dataset()[index] for index in range(256)), strict=True)
    assert task.build_model()(torch.stack(inputs)).shape == (256, 2)
    assert sum(labels) == 128


def test_the_diff_is_that_of_the_examples() -> None:
    plain, elastic = (example(name).splitlines() for name in ("plain_ddp.py", "elastic_ddp.py"))
    changed = [line for line in difflib.unified_diff(plain, elastic, lineterm="", n=0) if line[0] in "+-"][2:]
    blocks = [block.split("```")[0].splitlines() for block in TEXT.split("```diff\n")[1:]]
    assert len(blocks) == 2, "the front page has it with less around it"
    for shown in blocks:
        assert [line for line in shown if line[:1] in ("+", "-")] == changed
    new, gone = (sum(line.startswith(sign) and len(line) > 1 for line in changed) for sign in "+-")
    assert (new, gone) == (9, 14), "as the README says"


# --- what it says to install ------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_etcd_needs_nothing_that_is_not_installed() -> None:
    """A user of --rdzv-backend=etcd3 installs what a user of c10d does."""
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names >= {"etcd3", "tenacity"}


def test_every_extra_that_is_named_exists() -> None:
    pages = [path.read_text() for path in ROOT.rglob("README.md")]
    named = [found for page in pages for found in re.findall(r"(?:elastic_train|'\.)\[([\w,]+)\]'", page)]
    assert named
    assert {extra for extras in named for extra in extras.split(",")} <= set(PROJECT["optional-dependencies"])


# --- what it says to type ---------------------------------------------------------------------------------------------


def typed() -> list[str]:
    """What stands in indented blocks, line by line, and in backquotes."""
    text = FENCED.sub("", TEXT)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return sorted({*lines, *(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))})


def words_after(program: str) -> list[list[str]]:
    """Of each command that has this program and flags, the words that follow it, up to the next command."""
    found = []
    for text in typed():
        for command in re.split(r" && |;", text):
            match = re.search(rf"(?:^|[\s/]){re.escape(program)}(?=\s)(.*)", command)
            if match and FLAG.search(match[1]) and "--help" not in match[1] and " ... " not in match[1]:
                found.append([PLACEHOLDERS.get(word, word) for word in shlex.split(match[1])])
    assert found
    return found


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Those of its subcommands too."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from options_of(subparser)


def test_every_flag_exists() -> None:
    ours = {flag(field.name) for of in (Config, Flags) for field in dataclasses.fields(of) if field.name != "own_flags"}
    known = {*ours, *options_of(make_parser()), *options_of(get_args_parser()), *OF_OTHER_PROGRAMS, *OF_NEW_TORCHRUN}
    shown = {name for text in (*typed(), *FENCED.findall(TEXT)) for name in FLAG.findall(text)}
    assert len(shown) > 40
    assert shown <= known, shown - known


def test_every_flag_of_the_worker_is_in_the_table() -> None:
    table = [line for line in TEXT.split("## Flags, exit codes")[1].split("## ", 1)[0].splitlines() if line[:1] == "|"]
    wanted = ["| flag | default | |", "|---|---|---|"]
    for scope in (TaskFlags, PlaceFlags, JobFlags, StepFlags, NodeFlags):
        wanted.append(f"| **{scope.__doc__}** | | |")
        for entry in dataclasses.fields(scope):
            text = " ".join(get_attribute_docstring(scope, entry.name).docstring_below.split())
            default = "off" if entry.default is False else "" if entry.default is None else entry.default
            choices = [one for one in get_args(get_type_hints(scope)[entry.name]) if isinstance(one, str)]
            name = " ".join(f"`{one}`" for one in (flag(entry.name), *choices))
            wanted.append(f"| {name} | {default} | {text} |")
    assert table == wanted, "\n".join(wanted)


def test_every_row_of_the_table_that_is_flags_alone_is_a_command_line() -> None:
    table = TEXT.split("## What you have", 1)[1].split("## ", 1)[0]
    rows = [row.split(" | ")[1] for row in table.splitlines()[4:] if row.startswith("| ")]
    flags = [found[1] for row in rows if (found := re.match(r"`(--[^`]+)`", row))]
    assert len(flags) >= 4
    for line in flags:
        parse(shlex.split(line))


@pytest.mark.parametrize("words", words_after("-m elastic_train"), ids=" ".join)
def test_every_command_of_the_worker(words: list[str]) -> None:
    config = parse(words, Flags if "parity_task:Parity" in words else None)
    assert config != Config()


@pytest.mark.parametrize("words", words_after("elastic-train"), ids=" ".join)
def test_every_command_of_the_console_script(words: list[str]) -> None:
    assert callable(make_parser().parse_args(words).command)


@pytest.mark.parametrize("words", words_after("-m elastic_train.check"), ids=" ".join)
def test_every_command_of_the_check(words: list[str]) -> None:
    parse(make_parser().parse_args(["check", *words]).flags)


@pytest.mark.parametrize("words", words_after("elastic_ddp.py"), ids=" ".join)
def test_every_command_of_an_own_loop(words: list[str]) -> None:
    parse(words, scopes=SHARED)


@pytest.mark.parametrize("words", words_after("torchrun"), ids=" ".join)
def test_every_command_of_torchrun(words: list[str]) -> None:
    program = get_args_parser().parse_args(words).training_script
    assert program in ("elastic_train", "elastic_train.check", "train.py", "elastic_train/examples/elastic_ddp.py")


def test_the_front_page_is_short_and_leads_to_all_others() -> None:
    assert len(FRONT.splitlines()) <= 130
    linked = {(ROOT / link).resolve() for link in re.findall(r"\]\(([\w/]+\.md)\)", FRONT)}
    assert linked == {*PAGES[1:], *(ROOT / "deploy").glob("*/README.md")}


def test_the_tree_names_what_there_is() -> None:
    tree = TEXT.split("\n    elastic_train/\n")[1].split("\n    deploy/")[0]
    package, folders = ROOT / "elastic_train", [ROOT / "elastic_train"]
    named, files = set(), set()
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 3
        first, text = line.split(maxsplit=1)
        del folders[depth + 1 :]
        assert (folders[depth] / first).exists(), first
        if first.endswith("/"):
            folders.append(folders[depth] / first)
            named.add(folders[-1])
        files.add(folders[-1] / first)
        for name in re.findall(r"([\w*]+\.py)\b", text):
            found = list(folders[-1].glob(name))
            assert found, f"{folders[-1].name} has no {name}"
            files.update(found)
    here = {path.parent for path in package.rglob("__init__.py")} - {package}
    assert named == here | {package / "examples"}
    modules = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    layers = [path for path in modules if path.parent.name != "examples" and "tools" not in path.parts]
    assert [path for path in layers if path not in files] == [], "it names every module of what trains"
