"""The same job undisturbed, run once in one process, and kept for drills to come."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from elastic_train.errors import ElasticTrainError
from elastic_train.runlog.reader import read_json
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.system import processor_facts
from elastic_train.tools.audit.history import History, read_history
from elastic_train.tools.drills.nodes import clean_environment, dying_with_parent
from elastic_train.tools.drills.program import BUNDLED_PROGRAM, DrilledProgram
from elastic_train.tools.drills.user_code import digests
from elastic_train.tools.drills.watch import RunWatch

REFERENCE_SECONDS = 3600.0
TELL_SECONDS = 10.0
"""between two lines about a run that is not over"""
DEVICE = "the device"
"""the name of that fact, which the run itself tells"""
FILE_FLAGS = ("--init-from", "--data-dir")
PROCESSOR_FACTS = ("vendor_id", "cpu family", "model", "model name", "flags")


class ReferenceFailed(ElasticTrainError):
    """The undisturbed job did not reach its end."""


def undisturbed(
    flags: Sequence[str],
    *,
    cwd: Path,
    program: DrilledProgram = BUNDLED_PROGRAM,
    log: Callable[[str], None] = print,
    last_step: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """result.json of the program with these flags in one process, and `early_loss` and `late_loss` as of History.

    It is kept for the same program, flags and, where code is the user's, `cwd`, and used again while the same are: the
    user's code (the script or the task's module, and what it imports that is not installed), the files that flags name,
    all installed packages' versions, elastic_train's code, the device and the kind of processor. Other files that the
    code reads are not known: who changes them deletes what is kept. A job whose flags name a folder of data or a
    snapshot is run anew each time. Blocks for the training.

    Args:
        log: prints a line of where it comes from, why one that is kept will not do, and how far it is.
        last_step: of the job, for these lines.
        device: on which a job with these flags trains here, as of `device_of`; None where it is not known.

    Raises:
        ReferenceFailed: it did not end well; the message has its last line.
    """
    kept = kept_at(program, flags, cwd)
    facts = facts_of(program, flags, cwd)
    found = (read_json(kept) if kept is not None else None) or {}
    kept_facts = dict(found.get("facts") or {})
    used = kept_facts.get(DEVICE) if device is None else device
    changed = changes(kept_facts, facts if used is None else facts | {DEVICE: used})
    what = "the same job undisturbed, to compare with"
    if kept is not None and found and not changed:
        log(f"{what}: kept from an earlier drill in {kept}")
        return dict(found["result"])
    why = f", anew, for {', '.join(changed)} changed" if found else ""
    log(f"{what}{why} ({f'kept in {kept} for the next drill' if kept else 'not kept: its flags name data'}) ...")
    with tempfile.TemporaryDirectory(prefix="elastic-train-reference-") as folder:
        result, used = _run(flags, program, Path(folder), cwd, log, last_step)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps({"facts": {**facts, DEVICE: used}, "result": result}).encode())
    return result


def _run(
    flags: Sequence[str],
    program: DrilledProgram,
    folder: Path,
    cwd: Path,
    log: Callable[[str], None],
    last_step: int | None,
) -> tuple[dict[str, Any], str]:
    """The result, and on which device it was trained."""
    run_dir, errors_path, started = folder / "run", folder / "log", time.monotonic()
    watch = RunWatch(run_dir)
    with errors_path.open("wb") as errors:
        process = subprocess.Popen(
            [*dying_with_parent(), sys.executable, *program.words, *flags, "--run-dir", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=cwd,
            env=clean_environment() | program.environment,
        )
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TELL_SECONDS)
                break
            seconds = time.monotonic() - started
            if seconds > REFERENCE_SECONDS:
                raise ReferenceFailed(f"the undisturbed run took more than {REFERENCE_SECONDS:.0f} s")
            watch.poll()
            log(f"undisturbed, {seconds:.0f} s: step {watch.step}{f' of {last_step}' if last_step else ''}")
    finally:
        process.kill()
        process.wait()
    result = read_json(run_dir / "result.json")
    if process.returncode != 0 or result is None:
        last = (errors_path.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise ReferenceFailed(f"the undisturbed run ended with code {process.returncode}: {last}")
    history = read_history(run_dir)
    return result | {"early_loss": history.early_loss, "late_loss": history.late_loss}, device_of(history)


def device_of(history: History) -> str:
    """On which the newest worker of a run has trained: `cpu`, or `cuda` and the GPU's name."""
    start = history.starts[-1] if history.starts else {}
    kind = str(start.get("device", "unknown")).partition(":")[0]
    return f"{kind} {start['gpu']}" if "gpu" in start else kind


# --- what is kept -----------------------------------------------------------------------------------------------------


def kept_at(program: DrilledProgram, flags: Sequence[str], cwd: Path) -> Path | None:
    """The file for a job's result; None where it is not kept."""
    if any(word.partition("=")[0] in FILE_FLAGS for word in flags):
        return None
    named = [*program.words, *flags, *([str(cwd.absolute())] if program.code(flags) else [])]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "elastic_train" / "drills" / f"{hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]}.json"


def facts_of(program: DrilledProgram, flags: Sequence[str], cwd: Path) -> dict[str, str]:
    """What a result depends on beside the words of the command, by name."""
    versions = sorted(f"{found.name} {found.version}" for found in distributions())
    processor = processor_facts()
    named = {word: cwd / word.rpartition("=")[2] for word in flags}
    return {
        "elastic_train": _digest_of_package(),
        "the installed packages": hashlib.sha256(json.dumps(versions).encode()).hexdigest(),
        "the processor": " ".join(processor.get(name, "unknown") for name in PROCESSOR_FACTS),
        **{
            word: f"{path.stat().st_size} bytes of {path.stat().st_mtime_ns}"
            for word, path in named.items()
            if path.is_file()
        },
        **digests(program.code(flags), cwd),
    }


def changes(kept: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """The names of the facts that are not as they were."""
    before = kept or {}
    return [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]


def _digest_of_package() -> str:
    """Of all that trains; the drills' own task among it, and this file, which says what is kept of a result."""
    digest = hashlib.sha256()
    package, here = Path(__file__).parents[2], Path(__file__).parent
    training = [path for path in sorted(package.rglob("*.py")) if package / "tools" not in path.parents]
    for path in [*training, here / "task.py", here / "reference.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()
