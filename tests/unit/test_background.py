"""Threads beside the one that trains: the member waits for them at its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elastic_train.elastic.background import BackgroundThreads
from elastic_train.elastic.barriers import Surroundings
from elastic_train.elastic.membership import END_SECONDS
from tests.bare_membership import bare_membership
from tests.unit.test_world import member


def test_those_that_run_are_waited_for() -> None:
    threads, may_end, ended = BackgroundThreads(), threading.Event(), threading.Event()

    def task() -> None:
        may_end.wait(60)
        ended.set()

    threads.start("short", lambda: None)
    threads.start("long", task)
    threads.finish(0.05)
    assert not ended.is_set(), "it is not waited for without end"
    may_end.set()
    threads.finish(60)
    assert ended.is_set()


ENDS_BESIDE_ONE_THAT_HANGS = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from elastic_train.elastic.background import BackgroundThreads


class Last:
    # It goes while the interpreter ends; what hangs comes back meanwhile.
    def __del__(self):
        time.sleep(2.0)


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
threads = BackgroundThreads()
threads.start("hangs", lambda: store.wait(["never"], timedelta(seconds=1.0)))
threads.finish(0.1)
last = Last()
print("written by", "Python", flush=False)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError('of the script')", 1)],
    ids=["end", "exit", "error"],
)
def test_a_thread_that_comes_back_while_python_ends_changes_no_exit_code(end: str, code: int) -> None:
    """torch's C++ calls std::terminate there."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_BESIDE_ONE_THAT_HANGS + end], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout) == (code, "written by Python\n"), ended.stderr
    assert "terminate" not in ended.stderr


def test_a_member_that_ends_cancels_what_it_prepares_and_waits_for_its_threads() -> None:
    calls: list[str] = []
    membership = bare_membership(
        SimpleNamespace(facts=SimpleNamespace(known={}), close=lambda: calls.append("leave the job")),
        replace(member(0, 0), store=("10.0.0.1", 0)),
        SimpleNamespace(thread=SimpleNamespace(stop=lambda: calls.append("stop the watcher"))),
        sockets=SimpleNamespace(release=lambda: calls.append("release groups")),
        form=lambda _world: None,
        surroundings=Surroundings(
            start=lambda name, task: (calls.append(name), task())[1],
            finish=lambda seconds: calls.append(f"wait for {seconds:.0f} s"),
        ),
    )
    prepared = membership.joins._begin_preparation()
    membership.close()
    assert prepared.is_cancelled
    assert calls == ["stop the watcher", "release", "release groups", "leave the job", f"wait for {END_SECONDS:.0f} s"]
