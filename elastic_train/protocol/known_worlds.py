"""A member's knowledge of the worlds whose voters count (those since the last settled one), and the messages among the
members of a world and to its newcomers.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_train.errors import StoreUnreachable
from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import Arbitration
from elastic_train.protocol.join_queue import Waiting, admitted_key
from elastic_train.protocol.laws import Voters
from elastic_train.protocol.store import Clients, KeyValueStore, OwnStore, append, entries
from elastic_train.rules import agreeing, next_generation
from elastic_train.world import Member, World, to_json, value_of

SETTLED_REDUCTIONS = 2
"""reductions after which a member counts its world as settled"""
CARRIED_FACTS = ("job_token", "run_uid", "agreement")
KEPT_DECISIONS = 16
"""worlds before the settled one whose successors a member keeps; of older ones it knows only that they are over"""
FORGOTTEN = "forgotten"
"""key in a member's own store: the newest generation whose successor it has deleted, and the settled generation"""
LEFT = "left"
"""below a world's key: its ranks that leave on purpose"""
RELEASED = "released"
"""key in a member's own store: the number of releases written there, so that a look costs one read if there is none"""
DELETED_AT_ONCE = 100
"""keys deleted in one round: the watcher thread has other tasks"""
_WORLD = re.compile(r"(?:^|/)world-(\d+)-")


def outdated(keys: Iterable[str], settled: int) -> tuple[list[str], int | None]:
    """Return (keys in a member's own store that are not needed once generation `settled` is settled; the newest
    generation of which nothing is kept).

    All keys of the settled world and of the world before it stay. Of KEPT_DECISIONS worlds before the settled one the
    decision and the register stay: a member that wakes up in one of them learns at once what followed. Other votes in
    the ancestors of a settled world are not needed: a late decision there would need members that have gone on.
    """
    generations = {key: int(found[1]) for key in keys if (found := _WORLD.search(key))}
    # Other generations are only marks of a plan that failed.
    were_worlds = {generation for key, generation in generations.items() if key.endswith(("/next", "/register"))}
    before = sorted((generation for generation in were_worlds if generation < settled), reverse=True)
    over = {generation for generation in generations.values() if before and generation < before[0]}
    forgotten = before[KEPT_DECISIONS:]
    unneeded = [
        key
        for key, generation in generations.items()
        if generation in forgotten or (generation in over and not key.endswith(("/next", "/register")))
    ]
    return unneeded, max(forgotten, default=None)


class OldKeys:
    """The keys that past worlds have left in a member's own store; deleted bit by bit on the watcher thread."""

    def __init__(self, own: OwnStore) -> None:
        self._own = own
        self._settled: list[int] = []
        """generations, ascending"""
        self._num_listed = 2
        """how many of `_settled` are handled; nothing is old before the third"""
        self._keys: list[str] = []

    def note_settled(self, world: World) -> None:
        """Note that this member has settled `world`, or has heard that it is settled. From one thread at a time."""
        if not self._settled or world.generation > self._settled[-1]:
            self._settled.append(world.generation)

    def tend(self) -> None:
        """Delete some of the keys."""
        num_settled = len(self._settled)
        if num_settled > self._num_listed:
            keys, settled = self._own.keys(), self._settled[num_settled - 1]
            found, forgotten = outdated(keys, settled)
            if forgotten is not None:
                self._own.put(FORGOTTEN, json.dumps([forgotten, settled]))
            self._keys, self._num_listed = list(found), num_settled
        for key in self._keys[:DELETED_AT_ONCE]:
            self._own.delete(key)
        del self._keys[:DELETED_AT_ONCE]


class KnownWorlds:
    """One member's knowledge of the worlds since the last settled one.

    For the training thread and the thread that prepares a join. A lock guards `voters` and `past`: both threads change
    them.

    Args:
        own: this member's own store, into which other members write that they are released as voters.
    """

    def __init__(self, own: OwnStore) -> None:
        self._own = own
        self.old_keys = OldKeys(own)
        self._lock = threading.Lock()
        self._heard_released: tuple[str | None, frozenset[str]] = (None, frozenset())
        """(value of RELEASED, uids that the keys named then); read and replaced as one"""
        self.voters: tuple[Voters, ...] = ()
        """of each of these worlds, the present one last"""
        self.has_state = False
        """whether a world was settled, as far as this member knows: then the members of the first one have the state"""
        self.bound: frozenset[str] = frozenset()
        """uids of voters that have accepted the present world, though they may not be in it"""
        self.past: Mapping[str, World] = {}
        """worlds that this member has been in since the last settled one, by uid, with the present one; never changed
        in place, since the other thread reads it"""

    def enter(self, world: World, decision: Decision | None) -> None:
        """Add `world`, which this member has adopted by `decision`; a newcomer (None) has its voters already."""
        with self._lock:
            if decision is not None:
                kept = tuple(one.without(decision.dead) for one in self.voters)
                self.voters = (*kept, Voters.of(world.uid, world.members, world.world_size))
            self.past = {**self.past, world.uid: world}

    def note_settled(self, world: str) -> None:
        """Note that another member has settled the world of this uid: that counts for all. A spare has no other way."""
        with self._lock:
            uids = [voters.world for voters in self.voters]
            if world not in uids:
                return
            self.voters = self.voters[uids.index(world) :]
            past = list(self.past)
            if world in past[1:]:
                self.old_keys.note_settled(self.past[world])
                self.past = {uid: self.past[uid] for uid in past[past.index(world) :]}

    def settle(self, world: World) -> None:
        """Note that this member has settled `world`, the present one."""
        with self._lock:
            self.voters, self.bound, self.past = self.voters[-1:], frozenset(), {world.uid: world}
            self.old_keys.note_settled(world)
        self.has_state = True

    def voters_without(
        self, dead: Collection[str], members: Sequence[Member] = (), queue: Callable[[], Sequence[Waiting]] = list
    ) -> list[Voters]:
        """Return the voters without the votes of the dead, without released votes, and without those that these members
        of the present world, or workers in the join queue, had before. Reads `queue` only if there may be such ones."""
        gone = {*dead, *self._released()}
        if len(self.voters) > 1:  # who was left out by the only one of these worlds has no vote in it
            gone |= self.given_up((*members, *(one.member for one in queue())))
        return [one.without(gone) for one in self.voters]

    def holders(self, dead: Collection[str]) -> set[str]:
        """Return the members of the last settled world that are not known to be dead."""
        first = self.voters[0]  # read once: the other thread may settle a world
        return set(first.members) - first.dead - set(dead)

    def holders_outside(
        self, world: World, after: Sequence[Member], dead: Collection[str], holding: Collection[str], has_ended: bool
    ) -> set[str]:
        """Return the uids of those that may have the state and are not in `after`; none if one of these has it.

        If no member of the last settled world is there, any member of a later one may have got the state from it. What
        a member had that was left out is there if it is back: it has saved that, though others may have a newer state.

        Args:
            after: the members that would follow those of `world`. Spares, the last of them, hand over no state.
            holding: uids of members that are known to have the state.
            has_ended: whether all members of the last settled world have: then no heir in `world` is waited for.
        """
        inside, holders = {member.uid for member in after}, self.holders(dead) | set(holding)
        if holders & inside:
            return set()
        heirs = {uid for voters in self.voters for uid in voters.members if uid not in voters.dead}
        heirs -= {*dead, *self._released(), *(world.uids if has_ended else ())}
        awaited = holders | heirs if holders or self.has_state else set()
        return awaited - inside - self.given_up(after[: world.max_world_size])

    def given_up(self, members: Iterable[Member]) -> set[str]:
        """Return the uids that these newcomers had as members which worlds since the last settled one left out: so they
        have given up their votes before those worlds, in which no other member may have heard it."""
        worlds = {voters.world for voters in self.voters}
        return {uid for member in members for uid, left_out_by in member.was if left_out_by in worlds}

    def left_out(self, world: World) -> set[str]:
        """Return the members of earlier worlds that may train on without knowing of this one."""
        inside = {member.uid for member in world.members} | self._released()
        # All members, not only voters: a death that any member proves in time counts for its side.
        before = {uid for voters in self.voters[:-1] for uid in voters.members if uid not in voters.dead}
        return before - inside - self.bound

    def _released(self) -> frozenset[str]:
        """Return the members that have released their votes, as long as this store keeps the keys of their world."""
        count = self._own.get(RELEASED)
        if count != self._heard_released[0]:
            keys = self._own.keys()
            self._heard_released = count, frozenset(key.rpartition("/")[2] for key in keys if f"/{RELEASED}/" in key)
        return self._heard_released[1]


def announce_release(store: KeyValueStore, world: World) -> None:
    """Write into the store of another member that this member of `world` is no voter any more: it is in none of the
    worlds that follow. Blocks as a store does. Raises: StoreUnreachable."""
    store.put(f"{world.key}/{RELEASED}/{world.me.uid}", "told")
    store.add(RELEASED, 1)  # last: a reader that sees the new count finds the key


@dataclass(frozen=True)
class Admitted:
    """The admission of a newcomer to a world."""

    world: World
    facts: Mapping[str, str]
    came_later: bool
    """whether other members trained before"""


class Newcomers:
    """The messages to newcomers about their world, and about the worlds before it that count.

    For the training thread. The thread that prepares a join may call `message_for` and `notify` too, and any thread
    `repeat_message`.

    Args:
        clients: for the training thread.
    """

    def __init__(
        self,
        clients: Clients,
        known: KnownWorlds,
        arbitration: Arbitration,
        max_world_size: int | None,
        draw_uid: Callable[[], str],
    ) -> None:
        self._own, self._clients, self._known, self._arbitration = clients.own, clients, known, arbitration
        self._max_world_size, self._draw_uid = max_world_size, draw_uid
        self.message = ""
        """message of the present world"""

    def take_message(self, text: str, uid: str) -> Admitted:
        """Take over the message to this member, which is a newcomer itself, and return its admission."""
        self.message = text
        told = json.loads(text)
        decision = Decision.from_fields(told["decision"])
        old = value_of(tuple[Member, ...], told["old"])
        world = decision.world_for(uid, World(0, decision.generation - 1, old, self._max_world_size))
        assert world is not None, "only those in it are told"
        self._known.voters = value_of(tuple[Voters, ...], told["worlds"])
        self._arbitration.take_over(told.get("shared", {}))
        self._known.has_state = told.get("settled", False)
        return Admitted(world, decision.facts, came_later=bool(old))

    def begin(self, members: tuple[Member, ...]) -> None:
        """Make the first world of the given members, in the order of rank, and notify them."""
        first = members[0]
        agreement, fitting = agreeing(members, first.agreement)
        facts = {name: text for name in CARRIED_FACTS if (text := self._own.get(f"fact/{name}")) is not None}
        facts.setdefault("agreement", json.dumps(agreement))
        generation = next_generation([one.max_generation for one in fitting])
        decision = Decision(generation, self._draw_uid(), ranks=(), new=fitting, facts=facts)
        self._own.put("begun", decision.uid)
        self._own.put("fact/agreement", facts["agreement"])
        self.message = self.message_for(decision, None)
        self.notify(self._clients, fitting, self.message)
        self._own.put("host", json.dumps(first.store))

    def message_for(self, decision: Decision, world: World | None) -> str:
        """Return the message to the newcomers of the successor of `world`, before this member enters that successor."""
        voters = self._known.voters  # read once, too
        old = () if world is None else decision.members_after(world)[: len(decision.ranks)]
        after = Voters.of(decision.uid, decision.members_after(world), self._max_world_size)
        told = {
            "decision": replace(decision, ranks=tuple(range(len(old)))).to_fields(),
            "old": old,
            "worlds": [*(one.without(decision.dead) for one in voters), after],
            "shared": self._arbitration.known(voters),
            "settled": self._known.has_state,
        }
        return to_json(told)

    def notify(self, clients: Clients, newcomers: Sequence[Member], message: str) -> None:
        """Send the message to each newcomer, or keep it here if its store does not answer; the first message counts."""
        for member in newcomers:
            try:
                clients.of(member).create("admitted", message)
            except StoreUnreachable:  # it may look here, or gets it again from a member that misses it later
                clients.lose(member)
                self._own.put(admitted_key(member.uid), message)

    def repeat_message(self, world: World | None, waiting: Iterable[Waiting]) -> list[Member]:
        """Keep the message for workers that wait in the queue here though they are in `world`: no message has reached
        them, for example because they were frozen. They read this store. Return them. On any thread."""
        inside, message = {member.uid for member in world.members} if world is not None else set(), self.message
        missed = [one.member for one in waiting if one.member.uid in inside]
        if not missed or world is None or not message or json.loads(message)["decision"]["uid"] != world.uid:
            return []  # the training thread has entered the next world, to which the message belongs
        for member in missed:
            self._own.put(admitted_key(member.uid), message)
        return missed


def announced_key(name: str) -> str:
    """Return the key of what was announced to all members under a name."""
    return f"job/{name}"


class Announcements:
    """The messages that members of a world write to, and read from, the stores of other members; for the training
    thread. What a member writes or reads in its own store needs no help from here.
    """

    def __init__(self, clients: Clients, known: KnownWorlds, newcomers: Newcomers) -> None:
        self._clients, self._known, self._newcomers = clients, known, newcomers

    def present(self, world: World, ranks: Sequence[int]) -> dict[int, str]:
        """Return the reports (`PeerJob.announce_presence`) of the present among `ranks`; admit missed newcomers."""

        def ask(store: KeyValueStore) -> str | None:
            text, settled = store.get_many([f"{world.key}/present", "settled"])
            if settled:
                self._known.has_state = True
                self._known.note_settled(json.loads(settled)[1])
            if text is None and store.get("begun") != world.uid:
                store.create("admitted", self._newcomers.message)  # it may be a newcomer without a message
            return text

        return {rank: text for rank, text in self._clients.ask_each(world, ranks, ask).items() if text is not None}

    def announce(self, world: World, name: str, text: str) -> None:
        """Send a text of the job to every member of `world` that can be reached; the first text under a name counts."""
        self._send(world, lambda store: store.create(announced_key(name), text))

    def announce_leaving(self, world: World) -> None:
        """Tell every member of `world` that can be reached that this one leaves on purpose."""
        self._send(world, lambda store: append(store, f"{world.key}/{LEFT}", str(world.rank)))

    def _send(self, world: World, write: Callable[[KeyValueStore], object]) -> None:
        self._clients.ask_each(world, range(len(world.members)), write)

    def announce_ready(self, world: World) -> None:
        """Report at rank 0 that this member is about to make the process group of `world`; each call counts. Raises:
        StoreUnreachable."""
        append(self._clients.of_first(world), f"{world.key}/ready", str(world.rank))

    def are_ready(self, world: World) -> bool:
        """Return whether all workers of `world` are ready. Raises: StoreUnreachable."""
        number = self._clients.ask(world.members[0], lambda store: store.get(f"{world.key}/ready/count"))
        return int(number or 0) >= world.world_size

    def not_ready(self, world: World) -> tuple[int, ...]:
        """Return the ranks that are not ready, for a message. Raises: StoreUnreachable."""
        ready = set(map(int, self._clients.ask(world.members[0], lambda store: entries(store, f"{world.key}/ready"))))
        return tuple(rank for rank in range(world.world_size) if rank not in ready)
