"""Who is alive, by the pings of links.py: a watcher that breaks a hopeless collective off.

The death of a process is seen at once: its connections close and its listener refuses. A frozen process, a cut cable
and a stuck training thread close nothing. They are found by the members that ping this one: their watchers close the
sockets of the process group, so that the blocked collective raises and the worker goes on as after any lost peer.
contacts.py holds what was heard and what follows from it; the thread that acts on it is here.

In a small world all ping all. In a large one each member pings some neighbours (protocol/neighbours.py) and passes on
what it hears, so that all know of a death within some hops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.contacts import Blame, Contacts, Judge, Pings
from elastic_train.protocol.heartbeat import OwnHeartbeat, Pace, head_of
from elastic_train.protocol.neighbours import STANDARD, Topology
from elastic_train.rules import Activity
from elastic_train.world import World

TEND_SECONDS = 0.5
"""between two rounds of background tasks"""


class WatcherThread:
    """The thread that answers pings, sends them, and looks at what was heard.

    Args:
        links: the pings; for this thread alone from `start` on.
        turn: what it does in each round.
        interval: seconds between two rounds where nothing is urgent.
        stop_timeout: seconds that the last round may take.
    """

    def __init__(
        self,
        links: Pings,
        turn: Callable[[], None],
        interval: float,
        stop_timeout: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._links, self._turn, self._interval, self._stop_timeout = links, turn, interval, stop_timeout
        self._monotonic = monotonic
        self._is_turn_due = self._is_stopping = False
        self._crash: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def stop(self) -> None:
        """End it; it holds no key that others would wait for. Blocks up to `stop_timeout`."""
        self._is_stopping = True
        self._links.wake()
        if self._thread.ident is not None:  # it may never have found its job
            self._thread.join(self._stop_timeout)
        if not self._thread.is_alive():
            self._links.close()

    def check(self) -> None:
        """Raises: whatever ended it: a bug, without which this worker would silently look dead to others."""
        if self._crash is not None:
            raise self._crash

    def turn_soon(self) -> None:
        """What was heard before may matter now."""
        self._is_turn_due = True
        self._links.wake()

    def _run(self) -> None:
        next_turn = 0.0
        try:
            while not self._is_stopping:
                if self._is_turn_due or self._monotonic() >= next_turn:
                    self._is_turn_due, next_turn = False, self._monotonic() + self._interval
                    self._turn()
                seconds = 0.0 if self._is_turn_due else next_turn - self._monotonic()
                self._is_turn_due |= self._links.turn(max(0.0, seconds))
            self._links.turn(0.0)  # its last word may not be sent yet: without it who leaves would have died
        except Exception as error:  # the end of this thread; the training thread raises it
            self._crash = error


class Watcher:
    """What is known of the world and of whether it is over; it breaks a hopeless collective off.

    The training thread tells it what it does by `do`, an assignment and nothing more; so the step path never waits for
    anything here. What both change of the world that they are in is under one lock.

    Args:
        links: the pings; for the watcher's thread alone from its start on.
        peer_timeout: seconds after which a silent member is taken for dead.
        pace: how long the training thread may take.
        cut: closes the sockets of the present process group, from the watcher's thread.
        tend: background tasks, about once a second, with the world; may raise StoreUnreachable.
        give_up: ends the process, where the training thread still waits for a collective of a broken world after all
            the time that a step may take: gloo can lose the end of what was under way (collectives.py). Or where it
            does anything else there for as long as nothing takes (`Pace.last_limit`).
        topology: who pings whom.
        interval: seconds between two pings of `links`; by default what `ping_interval` says.
    """

    def __init__(
        self,
        links: Pings,
        peer_timeout: float,
        cut: Callable[[], None],
        tend: Callable[[World | None], None],
        monotonic: Callable[[], float] = time.monotonic,
        give_up: Callable[[str], None] = lambda _message: None,
        topology: Topology = STANDARD,
        interval: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.links = links
        self.pace = Pace(peer_timeout) if pace is None else pace
        self._interval = interval or ping_interval(peer_timeout)
        self._monotonic = monotonic
        self.own = OwnHeartbeat(self.pace, monotonic)
        self.contacts = Contacts(links, topology, peer_timeout, self._interval, monotonic)
        self._judge = Judge(self.contacts, self.own, peer_timeout, monotonic)
        self._cut, self._tend, self._give_up = cut, tend, give_up
        self._broken_at: float | None = None
        self._has_given_up = False
        self._world: World | None = None
        """whose process group is about to be made, or stands; mostly the adopted one of `contacts`"""
        self._is_standing = False
        self._broken: dict[int, str] | None = None
        """verdicts of the adopted world, once it is over"""
        self._is_by_vote = False
        """whether a vote has ended it"""
        self._passes_on = False
        self._next_tend = monotonic()
        self.verdicts: dict[int, str] = {}
        """ranks of the present world that are out, whatever their listener says, and why"""
        self.reason: str | None = None
        """why the present world was broken, as far as this member knows"""
        self._lock = threading.RLock()
        self.thread = WatcherThread(links, self.turn, self._interval, peer_timeout + 5, monotonic)

    # --- for the training thread --------------------------------------------------------------------------------------

    def do(self, activity: Activity, limit: float | None = None) -> None:
        """The training thread turns to something else, or gets on with the same.

        Args:
            limit: seconds that it may take, where the pace of the steps before does not tell.

        Raises:
            Whatever ended the watcher's thread (`WatcherThread.check`).
        """
        self.thread.check()
        if self._has_given_up and threading.current_thread() is threading.main_thread():
            threading.Event().wait()  # it came back after all; what is being saved must not change any more
        self.own.turn_to(activity, limit)

    def adopt(self, world: World) -> None:
        """Ping neighbours among the members of `world` from now on, as one of them, and answer nobody else."""
        neighbours = self.contacts.neighbours(world, world.rank)
        with self._lock:
            self.contacts.adopt(world, neighbours)
            self.own.begin(world.rank, self._interval / 4)
            self._passes_on = self.contacts.is_sparse
            self._broken, self._is_by_vote = None, False
            self.links.announce(self._status())
        self.contacts.watch()

    def forgive(self) -> None:
        """Nothing but their silence counts against the members of the world that is over, from now on."""
        with self._lock:
            self.verdicts, self._passes_on = {}, False

    def expect(self, world: World) -> None:
        """A process group of this world is about to be made: break it off if a member dies before it stands."""
        with self._lock:
            self._world, self._is_standing = world, False
            self._broken_at = None
            self.verdicts, self.reason = {}, None
        self.thread.turn_soon()

    def enter(self, world: World) -> None:
        """The process group of this world stands: it is watched until `leave`."""
        with self._lock:
            self._world, self._is_standing = world, True
        self.thread.turn_soon()

    @property
    def headless(self) -> World | None:
        """The adopted world where it is over, and its rank 0 lost; the training thread may not have noticed."""
        with self._lock:
            world, broken = self.contacts.world, self._broken
            if world is None or broken is None:
                return None
            is_lost = 0 in self.verdicts or 0 in broken or self.contacts.is_refused(world.members[0])
            return world if is_lost else None

    def leave(self) -> None:
        """The world is over: nothing is cut from now on."""
        with self._lock:
            self._world = self._broken_at = None
        self.thread.turn_soon()
        self.do(Activity.FORM)

    def announce_broken(self, *, is_by_vote: bool = False) -> None:
        """Tell the others' watchers that this member is out of the world, for those whom no closed socket tells.

        Args:
            is_by_vote: all who train end it at the same step; one of them may still be reading the votes.
        """
        with self._lock:
            if self._broken is None:
                self._broken, self._is_by_vote = {}, is_by_vote
            self.links.announce(self._status(), at_once=True)

    def is_anybody_at_work(self, world: World, proposer: int | None, seconds: float) -> bool:
        """Whether a member of `world` that has not come to the agreement on the next one is still within the time that
        its work may take; it comes after that. In a large world only the proposer sees all members. It lets the others
        know by restarting the time of its own activity.

        Args:
            proposer: the rank that this member waits for.
            seconds: the proposer counts as being at it where it restarted less than these ago.
        """
        contacts = self.contacts
        if any(contacts.is_at_work(world, rank) for rank in range(len(world.members)) if rank != world.rank):
            self.do(Activity.FORM)
            return True
        if not contacts.is_sparse or proposer is None:
            return False
        found = contacts.activity_of(world, proposer)
        return found is not None and found.generation < 0 and found.seconds < seconds

    # --- the thread ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """What the thread does in each of its rounds."""
        with self._lock:
            self.links.announce(self._status())
        self._look()
        if self._monotonic() >= self._next_tend:
            self._next_tend = self._monotonic() + TEND_SECONDS
            with suppress(StoreUnreachable):  # the next round asks again
                self._tend(self._world)
        self._end_if_stuck()

    def _status(self) -> str:
        """One line for the others; its head changes when this member is out of the world."""
        head = head_of(self.contacts.world, self._broken, is_by_vote=self._is_by_vote)
        return self.own.line(head, self._world)

    def _look(self) -> None:
        with self._lock:
            world, is_standing = self._world, self._is_standing
        if world is None:
            self._look_back()
            return
        for blame in self._judge.look(world, is_standing=is_standing):
            self._break_off(world, blame)

    def _look_back(self) -> None:
        world = self.contacts.world
        if world is None or not self.contacts.is_sparse or self._broken is None:
            return
        for verdicts in self._judge.look_back(world):
            self._merge(world, verdicts)

    def _end_if_stuck(self) -> None:
        (activity, seconds, limit), broken_at = self.own.at(), self._broken_at
        if broken_at is None:
            return
        waited = min(seconds, self._monotonic() - broken_at)
        if waited > max(limit, self.pace.last_limit(activity)):
            self._has_given_up = True
            what = "a collective of theirs" if activity.is_inside else "what it was doing"
            self._give_up(
                f"this world is over ({self.reason}), and {what} has not ended here in {waited:.0f} s: this worker ends"
            )

    def _break_off(self, world: World, blame: Blame) -> None:
        with self._lock:
            if self._world is not world:
                return  # the training thread has left it meanwhile
            if self._broken_at is None:
                self._broken_at = self._monotonic()
                self.verdicts = blame.verdicts
                self._broken, self._is_by_vote = dict(blame.verdicts), blame.is_by_vote
                self.links.announce(self._status(), at_once=True)
            elif self.contacts.is_sparse:
                self._merge(world, blame.verdicts)
            if self.reason is None:
                self.reason = "; ".join(blame.verdicts.values()) or blame.why
            self._cut()

    def _merge(self, world: World, verdicts: Mapping[int, str]) -> None:
        """Pass on what is news: who proposes, and for whom it waits, must not depend on whom a member pings."""
        with self._lock:
            if self.contacts.world is not world or self._broken is None or not self._passes_on:
                return
            news = {rank: why for rank, why in verdicts.items() if rank not in self._broken}
            if news:
                self._broken.update(news)
                self.verdicts = self.verdicts | news
                self.links.announce(self._status(), at_once=True)


def ping_interval(peer_timeout: float) -> float:
    """Seconds between two pings."""
    return min(0.25, peer_timeout / 8)
