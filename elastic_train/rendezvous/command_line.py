"""torchrun's command line, parsed as torchrun does, and the decision whether the program that it starts is ours."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.wording import TORCHRUN_OPTIONS, TORCHRUN_SWITCHES

MOST_ABOVE = 8
"""nested wrappers between an agent and its worker"""
SHORT_OPTIONS = {"-m": "module", "-r": "redirects", "-t": "tee", "-h": "help"}


def agent_arguments(command: Sequence[str]) -> list[str] | None:
    """Return torchrun's arguments in a process's full command line; None if it is no torchrun process."""
    for position, word in enumerate(command[:6]):
        if Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch"):
            return list(command[position + 1 :])
    return None


def launches_elastic_train(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> bool:
    """Return whether the program that torchrun is to start is ours.

    Ours are the module `elastic_train`, modules below it, and any Python file or module whose own source imports it;
    with ELASTIC_TRAIN=1 every program. Under another launcher, without torchrun's `arguments`, only the last counts.
    """
    if environ.get("ELASTIC_TRAIN") == "1":
        return True
    if arguments is None:
        return False
    command = read_command(arguments)
    program = command.program or ""
    if "module" in command.options or environ.get("PET_MODULE", "0") == "1":
        return re.fullmatch(r"elastic_train(\..+)?", program) is not None or _imports_us(_module_file(program))
    if Path(program).name == "elastic-train":  # torchrun --no-python elastic-train check
        return True
    return program.endswith(".py") and _imports_us(Path(program))


def _imports_us(file: Path | None) -> bool:
    if file is None or not file.is_file():
        return False
    source = file.read_text(encoding="utf-8", errors="replace")
    return re.search(r"^\s*(from\s+|import\s+([\w. ]+,\s*)*)elastic_train\b", source, re.MULTILINE) is not None


def _module_file(name: str) -> Path | None:
    """Return the file that `python -m` would run, if it is in the current directory or on PYTHONPATH."""
    for folder in (os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(folder, *name.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py"):
            if folder and file.is_file():
                return file
    return None


@dataclass(frozen=True)
class AgentCommand:
    """An agent's command line, parsed as torchrun does."""

    options: dict[str, str]
    """by long name with dashes; "" for a switch"""
    program: str | None
    """the script or module that is launched; its arguments are left out"""


def read_command(arguments: Sequence[str]) -> AgentCommand:
    """Parse torchrun's arguments. No error is raised here: torchrun itself refuses wrong ones."""
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        if word == "--" or not word.startswith("-"):
            return AgentCommand(options, next(words, None) if word == "--" else word)
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            flag, equals, value = flag[:2], word[2:], word[2:].removeprefix("=")  # -t3 is -t 3
        name = _full_name(flag)
        options[name] = "" if name in TORCHRUN_SWITCHES else value if equals else next(words, "")
    return AgentCommand(options, None)


def _full_name(flag: str) -> str:
    """Return the long name of an option, which may be short, spelled with underscores or abbreviated."""
    name = SHORT_OPTIONS.get(flag) or flag.removeprefix("--").replace("_", "-")
    meant = [option for option in (*TORCHRUN_OPTIONS, *TORCHRUN_SWITCHES) if option.startswith(name)]
    return name if name in meant or len(meant) != 1 else meant[0]


def option(arguments: Sequence[str], environ: Mapping[str, str], name: str) -> str | None:
    """Return the value of torchrun's option `--name`, else of its PET_ variable."""
    options = read_command(arguments).options
    return options[name] if name in options else environ.get("PET_" + name.replace("-", "_").upper())


def parse_nnodes(text: str) -> tuple[int, int]:
    """Return (min, max) nodes of torchrun's `--nnodes`; (1, 1) for a value that torchrun itself will refuse."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        return 1, 1


def asks_for_c10d(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the user asks torchrun for c10d; with --standalone torchrun chooses it by itself: that is no."""
    is_standalone = "standalone" in read_command(arguments).options or environ.get("PET_STANDALONE", "0") == "1"
    return option(arguments, environ, "rdzv-backend") == "c10d" and not is_standalone


def has_free_port(endpoint: str) -> bool:
    """Return whether an endpoint is `HOST:0`, as with --standalone or one node: no other node can find it."""
    return re.search(r":0+$", endpoint.strip()) is not None and "," not in endpoint


def agent_above(parent_pid: int) -> tuple[int, list[str]] | None:
    """Return the pid and arguments of the torchrun that has started a worker; None without one within MOST_ABOVE. The
    worker's parent is the agent itself, or a wrapper below it that does not exec the worker."""
    pid = parent_pid
    for _ in range(1 + MOST_ABOVE):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            status = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        found = agent_arguments(command)
        if found is not None:
            return pid, found
        pid = int(status.rpartition(b")")[2].split()[1])  # pid (name) state parent; the name may contain ")"
    return None
