"""A worker is told to stop: who hears it, and when."""

from __future__ import annotations

import subprocess
import sys

WHILE_BUSY = """
import hashlib, os, signal, threading, time
from elastic_train.stopping import StopSignal

called = []
stop = StopSignal(late_after=0.1, hopeless_after=0.4)
stop.when_late = lambda seconds: called.append((time.monotonic(), stop.signum, stop.cause, round(seconds, 3)))
stop.install()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
while not called:  # a call that lets other threads run, and no signal handler: like a backward pass
    hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)
came_back_at = time.monotonic()
[(called_at, signum, cause, seconds)] = called
assert called_at < came_back_at
assert (signum, cause, seconds) == (None, signal.SIGINT, 0.3), called
assert stop.signum == signal.SIGINT, "the handler has run by now"
"""

IN_A_CHILD = """
import os, signal, threading
from elastic_train.stopping import StopSignal

stop = StopSignal(late_after=60)
stop.install()
[listener] = [thread for thread in threading.enumerate() if thread.name == "stop-signal"]
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(0 if stop.signum == signal.SIGINT else 1)
assert os.waitpid(child, 0) == (child, 0)
stop.uninstall()
listener.join(20)
assert not listener.is_alive()
assert stop.signum is None
assert stop.cause == signal.SIGTERM, "what a child of this worker was told is not for the worker"
"""

UNINSTALLED = """
import os, signal, threading
from elastic_train.stopping import StopSignal

before = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
stop = StopSignal(late_after=0.5)
stop.when_late = lambda _seconds: os._exit(3)
stop.install()
[listener] = [thread for thread in threading.enumerate() if thread.name == "stop-signal"]
os.kill(os.getpid(), signal.SIGTERM)
assert stop.is_requested
stop.uninstall()
assert [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)] == before
assert signal.set_wakeup_fd(-1) == -1
listener.join(20)
assert not listener.is_alive()
"""


def run(program: str) -> None:
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr


def test_it_is_heard_while_the_main_thread_is_in_a_long_call() -> None:
    run(WHILE_BUSY)


def test_what_a_child_is_told_is_not_heard() -> None:
    run(IN_A_CHILD)


def test_who_has_come_to_an_end_is_not_late() -> None:
    run(UNINSTALLED)


TWICE = """
import os, signal, threading, time
from elastic_train.stopping import StopSignal

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a write to a closed socket would end this process
called = threading.Event()
stop = StopSignal(late_after=0.1, hopeless_after=0.2)
stop.when_late = lambda _seconds: called.set()
stop.install()
os.kill(os.getpid(), signal.SIGTERM)
assert called.wait(20)
os.kill(os.getpid(), signal.SIGTERM)
stop.uninstall()
assert stop.when_late(1.0) is None and not hasattr(stop.when_late, "set")
"""

TAKEN_OVER = """
import os, signal, threading
from elastic_train.stopping import StopSignal

stop = StopSignal(late_after=0.1)
stop.when_late = lambda _seconds: os._exit(3)
stop.install()
mine = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: mine.set())
os.kill(os.getpid(), signal.SIGTERM)
assert mine.wait(20)
[listener] = [thread for thread in threading.enumerate() if thread.name == "stop-signal"]
listener.join(0.5)
assert not stop.is_requested
"""


def test_a_second_signal_is_heard_as_well() -> None:
    run(TWICE)


def test_a_program_that_handles_the_signal_itself_is_left_alone() -> None:
    run(TAKEN_OVER)
