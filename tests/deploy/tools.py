"""What the tests of deploy/ have in common: the programs that check its files, and a cluster's commands run here."""

from __future__ import annotations

import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


def program(name: str) -> str:
    """A program of the `test` extra, else of the system; the test is skipped where there is neither."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def programs_folder(path: Path) -> Path:
    """A folder for PATH with torchrun and elastic-train of this environment, which need not have their scripts."""
    folder = path / "programs"
    folder.mkdir(exist_ok=True)
    modules = {"torchrun": "torch.distributed.run", "elastic-train": "elastic_train.cli"}
    for name, module in modules.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        script.chmod(0o755)
    return folder
