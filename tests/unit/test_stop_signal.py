"""The signals that stop a worker: on which thread they are noticed, and when."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from elastic_train import stopping
from elastic_train.errors import Stopped
from elastic_train.preemption import SHORTEST_SECONDS, PreemptionNotice
from elastic_train.stopping import ONE_INTERRUPT_SECONDS, StopSignal

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

SLURMS = """
import hashlib, os, signal, threading, time
from elastic_train.notices.watcher import source_of
from elastic_train.preemption import NoticesFlag
from elastic_train.stopping import StopSignal

stop = StopSignal()
stop.install()
slurm = source_of(NoticesFlag("slurm"), print, stop.call_on)()
heard = []
def watch():
    while slurm.look() is None:
        time.sleep(0.01)
    heard.append(time.monotonic())
threading.Thread(target=watch, daemon=True).start()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)
came_back_at = time.monotonic()
assert heard and heard[0] < came_back_at, (heard, came_back_at)
assert not stop.is_requested
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


def test_slurms_signal_is_heard_as_well() -> None:
    run(SLURMS)


def test_what_a_child_is_told_is_not_heard() -> None:
    run(IN_A_CHILD)


def test_who_has_come_to_an_end_is_not_late() -> None:
    run(UNINSTALLED)


AT_HANGUP = """
import os, signal
from elastic_train.stopping import StopSignal

signal.signal(signal.SIGHUP, {before})
stop = StopSignal()
stop.install()
os.kill(os.getpid(), signal.SIGHUP)
assert stop.is_requested == {is_requested}
assert stop.cause == signal.{cause}
stop.uninstall()
assert signal.getsignal(signal.SIGHUP) == {before}
"""


@pytest.mark.parametrize(
    ("before", "is_requested", "cause"),
    [("signal.SIG_DFL", True, "SIGHUP"), ("signal.SIG_IGN", False, "SIGTERM")],
    ids=["a terminal", "nohup"],
)
def test_a_terminal_that_closes(before: str, is_requested: bool, cause: str) -> None:
    run(AT_HANGUP.format(before=before, is_requested=is_requested, cause=cause))


TERMINAL_GOES = """
import os, pty, signal, sys
from elastic_train.stopping import StopSignal

gone, other = {gone}, {other}
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, as it should be
stop = StopSignal()
stop.install()
screen, terminal = pty.openpty()
os.dup2(terminal, gone)
os.close(terminal)
os.kill(os.getpid(), signal.SIGHUP)
os.write(gone, b"seen")
assert os.read(screen, 4) == b"seen", "it is there yet"
os.close(screen)
try:
    os.write(gone, b"x")
except OSError:
    os.kill(os.getpid(), signal.SIGHUP)
stream = [sys.stdout, sys.stderr][gone - 1]
print("lost", file=stream, flush=True)
assert os.path.samestat(os.fstat(gone), os.stat(os.devnull))
os.write(other, b"the other one is as it was")
"""


@pytest.mark.parametrize(("gone", "other"), [(1, 2), (2, 1)], ids=["stdout", "stderr"])
def test_at_hangup_prints_to_a_terminal_that_has_gone_are_lost(gone: int, other: int) -> None:
    program = TERMINAL_GOES.format(gone=gone, other=other)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout + found.stderr) == (0, "the other one is as it was")


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


def end_by(*signums: signal.Signals, pause: float = 0.0) -> int:
    """The exit code of a worker that is sent these signals, and ends by itself with 0 if it still runs then."""
    program = f"""
import os, signal, time
from elastic_train.stopping import StopSignal

stop = StopSignal(late_after=60)
stop.install()
for signum in {[int(signum) for signum in signums]}:
    os.kill(os.getpid(), signum)
    time.sleep({pause})
assert stop.signum == {int(signums[0])}
os._exit(0)
"""
    return subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode


@pytest.mark.parametrize(
    ("signums", "code"),
    [
        ((signal.SIGINT, signal.SIGTERM), 0),
        ((signal.SIGTERM, signal.SIGTERM, signal.SIGTERM), 0),
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 130),
    ],
)
def test_a_second_sigint_ends_it_at_once_whatever_came_before(signums: tuple[signal.Signals, ...], code: int) -> None:
    """Schedulers repeat SIGTERM; a person has lost patience."""
    assert end_by(*signums, pause=ONE_INTERRUPT_SECONDS + 0.1) == code


def test_a_ctrl_c_that_comes_from_the_terminal_and_from_the_init_is_one() -> None:
    assert end_by(signal.SIGINT, signal.SIGINT) == 0


def test_a_second_signal_is_heard_as_well() -> None:
    run(TWICE)


def test_a_program_that_handles_the_signal_itself_is_left_alone() -> None:
    run(TAKEN_OVER)


NOTICE = PreemptionNotice("file", "spot", host="n1")


def test_a_notice_stops_as_a_signal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "GRACE_SECONDS", -1.0)
    stop = StopSignal()
    assert stop.votes() == (0, 0)
    stop.give_notice(NOTICE, 60.0)
    assert (stop.is_requested, stop.votes(), stop.cause, stop.notice) == (True, (1, 1), signal.SIGTERM, NOTICE)
    with pytest.raises(Stopped, match=r"stopped by a notice \(file: spot\)") as stopped:
        stop.check()
    assert stopped.value.exit_code == 143
    stop.uninstall()


def test_a_notice_is_withdrawn_before_the_leave_alone() -> None:
    stop = StopSignal()
    stop.give_notice(NOTICE, 60.0)
    assert stop.withdraw_notice()
    assert (stop.is_requested, stop.votes(), stop.notice) == (False, (0, 0), None)
    stop.check()
    stop.give_notice(NOTICE, 60.0)
    stop.settle()
    assert not stop.withdraw_notice()
    assert stop.is_requested
    stop.signum = signal.SIGTERM  # of its agent, as another worker of the node has left
    assert stop.notice == NOTICE, "why it leaves"
    stop.uninstall()


def test_the_vote_to_leave_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may follow it, and the step in which they do has begun."""
    stop = StopSignal()
    stop.give_notice(NOTICE, 60.0)
    assert stop.votes() == (1, 0)
    monkeypatch.setattr(stopping, "GRACE_SECONDS", -1.0)
    assert stop.votes() == (1, 1)
    assert not stop.withdraw_notice()
    assert (stop.is_requested, stop.votes()) == (True, (1, 1)), "a world that is lost meanwhile changes nothing"
    stop.signum = signal.SIGTERM  # of its agent, as another worker of the node has left
    stop.settle()
    assert stop.notice == NOTICE
    stop.uninstall()


def test_a_vote_before_that_one_is_followed_by_all_or_taken_back() -> None:
    stop = StopSignal()
    stop.give_notice(NOTICE, 60.0)
    assert stop.votes() == (1, 0)
    assert stop.withdraw_notice()
    assert stop.votes() == (0, 0)
    stop.settle()
    assert stop.notice is None

    stop = StopSignal()
    stop.give_notice(NOTICE, 60.0)
    stop.votes()
    assert stop.withdraw_notice()
    stop.settle()  # all have said so in that step
    assert stop.notice == NOTICE, "why it leaves"


def test_a_signal_stands_when_the_notice_is_withdrawn() -> None:
    stop = StopSignal()
    stop.give_notice(NOTICE, 60.0)
    stop.signum = signal.SIGTERM
    assert not stop.withdraw_notice(), "training does not go on"
    stop.settle()
    assert stop.notice is None


def test_what_was_taken_back_is_not_settled() -> None:
    stop = StopSignal()
    stop.give_notice(NOTICE, 60.0)
    stop.withdraw_notice()
    assert not stop.settle_if_requested()
    stop.give_notice(NOTICE, 60.0)
    assert stop.settle_if_requested()
    assert not stop.withdraw_notice()
    stop.uninstall()


@pytest.mark.parametrize(("seconds_left", "is_late"), [(0.2, True), (60.0, False), (-5.0, False)])
def test_half_of_the_time_is_for_ending_steps(
    seconds_left: float, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "LEAST_SECONDS", 0.1 if is_late else stopping.LEAST_SECONDS)
    stop, called = StopSignal(), threading.Event()
    stop.when_late = lambda _seconds: called.set()
    stop.give_notice(NOTICE, seconds_left)
    assert called.wait(20.0 if is_late else 0.5) is is_late
    stop.uninstall()


@pytest.mark.parametrize("seconds_left", [-3600.0, -1.0, 0.0, 2.0])
def test_a_deadline_that_is_near_or_over_leaves_time_for_a_step(
    seconds_left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[float] = []
    monkeypatch.setattr(StopSignal, "_set_timer", lambda _stop, timer: timers.append(timer.interval))
    StopSignal().give_notice(NOTICE, seconds_left)
    assert timers == [5.0]
    assert timers[0] > stopping.GRACE_SECONDS


def test_a_notice_that_was_withdrawn_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "LEAST_SECONDS", 0.1)
    stop, called = StopSignal(), threading.Event()
    stop.when_late = lambda _seconds: called.set()
    stop.give_notice(NOTICE, 0.6)
    stop.withdraw_notice()
    assert not called.wait(0.6)


def test_how_long_it_still_has() -> None:
    stop = StopSignal()
    assert stop.seconds_left() is None
    notice = PreemptionNotice("file", "spot")
    stop.give_notice(notice, notice.seconds_left(time.time()))
    left = stop.seconds_left()
    assert left is not None
    assert SHORTEST_SECONDS - 5 < left <= SHORTEST_SECONDS, "it names no time"
    notice = replace(notice, deadline=time.time() + 100)
    stop.give_notice(notice, 100.0)
    stop.settle()
    left = stop.seconds_left()
    assert left is not None
    assert 95 < left <= 100
    told = StopSignal()
    told._remember(signal.SIGTERM, None)
    left = told.seconds_left()
    assert left is not None
    assert SHORTEST_SECONDS - 5 < left <= SHORTEST_SECONDS, "SIGKILL follows"


@pytest.mark.parametrize(("given", "late_after"), [(10.0, 5.0), (30.0, 15.0), (300.0, 15.0)])
def test_where_torchrun_kills_sooner_it_is_late_sooner(given: float, late_after: float) -> None:
    stop = StopSignal()
    stop.expect_kill(given)
    assert stop._late_after == late_after
    assert stop._hopeless_after == pytest.approx(late_after * 25 / 15)
    stop._remember(signal.SIGTERM, None)
    left = stop.seconds_left()
    assert left is not None
    assert 2 * late_after - 2 < left <= 2 * late_after
