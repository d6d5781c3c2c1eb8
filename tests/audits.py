"""The audit of a run directory."""

from __future__ import annotations

from pathlib import Path

from elastic_train.tools.audit.audit import Audit, audit_history
from elastic_train.tools.audit.history import read_history


def audit(run_dir: Path) -> Audit:
    return audit_history(read_history(run_dir))
