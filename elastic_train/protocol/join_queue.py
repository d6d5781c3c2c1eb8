"""How a worker enters a job: it finds the members and stands in the join queue, or it begins the job.

A worker enters the queue when it is ready: it has imported, built its model and read its data. A node is ready when all
its workers are ready, and it is admitted with all of them or not at all. If one worker of a node was left out, it comes
back to the workers of that node that train on.

Each worker serves a store. The queue is in the store of rank 0. Before the first world it is in the store of the
**beginner**, the process that serves the first endpoint. The key `host` of each store has the address of the queue's
store, as far as that worker knows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastic_train.errors import FormationFailed, StoreUnreachable
from elastic_train.protocol.finder import Finder, Size
from elastic_train.protocol.known_job import MOST_KNOWN, KnownJob, Probes
from elastic_train.protocol.store import Clients, KeyValueStore, stores_in
from elastic_train.rules import disagreement
from elastic_train.world import Address, Member, World, from_json, to_json


@dataclass(frozen=True)
class Waiting:
    """A worker in the join queue."""

    member: Member
    local_world_size: int
    """number of workers of its node"""
    order: int = 0
    """its rank, if a launcher has given one"""

    def to_json(self) -> str:
        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Waiting | None:
        """Return None if another version of this package has written the text."""
        try:
            return from_json(Waiting, text)
        except (ValueError, KeyError, TypeError):
            return None


def ready_nodes(waiting: Iterable[Waiting], inside: Collection[Member]) -> list[tuple[Member, ...]]:
    """Return the nodes of which each worker waits or is a member already, in the order of `waiting`. A node is the
    tuple of its waiting workers, by local rank.

    Args:
        inside: the members of the present world. They may still stand in the queue.
    """
    uids = {member.uid for member in inside}
    nodes: dict[object, dict[int, Waiting]] = {}
    for one in waiting:
        if one.member.uid not in uids:
            nodes.setdefault(one.member.node, {})[one.member.local_rank] = one
    there: dict[object, set[int]] = {}
    for member in inside:
        there.setdefault(member.node, set()).add(member.local_rank)
    return [
        tuple(workers[local_rank].member for local_rank in sorted(workers))
        for node, workers in nodes.items()
        if len(workers.keys() | there.get(node, set())) == next(iter(workers.values())).local_world_size
    ]


def fitting_nodes(nodes: Iterable[tuple[Member, ...]], agreement: str | None) -> list[tuple[Member, ...]]:
    """Return the nodes whose workers are all compatible with the job's fingerprint (JSON); all nodes if it has none."""
    reference = None if agreement is None else json.loads(agreement)
    if reference is None:
        return list(nodes)
    return [node for node in nodes if all(disagreement(one.agreement, reference) is None for one in node)]


def without_nodes_of(gone: Iterable[Member], members: Sequence[Member]) -> tuple[Member, ...]:
    """Return the `members` whose nodes have lost no worker: a node takes part with all of its workers or not at all."""
    nodes = {member.node for member in gone}
    return tuple(member for member in members if member.node not in nodes)


def by_newest(nodes: Sequence[tuple[Member, ...]]) -> list[tuple[Member, ...]]:
    """Return the nodes in the order of a first world: those whose newest snapshot has most steps lead it, and are no
    spares. Generations only break ties, for nodes that were apart have counted them apart."""

    def furthest(node: tuple[Member, ...]) -> tuple[int, int]:
        return max((member.newest or (-1, -1))[::-1] for member in node)

    return sorted(nodes, key=furthest, reverse=True)


def stores_by_node(world: World) -> list[Address]:
    """Return the stores of the first member of each node, by rank."""
    firsts = {member.node: member.store for member in reversed(world.members)}
    return [store for store in reversed(firsts.values()) if store]


def is_start_due(num_ready: int, *, min_nodes: int, max_nodes: int, seconds_enough: float, last_call: float) -> bool:
    """Return whether the first world is to form now.

    Args:
        seconds_enough: for how long at least `min_nodes` have been ready.
        last_call: how many seconds the beginner waits for more nodes after that.
    """
    return num_ready >= max_nodes or (num_ready >= min_nodes and seconds_enough >= last_call)


UNCALLED_SECONDS = 2.0
"""that the beginner waits for the sign of a running job, whose rank 0 looks at the endpoints twice a second"""
QUEUE_AGAIN_SECONDS = 3.0
"""after which a newcomer enters the queue again: the host may have dropped it for a lost probe"""
MOST_FOLLOWED = 2 * MOST_KNOWN
"""stores that a newcomer asks in one search for the queue; a silent one takes half a second"""
CHECK_SECONDS = 0.3
"""between two questions of a newcomer to the host of its queue"""


@dataclass
class _Host:
    """The worker whose store has the queue in which this newcomer stands."""

    address: Address
    store: KeyValueStore
    checked_at: float
    queued_at: float | None = None
    rests: bool = False
    """whether its members have yet to agree on a world, or it begins none because another job may run"""


class Entrance:
    """One worker's way into the job, and the join queue while this worker hosts it.

    Args:
        begin: makes the first world of the given members, in the order of their ranks.
        refused: returns the members that are gone, by one probe each.
        probe_all: probes addresses, as `probes.probe_all`.
        knows: stores of members of the job that this worker was in before.
    """

    def __init__(
        self,
        clients: Clients,
        address: Address,
        finder: Finder,
        size: Size,
        *,
        run_id: str,
        refused: Callable[[Sequence[Member]], list[Member]],
        begin: Callable[[tuple[Member, ...]], None],
        clock: Callable[[], float],
        probe_all: Probes,
        knows: Sequence[Address] = (),
    ) -> None:
        self._clients, self._own, self._address = clients, clients.own, address
        self._finder, self._size, self._run_id = finder, size, run_id
        self.refused, self._begin, self._clock, self._probe_all = refused, begin, clock, probe_all
        self._known = KnownJob(tuple(knows[:MOST_KNOWN]), clock()) if knows else None
        self._judged_at, self.holds_back = -math.inf, False
        """when this worker last checked whether the job that it knows may run; whether it begins none because of it"""
        self._host: _Host | None = None
        self._beginner_since: float | None = None
        self._enough_since: float | None = None
        self._num_seen = 0
        self._missing: dict[int, float] = {}
        """numbers up to `_num_seen` whose entry is not written yet, each with the time until which it is awaited"""
        self._queue: dict[str, Waiting] = {}
        self.is_first = True
        """whether there was no world in the job whose queue this worker found, as far as it knows"""

    @property
    def host_store(self) -> KeyValueStore | None:
        """The store of the host of the queue; None if no host is known."""
        return None if self._host is None else self._host.store

    def find(self) -> bool:
        """Look once for the host of the queue, or become the host. Return whether there is one.

        Raises: ElasticTrainError if there never will be.
        """
        if self._host is not None or self._find_other():
            return True
        if self._finder.is_beginner():
            self._own.put("host", json.dumps(self._address))
            self._host = _Host(self._address, self._own, self._clock())
            self._beginner_since = self._clock()
            self._finder.show([self._address, *(() if self._known is None else self._known.stores)], "")
            return True
        return False

    def _find_other(self) -> bool:
        """Look for a host other than this process, by the signs, and adopt it. Return whether there is one. A host that
        `rests` is adopted only if there is no other: its members may never agree, while another side trains."""
        resting: list[_Host] = []
        for address in self._finder.addresses()[:MOST_FOLLOWED]:
            with suppress(StoreUnreachable):
                found = self._follow(address)
                if found is not None and not found.rests:
                    return self._go_to(found)
                resting += [found] if found else []
        with suppress(StoreUnreachable):
            return bool(resting) and self._go_to(resting[0])
        return False

    def _go_to(self, found: _Host) -> bool:
        begun, members = found.store.get_many(["begun", "members"])
        if self._host is None or self._host.address != found.address:
            self.forget_host()
            self._host = found
        self.is_first = begun is None
        if begun is not None:
            self._note_job([found.address] if members is None else stores_in(members))
        return True

    def _note_job(self, stores: Sequence[Address]) -> None:
        self._known, self._judged_at = KnownJob(tuple(stores[:MOST_KNOWN]), self._clock()), -math.inf

    def _follow(self, address: Address) -> _Host | None:
        """Return the host that the store at `address` names, if the host's own store names it as well and it is not
        this process. Raises: StoreUnreachable if one of the two does not answer."""
        for _ in range(2):
            if address == self._address:
                return None
            text, run_id, rests = self._clients.ask(address, lambda store: store.get_many(["host", "run_id", "rests"]))
            if not text or run_id != self._run_id:
                return None
            named = address_of(text)
            if named == address:
                return _Host(address, self._clients.at(address), self._clock(), rests=bool(rests))
            address = named
        return None

    def look(self, mine: Waiting) -> str:
        """Stand in the queue; begin the job if this worker may. Return what it waits for. Blocks for short timeouts."""
        host, now = self._host, self._clock()
        if host is not None and now >= host.checked_at + CHECK_SECONDS:
            host.checked_at = now
            try:
                keys = ["host", admitted_key(mine.member.uid), "members", "rests", "over"]
                text, told, members, rests, over = host.store.get_many(keys)
                is_host, host.rests = bool(text) and address_of(text or "") == host.address, bool(rests)
                if told is not None:
                    self._own.create("admitted", told)
                if members is not None:
                    self.is_first = False
                    self._note_job(stores_in(members))
                if over is not None:  # the host tells each newcomer only once, which may have failed
                    self._own.put("over", over)
            except StoreUnreachable:
                is_host = False
            if not is_host:
                self.forget_host()
            elif self._beginner_since is not None and not self._find_other() and not self._finder.is_beginner():
                self.forget_host()  # a running job has left its sign, and cannot be reached
        if not self.find():
            return f"waiting for the job at {self._finder.describe()}"
        self._enqueue(mine)
        if self._beginner_since is not None:
            self._consider_beginning()
        return self._describe()

    def host_meanwhile(self, headless: World, present: Callable[[], World | None]) -> None:
        """Host the queue until there is another rank 0, which may take long: a node that comes back must not begin."""
        self._own.put("host", json.dumps(headless.me.store))
        shown = headless
        while (world := present()) is not None and world is not shown:
            shown = world  # the training thread has entered it meanwhile, and may have put its host before
            self._own.put("host", json.dumps(world.members[0].store))

    def forget_host(self) -> None:
        """Forget the host: its store does not answer, or has the queue no more."""
        self._host = self._beginner_since = self._enough_since = None
        self._own.put("host", "")

    def _enqueue(self, mine: Waiting) -> None:
        assert self._host is not None, "found"
        now = self._clock()
        if self._host.queued_at is not None:
            if now < self._host.queued_at + QUEUE_AGAIN_SECONDS:
                return
            if self._host.rests:
                self._find_other()
        try:
            number = self._host.store.add("queue/count", 1)
            self._host.store.put(f"queue/{number}", mine.to_json())
            self._host.queued_at = now
        except StoreUnreachable:
            self._clients.lose(self._host.address)
            self.forget_host()

    def leave(self) -> None:
        """Leave the queue: this worker has a world, or ends."""
        self._host = self._beginner_since = None

    def queue(self) -> list[Waiting]:
        """Return the workers in the queue that this member hosts."""
        count, now = int(self._own.get("queue/count") or "0"), self._clock()
        for number in range(self._num_seen + 1, count + 1):
            self._missing[number] = now + QUEUE_AGAIN_SECONDS
        self._num_seen = count
        numbers = list(self._missing)
        for number, text in zip(numbers, self._own.get_many([f"queue/{n}" for n in numbers]), strict=True):
            if text is not None:
                waiting = Waiting.from_json(text)
                if waiting is not None:  # else that worker learns from the fingerprint that it is of another version
                    self._queue[waiting.member.uid] = waiting
                self._own.delete(f"queue/{number}")
            elif now <= self._missing.get(number, now):  # its newcomer may still write it; later it has queued again
                continue
            self._missing.pop(number, None)  # another thread may have removed it
        return list(self._queue.values())

    def drop(self, members: Sequence[Member]) -> None:
        """Remove members from the queue: they are gone, or in a world."""
        for member in members:
            self._queue.pop(member.uid, None)

    def _describe(self) -> str:
        if self._host is None or self._beginner_since is None:
            return "waiting to be admitted"
        if self.holds_back:
            return "waiting for a sign of the job that this node knows of: it may train on"
        num_ready = len(ready_nodes(self._queue.values(), ()))
        return f"waiting for nodes: {num_ready} of at least {self._size.min_nodes} are ready"

    def _consider_beginning(self) -> None:
        size, now = self._size, self._clock()
        assert self._beginner_since is not None, "asked by the beginner"
        waiting = sorted(self.queue(), key=lambda one: one.order)
        if size.fixed is not None:
            if {one.order for one in waiting} != set(range(size.fixed)):
                return
        else:
            nodes = len(ready_nodes(waiting, ()))
            if nodes < size.min_nodes:
                self._enough_since = None
                if now - self._beginner_since > size.join_timeout:
                    raise FormationFailed(
                        f"{nodes} of at least {size.min_nodes} nodes came within {size.join_timeout:.0f} s (--nnodes, "
                        "--rdzv-conf join_timeout)"
                    )
                return
            self._enough_since = now if self._enough_since is None else self._enough_since
            seconds = now - self._enough_since
            if now - self._beginner_since < UNCALLED_SECONDS or not is_start_due(
                nodes, min_nodes=size.min_nodes, max_nodes=size.max_nodes, seconds_enough=seconds,
                last_call=size.last_call,
            ) or self._may_another_run():  # fmt: skip
                return
        if size.fixed is None:
            found = by_newest(ready_nodes(waiting, ()))[: size.max_nodes]
        else:  # these workers may know nothing but their ranks
            found = by_newest([(one.member,) for one in waiting])
        members = tuple(member for node in found for member in node)
        gone = self.refused(members)
        if gone:
            self.drop(gone)
            return
        if self._may_another_run() if size.fixed is None else len(members) > size.fixed:
            return  # a running job has called meanwhile; or two workers have one rank, and one is of another world
        self._begin(members)
        self.drop(members)

    def _may_another_run(self) -> bool:
        """Return whether a job may run that this worker was in, has waited for, or has a sign of at this moment."""
        now = self._clock()
        try:
            called_by = self._finder.called_by()[:MOST_KNOWN]
        except StoreUnreachable:
            return True  # there may be a sign
        if called_by and (self._known is None or self._known.stores != tuple(called_by)):
            self._note_job(called_by)
        known = self._known
        if known is not None and now >= self._judged_at + CHECK_SECONDS:
            gone = known.is_gone(self._clients, self._run_id, self._probe_all, now, self._size.silence)
            self.holds_back = not gone
            self._judged_at = self._clock()
        return self.holds_back


def admitted_key(uid: str) -> str:
    """Return the key of a newcomer's first world, in the store of a member that could not reach it."""
    return f"admitted/{uid}"


def address_of(text: str) -> Address:
    """Return the address in a value of the key `host`."""
    host, port = json.loads(text)
    return str(host), int(port)
