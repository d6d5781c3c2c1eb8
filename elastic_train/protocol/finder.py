"""The finder of a job, and the size of a job: the parts of its launch that a worker needs to join."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_train.world import Address


class Finder(Protocol):
    """Finds the job, or the place where it begins, and keeps the signs by which other workers find it."""

    def is_beginner(self) -> bool:
        """Return whether only this process may begin a job: it serves the first endpoint, or was the first to claim the
        beginning while no job is known."""

    def addresses(self) -> Sequence[Address]:
        """Return stores of members of the job, or of the host of its beginning. May block for a short timeout.

        Raises: ElasticTrainError if it can never find any."""

    def called_by(self) -> Sequence[Address]:
        """Return the stores of members of a running job in the sign that the job has left with this process; none if
        signs are kept elsewhere."""
        return ()

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        """Write the sign that names members of the job; with `if_missing` only if there is no sign."""

    def other_jobs(self) -> Sequence[Address]:
        """Return the stores of another job of this run id, if its sign stood in place of this process's sign since the
        last call. On any thread."""

    def keep(self, *, has_world: bool) -> None:
        """Serve the endpoints of this machine that no other process serves. On the watcher thread."""

    def describe(self) -> str:
        """Return the places where a newcomer looks, for messages."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Size:
    """The size of a job, and the times in which its first world forms."""

    min_nodes: int
    max_nodes: int
    last_call: float
    """seconds that the first world waits for more nodes when there are enough"""
    join_timeout: float = math.inf
    """seconds within which enough nodes must come for the first world"""
    fixed: int | None = None
    """workers of a world that no newcomer joins, and that begins with one of each rank; None if workers may join"""
    silence: float = math.inf
    """seconds of silence after which a job that this worker knows of counts as gone"""
