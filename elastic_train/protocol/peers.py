"""A job whose members serve a store each, and decide together: no process and no machine is special.

What follows a world is decided by a ballot among its members (ballots.py); which votes are enough is said by laws.py.

Keys in a member's own store: `host` (where newcomers queue, as far as it knows), `queue/...` (the join queue, while it
is the host), `admitted` (its first world), `admitted/UID` (that of one that could not be told), `fact/NAME`; and below
each world's key `present`, `register`, `next`, `left/...`, `released/UID` (who is nobody's voter any more), at rank 0
`ready/...`, and what else was announced. What names a world that is over for long is deleted (`OldKeys`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from elastic_train.errors import JobFinished, StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import Arbiter, Arbitration
from elastic_train.protocol.ballots import JOB, Ballots, Elsewhere, Round
from elastic_train.protocol.branch_off import BranchOff
from elastic_train.protocol.job import Admitted, Denied
from elastic_train.protocol.join_queue import Entrance, Finder, Size, Waiting, stores_by_node
from elastic_train.protocol.known_worlds import Announcements, KnownWorlds, Newcomers
from elastic_train.protocol.store import NUM_PROPOSERS, Afresh, Clients, KeyValueStore, Notes, OwnStore, entries, scoped
from elastic_train.world import Address, Member, World


class Facts:
    """What is fixed once for the whole job: the first proposal under a name counts.

    For the training thread; other threads read `known`.
    """

    def __init__(self, clients: Clients, entrance: Entrance) -> None:
        self._own, self._clients, self._entrance = clients.own, clients, entrance
        self.known: dict[str, str] = {}

    def create(self, name: str, proposal: str, world: World | None) -> str:
        """As Job.create_fact, in this world."""
        if name not in self.known:
            self.known[name] = self._create(f"fact/{name}", proposal, world)
            self._own.put(f"fact/{name}", self.known[name])
            self._tell_spares(name, self.known[name], world)
        return self.known[name]

    def _create(self, key: str, proposal: str, world: World | None) -> str:
        """At rank 0 of the world, before it at the host of the queue."""
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

    def _tell_spares(self, name: str, text: str, world: World | None) -> None:
        """Those who train agree by themselves; rank 0 tells the spares."""
        if world is not None and world.rank == 0:
            spares = range(world.world_size, len(world.members))
            self._clients.ask_each(world, spares, lambda store: store.put(f"fact/{name}", text))

    def find(self, name: str, world: World | None) -> str | None:
        """As Job.fact, in this world."""
        host = self._entrance.host_store
        if name not in self.known and world is None and host is not None:
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
        """As Job.host_says."""
        try:
            host = self._entrance.host_store
            return None if host is None else host.get(key)
        except StoreUnreachable:  # the next look finds another host
            self._entrance.forget_host()
            return None

    def take_over(self, facts: Mapping[str, str], *, is_newcomer: bool) -> None:
        """Those that come with a world; a newcomer's own store says all that it knows from then on."""
        for name, text in {**self.known, **facts}.items():
            if self.known.get(name) != text or is_newcomer:
                self._own.put(f"fact/{name}", text)
        self.known.update(facts)


class PeerJob:
    """As job.Job.

    Args:
        own: this member's own store; it answers two threads.
        uid: of this process; others ask for it, for another one may have its address by then.
        run_id: of the job; members of other jobs are not followed.
        reach: a client of the store at an address, for the training thread. Raises: StoreUnreachable.
        refused: which of some members are gone, by one probe each.
        clock: monotonic seconds.
        arbiter: a place that members may share, where decisions can be claimed.
        goes_on: whether a side without enough votes goes on as a branch (branches.py), where nothing could claim.
        in_background: runs a task on a thread of its own, where there are threads: connections are made ahead, so that
            a recovery need not wait for them.
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
        arbiter: Arbiter | None = None,
        in_background: Callable[[Callable[[], None]], None] = lambda _task: None,
        goes_on: bool = False,
    ) -> None:
        self._own, self._finder, self._peer_timeout, self._in_background = own, finder, peer_timeout, in_background
        self._clients = Clients(own, uid, reach)
        self._beside = Clients(own, uid, reach)
        """for the thread that prepares a join"""
        self._known = known = KnownWorlds(own)
        self._arbitration = Arbitration(arbiter, peer_timeout, clock)
        self._newcomers = Newcomers(self._clients, known, self._arbitration, max_world_size, draw_uid)
        self._announcements = Announcements(self._clients, known, self._newcomers)
        self._draw_uid = draw_uid
        self._entrance = Entrance(
            self._clients, address, finder, size, run_id=run_id, refused=refused, begin=self._begin, clock=clock
        )
        self._facts = Facts(self._clients, self._entrance)
        self.facts: Mapping[str, str] = self._facts.known
        elsewhere = Elsewhere(finder, known, self.facts, run_id=run_id, goes_on=goes_on)
        self._ballots = Ballots(known, self._arbitration, elsewhere, self.facts)
        branch_off = BranchOff(self._ballots, known, self._arbitration, peer_timeout=peer_timeout, clock=clock)
        self._decide = branch_off.decide if goes_on else self._ballots.decide
        self._world: World | None = None
        self._is_host_meanwhile = False
        """whether newcomers wait here, as long as there is no rank 0"""
        self._invited: tuple[Member, ...] = ()
        """newcomers of the next world, where it is decided ahead"""
        own.put("run_id", run_id)
        own.put("uid", uid)

    # --- the job ----------------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        return self._entrance.is_first

    def create_fact(self, name: str, proposal: str) -> str:
        return self._facts.create(name, proposal, self._world)

    def fact(self, name: str) -> str | None:
        return self._facts.find(name, self._world)

    def host_says(self, key: str) -> str | None:
        return self._facts.host_says(key)

    def _begin(self, members: tuple[Member, ...]) -> None:
        """As Newcomers.begin; as a job of its own where this worker has waited for another, which may live."""
        if not self._entrance.is_first:
            self._own.put(f"fact/{JOB}", self._draw_uid())
        self._newcomers.begin(members)

    # --- the join queue -----------------------------------------------------------------------------------------------

    def where(self) -> str:
        return self._finder.describe()

    def find(self) -> bool:
        return self._entrance.find()

    def look_from_queue(self, mine: Waiting) -> Admitted | str:
        text = self._own.get("admitted")
        if text is None:
            if self.is_over():
                raise JobFinished("the job reached its end while this node waited to be admitted")
            said = self._entrance.look(mine)
            text = self._own.get("admitted")
            if text is None:
                return said
        return self._newcomers.be_told(text, mine.member.uid)

    def leave_queue(self) -> None:
        self._entrance.leave()

    def queue(self) -> list[Waiting]:
        waiting = self._entrance.queue()
        self.drop(self._newcomers.tell_again(self._world, waiting))
        return waiting

    def drop(self, members: Sequence[Member]) -> None:
        self._entrance.drop(members)

    def is_over(self) -> bool:
        return self._own.get("over") is not None

    # --- a join that is prepared --------------------------------------------------------------------------------------

    def beside(self, member: Member) -> Notes:
        return Afresh(self._beside, member)

    def told(self, key: str) -> str | None:
        return self._own.get(key)

    def decide_ahead(self, world: World, decision: Decision) -> bool:
        text = decision.to_json()
        voters, everybody = self._known.voters_without(()), range(len(world.members))
        if self._ballots.decide(Round(self._beside, world, voters, text, everybody, frozenset())) != text:
            return False
        self._invited = decision.new
        self._newcomers.notify(self._beside, decision.new, self._newcomers.message_for(decision, world))
        return True

    def stop_planning(self) -> None:
        self._beside.keep_only(())

    # --- a world ------------------------------------------------------------------------------------------------------

    def enter(self, world: World, facts: Mapping[str, str], decision: Decision | None = None) -> None:
        if decision is not None:
            self._newcomers.message = self._newcomers.message_for(decision, self._world)
        self._known.enter(world, decision)
        before, self._world = self._world, world
        was_host, self._is_host_meanwhile = self._is_host_meanwhile, False
        invited, self._invited = self._invited, ()
        if before is None:
            self._own.put("begun", world.uid)
        self._facts.take_over(facts, is_newcomer=before is None)
        if before is None or was_host or before.members[0].uid != world.members[0].uid:
            self._own.put("host", json.dumps(world.members[0].store))
        if decision is not None and world.rank == 0 and decision.new != invited:
            self._newcomers.notify(self._clients, decision.new, self._newcomers.message)
        self._clients.keep_only({member.uid for member in world.members})
        self._in_background(lambda: self._after_entering(world))

    def _after_entering(self, world: World) -> None:
        """What nobody waits for."""
        self.drop(world.members)
        self._clients.connect_ahead(world, lambda: self._world is world)

    def settle(self, world: World) -> None:
        self._known.settle(world)
        self._arbitration.forget_all_but(self._known.voters)
        self._own.put("settled", json.dumps([world.generation, world.uid]))

    def say_present(self, world: World, text: str) -> None:
        self._own.put(f"{world.key}/present", text)

    def present(self, world: World, ranks: Sequence[int]) -> dict[int, str]:
        return self._announcements.present(world, ranks)

    def announce(self, world: World, name: str, text: str) -> None:
        self._announcements.announce(world, name, text)

    def heard(self, world: World, name: str) -> str | None:
        return self._own.get(scoped(world, name))

    def left(self, world: World) -> frozenset[int]:
        return frozenset(map(int, entries(self._own, f"{world.key}/left")))

    def decided(self, world: World, asked: Sequence[int]) -> str | Denied | None:
        return self._ballots.decided(self._clients, world, asked)

    def show_place(self, world: World) -> None:
        self._arbitration.show(world.uid)

    def sees_place(self, world: World) -> bool:
        return self._arbitration.sees(world.uid)

    def note_place(self, world: World, *, is_shared: bool | None) -> None:
        self._arbitration.note(world.uid, is_shared=is_shared)

    def ended_holders(self, gone: Collection[str]) -> frozenset[str]:
        return self._arbitration.ended_holders(self._known.voters, gone)

    def decide(
        self, world: World, proposal: str, reachable: Sequence[int], *, dead: frozenset[str] = frozenset(),
        ended: frozenset[str] = frozenset(), answering: frozenset[str] = frozenset(),
    ) -> str | Denied:  # fmt: skip
        voters = self._known.voters_without(dead)
        return self._decide(Round(self._clients, world, voters, proposal, reachable, dead, answering, ended))

    def release(self, world: World, decision: Decision) -> None:
        self._ballots.release(self._clients, world, decision)

    def say_ready(self, world: World) -> None:
        self._announcements.say_ready(world)

    def are_ready(self, world: World) -> bool:
        return self._announcements.are_ready(world)

    def not_ready(self, world: World) -> tuple[int, ...]:
        return self._announcements.not_ready(world)

    def world_store(self, world: World) -> KeyValueStore:
        return self._clients.of_first(world)

    def seconds_to_wait(self, world: World, answered: Mapping[str, float]) -> float:
        left_out = self._known.left_out(world)
        return max((self._peer_timeout - answered.get(uid, math.inf) for uid in left_out), default=0.0)

    # --- its thread and its end ---------------------------------------------------------------------------------------

    def tend(self, world: World | None, *, headless: World | None = None) -> None:
        self._finder.keep(has_world=self._world is not None)
        self._known.old_keys.tend()
        world = world or self._world  # between two worlds, too: no other job may begin meanwhile
        if headless is not None and headless.rank > 0 and headless is self._world and not self._is_host_meanwhile:
            self._is_host_meanwhile = True
            self._entrance.host_meanwhile(headless, lambda: self._world)
        # Some besides rank 0: the place where newcomers look may not hear rank 0 alone.
        if world is not None and (world.rank <= NUM_PROPOSERS or world is headless):
            self._finder.show(stores_by_node(world), self.facts.get("job_token", ""), if_missing=world.rank > 0)

    def finish(self, world: World) -> None:
        self._own.put("over", world.uid)
        for member in (*(waiting.member for waiting in self._entrance.queue()), *self._invited):
            with suppress(StoreUnreachable):
                self._clients.of(member).put("over", world.uid)

    def stand_down(self) -> None:
        self._world = None
        with suppress(StoreUnreachable):  # it lives as long as the process: newcomers would wait there
            self._entrance.forget_host()

    def close(self) -> None:
        self.stand_down()
        self._finder.close()
        self._clients.keep_only(())
