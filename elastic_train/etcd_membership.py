"""Membership where the workers of all nodes meet in etcd: any node may die, and a join restarts nobody.

The agents know nothing of each other: each supervises a world of its own (rendezvous.py). A worker that is ready waits
in the lobby (lobby.py); it is taken in at a step boundary of the others, who re-form with it, and gets the state from
one of them. Meeting, watching and leaving are those of every membership.
"""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from torch.distributed import PrefixStore, Store, TCPStore

from elastic_train.errors import (
    FormationFailed,
    JobFinished,
    LeftOut,
    StoreRefused,
    StoreUnreachable,
)
from elastic_train.etcd import ATTEMPT_SECONDS, Connections, Etcd
from elastic_train.etcd_job import NOTICE_SECONDS, Job, open_job, take_away
from elastic_train.etcd_settings import EtcdSettings
from elastic_train.etcd_store import EtcdStore, Mirror
from elastic_train.liveness import Probe, Watcher, probe, probe_all, refusing
from elastic_train.lobby import (
    Admission,
    Standing,
    Waiting,
    is_start_due,
    nobody,
    ready_nodes,
    standing,
    without_nodes_of,
)
from elastic_train.meeting import Sight, meet, world_of
from elastic_train.membership import WORD_SECONDS, Change, Membership
from elastic_train.process_group import FORM_TIMEOUT, GroupStoreServer, address_towards_any
from elastic_train.rules import Activity, disagreement, require_agreement
from elastic_train.world import Member, World

SETTLE_SECONDS = 0.5
"""nodes that become ready within so short a time are taken in together"""
TURN_SECONDS = 1.0
"""that the first of those who wait has to begin the first world, before any other does it"""
CLOSE_SECONDS = 3.0
"""for tidying up at the end; what is left then runs out with the lease"""


@dataclass(frozen=True)
class Seat:
    """A place in a meeting, for a worker that waited in the lobby."""

    key: str
    rank: int
    admission: Admission
    generation: int | None
    """of the world that ends there; None before the first one"""


class EtcdMembership(Membership):
    """As Membership; `launch.etcd` says where the cluster is."""

    store: EtcdStore
    _job: Job
    _name: str | None = None
    """of this worker, once it has a heart that beats"""
    _is_on_the_way = False
    _lobby_lease = 0
    _waiting: Waiting | None = None
    """what this worker has in the lobby, while it is there"""
    _server: GroupStoreServer | None = None
    _enough_since: float | None = None
    _due_since: float | None = None
    _ready: tuple[tuple[str, ...], float] = ((), 0.0)
    """names of the workers that were seen ready, and since when it is these"""
    _admitted_after = -1
    """the newest generation whose world will be followed by one with new members"""
    _observed: tuple[Member, ...] = ()
    """those whose hearts are watched from the lobby"""
    _next_keep = 0.0
    _dead: set[str]
    """names of members that are gone, whose last beats are still to be removed; two threads change it, in place"""
    _swept = -1
    """generations up to here have left nothing but their decisions"""

    # --- the store ----------------------------------------------------------------------------------------------------

    @property
    def _settings(self) -> EtcdSettings:
        assert self._launch.etcd is not None, "recovery.py chooses the form of membership by it"
        return self._launch.etcd

    def _connect(self) -> tuple[EtcdStore, str]:
        settings = self._settings
        self._dead = set()
        self._lobby_lock = threading.Lock()
        self._connections = Connections(settings)
        etcd = Etcd(self._connections, deadline=settings.grace, before_retry=self._wait_for_store)
        job = open_job(
            etcd,
            settings,
            self._launch.run_id,
            peer_timeout=self._peer_timeout,
            check=self._stop.check,
            say=self._say,
        )
        self._job = job
        self.run_prefix = job.prefix
        self._mirror = Mirror(replace(etcd, before_retry=lambda _why: None), f"{job.prefix}/")
        store = EtcdStore(etcd, lease=job.lease, guard=job.guard, mirror=self._mirror)
        store.put(self._presence_key, "")
        self._is_on_the_way = True
        return store, "0"

    @property
    def _presence_key(self) -> str:
        """There until this worker's heart beats: whoever leaves takes the job away only where nobody is on the way."""
        return f"{self.run_prefix}/here/{self._launch.node_id}/{self._launch.local_rank}"

    _next_store_word = 0.0

    def _wait_for_store(self, why: str) -> None:
        """Between two attempts of the training thread: it can be stopped, and says what it waits for."""
        self._stop.check()
        now = time.monotonic()
        if now > self._next_store_word + WORD_SECONDS:
            if self._next_store_word:
                self._say(f"waiting for etcd, {self._settings.grace:.0f} s at most: {why}")
            self._next_store_word = now

    def local_address(self) -> str:
        return address_towards_any(self._settings.endpoints)

    @property
    def is_first_round(self) -> bool:
        return self.store.get(f"{self.prefix}/start/next") is None

    # --- worlds -------------------------------------------------------------------------------------------------------

    def first_world(self, me: Member) -> World:
        """Wait in the lobby until the job takes this worker in. Blocks as long as others train without it.

        Raises:
            TaskMismatch: this worker's flags, data or versions are not those of the run; names both values.
            JobFinished: the others reached the end meanwhile.
        """
        self._server = GroupStoreServer(me.address[0])
        self._name = me.name
        watcher = Watcher(
            self.store.with_patience(self._watch_seconds, min(ATTEMPT_SECONDS, self._watch_seconds), lambda _why: None),
            self.prefix,
            me,
            self._peer_timeout,
            self.sockets.shut,
            self._errands,
            store_grace=self._settings.grace,
            warn=self._warn,
            give_up=self._give_up,
        )
        me = replace(self._start_watcher(watcher, me), group_store=self._server.address)
        self._enter_lobby(me)
        while True:
            seat = self._wait_for_seat(me)
            world = self._take(seat, me)
            if world is not None:
                self.came_later = seat.generation is not None
                self._dead.update({m.name for m in seat.admission.everyone} - {m.name for m in world.members})
                self._leave_lobby()
                self._enter(world)
                return world

    @property
    def _watch_seconds(self) -> float:
        """What the watcher's calls may take: it must not miss its own heartbeats for long."""
        return max(0.5, min(ATTEMPT_SECONDS, self._peer_timeout / 4))

    def _enter_lobby(self, me: Member) -> None:
        reference = self.published("agreement")
        if reference is not None:
            require_agreement(me.agreement, json.loads(reference), "the run")
        self._waiting = Waiting(me, self._launch.node_id, self._launch.local_world_size)
        self._renew_lobby_lease(self.store)

    def _renew_lobby_lease(self, store: EtcdStore) -> None:
        """Be in the lobby as long as this worker lives, and not much longer."""
        with self._lobby_lock:
            waiting = self._waiting
            if waiting is None or (self._lobby_lease and store.etcd.refresh(self._lobby_lease)):
                return
            lease = store.etcd.grant(max(5.0, self._peer_timeout))
            store.under(lease).put(self._lobby_key, waiting.to_json())
            self._lobby_lease = lease  # not before: a lease without the key would be refreshed for ever

    @property
    def _lobby_key(self) -> str:
        return f"{self.prefix}/lobby/{self._launch.node_id}/{self._launch.local_rank}"

    def _leave_lobby(self) -> None:
        with self._lobby_lock:
            self._waiting = None
            if self._lobby_lease:
                self.store.etcd.revoke(self._lobby_lease)
                self._lobby_lease = 0

    def _wait_for_seat(self, me: Member) -> Seat:
        next_word = time.monotonic() + WORD_SECONDS
        while True:
            self._stop.check()
            self.watcher.do(Activity.FORM)
            if self.published("over") is not None:
                raise JobFinished("the job reached its end while this node waited to be taken in")
            stands = self._standing()
            key, admission = stands.key, stands.admission
            names = [member.name for member in stands.everyone] if admission is not None else []
            if admission is not None and me.name in names:
                return Seat(key, names.index(me.name), admission, stands.generation)
            if admission is not None:
                if self._are_dead(admission.everyone):
                    self.store.create(f"{key}/next", nobody(admission.everyone, stands.generation).to_json())
            elif not stands.members:
                self._consider_start(key)
            elif self._are_dead(stands.members):
                ready = self._without_dead(self._ready_members())
                if me.name in {member.name for member in ready}:
                    self._create_admission(key, Admission(stands.members, ready))
            now = time.monotonic()
            if now > next_word:
                next_word = now + 3 * WORD_SECONDS
                self._say(self._describe_waiting(stands))
            self.store.wait_for_change(0.05)

    def _describe_waiting(self, stands: Standing) -> str:
        settings = self._settings
        if not stands.members:
            num_ready = len(ready_nodes(self._waiting_workers(), ()))
            return f"waiting for nodes: {num_ready} of at least {settings.min_nodes} are ready"
        nodes = len({member.node for member in stands.members})
        return f"waiting to be taken in: {nodes} of at most {settings.max_nodes} nodes train"

    def _take(self, seat: Seat, me: Member) -> World | None:
        """Meet the members of the world that takes this worker in; None if they went on without it after all.

        Raises:
            TaskMismatch: because its flags, data or versions are others.
        """
        everyone, size = seat.admission.everyone, len(seat.admission.present)
        # Where those who train are all dead, nobody else says how far the generations have come.
        seen = [generation for generation in (seat.generation, me.max_generation) if generation is not None]
        me = replace(me, max_generation=max(seen, default=None))
        self.watcher.observe(everyone)
        joined: dict[int, Member] = {}

        def sight(rank: int) -> Sight:
            member = everyone[rank]
            # Of those who train a newcomer believes nothing but their hearts: perhaps only it cannot reach them.
            if rank < size:
                return Sight.DEAD if self.watcher.age(member) > self._peer_timeout else Sight.ALIVE
            return self.watcher.sight(member, rank, patience_is_over=False)

        def fits(first: Member, other: Member) -> bool:
            return disagreement(first.agreement, other.agreement) is None

        meeting = meet(self.store, seat.key, seat.rank, len(everyone), me, sight, fits, joined)
        decision, _ = self._drive(meeting, math.inf)
        world = world_of(decision, joined, seat.rank, self._max_world_size)
        first = joined.get(decision.ranks[0]) if decision.ranks else None
        if world is None and first is not None:
            require_agreement(me.agreement, first.agreement, first.name)
        return world

    def _check_fatal(self) -> None:
        super()._check_fatal()
        if self._world is None and self.published("over") is not None:
            raise JobFinished("the job reached its end while this node was about to be taken in")

    def next_world(self, world: World, *, has_formed: bool) -> tuple[World, Change]:
        following, change = super().next_world(world, has_formed=has_formed)
        self._dead.update(member.name for member in (*change.lost, *change.left))
        self._dead -= {member.name for member in following.members}  # a container's second life has its name
        return following, change

    def _renew_store(self) -> None:
        """Connections to etcd renew themselves. What the watcher has waited for etcd counts for this thread too."""
        if not self.watcher.is_store_silent:
            return
        silence = self.watcher.store_silence
        left = max(0.5, self._settings.grace - silence)
        try:
            self.store.with_patience(left, min(ATTEMPT_SECONDS, left), self._wait_for_store).etcd.get(self._key)
        except StoreUnreachable as error:
            raise StoreUnreachable(f"{error}, after {silence:.0f} s without an answer") from error
        self.watcher.note_answer()

    def _members_to_take_in(self, world: World) -> tuple[Member, ...]:
        standing = self._create_admission(self._key, Admission(world.members, ()))
        if [member.name for member in standing.present] != [member.name for member in world.members]:
            raise LeftOut("those who waited to be taken in took every member of this world for dead")
        return standing.new

    def can_take_in(self, world: World) -> bool:
        self._consider_admission(world, self.store)
        return self.is_join_due

    @property
    def is_join_due(self) -> bool:
        """Whether the next world takes members in; an answer for an earlier world does not count."""
        return self._world is not None and self._admitted_after == self._world.generation

    def group_store(self) -> Store:
        """At the store of the new rank 0, not in etcd: a process group exchanges addresses in milliseconds there.

        Raises:
            FormationFailed: rank 0 is dead.
        """
        world, server = self._world, self._server
        assert world is not None, "first_world() forms it"
        assert server is not None, "first_world() starts it"
        if world.rank == 0:
            return PrefixStore(self._key, server.store)
        address = world.members[0].group_store
        assert address is not None, "every member of an etcd job has one"
        if probe(address, FORM_TIMEOUT.total_seconds()) is not Probe.ACCEPTED:  # TCPStore would try for seconds
            raise FormationFailed(f"{world.members[0].name} (rank 0) does not answer at {address[0]}:{address[1]}")
        return PrefixStore(self._key, TCPStore(*address, is_master=False, wait_for_workers=False, timeout=FORM_TIMEOUT))

    # --- what the store shows -----------------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        return standing(self.prefix, self._mirror.below(f"{self.prefix}/"))

    def _create_admission(self, key: str, admission: Admission) -> Admission:
        return Admission.from_json(self.store.create(f"{key}/admit", admission.to_json()))

    def _waiting_workers(self) -> list[Waiting]:
        return [Waiting.from_json(text) for _, text in sorted(self._mirror.below(f"{self.prefix}/lobby/").items())]

    def _ready_members(self, present: tuple[Member, ...] = ()) -> tuple[Member, ...]:
        """The workers of as many ready nodes as there is room for beside `present`."""
        nodes = ready_nodes(self._waiting_workers(), {member.name for member in present})
        room = max(0, self._settings.max_nodes - len({member.node for member in present}))
        return tuple(member for node in nodes[:room] for member in node)

    def _without_dead(self, ready: tuple[Member, ...]) -> tuple[Member, ...]:
        """Those of whose nodes nobody has just died. Blocks up to PROBE_SECONDS."""
        return without_nodes_of(refusing(ready), ready)

    def _reachable(self, ready: tuple[Member, ...]) -> tuple[Member, ...]:
        """Those of whose nodes all workers answer: with one behind a firewall no process group can be made, and each
        attempt would cost the others a world. Blocks up to PROBE_SECONDS."""
        found = zip(ready, probe_all(ready), strict=True)
        return without_nodes_of([member for member, answer in found if answer is not Probe.ACCEPTED], ready)

    def _consider_start(self, key: str) -> None:
        members = self._ready_members()
        if len({member.node for member in members}) < self._settings.min_nodes:
            self._enough_since = self._due_since = None
            return
        now = time.monotonic()
        self._enough_since = self._enough_since or now
        if not self._is_start_due(members):
            return
        self._due_since = self._due_since or now
        if members[0].name != self._name and now < self._due_since + TURN_SECONDS:
            return  # written by all at once, a list of hundreds would keep etcd busy for no use
        alive = self._without_dead(members)
        if self._is_start_due(alive):
            self._create_admission(key, Admission((), alive))
        else:
            time.sleep(0.2)  # the dead one's place in the lobby runs out in a while

    def _is_start_due(self, members: tuple[Member, ...]) -> bool:
        assert self._enough_since is not None
        return is_start_due(
            len({member.node for member in members}),
            min_nodes=self._settings.min_nodes,
            max_nodes=self._settings.max_nodes,
            seconds_enough=time.monotonic() - self._enough_since,
            last_call=self._settings.last_call,
        )

    def _are_dead(self, members: tuple[Member, ...]) -> bool:
        """Whether the hearts of all of them stand still, so that those who wait go on without them.

        Somebody who cannot be reached may train on without etcd for as long as its grace lasts.
        """
        if self._observed != members:
            self.watcher.observe(members)
            self._observed = members
        silence = min((self.watcher.age(member) for member in members), default=math.inf) - 1.0
        if silence <= self._peer_timeout:
            return False
        longest = self._settings.grace + NOTICE_SECONDS
        return silence > longest or all(probe(member.address) is Probe.REFUSED for member in members)

    # --- on the watcher's thread --------------------------------------------------------------------------------------

    def _errands(self) -> None:
        """Once a second: keep the leases, see who waits to be taken in, and sweep up behind worlds that are over."""
        store, now = self.watcher.store, time.monotonic()
        assert isinstance(store, EtcdStore)
        if self._is_on_the_way:  # no more: the heart has begun to beat
            store.etcd.delete(self._presence_key)
            self._is_on_the_way = False
        if now >= self._next_keep:
            self._job.keep(store.etcd)
            self._renew_lobby_lease(store)
            self._next_keep = now + min(self._job.lease_seconds / 4, self._peer_timeout / 3, 5.0)
        world = self._world
        if world is None or not self.watcher.is_spokesman:
            return
        self._consider_admission(world, store)
        self._forget_dead(store)
        if self._swept < world.generation - 2:
            for part in ("join/", "left/", "ready/", "admit"):
                store.delete_prefix(f"{self.prefix}/world-{world.generation - 2}/{part}")
            self._swept = world.generation - 2

    def _forget_dead(self, store: EtcdStore) -> None:
        for name in tuple(self._dead):
            store.etcd.delete(f"{self.prefix}/beat/{name}")
            self._dead.discard(name)

    def _consider_admission(self, world: World, store: EtcdStore) -> None:
        """Decide whom the next world takes in, when somebody is ready; from then on the training thread knows."""
        key = self._key_of(world)  # not self._key: the training thread may be a world further
        text = store.get(f"{key}/admit")
        if text is None:
            ready = self._ready_members(world.members)
            names, now = tuple(member.name for member in ready), time.monotonic()
            if names != self._ready[0]:
                self._ready = (names, now)
            if not ready or now - self._ready[1] < SETTLE_SECONDS:
                return
            ready = self._reachable(ready)
            if not ready:
                return
            text = store.create(f"{key}/admit", Admission(world.members, ready).to_json())
        if Admission.from_json(text).new:
            self._admitted_after = world.generation

    # --- the end ------------------------------------------------------------------------------------------------------

    def _last_words(self) -> EtcdStore:
        """As Membership's; it waits for no long answer, and is not stopped by the stop that it tells of."""
        return self.store.with_patience(CLOSE_SECONDS, CLOSE_SECONDS / 2, lambda _why: None)

    def leave(self, world: World, reason: str) -> None:
        try:
            super().leave(world, reason)
        except StoreUnreachable as error:  # then the others lose it as a peer
            self._warn(f"{error}; the others are not told that this worker leaves")

    def release_agents(self, world: World) -> None:
        """At the end of training: tell those who wait in the lobby. No agent waits for another one here."""
        if world.rank == 0:
            store = self._last_words()
            self._forget_dead(store)
            store.put(f"{self.run_prefix}/over", "finished")

    def close(self) -> None:
        """Leave nothing behind: the last one out takes the job away. Not long where etcd does not answer."""
        super().close()
        store = self._last_words()
        with suppress(StoreUnreachable, StoreRefused, LeftOut):
            if self._lobby_lease:
                store.etcd.revoke(self._lobby_lease)
            if self._name is not None:
                store.etcd.delete(f"{self.prefix}/beat/{self._name}")
            self._forget_dead(store)  # one that died in this very second
            store.etcd.delete(self._presence_key)
            take_away(store.etcd, self._job, unless_below=(f"{self.run_prefix}/here/", f"{self.prefix}/beat/"))
        self._mirror.close()
        self._connections.close()
