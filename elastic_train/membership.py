"""One worker's part in the membership of its job: it connects, meets the others, watches them, and leaves.

Under c10d, and wherever torchrun's agents say who takes part; etcd_membership.py is the form for etcd. The store is the
TCPStore at torchrun's rendezvous endpoint, never MASTER_ADDR's, which dies with the node of rank 0 and can be stale
after a change of membership. Where there is no such endpoint (static rendezvous, `--standalone`, no torchrun),
MASTER_ADDR's or a store inside the process serves.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from elastic_train.agents import Agents
from elastic_train.agents_state import agents_key
from elastic_train.errors import FormationFailed, LeftOut, StoreUnreachable, first_line
from elastic_train.liveness import Probe, Watcher, announce_broken, probe, unreachable_members
from elastic_train.meeting import Decision, Sight, meet, world_of
from elastic_train.process_group import GroupSockets, address_towards
from elastic_train.rules import Failure, disagreement, judge_error, require_agreement
from elastic_train.stopping import StopSignal
from elastic_train.store import KeyValueStore, TorchStore, connect
from elastic_train.torchrun import Launch, split_endpoint, torchrun_round
from elastic_train.world import Member, World

POLL_SECONDS = 0.003
STORE_TIMEOUT = timedelta(seconds=10)
SPARE_POLL_SECONDS = 0.01
"""between two looks of a spare; a part of what a recovery takes that waits for it"""
JOIN_SIGNAL_SECONDS = 5.0
"""how long after a join showed the agents' SIGTERM may take; they look once a second"""
WORD_SECONDS = 10.0
"""between two words to the person who waits with us"""
AT_LAST_SECONDS = 120.0
"""for saving the state of a worker that is about to be ended"""
CLOSED_SECONDS = 15.0
"""how long a closed rendezvous is given to show that a missing worker comes after all"""


@dataclass(frozen=True)
class Change:
    """How one world became the next."""

    lost: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    joined: tuple[Member, ...] = ()
    """taken in without a restart"""
    reason: str | None = None
    """why the world ended, where a watcher ended it"""
    seconds_meet: float = 0.0


class Membership:
    """Created once per worker. Its methods are for the training thread; they block as they say.

    Args:
        formation_timeout: seconds that the first world waits for all of its members, imports included.
        peer_timeout: seconds of silence after which a member is taken for dead.
        max_world_size: how many members a step has work for; further ones are spares. The same on all members.
        say: tells the person in front of this node what is being waited for.
        warn: tells, and notes in the run's events, what is not as it should be.
    """

    def __init__(
        self,
        launch: Launch,
        stop: StopSignal,
        *,
        formation_timeout: float,
        peer_timeout: float,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        max_world_size: int | None = None,
    ) -> None:
        self._launch = launch
        self._max_world_size = max_world_size
        self._say = say
        self._warn = warn
        self._stop = stop
        self._formation_timeout = formation_timeout
        self._peer_timeout = peer_timeout
        self.sockets = GroupSockets()
        self.run_prefix = f"elastic_train/{launch.run_id}"
        """prefix of the keys that outlive a round: those of the job"""
        self.store, self.round = self._connect()
        self.agents = Agents(launch, self.round)
        self.prefix = f"{self.run_prefix}/round-{self.round}"
        self._key = f"{self.prefix}/start"
        """prefix of the keys of the present world, or of the first meeting"""
        self._watcher: Watcher | None = None
        self._is_through = False
        self._world: World | None = None
        self.at_last: Callable[[], str] = lambda: "there is nothing to save"
        """called before the process ends without its training thread; returns what a person should know then"""
        self.came_later = False
        """whether others of this job trained before this worker was taken in, with no restart of all in between"""

    # --- the store ----------------------------------------------------------------------------------------------------

    def _connect(self) -> tuple[KeyValueStore, str]:
        """The store for the training thread, and the torchrun round that this worker is of."""
        launch = self._launch
        if launch.endpoint is None and launch.world_size == 1 and launch.agent_pid is None:
            return TorchStore(HashStore(), STORE_TIMEOUT), "0"
        if launch.endpoint is not None:
            host, port = split_endpoint(launch.endpoint)
            store = TorchStore(self._tcp_store(host, port, is_master=False), STORE_TIMEOUT)
            return store, str(self._wait_for_round(store))
        if launch.master is None:
            raise StoreUnreachable("neither a rendezvous endpoint nor MASTER_ADDR is known: give --store-endpoint")
        host, port = launch.master
        is_master = launch.rank == 0 and not launch.is_agent_store
        store = TorchStore(self._tcp_store(host, port, is_master=is_master), STORE_TIMEOUT)
        return store, f"restart-{launch.restart_count}"

    def _tcp_store(self, host: str, port: int, is_master: bool) -> Store:
        if not is_master:
            self._wait_for_listener(host, port)
        timeout = timedelta(seconds=self._formation_timeout)
        making = connect(lambda: TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout))
        deadline = time.monotonic() + self._formation_timeout + 5.0
        result: Store | RuntimeError | None = None
        while result is None:
            self._stop.check()
            if time.monotonic() > deadline:
                raise StoreUnreachable(
                    f"something at {host}:{port} accepts connections and does not answer like a rendezvous store; "
                    "check the address, or give --store-endpoint HOST:PORT"
                )
            with suppress(queue.Empty):
                result = making.get(timeout=0.1)
        if isinstance(result, RuntimeError):
            verb = "serve" if is_master else "reach"
            raise StoreUnreachable(
                f"cannot {verb} the rendezvous store at {host}:{port}: {first_line(result)}; "
                f"check the address, or give --store-endpoint HOST:PORT"
            ) from result
        return result

    def _wait_for_listener(self, host: str, port: int) -> None:
        """Until something accepts connections there. Where nothing does, TCPStore tries on beyond its own deadline, on
        a thread that ends the process with an abort when it gives up while Python exits."""
        deadline = time.monotonic() + self._formation_timeout
        while True:
            self._stop.check()
            try:
                with socket.create_connection((host, port), timeout=1.0):
                    return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise StoreUnreachable(
                        f"cannot reach the rendezvous store at {host}:{port}: {error.strerror or error}; "
                        "check the address, or give --store-endpoint HOST:PORT"
                    ) from error
            time.sleep(0.2)

    def _wait_for_round(self, store: TorchStore) -> int:
        deadline = time.monotonic() + self._formation_timeout
        while True:
            encoded = store.get(agents_key(self._launch.run_id))
            try:
                found = torchrun_round(encoded, self._launch) if encoded is not None else None
            except ValueError as error:
                raise FormationFailed(f"{error}; please report this with your torch version") from error
            if found is not None:
                return found
            self._stop.check()
            if time.monotonic() > deadline:
                raise FormationFailed(
                    f"the rendezvous at {self._launch.endpoint} shows no round with this node after "
                    f"{self._formation_timeout:.0f} s; is the run id {self._launch.run_id!r} used by another job? "
                    "(--rdzv-id gives a job its own)"
                )
            time.sleep(0.02)

    def agreed_once(self, name: str, proposal: str) -> str:
        """The first `proposal` that any member of this job ever made under `name`; all later ones read it."""
        return self.store.create(f"{self.run_prefix}/{name}", proposal)

    def published(self, name: str) -> str | None:
        """What a member of this job has made known with `agreed_once`; None where none has."""
        return self.store.get(f"{self.run_prefix}/{name}")

    @property
    def is_first_round(self) -> bool:
        """Whether no workers of this job have met before these."""
        return self.agreed_once("first_round", self.round) == self.round

    def local_address(self) -> str:
        """The IP address by which other members reach this worker: the one it reaches the store from."""
        if self._launch.endpoint is not None:
            return address_towards(*split_endpoint(self._launch.endpoint))
        if self._launch.master is not None:
            return address_towards(*self._launch.master)
        return "127.0.0.1"

    # --- worlds -------------------------------------------------------------------------------------------------------

    def first_world(self, me: Member) -> World:
        """Meet the other workers of this torchrun round. Blocks until all have come, or are given up.

        Starts the watcher; `me.address` is filled in.

        Raises:
            Refused: this worker's flags, data or versions are not those of the run; names both values.
            FormationFailed: not all came in time.
        """
        watcher = Watcher(
            self.store.clone(),
            self.prefix,
            me,
            self._peer_timeout,
            self.sockets.shut,
            self._errands,
            give_up=self._give_up,
        )
        me = self._start_watcher(watcher, me)
        reference = self.published("agreement")
        agreement = json.loads(reference) if reference is not None else None
        joined: dict[int, Member] = {}

        def fits(first: Member, other: Member) -> bool:
            return disagreement(agreement or first.agreement, other.agreement) is None

        launch = self._launch
        deadline = time.monotonic() + self._formation_timeout
        closed_since: list[float] = []

        def sight(rank: int) -> Sight:
            if rank in joined:
                return Sight.DEAD if probe(joined[rank].address) is Probe.REFUSED else Sight.ALIVE
            now = time.monotonic()
            if now > deadline:
                return Sight.DEAD
            if self.agents.is_gone(rank // launch.local_world_size):
                return Sight.DEAD
            if self.agents.are_closed:  # an agent has ended, and its workers with it
                closed_since.append(now)
                return Sight.DEAD if now - closed_since[0] > CLOSED_SECONDS else Sight.ALIVE
            return Sight.ALIVE

        meeting = meet(self.store, self._key, launch.rank, launch.world_size, me, sight, fits, joined)
        decision, _ = self._drive(meeting, self._formation_timeout + 60)
        world = world_of(decision, joined, launch.rank, self._max_world_size)
        if world is None:
            reference = self.published("agreement")
            standard = json.loads(reference) if reference is not None else joined[min(joined)].agreement
            require_agreement(me.agreement, standard, "the run")
            raise LeftOut("the others formed a world without this worker: it came too late")
        self._enter(world)
        return world

    def _give_up(self, why: str) -> None:
        """On the watcher's thread: the training thread cannot be reached any more."""
        try:
            self._warn(why)
            # On a thread of its own: a disk, or a GPU that waits as well, may never answer.
            saver = threading.Thread(target=lambda: self._warn(self.at_last()), name="at-last", daemon=True)
            saver.start()
            saver.join(AT_LAST_SECONDS)
        finally:
            os._exit(1)

    def _start_watcher(self, watcher: Watcher, me: Member) -> Member:
        me = replace(me, address=watcher.listener.address)
        self._watcher = watcher
        watcher.start(self.store)
        return me

    def next_world(self, world: World, *, has_formed: bool) -> tuple[World, Change]:
        """Meet the survivors of `world`, whose process group is gone. Blocks until each old member has come or is out.

        Args:
            has_formed: whether the process group stood; if it never did, two members may be cut off from each other.

        Raises:
            LeftOut: the others went on without this worker.
            Stopped: this worker was told to stop meanwhile.
            StoreUnreachable: the store is gone, and the job with it.
        """
        started = time.monotonic()
        watcher = self.watcher
        watcher.leave()
        self._renew_store()
        watcher.verdicts |= announce_broken(self.store, self._key)
        self._wait_out_join()
        me = replace(world.me, max_generation=world.generation)
        is_nobody_known_dead = not watcher.verdicts and not any(
            probe(member.address) is Probe.REFUSED for member in world.members
        )
        if is_nobody_known_dead and (watcher.reason is not None or not has_formed):
            me = replace(me, unreachable=unreachable_members(world))
        patience = 3 * self._peer_timeout + 2 * watcher.slowest_step
        if world.is_spare:  # it knows nothing of how long a step takes, and leaves that to those who do
            patience *= 10
        joining = self._members_to_take_in(world)
        candidates = (*world.members, *joining)
        watcher.observe(candidates)
        joined: dict[int, Member] = {}

        def sight(rank: int) -> Sight:
            # While the store was away, nobody could join.
            has_run_out = rank not in joined and time.monotonic() - max(started, watcher.answering_since) > patience
            return watcher.sight(candidates[rank], rank, has_run_out)

        def fits(first: Member, other: Member) -> bool:
            return not joining or disagreement(first.agreement, other.agreement) is None

        meeting = meet(self.store, self._key, world.rank, len(candidates), me, sight, fits, joined)
        decision, _ = self._drive(meeting, patience + 60)
        self._check_fatal()  # whoever ended the job said so before it died, and may be among the dead of this decision
        following = world_of(decision, joined, world.rank, self._max_world_size)
        if following is None:
            raise LeftOut(
                f"the others went on as generation {decision.generation} without this worker"
                + (f": {watcher.reason}" if watcher.reason else "")
            )
        self.agents.note_lost([world.members[rank] for rank in decision.lost if rank < len(world.members)], following)
        self._enter(following)
        return following, Change(
            lost=tuple(world.members[rank] for rank in decision.lost if rank < len(world.members)),
            joined=tuple(candidates[rank] for rank in decision.ranks if rank >= len(world.members)),
            left=tuple(world.members[rank] for rank in decision.left),
            reason=watcher.reason or "; ".join(watcher.verdicts.values()) or None,
            seconds_meet=time.monotonic() - started,
        )

    def _renew_store(self) -> None:
        """A new connection for the training thread, if need be: the last one was silent while the world stood, perhaps
        for days, and firewalls on the way forget such connections."""
        address = split_endpoint(self._launch.endpoint) if self._launch.endpoint else self._launch.master
        try:
            self.store.get(f"{self._key}/broken")
            self.watcher.note_answer()
        except StoreUnreachable:
            if address is None or probe(address) is not Probe.ACCEPTED:
                raise
            self.store = self.store.clone()

    def wait_for_workers(self, world: World) -> None:
        """Wait until all who train are about to make the process group, so that making it takes milliseconds.

        Between the agreed list and this point a member may have to wait for a disk. A death here is seen at once; while
        the group is made it would cost gloo's timeout.

        Raises:
            FormationFailed: one died, or has not come within the peer timeout.
        """
        self.store.put(f"{self._key}/ready/{world.rank}", "")
        missing = [rank for rank in range(world.world_size) if rank != world.rank]
        deadline = time.monotonic() + self._peer_timeout
        while missing:
            values = self.store.get_many([f"{self._key}/ready/{rank}" for rank in missing])
            missing = [rank for rank, value in zip(missing, values, strict=True) if value is None]
            if not missing:
                return
            if self.store.get(f"{self._key}/broken") is not None:
                raise FormationFailed("a member was lost before the process group was made")
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise FormationFailed(f"rank {ranks} did not come to the process group in {self._peer_timeout:.0f} s")
            time.sleep(POLL_SECONDS)

    def leave(self, world: World, reason: str) -> None:
        """Tell the others that this worker leaves on purpose, so that nobody waits for it or looks for it."""
        store = self._last_words()
        store.put(f"{self._key}/left/{world.rank}", reason)
        if not world.is_spare:  # nobody's step needs a spare
            announce_broken(store, self._key)

    def _last_words(self) -> KeyValueStore:
        """The store for what a worker says as it ends."""
        return self.store

    def stand_by(self, world: World) -> str | None:
        """Wait, as a spare of `world`, until it ends. Returns what `announce_finished` was given; None where a member
        was lost or left and the others meet for the next world.

        Raises:
            Stopped: this worker was told to stop.
            StoreUnreachable: the store is gone, and the job with it.
        """
        while True:
            self.watcher.check()
            if self.watcher.is_store_lost:  # what is read below may be a copy
                self._renew_store()
            # The watcher breaks the world off, too, where the store is gone and a peer with it.
            is_broken = self.watcher.reason is not None or self.store.get(f"{self._key}/broken") is not None
            finished = self.store.get(f"{self._key}/finished")  # after it: who finished and went looks lost
            if finished is not None or is_broken:
                return finished
            self._stop.check()
            time.sleep(SPARE_POLL_SECONDS)

    def announce_finished(self, result: str) -> None:
        """Tell the spares of the present world that the run is through, and with what."""
        self.store.put(f"{self._key}/finished", result)

    def _members_to_take_in(self, _world: World) -> tuple[Member, ...]:
        """Who is to be in the next world besides the members of this one; the same for all of them."""
        return ()

    @property
    def is_join_due(self) -> bool:
        """Whether members are to be taken in at the next step boundary; never where torchrun's agents do it."""
        return False

    def can_take_in(self, _world: World) -> bool:
        """Whether `next_world` would find members that are ready to join, with no restart; for a world that waits."""
        return False

    def group_store(self) -> Store:
        """Where the process group of the present world meets: a prefix that no other generation ever used, on a
        connection of its own, so that it can be broken off."""
        store = self.store.clone()
        assert isinstance(store, TorchStore)
        return PrefixStore(f"{self._key}/group", store.raw)

    @property
    def watcher(self) -> Watcher:
        assert self._watcher is not None, "first_world() starts it"
        return self._watcher

    @property
    def key(self) -> str:
        return self._key

    def judge(self, error_text: str, is_communication: bool, step: int, me: Member) -> Failure:
        """Whose error it was that ended `step`; an own one is told to the others, who may meet it at the same step."""
        if is_communication:
            return Failure.PEER
        node = "/".join(map(str, me.node))  # two workers of one node are one witness: its disk may be broken
        first = self.store.create(f"{self.prefix}/error/{step}", json.dumps([node, step, error_text]))
        first_node, failed_step, _ = json.loads(first)
        verdict = judge_error(False, step, (str(first_node), int(failed_step)), node)
        if verdict is Failure.JOB:
            self.announce_fatal(f"step {step} fails on every member that tries it: {error_text}")
        return verdict

    def announce_fatal(self, why: str) -> None:
        """The job cannot go on: whoever meets for another world reads this and ends."""
        self.store.create(f"{self.prefix}/fatal", why)

    def _drive(self, meeting: Any, limit: float) -> tuple[Decision, dict[int, Member]]:
        started = time.monotonic()
        deadline, next_word = started + limit, started + WORD_SECONDS
        while True:
            try:
                waiting_for = next(meeting)
            except StopIteration as end:
                outcome: tuple[Decision, dict[int, Member]] = end.value
                return outcome
            self._stop.check()
            if not waiting_for:
                continue
            self._check_fatal()
            now = time.monotonic()
            if now > next_word:
                next_word = now + WORD_SECONDS
                ranks = ", ".join(map(str, waiting_for))
                at_most = f", {limit:.0f} s at most" if limit < math.inf else ""
                self._say(f"waiting for rank {ranks}, {now - started:.0f} s so far{at_most}")
            if now > deadline:
                raise FormationFailed(
                    f"no new world after {limit:.0f} s: rank {', '.join(map(str, waiting_for))} neither came nor died"
                )
            time.sleep(POLL_SECONDS)

    def _check_fatal(self) -> None:
        fatal = self.store.get(f"{self.prefix}/fatal")
        if fatal is not None:
            raise FormationFailed(fatal)

    def _enter(self, world: World) -> None:
        self.watcher.observe(world.members)
        self._world = world
        self._key = self._key_of(world)

    def _key_of(self, world: World) -> str:
        """Prefix of the keys by which `world` ends."""
        return f"{self.prefix}/world-{world.generation}"

    @property
    def is_among_others(self) -> bool:
        """Whether other nodes may go on when this worker ends."""
        return self._world is None or self._world.num_nodes > 1

    # --- torchrun's agents --------------------------------------------------------------------------------------------

    def _errands(self) -> None:
        """On the watcher's thread, once a second: what the agents are about to do, and what has to be mended there."""
        self.agents.look(self.watcher.store)
        if self.watcher.is_spokesman:
            self.agents.mend(self.watcher.store)

    def _wait_out_join(self) -> None:
        """A join under c10d: this worker waits for the SIGTERM that it is about to get, instead of re-forming."""
        if not self.agents.look(self.store):
            return
        deadline = time.monotonic() + JOIN_SIGNAL_SECONDS
        while time.monotonic() < deadline:
            self._stop.check()
            time.sleep(0.01)

    def release_agents(self, world: World) -> None:
        """At the end of training: when this process ends, let no agent wait for a dead one, nor leave a living one."""
        if self.agents.have_exit_barrier:
            self._is_through = True
            # Not before the process ends: a training function's script may have more to do.
            atexit.register(self.agents.see_off, self.store, self._key, world, self._stop)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.stop(keeps_listening=self._is_through)
            self._watcher = None


def new_token() -> str:
    """A name that no other job has."""
    return uuid.uuid4().hex[:12]


def versions() -> dict[str, str]:
    """What must be the same on all members for them to talk to each other and to train alike."""
    from elastic_train import __version__

    return {"torch": str(torch.__version__), "elastic_train": __version__}
