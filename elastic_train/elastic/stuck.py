"""A line for the user of a worker that stands still: for how long, and at which line of code its main thread is."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist

from elastic_train.errors import is_of_user
from elastic_train.protocol.heartbeat import OwnHeartbeat
from elastic_train.rules import Activity
from elastic_train.world import World

AGAIN_SECONDS = 10.0
EARLY_SECONDS = 60.0
"""for which others wait in a collective until that is reported; the worker may still have time"""


class StuckThread:
    """Warns when this worker's training thread spends longer on code of its own than it may: once each time. Also warns
    once if others have waited long for it, and once if all have waited for each other.

    Other members expel it in the first case, if they wait for it. A lone worker is expelled by no other, and newcomers
    wait for it.

    Args:
        waited: returns the seconds that others have been waiting in a collective, by their heartbeats.
        where: returns the place in the code at which the training thread is.
        is_inside: whether that is in a collective of the function's own, which the watcher does not know of.
    """

    def __init__(
        self,
        own: OwnHeartbeat,
        warn: Callable[[str], None],
        waited: Callable[[World], float],
        where: Callable[[], str] | None = None,
        is_inside: Callable[[], bool] | None = None,
    ) -> None:
        self._own, self._warn, self._waited = own, warn, waited
        self._where = place_of_main_thread if where is None else where
        self._is_inside = is_main_thread_in_collective if is_inside is None else is_inside
        self._line: str | None = None
        """the warning while it stands still"""
        self._said_at = 0.0
        """seconds that it had stood still at the last report"""
        self._was_early = self._was_apart = False

    def look(self, world: World | None) -> str | None:
        """Check the training thread, from time to time, on another thread; `world` is the present one. Never blocks.
        Returns, every AGAIN_SECONDS, a line that nodes in the join queue should get, too; else None."""
        activity, seconds, limit = self._own.at()
        if world is None or world.is_spare or activity is not Activity.COMPUTE or seconds <= min(limit, EARLY_SECONDS):
            self._line = None
            return None
        if seconds <= limit:
            if not self._was_early and self._waited(world) > EARLY_SECONDS:
                self._was_early = True
                self._warn_beside(self._describe(world, seconds, limit))
            return None
        if self._line is None or seconds < self._said_at:
            self._line = self._describe(world, seconds, limit)
            self._warn_beside(self._line)
        elif seconds < self._said_at + AGAIN_SECONDS:
            return None
        if self._is_inside():  # by now; else a rank outside would keep all waiting for ever, and none would be to blame
            self._own.turn_inside()
        self._said_at = seconds
        return self._line  # unchanged, so that a node that has it is not told twice

    def _describe(self, world: World, seconds: float, limit: float) -> str:
        waited = self._waited(world)
        return (f"others have waited for it for {waited:.0f} s; " if waited > EARLY_SECONDS else "") + (
            f"this worker has been at one thing for {seconds:.0f} s, and {limit:.0f} s are allowed (--stall-timeout): "
            f"{self._where()}"
        )

    def look_apart(self) -> None:
        """Warn once where this worker has waited in a collective, when the world is broken off and no member is to
        blame. Never blocks."""
        activity, seconds, limit = self._own.at()
        # Another member may have broken it off, a moment before this one would have. And a member that may be computing
        # counts as outside until the peer timeout before the end of its time (`OwnHeartbeat.line`).
        are_apart = seconds > limit / 2 and self._own.seconds_all_inside > self._own.pace.peer_timeout / 2
        if self._was_apart or not activity.is_inside or not are_apart:
            return
        self._was_apart = True
        self._warn_beside(
            f"a collective has not ended in {seconds:.0f} s though all take part in one: {self._where()}. Where "
            "another worker names another place, the code that is trained calls a collective on some ranks alone"
        )

    def _warn_beside(self, line: str) -> None:
        # On a thread of its own: the training thread may be waiting for the very disk that the line goes to.
        threading.Thread(target=self._warn, args=(line,), name="stuck", daemon=True).start()


def is_main_thread_in_collective() -> bool:
    """Whether the main thread is inside of a function of torch.distributed."""
    return any(frame.f_code.co_filename == dist.distributed_c10d.__file__ for frame in frames_of_main_thread())


def frames_of_main_thread() -> list[FrameType]:
    """Return the main thread's frames, the innermost one first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # documented, despite its name
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def place_of_main_thread() -> str:
    """Return the main thread's innermost line, and before it that of the user's own code. Without user code, that is
    the line of this package or of an installed one."""
    frames = frames_of_main_thread()
    if not frames:
        return "its main thread has ended"
    theirs = next(filter(is_of_user, frames), None) or next(filter(_is_of_package, frames), None)
    places = [frames[0]] if theirs in (None, frames[0]) else [theirs, frames[0]]
    return "it is at " + ", in a call to ".join(map(_place, filter(None, places)))


def _is_of_package(frame: FrameType) -> bool:
    paths, name = sysconfig.get_paths(), frame.f_code.co_filename
    return name.startswith((paths["purelib"], paths["platlib"])) or not name.startswith(("<", paths["stdlib"]))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
