"""The same job without faults, run in one process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_train.errors import ElasticTrainError
from elastic_train.runlog.reader import read_json
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.drills.nodes import Node, clean_environment, dying_with_parent
from elastic_train.tools.drills.watch import RunWatch
from elastic_train.tools.program import BUNDLED_PROGRAM, Program

REFERENCE_SECONDS = 3600.0
LINE_SECONDS = 10.0
"""between two lines about the running job"""


class ReferenceFailed(ElasticTrainError):
    """The undisturbed job did not reach its end."""


def undisturbed(
    flags: Sequence[str],
    *,
    cwd: Path,
    program: Program = BUNDLED_PROGRAM,
    log: Callable[[str], None] = print,
    last_step: int | None = None,
) -> dict[str, Any]:
    """Run the program with these flags in one process. Return its result.json with `early_loss` and `late_loss` of its
    History. Blocks for the training.

    Args:
        log: prints a line at the start, and lines about the progress.
        last_step: of the job, for these lines.

    Raises:
        ReferenceFailed: it failed or took too long; the message has the reason, or the last line of its errors.
    """
    log("the same job undisturbed, to compare with ...")
    with tempfile.TemporaryDirectory(prefix="elastic-train-reference-") as folder:
        run_dir, started = Path(folder, "run"), time.monotonic()
        watch = RunWatch(run_dir)
        command = [*dying_with_parent(), sys.executable, *program, *flags, "--run-dir", str(run_dir)]
        node = Node(command, Path(folder, "log"), cwd, clean_environment())
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    node.process.wait(LINE_SECONDS)
                    break
                seconds = time.monotonic() - started
                if seconds > REFERENCE_SECONDS:
                    raise ReferenceFailed(f"the undisturbed run took more than {REFERENCE_SECONDS:.0f} s")
                watch.poll()
                log(f"undisturbed, {seconds:.0f} s: step {watch.step}{f' of {last_step}' if last_step else ''}")
        finally:
            node.kill()
        result = read_json(run_dir / "result.json")
        if node.process.returncode != 0 or result is None:
            last = (node.text().strip().splitlines() or ["it said nothing"])[-1]
            raise ReferenceFailed(f"the undisturbed run ended with code {node.process.returncode}: {last}")
        history = read_history(run_dir)
        return result | {"early_loss": history.early_loss, "late_loss": history.late_loss}
