"""What finds a job, and how many nodes a job has: what a worker needs of its launch to come in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_train.world import Address


class Finder(Protocol):
    """Finds the job, or the place where it begins; and keeps the signs by which others do."""

    def is_beginner(self) -> bool:
        """Whether this process may begin a job, and no other one: it serves the first endpoint, or has said so first
        where no job is known."""

    def addresses(self) -> Sequence[Address]:
        """Stores of members of the job, or of the host of its beginning. May block for a short timeout.

        Raises: ElasticTrainError where it never will."""

    def called_by(self) -> Sequence[Address]:
        """Stores of members of a running job, by the sign that it has left with this process, as that is now; where
        signs are elsewhere none."""
        return ()

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        """Make it known where members of the job are; with `if_missing` only where nothing is known of it."""

    def other_jobs(self) -> Sequence[Address]:
        """Stores of members of another job of this run id, whose sign stood in the place of this process's since the
        last call. On any thread."""

    def keep(self, *, has_world: bool) -> None:
        """Serve what this machine should serve and nobody does. On the watcher's thread."""

    def describe(self) -> str:
        """Where a newcomer looks, for a person."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Size:
    """Of a job."""

    min_nodes: int
    max_nodes: int
    last_call: float
    """seconds that the first world waits for more nodes when there are enough"""
    join_timeout: float = math.inf
    """seconds within which there have to be enough nodes for it"""
    fixed: int | None = None
    """workers of a world that nobody joins, and that begins with one of each rank"""
    silence: float = math.inf
    """seconds without a word after which a job that this worker knows of may be taken for gone"""
