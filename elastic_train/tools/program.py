"""The program on the nodes of a drill or a batch job: the bundled trainer, or a script with its own function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_train.errors import UsageError
from elastic_train.rendezvous.command_line import launches_elastic_train

FORCED = "ELASTIC_TRAIN"
"""in the environment, `1` makes torchrun's agent treat any program as one that uses elastic_train"""

Program = tuple[str, ...]
"""as torchrun takes it: `script.py`, or `-m module`"""
BUNDLED_PROGRAM: Program = ("-m", "elastic_train")


def read_program(given: Sequence[str], environ: Mapping[str, str]) -> tuple[Program, list[str]]:
    """Split the words after `--` into a program, if they begin with one, and its flags.

    Raises:
        UsageError: there is no such script or module, or it does not use elastic_train.
    """
    if not given or (given[0].startswith("-") and given[0] not in ("-m", "--module")):
        return BUNDLED_PROGRAM, list(given)
    length = 2 if given[0].startswith("-") else 1
    if len(given) < length:
        raise UsageError(f"{given[0]}: name the module that torchrun is to run")
    program: Program = ("-m", given[1]) if length == 2 else (given[0],)
    if program != BUNDLED_PROGRAM:
        _require_ours(program, environ)
    return program, list(given[length:])


def _require_ours(program: Program, environ: Mapping[str, str]) -> None:
    name = program[-1]
    if len(program) == 1 and not Path(name).is_file():
        raise UsageError(f"{name}: there is no such script in {Path.cwd()} (flags of the worker begin with --)")
    if not launches_elastic_train(program, environ):
        raise UsageError(
            f"{name} does not import elastic_train: give a script that passes its training function to "
            f"elastic_train.run; where a module further down imports it, set {FORCED}=1"
        )
