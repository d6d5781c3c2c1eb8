"""SIGTERM, SIGINT, SIGHUP, or a notice that the node goes away: finish the step in hand, save, leave."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from elastic_train.errors import Stopped
from elastic_train.preemption import SHORTEST_SECONDS, PreemptionNotice
from elastic_train.system import AGENT_VARIABLE, give_up_gone_terminals, has_ended

GRACE_SECONDS = 3.0
"""people, and schedulers, stop nodes one after the other, and on a busy machine an agent passes the signal on late"""
LATE_SECONDS = 15.0
"""from a signal on, in which a worker should stop by itself. SIGKILL follows after 30 s (torchrun, Kubernetes and Slurm
by default; no worker sees what the latter are set to): one half is for ending steps, the other for saving without the
one in hand"""
HOPELESS_SECONDS = 25.0
"""from a signal on: what has not begun to save by then would not come to its end"""
LEAST_SECONDS = 10.0
"""that a notice leaves, whatever it says: half of it is for the grace time and a step. Where the deadline is nearer, or
over, the source's clock may be another one, and a late stop before the vote to leave would lose what it need not"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def signals_to_handle() -> list[signal.Signals]:
    """SIGNALS, without a SIGHUP that this process ignores: so nohup leaves it."""
    return [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


class StopSignal:
    """Remembers that this worker was told to stop; the handler waits for nobody, and does no more than give up a
    terminal that has gone.

    The training loop turns it into a vote, so that all ranks stop at the same step though their signals arrive at
    different moments. A second SIGINT is a person who has lost patience: it ends the process at once.

    A thread listens as well: the handler runs only when the main thread comes back to Python, and a backward pass, or a
    collective in it, may take long.

    Args:
        late_after: seconds after a signal until `when_late` is called.
        hopeless_after: seconds after a signal until nothing more should be begun.
    """

    def __init__(self, late_after: float = LATE_SECONDS, hopeless_after: float = HOPELESS_SECONDS) -> None:
        self.signum: int | None = None
        """the first that this worker was sent"""
        self._is_interrupted = False
        """by a SIGINT, whatever came before it"""
        self._requested_at = 0.0
        self._late_after, self._hopeless_after = late_after, hopeless_after
        self._killed_after = SHORTEST_SECONDS
        self._heard: int | None = None
        """by the thread, perhaps before the handler has run"""
        self.when_late: Callable[[float], None] = lambda _seconds: None
        """called on the thread that listens, if this worker still runs then, with the seconds until it is hopeless"""
        self._also_told: dict[int, Callable[[], None]] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup: socket.socket | None = None
        self._wakeup_before = -1
        self._is_uninstalled = threading.Event()
        self._notice: PreemptionNotice | None = None
        self._noticed_at = 0.0
        self._notice_timer: threading.Timer | None = None
        self._voted_notice: PreemptionNotice | None = None
        """because of which this worker has said in its newest vote that it is told to stop"""
        self._is_vote_to_leave = False
        """that one"""
        self._notice_lock = threading.Lock()
        """of what a notice and a vote make of each other; no handler of a signal takes it"""
        self._settled_notice: PreemptionNotice | None = None
        self.is_settled = False
        """this worker leaves: a notice is not taken back any more"""
        self._late_lock = threading.Lock()

    def install(self) -> None:
        """Call from the main thread."""
        self._before = {signum: signal.signal(signum, self._remember) for signum in signals_to_handle()}
        ears, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._be_deaf)
        threading.Thread(target=self._listen, args=(ears,), name="stop-signal", daemon=True).start()

    def expect_kill(self, seconds: float) -> None:
        """SIGKILL follows a signal so soon. Fewer seconds than usual shorten all times alike; more change nothing, for
        Kubernetes or Slurm may not wait for them. Call before a signal is likely."""
        part = min(1.0, seconds / self._killed_after)
        self._late_after, self._hopeless_after = part * self._late_after, part * self._hopeless_after
        self._killed_after *= part

    def tell_also(self, signum: int, tell: Callable[[], None]) -> None:
        """Call `tell` when that signal comes, for which there is a handler: on the thread that listens, so that it is
        heard while the main thread is in a long call."""
        self._also_told[signum] = tell

    def uninstall(self) -> None:
        """Put back what `install` has replaced; for the main thread."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._is_uninstalled.set()
        self.when_late = lambda _seconds: None  # it may refer to a model
        self._set_timer(None)
        self._be_deaf()

    def _be_deaf(self) -> None:
        """In a forked child as well: a signal to that one is none to this worker."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakeup.close()
            self._wakeup = None

    def _listen(self, ears: socket.socket) -> None:
        with ears:  # to the end: a later signal must not meet a closed socket
            while numbers := ears.recv(1):
                if numbers[0] in self._also_told:
                    self._also_told[numbers[0]]()
                elif self._heard is None and numbers[0] in SIGNALS:
                    self._heard = numbers[0]
                    if not self._is_uninstalled.wait(self._late_after) and self._is_ours(numbers[0]):
                        self._be_late(self._hopeless_after - self._late_after)

    def _is_ours(self, signum: int) -> bool:
        """Else the program handles this signal itself by now."""
        return signal.getsignal(signum) == self._remember

    def _remember(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:  # each: a shell passes it on, and takes the terminal along as it ends
            give_up_gone_terminals()
        if signum == signal.SIGINT:
            if self._is_interrupted:
                os._exit(128 + signal.SIGINT)
            self._is_interrupted = True
        if self.signum is None:
            self._requested_at = time.monotonic()
            self.signum = signum

    def give_notice(self, notice: PreemptionNotice, seconds_left: float) -> None:
        """As a signal, but with the time that the notice leaves: half of it is for ending steps, as of a signal's. From
        any thread; a later notice replaces an earlier one."""
        seconds = max(seconds_left, LEAST_SECONDS)
        late_after, hopeless_after = (seconds * part / SHORTEST_SECONDS for part in (LATE_SECONDS, HOPELESS_SECONDS))
        with self._notice_lock:
            if self._notice is None:
                self._noticed_at = time.monotonic()
            self._notice = notice
        self._set_timer(threading.Timer(late_after, self._be_late, [hopeless_after - late_after]))

    def withdraw_notice(self) -> bool:
        """The notice holds no more. Returns whether that is in time: else this worker leaves, by a signal that stands
        or by a vote to leave because of the notice, which the others may follow; then it holds all the same.

        Before it votes to leave it has only said that it is told to stop. Where all say so in the very step in which
        the notice ends, they stop nevertheless, because of the notice.
        """
        with self._notice_lock:
            if self.is_settled or self._is_vote_to_leave:
                return False
            self._notice = None
        self._set_timer(None)
        return not self._is_signalled

    def _set_timer(self, timer: threading.Timer | None) -> None:
        if self._notice_timer is not None:
            self._notice_timer.cancel()
        self._notice_timer = timer
        if timer is not None:
            timer.daemon = True
            timer.start()

    def _be_late(self, seconds: float) -> None:
        with self._late_lock:  # a signal may follow a notice
            self.when_late(seconds)

    def settle(self) -> None:
        """This worker leaves, whatever becomes of a notice, and though a signal may follow: its agent's, once another
        worker of the node has left."""
        with self._notice_lock:
            self._settle()

    def settle_if_requested(self) -> bool:
        """The same, unless the notice was taken back meanwhile. Returns whether this worker leaves."""
        with self._notice_lock:
            if not self.is_requested:
                return False
            self._settle()
            return True

    def _settle(self) -> None:
        if self.is_settled:
            return
        voted = self._voted_notice
        is_by_vote = voted is not None and (voted is self._notice or not self.is_requested)
        self._settled_notice, self.is_settled = voted if is_by_vote else self.notice, True

    @property
    def notice(self) -> PreemptionNotice | None:
        """Why this worker was told to stop, where that was a notice and no signal."""
        if self.is_settled:
            return self._settled_notice
        return None if self._is_signalled else self._notice

    @property
    def why(self) -> str:
        """For people: a signal's name, or whose notice it was."""
        notice = self.notice
        return self.cause.name if notice is None else f"a notice ({notice.described})"

    def seconds_left(self) -> float | None:
        """Until this node is taken away, or SIGKILL follows a signal, as far as that is known; None where this worker
        was not told to stop."""
        notice = self.notice
        if notice is not None and notice.deadline is not None:
            return notice.deadline - time.time()
        if not self.is_requested:
            return None
        now = time.monotonic()
        since = self._requested_at if self._is_signalled else self._noticed_at
        given = self._killed_after if self._is_signalled else SHORTEST_SECONDS
        return given - (now - (since or now))  # a signal may be heard before its handler has run

    @property
    def is_requested(self) -> bool:
        return self._is_signalled or self._notice is not None

    @property
    def _is_signalled(self) -> bool:
        return self.signum is not None or (self._heard is not None and self._is_ours(self._heard))

    @property
    def cause(self) -> signal.Signals:
        """With which signal this worker was told to stop; SIGTERM where it was not."""
        return signal.Signals(self.signum or self._heard or signal.SIGTERM)

    def votes(self) -> tuple[int, int]:
        """(told to stop, leaving now): what this worker contributes to the step in hand.

        The signals of one stop reach the workers up to some seconds apart. So a worker that was told to
        stop trains on for GRACE_SECONDS; if not everybody has been told by then, it is a stop of this node alone.
        """
        with self._notice_lock:
            notice, is_signalled = self._notice, self.signum is not None
            told = [self._requested_at] * is_signalled + [self._noticed_at] * (notice is not None)
            is_leaving = bool(told) and time.monotonic() - min(told) > GRACE_SECONDS
            self._voted_notice = None if is_signalled else notice
            self._is_vote_to_leave = is_leaving and self._voted_notice is not None
        return int(bool(told)), int(is_leaving)

    def check(self) -> None:
        """For waits outside of a step.

        Raises:
            Stopped: this worker was told to stop.
        """
        if self.settle_if_requested():
            raise Stopped(self.cause, self.why)


def die_with_agent() -> None:
    """As `die_with_parent`, for a worker: also where its agent died before this call, while it imported. The agent need
    not be the parent: a wrapper may lie between them.

    It says so in one line, and exits at once as by SIGKILL.
    """
    die_with_parent()
    agent = os.environ.get(AGENT_VARIABLE, "")
    if has_ended(agent):
        with contextlib.suppress(OSError):  # the agent may have read our stderr
            line = f"elastic_train: error: the agent, pid {agent.split()[0]}, has ended: this worker ends too\n"
            os.write(2, line.encode())
        os._exit(128 + signal.SIGKILL)


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent dies, so that no worker outlives its agent (prctl(2)).

    torchrun starts workers in sessions of their own: a SIGKILLed agent would leave them training as orphans.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1
    if libc.prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) == 0 and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the parent died before the kernel was told
