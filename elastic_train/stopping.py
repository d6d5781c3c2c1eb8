"""Stop on SIGTERM, SIGINT, SIGHUP, or a notice that the node goes away: finish the current step, save, leave."""

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
"""The time in which the signals of one stop arrive: people and schedulers stop nodes one after the other, and on a busy
machine an agent passes the signal on late."""
LATE_SECONDS = 15.0
"""The time after a signal in which a worker should stop at the end of a step. SIGKILL follows after 30 s (the default
of torchrun, Kubernetes and Slurm; a worker cannot see their setting). The second half is for a save without that step.
"""
HOPELESS_SECONDS = 25.0
"""The time after a signal from which on a save would not finish before SIGKILL."""
LEAST_SECONDS = 10.0
"""The least time that a notice is assumed to leave: half of it is for GRACE_SECONDS and a step. If the deadline is
nearer or over, the source's clock may differ, and a late stop before the vote to leave would lose steps needlessly."""
ONE_INTERRUPT_SECONDS = 1.0
"""SIGINTs within this are one Ctrl-C: a terminal sends it to all of its processes, and those that start others (the
init of a container, `timeout`, torchrun under srun) pass it on as well."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def signals_to_handle() -> list[signal.Signals]:
    """SIGNALS, without SIGHUP if this process ignores it, as under nohup."""
    return [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


class StopSignal:
    """Remembers that this worker was told to stop. The signal handler never blocks; it only remembers the signal, and
    gives up a closed terminal.

    The training loop turns the signal into a vote, so that all ranks stop at the same step although their signals
    arrive at different moments. A second SIGINT, of an impatient person, ends the process at once.

    A thread listens as well: the handler runs only when the main thread returns to Python, and a backward pass or a
    collective may take long.

    Args:
        late_after: seconds from a signal to the call of `when_late`.
        hopeless_after: seconds from a signal to the moment after which no save should begin.
    """

    def __init__(self, late_after: float = LATE_SECONDS, hopeless_after: float = HOPELESS_SECONDS) -> None:
        self.signum: int | None = None
        """The first signal that the handler has received."""
        self._interrupted_at: float | None = None
        """When the first SIGINT was received."""
        self._requested_at = 0.0
        self._late_after, self._hopeless_after = late_after, hopeless_after
        self._killed_after = SHORTEST_SECONDS
        self._heard: int | None = None
        """The first signal that the thread has received, perhaps before the handler has run."""
        self.when_late: Callable[[float], None] = lambda _seconds: None
        """Called on another thread if this worker still runs after `late_after`, with the rest of `hopeless_after`."""
        self._calls_on_signal: dict[int, Callable[[], None]] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup: socket.socket | None = None
        self._wakeup_before = -1
        self._is_uninstalled = threading.Event()
        self._notice: PreemptionNotice | None = None
        self._noticed_at = 0.0
        self._notice_timer: threading.Timer | None = None
        self._voted_notice: PreemptionNotice | None = None
        """The notice that was the reason for the newest vote to stop."""
        self._is_vote_to_leave = False
        """Whether that vote was also to leave now."""
        self._notice_lock = threading.Lock()
        """Guards the state of notices and votes; no signal handler takes it."""
        self._settled_notice: PreemptionNotice | None = None
        self.is_settled = False
        """Whether this worker leaves in any case; a notice cannot be withdrawn any more."""
        self._late_lock = threading.Lock()

    def install(self) -> None:
        """Install handlers and start the listening thread. Call on the main thread."""
        self._before = {signum: signal.signal(signum, self._remember) for signum in signals_to_handle()}
        ears, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._be_deaf)
        threading.Thread(target=self._listen, args=(ears,), name="stop-signal", daemon=True).start()

    def expect_kill(self, seconds: float) -> None:
        """Set the time from a signal to SIGKILL. A shorter time than the default shortens all limits in proportion; a
        longer one changes nothing, because Kubernetes or Slurm may not wait. Call before a signal is likely."""
        part = min(1.0, seconds / self._killed_after)
        self._late_after, self._hopeless_after = part * self._late_after, part * self._hopeless_after
        self._killed_after *= part

    def call_on(self, signum: int, call: Callable[[], None]) -> None:
        """Call `call` on the listening thread when a signal comes that has a handler, so that it is noticed while the
        main thread is in a long call."""
        self._calls_on_signal[signum] = call

    def uninstall(self) -> None:
        """Restore the previous handlers. Call on the main thread."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._is_uninstalled.set()
        self.when_late = lambda _seconds: None  # it may refer to a model
        self._set_timer(None)
        self._be_deaf()

    def _be_deaf(self) -> None:
        """Stop listening. Also called in a forked child: a signal to the child is not for this worker."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakeup.close()
            self._wakeup = None

    def _listen(self, ears: socket.socket) -> None:
        with ears:  # to the end: a later signal must not meet a closed socket
            while numbers := ears.recv(1):
                if numbers[0] in self._calls_on_signal:
                    self._calls_on_signal[numbers[0]]()
                elif self._heard is None and numbers[0] in SIGNALS:
                    self._heard = numbers[0]
                    if not self._is_uninstalled.wait(self._late_after) and self._is_ours(numbers[0]):
                        self._be_late(self._hopeless_after - self._late_after)

    def _is_ours(self, signum: int) -> bool:
        """Whether the signal's handler is still ours, and not the program's own."""
        return signal.getsignal(signum) == self._remember

    def _remember(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:  # each time: a shell that ends sends it, and closes the terminal
            give_up_gone_terminals()
        if signum == signal.SIGINT:
            if self._interrupted_at is None:
                self._interrupted_at = time.monotonic()
            elif time.monotonic() - self._interrupted_at > ONE_INTERRUPT_SECONDS:
                os._exit(128 + signal.SIGINT)
        if self.signum is None:
            self._requested_at = time.monotonic()
            self.signum = signum

    def give_notice(self, notice: PreemptionNotice, seconds_left: float) -> None:
        """Stop as after a signal, but within the notice's time; half of it is for the end of the step, as after a
        signal. Any thread may call this. A later notice replaces an earlier one."""
        seconds = max(seconds_left, LEAST_SECONDS)
        late_after, hopeless_after = (seconds * part / SHORTEST_SECONDS for part in (LATE_SECONDS, HOPELESS_SECONDS))
        with self._notice_lock:
            if self._notice is None:
                self._noticed_at = time.monotonic()
            self._notice = notice
        self._set_timer(threading.Timer(late_after, self._be_late, [hopeless_after - late_after]))

    def withdraw_notice(self) -> bool:
        """Withdraw the notice. Return False if this worker leaves nevertheless: because of a signal, or because it has
        voted to leave and other members may act on that vote. In the second case the notice stays valid.

        Before the vote to leave, this worker only votes that it is told to stop. If all members do so in the step in
        which the notice is withdrawn, they still stop, because of the notice.
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
        """Decide that this worker leaves, even if the notice is withdrawn. Its reason then stays, even if a signal
        follows: the agent sends one once another worker of the node has left."""
        with self._notice_lock:
            self._settle()

    def settle_if_requested(self) -> bool:
        """Do the same if a stop is still requested, as a notice may be withdrawn. Return whether this worker leaves."""
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
        """The notice that told this worker to stop; None if a signal did."""
        if self.is_settled:
            return self._settled_notice
        return None if self._is_signalled else self._notice

    @property
    def why(self) -> str:
        """The reason in words: the name of the signal, or the source of the notice."""
        notice = self.notice
        return self.cause.name if notice is None else f"a notice ({notice.described})"

    def seconds_left(self) -> float | None:
        """The time until this node is taken away, or until SIGKILL follows a signal, as far as is known; None if this
        worker was not told to stop."""
        notice = self.notice
        if notice is not None and notice.deadline is not None:
            return notice.deadline - time.time()
        if not self.is_requested:
            return None
        now = time.monotonic()
        since = self._requested_at if self._is_signalled else self._noticed_at
        given = self._killed_after if self._is_signalled else SHORTEST_SECONDS
        return given - (now - (since or now))  # `since` is 0 until the signal's handler has run

    @property
    def is_requested(self) -> bool:
        return self._is_signalled or self._notice is not None

    @property
    def _is_signalled(self) -> bool:
        return self.signum is not None or (self._heard is not None and self._is_ours(self._heard))

    @property
    def cause(self) -> signal.Signals:
        """The signal that told this worker to stop; SIGTERM if there was none."""
        return signal.Signals(self.signum or self._heard or signal.SIGTERM)

    def votes(self) -> tuple[int, int]:
        """This worker's votes in the current step: (told to stop, leaving now).

        The signals of one stop reach the workers some seconds apart. So a worker that was told to stop trains on for
        GRACE_SECONDS. If not all workers were told by then, only this node stops.
        """
        with self._notice_lock:
            notice, is_signalled = self._notice, self.signum is not None
            told = [self._requested_at] * is_signalled + [self._noticed_at] * (notice is not None)
            is_leaving = bool(told) and time.monotonic() - min(told) > GRACE_SECONDS
            self._voted_notice = None if is_signalled else notice
            self._is_vote_to_leave = is_leaving and self._voted_notice is not None
        return int(bool(told)), int(is_leaving)

    def check(self) -> None:
        """Check for a stop in a wait outside of a step.

        Raises:
            Stopped: this worker was told to stop.
        """
        if self.settle_if_requested():
            raise Stopped(self.cause, self.why)


def die_with_agent() -> None:
    """Call `die_with_parent`, and exit at once, as by SIGKILL and with one line, if the agent has already died.

    That may happen during this worker's imports. The agent need not be the parent: a wrapper may be between them.
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
