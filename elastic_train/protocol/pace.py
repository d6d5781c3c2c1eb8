"""How long a member may take for what it does, before it is called stuck: by its own account.

Nobody else knows what its first step compiles, how long its evaluation takes or its disk. So each member says with its
heartbeat for how long it has been at something and for how long it may be, and the others hold it to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from elastic_train.rules import Activity

LEAST_SECONDS = 300.0
"""that a step may take, however fast the steps before were: a loader or a disk may hiccup"""
STEPS = 20
"""median steps that one may take, where that is more"""
FIRST_SECONDS = 1800.0
"""that a member may take for its first step, and for what its own code does between two steps"""
COLLECTIVES = 10
"""usual collectives that one may take beyond the peer timeout, when all take part in it"""
NUM_REMEMBERED = 64


class Pace:
    """What this member's steps and collectives took; from that what the next ones may take.

    Noted by the training thread and asked by the watcher's.

    Args:
        stall_timeout: seconds of `--stall-timeout`; None for what the steps say.
        formation_timeout: seconds that anything may take while a world forms.
    """

    def __init__(
        self, peer_timeout: float, stall_timeout: float | None = None, formation_timeout: float = LEAST_SECONDS
    ) -> None:
        self._peer_timeout, self._stall_timeout = peer_timeout, stall_timeout
        self._formation_timeout = formation_timeout
        self._steps: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._collectives: deque[float] = deque(maxlen=NUM_REMEMBERED)
        """the longest one of each step"""
        self._longest = 0.0
        self._is_first = True
        self.slowest_step = 0.0
        """seconds of the slowest of the last steps"""

    def expect_first_step(self) -> None:
        """The next step may take as long as the first one did: it may compile for new shapes."""
        self._is_first = True

    def note_step(self, seconds: float, interval: float | None = None) -> None:
        """A step was committed.

        Args:
            seconds: from its data on.
            interval: from the commit before it, with the time for its data.
        """
        self._is_first = False
        self._steps.append(seconds if interval is None else interval)
        self._collectives.append(self._longest)
        self._longest = 0.0
        self.slowest_step = max(0.99 * self.slowest_step, seconds)

    def note_collective(self, seconds: float) -> None:
        """A collective has ended in so many seconds, waiting for others included."""
        self._longest = max(self._longest, seconds)

    def limit(self, activity: Activity) -> float:
        """Seconds that a member may be at it."""
        if activity is Activity.FORM:
            return self._formation_timeout
        if activity is Activity.COMPUTE:
            return max(FIRST_SECONDS, self.stall_limit) if self._is_first else self.stall_limit
        if self._is_first:
            return FIRST_SECONDS
        return self._peer_timeout + COLLECTIVES * _median(self._collectives)

    @property
    def stall_limit(self) -> float:
        """Seconds that the others wait for a member that is outside of their collective, after its first step."""
        if self._stall_timeout is not None:
            return self._stall_timeout
        return max(LEAST_SECONDS, STEPS * _median(self._steps))

    @property
    def between_steps(self) -> float:
        """The same where code of the user's may do what it likes."""
        return self.stall_limit if self._stall_timeout is not None else max(FIRST_SECONDS, self.stall_limit)

    def last_limit(self, activity: Activity) -> float:
        """Seconds after which a member of a world that is over does not come back any more."""
        if activity is Activity.FORM:  # it reads from a disk that does not answer, say
            return max(FIRST_SECONDS, self._formation_timeout)
        # The others have expelled it by then, and it might have come back.
        return 2 * max(FIRST_SECONDS, self.stall_limit) if activity is Activity.COMPUTE else self.limit(activity)

    @property
    def step_limit(self) -> float:
        """Seconds after which no step in hand is to be expected any more, where nobody can be asked."""
        return FIRST_SECONDS if self._is_first else self._peer_timeout + COLLECTIVES * self.slowest_step


def _median(seconds: Iterable[float]) -> float:
    known = list(seconds)  # at once: the other thread may add one
    return median(known) if known else 0.0
