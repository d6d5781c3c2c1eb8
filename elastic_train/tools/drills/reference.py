"""The same job undisturbed, run once in one process, and kept for drills to come."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elastic_train.errors import ElasticTrainError
from elastic_train.runlog.reader import read_json
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.system import processor_facts
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.drills.nodes import clean_environment, dying_with_parent

REFERENCE_SECONDS = 3600.0
FILE_FLAGS = ("--init-from", "--data-dir")


class ReferenceFailed(ElasticTrainError):
    """The undisturbed job did not reach its end."""


def undisturbed(flags: Sequence[str], *, is_own_task: bool, cwd: Path) -> dict[str, Any]:
    """result.json of `python -m elastic_train FLAGS`, and `early_loss` and `late_loss` as of History.

    Those of the bundled job are cached. What a user's own task depends on is not known, nor what is in the files that
    flags name: they are run anew each time. Blocks for the training.

    Raises:
        ReferenceFailed: it did not end well; the message has its last line.
    """
    names_files = any(flag.partition("=")[0] in FILE_FLAGS for flag in flags)
    cached = None if is_own_task or names_files else cache_directory() / f"{cache_key(flags)}.json"
    found = read_json(cached) if cached is not None else None
    if found is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="elastic-train-reference-") as folder:
        result = _run(flags, Path(folder), cwd)
    if cached is not None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cached, json.dumps(result).encode())
    return result


def _run(flags: Sequence[str], folder: Path, cwd: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "elastic_train", *flags, "--run-dir", str(folder / "run")]
    try:
        done = subprocess.run(
            [*dying_with_parent(), *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=cwd,
            env=clean_environment(),
            timeout=REFERENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ReferenceFailed(f"the undisturbed run took more than {REFERENCE_SECONDS:.0f} s") from error
    result = read_json(folder / "run" / "result.json")
    if done.returncode != 0 or result is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ReferenceFailed(f"the undisturbed run ended with code {done.returncode}: {last}")
    history = read_history(folder / "run")
    return result | {"early_loss": history.early_loss, "late_loss": history.late_loss}


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "elastic_train" / "drills"


def cache_key(flags: Sequence[str]) -> str:
    """Everything that the result can depend on: flags, versions, the code itself, the kind of processor."""
    digest = hashlib.sha256(json.dumps([list(flags), version("torch"), version("numpy"), _processor()]).encode())
    package, here = Path(__file__).parents[2], Path(__file__).parent
    training = [path for path in sorted(package.rglob("*.py")) if package / "tools" not in path.parents]
    for path in [*training, here / "task.py", here / "reference.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    facts = processor_facts()
    return " ".join(facts.get(name, "unknown") for name in ("vendor_id", "cpu family", "model", "model name", "flags"))
