"""Processes among which histories are shared out."""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.pool import Pool


def two_processes() -> Pool:
    """Forked by a process without threads: in a fork of the test's own one a lock may be held for ever."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.simulation.simulator"])
    return context.Pool(2, initializer=gc.freeze)
