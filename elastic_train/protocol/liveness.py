"""The liveness of the members, by the pings of links.py: a watcher that breaks off a collective that cannot end.

The death of a process is seen at once: its connections close and its listener refuses. A frozen process, a cut cable
and a stuck training thread close nothing. The members that ping such a member find it out: their watchers close the
sockets of the process group, so that the blocked collective raises and each worker goes on as after any lost peer.
contacts.py holds the answers to the pings and judges them; the thread that acts on its judgement is here.

In a small world every member pings every other. In a large one each member pings some neighbours
(protocol/neighbours.py) and passes on what it hears, so that all members know of a death within some hops.
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
"""time between two rounds of background tasks"""


class WatcherThread:
    """The thread that sends and answers pings, and looks at the answers.

    Args:
        links: the pings; for this thread alone from `start` on.
        turn: called in each round.
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
        """End it; no other thread depends on it. Blocks up to `stop_timeout`."""
        self._is_stopping = True
        self._links.wake()
        if self._thread.ident is not None:  # a worker that has not found its job has not started the thread
            self._thread.join(self._stop_timeout)
        if not self._thread.is_alive():
            self._links.close()

    def check(self) -> None:
        """Raise the error that ended the thread. It is a bug: unraised, this worker would look dead to its peers."""
        if self._crash is not None:
            raise self._crash

    def turn_soon(self) -> None:
        """Run a round at once: answers that came earlier may matter now."""
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
            self._links.turn(0.0)  # its last announcement may not be sent yet: without it a leaving member looks dead
        except Exception as error:  # this ends the thread; the training thread raises the error
            self._crash = error


class Watcher:
    """The state of the world, and whether it is over; breaks off a collective that cannot end.

    The training thread reports its activity by `do`, which only assigns, so the step path never waits for anything
    here. One lock guards what the training thread and the watcher thread both change of their world.

    Args:
        links: the pings; for the watcher thread alone from its start on.
        peer_timeout: seconds after which a silent member counts as dead.
        pace: how long the training thread may take.
        cut: closes the sockets of the present process group, on the watcher thread.
        tend: runs the background tasks of a world, every TEND_SECONDS; may raise StoreUnreachable.
        give_up: ends the process if the training thread still waits in a collective of a broken world after the longest
            time that a step may take: gloo can lose the end of an operation under way (collectives.py). It also ends
            the process if any other activity lasts longer than `Pace.last_limit`.
        topology: chooses the neighbours that a member pings.
        interval: seconds between two pings of `links`; `ping_interval` by default.
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
        """world whose process group is about to be made, or stands; mostly the adopted world of `contacts`"""
        self._has_group = False
        self._broken: dict[int, str] | None = None
        """verdicts of the adopted world, once it is over"""
        self._is_by_vote = False
        """whether a vote has ended the adopted world"""
        self._passes_on = False
        self._next_tend = monotonic()
        self.verdicts: dict[int, str] = {}
        """ranks of the present world that are out, even if their listener answers, each with the reason"""
        self.reason: str | None = None
        """why the present world was broken, as far as this member knows"""
        self._lock = threading.RLock()
        self.thread = WatcherThread(links, self.turn, self._interval, peer_timeout + 5, monotonic)

    # --- for the training thread --------------------------------------------------------------------------------------

    def do(self, activity: Activity, limit: float | None = None) -> None:
        """Note that the training thread begins an activity, or restart the time of the same one.

        Args:
            limit: seconds that it may take, if the pace of earlier steps does not tell.

        Raises:
            The error that ended the watcher thread (`WatcherThread.check`).
        """
        self.thread.check()
        if self._has_given_up and threading.current_thread() is threading.main_thread():
            threading.Event().wait()  # the collective ended after all, but the state being saved must not change now
        self.own.turn_to(activity, limit)

    def adopt(self, world: World) -> None:
        """Ping neighbours among the members of `world` from now on, as one of them, and answer only members."""
        neighbours = self.contacts.neighbours(world, world.rank)
        with self._lock:
            self.contacts.adopt(world, neighbours)
            self.own.begin(world.rank, self._interval / 4)
            self._passes_on = self.contacts.is_sparse
            self._broken, self._is_by_vote = None, False
            self.links.announce(self._status())
        self.contacts.watch()

    def forgive(self) -> None:
        """Drop all verdicts: from now on only silence counts against the members of the world that is over."""
        with self._lock:
            self.verdicts, self._passes_on = {}, False

    def expect(self, world: World) -> None:
        """Watch the making of this world's process group: break it off if a member dies before the group stands."""
        with self._lock:
            self._world, self._has_group = world, False
            self._broken_at = None
            self.verdicts, self.reason = {}, None
        self.thread.turn_soon()

    def enter(self, world: World) -> None:
        """Watch the process group of this world, which stands now, until `leave`."""
        with self._lock:
            self._world, self._has_group = world, True
        self.thread.turn_soon()

    @property
    def headless(self) -> World | None:
        """The adopted world if it is over and its rank 0 is lost, else None; the training thread may not know yet."""
        with self._lock:
            world, broken = self.contacts.world, self._broken
            if world is None or broken is None:
                return None
            is_lost = 0 in self.verdicts or 0 in broken or self.contacts.is_refused(world.members[0])
            return world if is_lost else None

    def leave(self) -> None:
        """Stop watching the process group: the world is over, and `cut` is not called from now on."""
        with self._lock:
            self._world = self._broken_at = None
        self.thread.turn_soon()
        self.do(Activity.FORM)

    def announce_broken(self, *, is_by_vote: bool = False) -> None:
        """Tell the other watchers that this member is out of the world: not every member sees a closed socket.

        Args:
            is_by_vote: whether all workers end the world at the same step; a worker may still be reading the votes.
        """
        with self._lock:
            if self._broken is None:
                self._broken, self._is_by_vote = {}, is_by_vote
            self.links.announce(self._status(), at_once=True)

    def is_anybody_at_work(self, world: World, proposer: int | None, seconds: float) -> bool:
        """Return whether a member of `world` that has not come to the agreement is still within the time that its work
        may take. In a large world only the proposer sees all members; it tells the others by restarting the time of its
        own activity.

        Args:
            proposer: the rank that this member waits for.
            seconds: age up to which a restart by the proposer counts.
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
        """Do one round of the thread."""
        with self._lock:
            self.links.announce(self._status())
        self._look()
        if self._monotonic() >= self._next_tend:
            self._next_tend = self._monotonic() + TEND_SECONDS
            with suppress(StoreUnreachable):  # the next round asks again
                self._tend(self._world)
        self._end_if_stuck()

    def _status(self) -> str:
        """The line that other members get in answer to pings; its head changes when this member is out of the world."""
        head = head_of(self.contacts.world, self._broken, is_by_vote=self._is_by_vote)
        return self.own.line(head, self._world)

    def _look(self) -> None:
        with self._lock:
            world, has_group = self._world, self._has_group
        if world is None:
            self._look_back()
            return
        for blame in self._judge.look(world, has_group=has_group):
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
        """Pass on new verdicts: the proposer, and the ranks it waits for, must not depend on a member's neighbours."""
        with self._lock:
            if self.contacts.world is not world or self._broken is None or not self._passes_on:
                return
            news = {rank: why for rank, why in verdicts.items() if rank not in self._broken}
            if news:
                self._broken.update(news)
                self.verdicts = self.verdicts | news
                self.links.announce(self._status(), at_once=True)


def ping_interval(peer_timeout: float) -> float:
    """Return the seconds between two pings."""
    return min(0.25, peer_timeout / 8)
