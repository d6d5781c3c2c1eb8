"""Notices that a node may be taken away: what one says, when it is acted on, what fits it, and what --notices says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from elastic_train.errors import UsageError

LEAD_SECONDS = 120.0
"""before its deadline a noticed node leaves, at least: as long as AWS gives. Where the notice comes later, at once"""
SHORTEST_SECONDS = 30.0
"""that a node has where the notice names no time, or one that is over: GCP's, and as long as torchrun waits"""
GIVEN_SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""from a notice to the end of a spot machine, at least; the pages that say so are named in notices/notice.py"""
SIGNAL_SECONDS = 60.0
"""SLURM's, where --signal names none"""
NAMED = ("aws", "gcp", "azure", "kubernetes", "slurm")
GRAMMAR = "off, auto, aws, gcp, azure, kubernetes, slurm, file:PATH or http://HOST[:PORT]/PATH"
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class PreemptionNotice:
    """That a node may be taken away: who is, when, and how sure it is."""

    source: str
    """who says so: `aws`, `file` and so on"""
    reason: str
    deadline: float | None = None
    """Unix seconds, by the clock of the source; None where it says no time"""
    is_certain: bool = True
    """the node goes, if the notice is not withdrawn; else it may, and nothing is done but say so"""
    host: str = ""
    is_followed: bool = False
    """another worker of the node leaves by it"""

    def at(self, host: str) -> PreemptionNotice:
        """The same, of a node."""
        return replace(self, host=host)

    def seconds_left(self, now: float) -> float:
        """Until the node is taken away, as far as is known. Where the clocks disagree it may be less than nothing."""
        return SHORTEST_SECONDS if self.deadline is None else self.deadline - now

    def is_due(self, now: float, save_seconds: float = 0.0) -> bool:
        """Whether the node should leave now, where all leave at once and save the state in so long."""
        is_near = self.is_followed or self.seconds_left(now) <= max(LEAD_SECONDS, ample_seconds(save_seconds))
        return self.is_certain and is_near

    @property
    def described(self) -> str:
        """For a line of a log; what comes from outside is cut, and has no control characters."""
        text = "".join(c if c.isprintable() else " " for c in f"{self.source}: {self.reason}")
        return text[:SHOWN_CHARACTERS]

    def to_fields(self) -> dict[str, Any]:
        """For the event `notice`; `host` is in every event."""
        return {
            "source": self.source[:SHOWN_CHARACTERS],
            "reason": self.reason[:SHOWN_CHARACTERS],
            "deadline": self.deadline,
            "certain": self.is_certain,
        }


SAVE_SOONER = "lower --snapshot-every, choose a faster --snapshot-dir, or make the state smaller"
"""what to do where the state is not saved in time"""


class Fit(Enum):
    """Whether a state is saved in the time that a notice, or a signal to stop, leaves."""

    FITS = "fits"
    TIGHT = "tight"
    """where the step in hand is short, for it goes first, and the disk not busier than when it was measured"""
    TOO_LONG = "too long"


def ample_seconds(save_seconds: float) -> float:
    """That are enough for a state which takes so long to save: its size over the measured rate."""
    return 2 * save_seconds + 5


def fit_of(save_seconds: float, given_seconds: float) -> Fit:
    """As `ample_seconds`, of the time that there is."""
    if save_seconds > given_seconds:
        return Fit.TOO_LONG
    return Fit.TIGHT if ample_seconds(save_seconds) > given_seconds else Fit.FITS


def given_seconds(source: str, environ: Mapping[str, str]) -> float | None:
    """That a source, by its name, leaves at least between its notice and the end; None where nobody knows before.

    What srun and sbatch were told by --signal they do not pass on; SLURM_SIGNAL and SBATCH_SIGNAL, which say the same,
    are seen by the job.
    """
    if source != "slurm":
        return GIVEN_SECONDS.get(source)
    said = environ.get("SLURM_SIGNAL") or environ.get("SBATCH_SIGNAL") or ""
    found = re.fullmatch(r"(?:[A-Z]+:)?\w+(?:@(\d+))?", said)
    return None if found is None else float(found[1] or SIGNAL_SECONDS)


@dataclass(frozen=True)
class NoticesFlag:
    """What --notices says: who is asked for notices."""

    kind: str
    """off, auto, one of `NAMED`, file or http"""
    target: str = ""
    """the path of a file; the URL of an endpoint"""


def notices_flag(value: str) -> NoticesFlag:
    """Raises: UsageError: --notices says nothing that works."""
    if value in ("off", "auto", *NAMED):
        return NoticesFlag(value)
    if value.startswith("file:") and (path := value.removeprefix("file:").removeprefix("//")):
        return NoticesFlag("file", path)
    if re.match(r"https?://[^/]", value):
        try:
            parts = urlsplit(value)
            if parts.hostname and parts.port != 0 and parts.username is None:
                return NoticesFlag("http", value)
        except ValueError:  # no such port
            pass
    scheme, separator, _ = value.partition("://")
    shown = f"{scheme}://..." if separator and re.search("[?#@]", value) else value  # there may be a secret
    raise UsageError(f"--notices {shown}: must be {GRAMMAR}")


def shown_notices(value: str) -> str:
    """What --notices says, for files and messages: behind the path of a URL there may be a secret."""
    return re.split("[?#]", value, maxsplit=1)[0] if notices_flag(value).kind == "http" else value
