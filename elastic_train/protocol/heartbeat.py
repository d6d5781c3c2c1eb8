"""The heartbeat: one line that a member sends with every ping and answer; its size does not grow with the world.

`-{} [3, "reduce", 0.031, 10.2, 0.044, 7, 512]` has these fields. The head: whether the world is over (`!`, or `=` if
all ended it at the step of a vote), and the verdicts. Then generation, activity, its age in seconds, and its limit in
seconds by the member's own estimate. Then the seconds for which, as far as it has heard, no member has been outside of
the reduction, with the heartbeat (rank, count) that showed this. Each member passes on the least such age among its
neighbours, so all learn whether a member is still to come, though no member pings all.

Other members cannot know what a member's first step compiles, or how long its evaluation or its disk takes. So each
member reports the age and the limit of its activity, and the others hold it to that limit.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from elastic_train.rules import Activity, MemberActivity
from elastic_train.world import World, from_runs, to_runs

LEAST_SECONDS = 300.0
"""limit of a step, however fast earlier steps were: a loader or a disk may hiccup"""
STEPS = 20
"""limit of a step in median steps, if that is longer"""
FIRST_SECONDS = 1800.0
"""limit of a member's first step, and of its user code between two steps"""
COLLECTIVES = 10
"""limit of a collective with all members inside, in median collectives beyond the peer timeout"""
NUM_REMEMBERED = 64
LONGEST_PAUSE = 2.5
"""seconds between two looks at a clock by a waiting thread: an attempt at a store, and a pause after it"""


class AwakeTime:
    """The seconds since `restart`, without those in which this process was suspended or starved: then it could not have
    heard other members.

    A thread that waits calls `look` again and again. Time between two looks beyond `longest` counts as a suspension.
    For any thread.

    Args:
        longest: seconds between two looks of a process that is awake.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, longest: float = LONGEST_PAUSE) -> None:
        self._monotonic, self._longest = monotonic, longest
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        with self._lock:
            self._looked_at, self._seconds = self._monotonic(), 0.0

    def look(self) -> float:
        """Return the seconds of a suspension since the last look; 0 if there was none."""
        with self._lock:
            now = self._monotonic()
            elapsed, self._looked_at = now - self._looked_at, now
            awake = min(elapsed, self._longest)
            self._seconds += awake
            return elapsed - awake

    @property
    def seconds(self) -> float:
        """The seconds awake; reading it is a look, too."""
        self.look()
        return self._seconds


class Pace:
    """The durations of this member's steps and collectives, and the limits of the next ones that follow from them.

    The training thread notes durations; the watcher thread reads limits.

    Args:
        stall_timeout: seconds of `--stall-timeout`; None to derive the limit from the steps.
        formation_timeout: seconds that anything may take while a world forms.
    """

    def __init__(
        self, peer_timeout: float, stall_timeout: float | None = None, formation_timeout: float = LEAST_SECONDS
    ) -> None:
        self.peer_timeout, self._stall_timeout = peer_timeout, stall_timeout
        self._formation_timeout = formation_timeout
        self._steps: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._collectives: deque[float] = deque(maxlen=NUM_REMEMBERED)
        """the longest collective of each step"""
        self._longest = 0.0
        self._is_first = True
        self.slowest_step = 0.0
        """seconds of the slowest of the last steps"""

    def expect_first_step(self) -> None:
        """Let the next step take as long as a first step may: it may compile for new shapes."""
        self._is_first = True

    def note_step(self, seconds: float, interval: float | None = None) -> None:
        """Note a committed step.

        Args:
            seconds: from the arrival of its data to the commit.
            interval: from the commit before it, with the time to load its data.
        """
        self._is_first = False
        self._steps.append(seconds if interval is None else interval)
        self._collectives.append(self._longest)
        self._longest = 0.0
        self.slowest_step = max(0.99 * self.slowest_step, seconds)

    def note_collective(self, seconds: float) -> None:
        """Note a collective that has ended, with its time of waiting for other members."""
        self._longest = max(self._longest, seconds)

    def limit(self, activity: Activity) -> float:
        """Return the seconds that an activity may last."""
        if activity is Activity.FORM:
            return self._formation_timeout
        if activity in (Activity.COMPUTE, Activity.STEP):
            return max(FIRST_SECONDS, self.stall_limit) if self._is_first else self.stall_limit
        if self._is_first:
            return FIRST_SECONDS
        return self.peer_timeout + COLLECTIVES * _median(self._collectives)

    @property
    def stall_limit(self) -> float:
        """The seconds that members wait in a collective for a member outside of it, after its first step."""
        if self._stall_timeout is not None:
            return self._stall_timeout
        return max(LEAST_SECONDS, STEPS * _median(self._steps))

    @property
    def between_steps(self) -> float:
        """As `stall_limit`, between two steps, where user code runs."""
        return self.stall_limit if self._stall_timeout is not None else max(FIRST_SECONDS, self.stall_limit)

    def last_limit(self, activity: Activity) -> float:
        """Return the seconds after which an activity in a world that is over counts as one that never ends."""
        if activity is Activity.FORM:  # for example a read from a disk that does not answer
            return max(FIRST_SECONDS, self._formation_timeout)
        # The other members leave it out before that; until then it might have come back.
        return 2 * max(FIRST_SECONDS, self.stall_limit) if activity is Activity.COMPUTE else self.limit(activity)


def _median(seconds: Iterable[float]) -> float:
    known = list(seconds)  # copied first: the other thread may add one
    return median(known) if known else 0.0


@dataclass(frozen=True)
class Heartbeat(MemberActivity):
    """The activity of a member, and what it has heard of the other members."""

    age: float
    """seconds since any member was outside of the reduction, as far as it has heard"""
    witness: tuple[int, int]
    """(rank, count) of the heartbeat that showed this"""

    def to_line(self, head: str) -> str:
        times = [round(seconds, 3) for seconds in (self.seconds, self.limit, self.age)]
        return f"{head} {json.dumps([self.generation, self.activity, *times, *self.witness])}"

    @staticmethod
    def from_line(line: str) -> Heartbeat:
        """Raises: ValueError."""
        generation, activity, seconds, limit, age, rank, count = json.loads(line.partition(" ")[2])
        times = (float(seconds), float(limit), float(age))
        return Heartbeat(int(generation), Activity(activity), *times, (int(rank), int(count)))


def head_of(world: World | None, verdicts: Mapping[int, str] | None, *, is_by_vote: bool = False) -> str:
    """Return the first word of the line: `-{}`; `!` with the verdicts, as ranks by reason, if the world is over; `={}`
    if a vote has ended it and there are no verdicts.

    Args:
        verdicts: reasons by rank, as `describe` makes them; None if the world is not over.
    """
    if verdicts is None:
        return "-{}"
    if is_by_vote and not verdicts:
        return "={}"
    if world is None:
        return "!{}"
    ranks: dict[str, list[int]] = {}
    for rank, why in sorted(verdicts.items()):
        ranks.setdefault(why.removeprefix(describe(world, rank, "")), []).append(rank)
    text = json.dumps({what: to_runs(those) for what, those in ranks.items()}, separators=(",", ":"))
    return "!" + text.replace(" ", "\\u0020")


def verdicts_of(world: World, line: str) -> dict[int, str] | None:
    """Return the verdicts of a line of `head_of`; None if the world is not over. Raises: ValueError."""
    if line[:1] not in ("!", "="):
        return None
    return {rank: describe(world, rank, what) for what, runs in _verdicts(line).items() for rank in from_runs(runs)}


def _verdicts(line: str) -> dict[str, str]:
    told: dict[str, str] = json.loads(line.partition(" ")[0][1:] or "{}")
    return told


def is_readable(line: str) -> bool:
    """Return whether this build can read a heartbeat or it is empty. Another build may use another form."""
    try:
        if line:
            Heartbeat.from_line(line)
        for runs in _verdicts(line).values():
            from_runs(runs)
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def has_ended_by_vote(line: str) -> bool:
    """Return whether all end the world at the same step; no member's part in that step may be broken off."""
    return line[:1] == "="


def describe(world: World, rank: int, what: str) -> str:
    """Return the text of a verdict."""
    return f"{world.members[rank].name} (rank {rank}) {what}"


SILENT = "was silent for"


def is_silence(why: str) -> bool:
    """Return whether a verdict says only that another member did not hear this one."""
    return SILENT in why


@dataclass
class LastOutside:
    """The newest moment, by hearsay, at which any member was outside of the reduction.

    A moment travels as an age, since the clocks of two machines are never compared. With each message it seems to grow
    younger by the time that the message takes. Three rules keep this from going on for ever: of one heartbeat the
    oldest moment counts; after it no older heartbeat of the same member counts; a heartbeat of another member counts
    only if it is newer by `slack`.
    """

    at: float
    slack: float = 0.0
    """seconds, more than a message takes; the moment may be too old by this much for each member that passed it on"""
    witness: tuple[int, int] = (-1, 0)

    def hear(self, witness: tuple[int, int], at: float) -> None:
        if witness == self.witness:
            self.at = min(self.at, at)
        elif witness[0] == self.witness[0]:
            if witness > self.witness and at > self.at:
                self.witness, self.at = witness, at
        elif at > self.at + self.slack:
            self.witness, self.at = witness, at


class OwnHeartbeat:
    """The activity of this member's training thread, its age and its limit: the line that other members get.

    The training thread calls `turn_to`, which only assigns, so the step path never waits here. All other methods are
    for the holder of the watcher's lock, or for the watcher thread.
    """

    def __init__(self, pace: Pace, monotonic: Callable[[], float]) -> None:
        self.pace, self._monotonic = pace, monotonic
        self._activity: tuple[Activity, float, float | None] = (Activity.FORM, monotonic(), None)
        """with the moment when it began, and with a limit of its own"""
        self._rank, self._count = -1, 0
        self.outside = LastOutside(0.0)

    def begin(self, rank: int, slack: float) -> None:
        """Begin in an adopted world, in which this member has this rank.

        Args:
            slack: as in LastOutside.
        """
        self._rank = rank
        self.outside = LastOutside(self._monotonic(), slack)

    def turn_to(self, activity: Activity, limit: float | None = None) -> None:
        """Begin an activity, or the same one anew; with a limit in seconds if the pace does not tell."""
        now, (before, since, _) = self._monotonic(), self._activity
        if before is Activity.REDUCE and activity is Activity.COMPUTE:
            self.pace.note_collective(now - since)
        self._activity = (activity, now, limit)

    def turn_inside(self) -> None:
        """For the watcher thread: the training thread, late at its own work, was found inside a collective. From now on
        it counts as waiting for its peers, with the same limit anew."""
        found = self._activity
        if found[0] is Activity.COMPUTE:
            inside = (Activity.REDUCE, self._monotonic(), self.at()[2])
            if self._activity is found:  # else it has just turned to something else
                self._activity = inside

    def at(self) -> tuple[Activity, float, float]:
        """Return the activity of the training thread, its age in seconds, and its limit in seconds."""
        activity, since, limit = self._activity
        return activity, self._monotonic() - since, self.pace.limit(activity) if limit is None else limit

    @property
    def seconds_all_inside(self) -> float:
        """The seconds for which no member has been outside of the reduction, as far as this one has heard."""
        return self._monotonic() - self.outside.at

    def line(self, head: str, world: World | None) -> str:
        """Return the next line.

        Args:
            head: its first word (`head_of`).
            world: the world that this member is in at this moment.
        """
        (activity, seconds, limit), now = self.at(), self._monotonic()
        # STEP counts as its own work until shortly before its limit: the other members wait for longer than the peer
        # timeout after they have heard so last.
        may_compute = activity is Activity.STEP and seconds < limit - self.pace.peer_timeout
        if not activity.is_inside or may_compute or world is None:
            self._count += 1
            self.outside.hear((self._rank, self._count), now)
        generation, outside = world.generation if world else -1, self.outside
        return Heartbeat(generation, activity, seconds, limit, now - outside.at, outside.witness).to_line(head)
