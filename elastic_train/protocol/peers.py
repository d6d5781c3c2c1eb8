"""A job in which each member serves a store, and the members decide together: no process and no machine is special.

The members decide the successor of their world by a ballot (ballots.py); laws.py defines which votes are enough.

Keys in a member's own store: `host` (store of the host of the join queue, as far as it knows), `queue/...` (the join
queue, while this member is the host), `members` (stores of its world, which newcomers remember), `rests` (set while its
world is over and the next one is not agreed on, or while it begins no world because another job may run), `over` (set
once the job has ended), `admitted` (its first world), `admitted/UID` (that of a newcomer whose store did not answer),
`fact/NAME`; and below each world's key `present`, `register`, `next`, `left/...`, `released/UID` (a member that is no
voter any more), at rank 0 `ready/...`, and other announcements. Keys of worlds that are long over are deleted
(`OldKeys`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from elastic_train.errors import JobFinished, StoreUnreachable
from elastic_train.protocol.agreement import Decision, Denied
from elastic_train.protocol.arbiter import Arbiter, Arbitration
from elastic_train.protocol.ballots import JOB, Ballots, Elsewhere, Round
from elastic_train.protocol.branch_off import BranchOff
from elastic_train.protocol.finder import Finder, Size
from elastic_train.protocol.join_queue import Entrance, Waiting, stores_by_node
from elastic_train.protocol.known_job import MOST_KNOWN, Probes
from elastic_train.protocol.known_worlds import LEFT, Admitted, Announcements, KnownWorlds, Newcomers, announced_key
from elastic_train.protocol.probes import probe_all
from elastic_train.protocol.store import NUM_PROPOSERS, Answer, Clients, KeyValueStore, OwnStore, entries
from elastic_train.world import Address, Member, World

NOBODY: frozenset[str] = frozenset()


class Facts:
    """The facts of the whole job, each fixed once: the first proposal under a name counts.

    For the training thread; other threads read `known` and `world`.
    """

    def __init__(self, clients: Clients, entrance: Entrance) -> None:
        self._own, self._clients, self._entrance = clients.own, clients, entrance
        self.known: dict[str, str] = {}
        """facts that this member knows; it grows"""
        self.world: World | None = None
        """world that this member is in"""

    def create(self, name: str, proposal: str) -> str:
        """Propose a value and return the first value ever proposed under this name. Raises: StoreUnreachable."""
        if name not in self.known:
            self.known[name] = self._create(f"fact/{name}", proposal)
            self._own.put(f"fact/{name}", self.known[name])
            self._send_to_spares(name, self.known[name])
        return self.known[name]

    def _create(self, key: str, proposal: str) -> str:
        """Create the key at rank 0 of the world or, without a world, at the host of the join queue."""
        world = self.world
        try:
            if world is not None:
                return self._clients.of_rank(world, 0).create(key, proposal)
            return (self._entrance.host_store or self._own).create(key, proposal)
        except StoreUnreachable:
            if world is None:
                self._entrance.forget_host()
                raise
            self._clients.lose_rank(world, 0)
            return proposal  # a death ends this world, and the next one agrees on one state again

    def _send_to_spares(self, name: str, text: str) -> None:
        """Send a fact to the spares; rank 0 does. The training members create each fact themselves."""
        world = self.world
        if world is not None and world.rank == 0:
            spares = range(world.world_size, len(world.members))
            self._clients.ask_each(world, spares, lambda store: store.put(f"fact/{name}", text))

    def find(self, name: str) -> str | None:
        """Return the value that was proposed under a name; None if none was."""
        host = self._entrance.host_store
        if name not in self.known and self.world is None and host is not None:
            try:
                found = host.get(f"fact/{name}")
            except StoreUnreachable:  # the next look finds another host
                self._entrance.forget_host()
                return None
            if found is not None:
                self.known[name] = found
        if name not in self.known and (told := self._own.get(f"fact/{name}")) is not None:
            self.known[name] = told
        return self.known.get(name)

    def host_says(self, key: str) -> str | None:
        """Return a value from the store of the join queue's host, for a newcomer; None if the host has or says none."""
        try:
            host = self._entrance.host_store
            return None if host is None else host.get(key)
        except StoreUnreachable:  # the next look finds another host
            self._entrance.forget_host()
            return None

    def enter(self, world: World, facts: Mapping[str, str]) -> None:
        """Take over `world`, which this member has entered, and its facts. A newcomer copies all facts to its store,
        and forgets those of another job, in whose queue it has waited."""
        if self.world is None and facts.get(JOB) not in (None, self.known.get(JOB)):
            self.known.clear()
        for name, text in {**self.known, **facts}.items():
            if self.known.get(name) != text or self.world is None:
                self._own.put(f"fact/{name}", text)
        self.known.update(facts)
        self.world = world


class PeerJob:
    """What one member shares with the other members of its job. Values are text. Every call answers at once or raises
    StoreUnreachable; none waits for other members.

    Callers that need one of its parts hold that part: `facts`, `entrance`, `announcements`, `place`, `finder`. For the
    training thread; `tend`, `queue` and `entrance.drop` are for the watcher thread too.

    Args:
        own: this member's own store; two threads may call it.
        uid: of this process; callers check it, since another process may serve at its address later.
        run_id: of the job; this member does not follow members of other jobs.
        reach: returns a client of the store at an address, for the training thread. Raises: StoreUnreachable.
        max_world_size: how many members a step has work for; further ones are spares. The same on all members.
        refused: returns those of some members that are gone, by one probe each.
        clock: monotonic seconds.
        arbiter: returns the place where members may claim decisions; `find_place` of arbiter.Arbitration.
        goes_on: whether a side without enough votes goes on as a branch (branches.py) where it cannot claim.
        in_background: runs a task, on another thread if there are threads: it connects ahead of a recovery.
        probe_all, knows: as Entrance's.
    """

    def __init__(
        self,
        own: OwnStore,
        address: Address,
        reach: Callable[[Address], KeyValueStore],
        finder: Finder,
        size: Size,
        *,
        uid: str,
        run_id: str,
        peer_timeout: float,
        max_world_size: int | None,
        refused: Callable[[Sequence[Member]], list[Member]],
        draw_uid: Callable[[], str],
        clock: Callable[[], float],
        arbiter: Callable[[], Arbiter] | None = None,
        in_background: Callable[[Callable[[], None]], None] = lambda _task: None,
        goes_on: bool = False,
        probe_all: Probes = probe_all,
        knows: Sequence[Address] = (),
    ) -> None:
        self._own, self.finder, self._peer_timeout, self._in_background = own, finder, peer_timeout, in_background
        self._clients, self._beside = Clients(own, uid, reach), Clients(own, uid, reach)
        """for the training thread, and for the thread that prepares a join"""
        self._draw_uid, self.worlds = draw_uid, KnownWorlds(own)
        known, self.place = self.worlds, Arbitration(arbiter, peer_timeout, clock)
        self._newcomers = Newcomers(self._clients, known, self.place, max_world_size, draw_uid)
        self.announcements = Announcements(self._clients, known, self._newcomers)
        self.entrance = Entrance(
            self._clients, address, finder, size, run_id=run_id, refused=refused, begin=self._begin, clock=clock,
            probe_all=probe_all, knows=knows,
        )  # fmt: skip
        self.facts = Facts(self._clients, self.entrance)
        elsewhere = Elsewhere(finder, known, self.facts.known, run_id=run_id, goes_on=goes_on)
        self._ballots = Ballots(known, self.place, elsewhere, self.facts.known)
        branch_off = BranchOff(self._ballots, known, self.place, peer_timeout=peer_timeout, clock=clock)
        self._decide = branch_off.decide if goes_on else self._ballots.decide
        self._is_host_meanwhile = False
        """whether this member hosts the join queue while there is no rank 0"""
        self._invited: tuple[Member, ...] = ()
        """newcomers of the next world, if that is decided ahead"""
        own.put("run_id", run_id)
        own.put("uid", uid)

    @property
    def world(self) -> World | None:
        """The world that this member is in, or was in last; None before the first one, and after `stand_down`."""
        return self.facts.world

    def _begin(self, members: tuple[Member, ...]) -> None:
        """As Newcomers.begin. Give the job a new token if this worker waited for another job, which may live."""
        if not self.entrance.is_first:
            self._own.put(f"fact/{JOB}", self._draw_uid())
        self._newcomers.begin(members)

    # --- the join queue -----------------------------------------------------------------------------------------------

    def look_from_queue(self, mine: Waiting) -> Admitted | str:
        """Stay in the join queue. Return the admission or, for the log, what this worker waits for. A worker without a
        world calls it again and again. Raises: JobFinished."""
        text = self._own.get("admitted")
        if text is None:
            if self.is_over():
                raise JobFinished("the job reached its end while this node waited to be admitted")
            said = self.entrance.look(mine)
            text = self._own.get("admitted")
            if text is None:
                return said
        return self._newcomers.take_message(text, mine.member.uid)

    def queue(self) -> list[Waiting]:
        """Return the workers in the join queue, for rank 0."""
        waiting = self.entrance.queue()
        self.entrance.drop(self._newcomers.repeat_message(self.world, waiting))
        return waiting

    def is_over(self) -> bool:
        """Return whether this worker was told that the job has reached its end."""
        return self.told("over") is not None

    # --- a join that is prepared while the world trains: for a thread of its own, except `told` -----------------------

    def ask_beside(self, member: Member, question: Callable[[KeyValueStore], Answer]) -> Answer:
        """Call the store of `member` about a plan or the reason why it waits, and return the answer. Raises:
        StoreUnreachable if there is none; the next call may get one."""
        return self._beside.ask(member, question)

    def told(self, key: str) -> str | None:
        """Return what another worker wrote under a key of this one: by `ask_beside`, or under `over` by `finish`."""
        return self._own.get(key)

    def decide_ahead(self, world: World, decision: Decision) -> bool:
        """Make `decision` the successor of `world`, which trains on, and announce it to the members and the newcomers.
        Return whether it is the successor. For rank 0."""
        text = decision.to_json()
        self.place.note_end(world.uid)
        voters, everybody = self.worlds.voters_without(()), range(len(world.members))
        if self._ballots.decide(Round(self._beside, world, voters, text, everybody, frozenset())) != text:
            return False
        self._invited = decision.new
        self._newcomers.notify(self._beside, decision.new, self._newcomers.message_for(decision, world))
        return True

    def stop_planning(self) -> None:
        """Close the connections of `ask_beside` and `decide_ahead`, on their thread."""
        self._beside.keep_only(())

    # --- a world ------------------------------------------------------------------------------------------------------

    def enter(self, world: World, facts: Mapping[str, str], decision: Decision | None) -> None:
        """Enter `world`, adopted by `decision` or from the join queue, and publish its rank 0 as the queue's host."""
        if decision is not None:
            self._newcomers.message = self._newcomers.message_for(decision, self.world)
        self.worlds.enter(world, decision)
        if world.is_spare:  # a spare is not in the collective that compares whether members see the place
            self.place.note(world.uid, is_shared=None)
        was_host, self._is_host_meanwhile = self._is_host_meanwhile, False
        before, invited, self._invited = self.world, self._invited, ()
        if before is None:
            self._own.put("begun", world.uid)
        self.facts.enter(world, facts)
        if before is None or was_host or before.members[0].uid != world.members[0].uid:
            self._own.put("host", json.dumps(world.members[0].store))
        if decision is not None and world.rank == 0 and decision.new != invited:
            self._newcomers.notify(self._clients, decision.new, self._newcomers.message)
        self._clients.keep_only({member.uid for member in world.members})
        self._in_background(lambda: self._after_entering(world))

    def _after_entering(self, world: World) -> None:
        """Do the rest, for which no caller waits."""
        self.entrance.drop(world.members)
        self._clients.connect_ahead(world, lambda: self.world is world)

    def settle(self, world: World) -> None:
        """Note that this member has finished SETTLED_REDUCTIONS in the present world: its workers have the state."""
        self.worlds.settle(world)
        self.place.forget_all_but(self.worlds.voters)
        self._own.put("settled", json.dumps([world.generation, world.uid]))

    def announce_presence(self, world: World, text: str) -> None:
        """Report in its own store that this member wants to be in the world after `world`."""
        self.place.note_end(world.uid)
        self._own.put(f"{world.key}/present", text)

    def heard(self, name: str) -> str | None:
        """Return what was announced to this member under a name."""
        return self._own.get(announced_key(name))

    def left(self, world: World) -> frozenset[int]:
        """Return the ranks that have announced that they leave on purpose."""
        return frozenset(map(int, entries(self._own, f"{world.key}/{LEFT}")))

    def decided(self, world: World, asked: Sequence[int]) -> str | Denied | None:
        """As `Ballots.decided`."""
        return self._ballots.decided(self._clients, world, asked)

    def ended_holders(self, gone: Collection[str]) -> frozenset[str]:
        """As `Arbitration.ended_holders`, for the worlds since the last settled one."""
        return self.place.ended_holders(self.worlds.voters, gone)

    def decide(
        self, world: World, proposal: str, reachable: Sequence[int], *, dead: frozenset[str] = NOBODY,
        ended: frozenset[str] = NOBODY, answering: frozenset[str] = NOBODY, holding: frozenset[str] = NOBODY,
    ) -> str | Denied:  # fmt: skip
        """Make the proposal, or an earlier accepted one, the successor of `world`.

        Args:
            reachable: ranks that may be asked, this member's first.
            dead: uids of members of `world` that are proven dead in time or have left.
            ended: the result of `ended_holders`.
            answering: uids of members that answer pings, whether they take part or not.
            holding: uids of members that have the run's state.
        """
        voters = self.worlds.voters_without(dead, world.members, self.entrance.queue)
        return self._decide(Round(self._clients, world, voters, proposal, reachable, dead, answering, ended, holding))

    def release(self, world: World, decision: Decision) -> None:
        """As `Ballots.release`."""
        self._ballots.release(self._clients, world, decision)

    def world_store(self, world: World) -> KeyValueStore:
        """Return the store that all members of `world` share, for keys below the world's. Raises: StoreUnreachable."""
        return self._clients.of_first(world)

    def seconds_to_wait(self, world: World, answered: Mapping[str, float]) -> float:
        """Return the seconds until the members that `world` leaves out must have stopped: this member reduces then.

        Args:
            answered: for each uid, the seconds since this member last answered a ping of it.
        """
        left_out = self.worlds.left_out(world)
        return max((self._peer_timeout - answered.get(uid, math.inf) for uid in left_out), default=0.0)

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, headless: World | None = None) -> None:
        """Do the background tasks, on the watcher thread. `headless`: a world that is over and has lost its rank 0."""
        self.finder.keep(has_world=self.world is not None)
        self.worlds.old_keys.tend()
        rests = self.entrance.holds_back if self.world is None else world is None
        self._own.put("rests", "yes" if rests else "")
        world = world or self.world  # also between two worlds: no other job may begin meanwhile
        if headless is not None and headless.rank > 0 and headless is self.world and not self._is_host_meanwhile:
            self._is_host_meanwhile = True
            self.entrance.host_meanwhile(headless, lambda: self.world)
        # Some more ranks do this: the endpoint where newcomers look may be out of reach for rank 0 alone.
        if world is not None and (world.rank <= NUM_PROPOSERS or world is headless):
            stores = stores_by_node(world)
            self._own.put("members", json.dumps({"stores": stores[:MOST_KNOWN]}))
            self.finder.show(stores, self.facts.known.get("job_token", ""), if_missing=world.rank > 0)

    def finish(self, world: World, result: str, neighbours: Iterable[Member]) -> None:
        """Tell these members of `world` that the job has ended, and its result; as rank 0 also the join queue."""
        waiting = [*self._invited, *(one.member for one in self.entrance.queue())] if world.rank == 0 else []
        for member in (world.me, *neighbours, *waiting):
            with suppress(StoreUnreachable):
                self._clients.of(member).put("over", result)

    def stand_down(self) -> None:
        """Leave the world for good, so that no newcomer waits for this member. The watcher may still tend."""
        self.facts.world = None
        with suppress(StoreUnreachable):  # its store lives as long as the process: newcomers would wait there
            self.entrance.forget_host()

    def close(self) -> None:
        """Leave the world; close the finder and all connections."""
        self.stand_down()
        self.finder.close()
        self._clients.keep_only(())
