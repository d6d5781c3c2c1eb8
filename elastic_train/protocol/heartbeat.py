"""What a member says of itself with every ping and answer: one line of a size that does not grow with the world.

`-{} [3, "reduce", 0.031, 10.2, 0.044, 7, 512]`: whether its world is over (`!`, or `=` where all ended it at the step
of a vote) and whose fault that is; generation, activity, its seconds, and how many it may last by the member's own
account; and for how long, as far as it has heard, nobody has been outside of the reduction, by which heartbeat (rank,
count). Each member passes on the least age of its neighbours', so that all know whether somebody is still to come
though nobody sees everybody.

Nobody else knows what a member's first step compiles, how long its evaluation takes or its disk. So each says for how
long it has been at something and for how long it may be, and the others hold it to that.
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
"""that a step may take, however fast the steps before were: a loader or a disk may hiccup"""
STEPS = 20
"""median steps that one may take, where that is more"""
FIRST_SECONDS = 1800.0
"""that a member may take for its first step, and for what its own code does between two steps"""
COLLECTIVES = 10
"""usual collectives that one may take beyond the peer timeout, when all take part in it"""
NUM_REMEMBERED = 64
LONGEST_PAUSE = 2.5
"""between two looks at a clock by a thread that waits for something: an attempt at a store, and a pause after it"""


class AwakeTime:
    """Seconds since `restart`, without those in which this process was suspended, or starved: then it learned nothing
    of the others, and nobody could have answered it.

    Who waits looks again and again. What is between two looks beyond `longest` is taken for a suspension. For any
    thread.

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
        """Seconds of a suspension since the last look; 0 where there was none."""
        with self._lock:
            now = self._monotonic()
            elapsed, self._looked_at = now - self._looked_at, now
            awake = min(elapsed, self._longest)
            self._seconds += awake
            return elapsed - awake

    @property
    def seconds(self) -> float:
        """That it was awake; a look, too."""
        self.look()
        return self._seconds


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
        self.peer_timeout, self._stall_timeout = peer_timeout, stall_timeout
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
        if activity in (Activity.COMPUTE, Activity.STEP):
            return max(FIRST_SECONDS, self.stall_limit) if self._is_first else self.stall_limit
        if self._is_first:
            return FIRST_SECONDS
        return self.peer_timeout + COLLECTIVES * _median(self._collectives)

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


def _median(seconds: Iterable[float]) -> float:
    known = list(seconds)  # at once: the other thread may add one
    return median(known) if known else 0.0


@dataclass(frozen=True)
class Heartbeat(MemberActivity):
    """What a member is at, and what it has heard of the others."""

    age: float
    """seconds since anybody was outside of the reduction, as far as it has heard"""
    witness: tuple[int, int]
    """(rank, count) of the heartbeat that said so"""

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
    """The first word of the line: `-{}`, or `!` and who is out of the world that is over, by what befell them; `={}`
    where nothing befell anybody and a vote has ended it.

    Args:
        verdicts: why, by rank, as `describe` makes them; None where the world is not over.
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
    """What `head_of` said; None where the world is not over. Raises: ValueError."""
    if line[:1] not in ("!", "="):
        return None
    return {rank: describe(world, rank, what) for what, runs in _told(line).items() for rank in from_runs(runs)}


def _told(line: str) -> dict[str, str]:
    told: dict[str, str] = json.loads(line.partition(" ")[0][1:] or "{}")
    return told


def is_readable(line: str) -> bool:
    """Whether this build can read a heartbeat, or there is none yet. Another build's may be of another form."""
    try:
        if line:
            Heartbeat.from_line(line)
        for runs in _told(line).values():
            from_runs(runs)
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def has_ended_by_vote(line: str) -> bool:
    """Whether all end the world at the same step, and nobody else's part in that may be broken off."""
    return line[:1] == "="


def describe(world: World, rank: int, what: str) -> str:
    """A verdict, for a person."""
    return f"{world.members[rank].name} (rank {rank}) {what}"


SILENT = "was silent for"


def is_silence(why: str) -> bool:
    """Whether a verdict is that a member was not heard, by one that could not reach it."""
    return SILENT in why


@dataclass
class LastOutside:
    """When anybody was last outside of the reduction, by hearsay: the newest moment that a member has heard of.

    A moment travels as an age, for no two machines' clocks are compared. On its way it seems to grow younger by the
    time that a message takes. Three rules keep it from doing so for ever as it goes round: a heartbeat's moment is the
    oldest that was heard of it; no older heartbeat of the same member counts after it; one of another member counts
    only if it is newer by `slack`.
    """

    at: float
    slack: float = 0.0
    """seconds, more than a message takes; by so many may the moment be too old, for each member that passed it on"""
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
    """What this member's training thread does, since when, and for how long it may: the line that the others hear.

    The training thread tells by `turn_to`, an assignment and nothing more; so the step path never waits here. All
    else is for who holds the watcher's lock, or for its thread.
    """

    def __init__(self, pace: Pace, monotonic: Callable[[], float]) -> None:
        self.pace, self._monotonic = pace, monotonic
        self._activity: tuple[Activity, float, float | None] = (Activity.FORM, monotonic(), None)
        """with the moment since when, and with a limit of its own"""
        self._rank, self._count = -1, 0
        self.outside = LastOutside(0.0)

    def begin(self, rank: int, slack: float) -> None:
        """A world is adopted, in which this member has this rank.

        Args:
            slack: seconds, as LastOutside has them.
        """
        self._rank = rank
        self.outside = LastOutside(self._monotonic(), slack)

    def turn_to(self, activity: Activity, limit: float | None = None) -> None:
        """Something else, or the same anew; with a limit in seconds where the pace does not tell."""
        now, (before, since, _) = self._monotonic(), self._activity
        if before is Activity.REDUCE and activity is Activity.COMPUTE:
            self.pace.note_collective(now - since)
        self._activity = (activity, now, limit)

    def turn_inside(self) -> None:
        """For the watcher's thread: the training thread, late at something of its own, is found inside of a collective.
        From now on it counts as waiting for its peers, and may for as long again."""
        found = self._activity
        if found[0] is Activity.COMPUTE:
            inside = (Activity.REDUCE, self._monotonic(), self.at()[2])
            if self._activity is found:  # else it has just turned to something else
                self._activity = inside

    def at(self) -> tuple[Activity, float, float]:
        """What the training thread does, for how many seconds, and how many it may."""
        activity, since, limit = self._activity
        return activity, self._monotonic() - since, self.pace.limit(activity) if limit is None else limit

    @property
    def seconds_all_inside(self) -> float:
        """For how long nobody has been outside of the reduction, as far as it has heard."""
        return self._monotonic() - self.outside.at

    def line(self, head: str, world: World | None) -> str:
        """The next one.

        Args:
            head: its first word (`head_of`).
            world: the one that this member is in at this moment.
        """
        (activity, seconds, limit), now = self.at(), self._monotonic()
        # What may be its own work counts as that, for as long as it may last: the others wait for longer than the peer
        # timeout after they have heard so last.
        may_compute = activity is Activity.STEP and seconds < limit - self.pace.peer_timeout
        if not activity.is_inside or may_compute or world is None:
            self._count += 1
            self.outside.hear((self._rank, self._count), now)
        generation, outside = world.generation if world else -1, self.outside
        return Heartbeat(generation, activity, seconds, limit, now - outside.at, outside.witness).to_line(head)
