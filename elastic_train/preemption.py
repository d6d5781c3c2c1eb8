"""Notices that a node may be taken away: their content, when a node leaves, whether saving fits, and --notices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from elastic_train.errors import UsageError

LEAD_SECONDS = 120.0
"""A node leaves at least this long before its deadline, or at once after a later notice. AWS gives as long."""
SHORTEST_SECONDS = 30.0
"""The assumed time after a notice without a deadline: that of GCP, and torchrun's wait before SIGKILL."""
GIVEN_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""The least time from a notice to the end of a spot machine; notices/notice.py names the sources."""
SIGNAL_SECONDS = 60.0
"""SLURM's default if --signal names no time."""
NAMED = ("aws", "gcp", "azure", "kubernetes", "slurm")
GRAMMAR = "off, auto, aws, gcp, azure, kubernetes, slurm, file:PATH or http://HOST[:PORT]/PATH"
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class PreemptionNotice:
    """An announcement that a node may be taken away."""

    source: str
    """The name of the source: `aws`, `file` and so on."""
    reason: str
    deadline: float | None = None
    """Unix seconds by the clock of the source; None if the source names no time."""
    is_certain: bool = True
    """Whether the node will go unless the notice is withdrawn. Otherwise the notice is only logged."""
    host: str = ""
    is_followed: bool = False
    """Whether another worker of the node leaves because of it."""

    def seconds_left(self, now: float) -> float:
        """The time until the node is taken away, as far as is known; negative if it is over or clocks differ."""
        return SHORTEST_SECONDS if self.deadline is None else self.deadline - now

    def is_due(self, now: float, save_seconds: float = 0.0) -> bool:
        """Whether the node should leave now, given the time that all nodes together need to save the state."""
        is_near = self.is_followed or self.seconds_left(now) <= max(LEAD_SECONDS, ample_seconds(save_seconds))
        return self.is_certain and is_near

    @property
    def described(self) -> str:
        """Source and reason for a log line, shortened and without control characters, because they are untrusted."""
        text = "".join(c if c.isprintable() else " " for c in f"{self.source}: {self.reason}")
        return text[:SHOWN_CHARACTERS]

    def to_fields(self) -> dict[str, Any]:
        """The fields of the event `notice`; `host` is in every event anyway."""
        return {
            "source": self.source[:SHOWN_CHARACTERS],
            "reason": self.reason[:SHOWN_CHARACTERS],
            "deadline": self.deadline,
            "certain": self.is_certain,
        }


SAVE_SOONER = "lower --snapshot-every, choose a faster --snapshot-dir, or make the state smaller"
"""The advice if saving the state takes too long."""


class Fit(Enum):
    """Whether a state can be saved in the time after a notice or a signal to stop."""

    FITS = "fits"
    TIGHT = "tight"
    """Only if the current step, which ends first, is short, and the disk is no slower than when it was measured."""
    TOO_LONG = "too long"


def ample_seconds(save_seconds: float) -> float:
    """A sufficient time to leave, for a state that takes `save_seconds` by its size and the measured rate."""
    return 2 * save_seconds + 5


def fit_of(save_seconds: float, given_seconds: float) -> Fit:
    """Whether saving fits into the given time."""
    if save_seconds > given_seconds:
        return Fit.TOO_LONG
    return Fit.TIGHT if ample_seconds(save_seconds) > given_seconds else Fit.FITS


def given_seconds(source: str, environ: Mapping[str, str]) -> float | None:
    """The least time between a notice of this source and the end of the node; None if unknown in advance.

    The job cannot see the option --signal of srun and sbatch, but it sees SLURM_SIGNAL and SBATCH_SIGNAL, which have
    the same effect.
    """
    if source != "slurm":
        return GIVEN_SECONDS.get(source)
    said = environ.get("SLURM_SIGNAL") or environ.get("SBATCH_SIGNAL") or ""
    found = re.fullmatch(r"(?:[A-Z]+:)?\w+(?:@(\d+))?", said)
    return None if found is None else float(found[1] or SIGNAL_SECONDS)


@dataclass(frozen=True)
class NoticesFlag:
    """The source of notices, as --notices names it."""

    kind: str
    """off, auto, one of `NAMED`, file or http."""
    target: str = ""
    """The path of a file, or the URL of an endpoint."""


def notices_flag(value: str) -> NoticesFlag:
    """Parse the value of --notices. Raises: UsageError: it is not valid."""
    if value in ("off", "auto", *NAMED):
        return NoticesFlag(value)
    if value.startswith("file:") and (path := value.removeprefix("file:").removeprefix("//")):
        return NoticesFlag("file", path)
    if re.match(r"https?://[^/]", value):
        try:
            parts = urlsplit(value)
            if parts.hostname and parts.port != 0 and parts.username is None:
                return NoticesFlag("http", value)
        except ValueError:  # an invalid port
            pass
    scheme, separator, _ = value.partition("://")
    shown = f"{scheme}://..." if separator and re.search("[?#@]", value) else value  # it may hold a secret
    raise UsageError(f"--notices {shown}: must be {GRAMMAR}")


def shown_notices(value: str) -> str:
    """The value of --notices for files and messages, without the query of a URL, which may hold a secret."""
    return re.split("[?#]", value, maxsplit=1)[0] if notices_flag(value).kind == "http" else value
