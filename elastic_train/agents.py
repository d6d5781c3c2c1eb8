"""torchrun's agents as their workers see them: what they are about to do, what is mended in their state, how they end.

Under c10d the agents of all nodes share a state in the rendezvous store; torchrun.py knows its form. Elsewhere nothing
is known of them, and every question here has the answer that changes nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from elastic_train.agents_state import (
    AgentsState,
    agents_key,
    exit_barrier_keys,
    mend_agents_state,
    read_agents_state,
)
from elastic_train.errors import StoreUnreachable
from elastic_train.liveness import Probe, probe
from elastic_train.stopping import StopSignal
from elastic_train.store import KeyValueStore
from elastic_train.torchrun import Launch
from elastic_train.world import Member, World

EXIT_BARRIER_SECONDS = 300.0
"""torch's own"""
ARRIVAL_SECONDS = 30.0
"""that a busy machine may take to end a process that has said goodbye, and its agent to see that"""
SILENCE_SECONDS = 5.0
"""after which a worker whose host does not answer is taken for dead at the end"""
LOOK_SECONDS = 0.5
"""between two looks at the others at the end; a process that is stuck does not empty its listener's queue"""
END_SECONDS = 5.0
"""that this worker's agent may take to pass a SIGTERM on"""


class Agents:
    """The agents of one torchrun round. The training thread and the watcher's both look, each with a store of its own.

    Args:
        round_: the rendezvous round that this worker is of.
    """

    def __init__(self, launch: Launch, round_: str) -> None:
        self._launch = launch
        self._round = round_
        self._encoded: str | None = None
        self._state: AgentsState | None = None
        self._dead: frozenset[tuple[str, int]] = frozenset()

    def look(self, store: KeyValueStore) -> bool:
        """Read what they share. Returns whether nodes wait to be let in: all workers are then about to be restarted."""
        if self._launch.endpoint is not None:
            encoded = store.get(agents_key(self._launch.run_id))
            self._state = None if encoded is None else read_agents_state(encoded)
            self._encoded = encoded
        return self.is_join_pending

    @property
    def is_join_pending(self) -> bool:
        """Whether nodes wait to be let in, by the last look."""
        return self._state is not None and self._state.num_waiting > 0

    @property
    def are_closed(self) -> bool:
        """Whether newcomers are refused, by the last look: an agent has ended, and its workers with it."""
        return self._state is not None and self._state.is_closed

    def is_gone(self, node_rank: int) -> bool:
        """Whether they have dropped a node of this round, whose keep-alive they have not seen for 15 s."""
        state = self._state
        if state is None or str(state.round) != self._round or not state.is_complete:
            return False
        return not any(node_rank in node_ranks for node_ranks in state.ranks_by_pid.values())

    def note_lost(self, lost: Iterable[Member], following: World) -> None:
        """The agent of a node of which nobody is left is dead, or about to end, where its workers are proven dead."""
        living = {member.node for member in following.members}
        for member in lost:
            if member.node not in living and probe(member.address) is Probe.REFUSED:
                self._dead |= {member.node}

    def mend(self, store: KeyValueStore) -> None:
        """By the last look: let newcomers in again, and drop the dead. One worker of the world does."""
        state, encoded = self._state, self._encoded
        if state is None or encoded is None:
            return
        if state.is_closed or any(pid in state.ranks_by_pid for _, pid in self._dead):
            mended = mend_agents_state(encoded, self._dead)
            if mended is not None:
                store.swap(agents_key(self._launch.run_id), encoded, mended)

    @property
    def have_exit_barrier(self) -> bool:
        """Whether, at the end, each of them waits for all others, 300 s for those that died."""
        return self._launch.endpoint is not None and self._launch.num_nodes > 1

    def see_off(self, store: KeyValueStore, key: str, world: World, stop: StopSignal) -> None:
        """The last thing that a worker's process does at the end of training.

        Until a worker has ended its agent asks the store, which the agent of another node may serve: no agent is to
        leave before all living workers have ended. The agents' exit barrier sees to that, but counts the dead too. So
        one worker stays until the last one, and arrives there for them: rank 0, or where its node dies before it could
        begin, a deputy on another node. Threads cannot be started any more at this point.

        Args:
            key: prefix of keys that this world has for itself.
        """
        with suppress(StoreUnreachable):  # the run is finished all the same
            if self._is_keeper(store, key, world, stop):
                self._keep_barrier(store, key, world, stop)
            store.put(f"{key}/bye/{world.rank}", "")

    def _is_keeper(self, store: KeyValueStore, key: str, world: World, stop: StopSignal) -> bool:
        if world.rank == 0:
            store.put(f"{key}/keeper", "")
            return True
        first = world.members[0]
        deputies = (rank for rank, member in enumerate(world.members) if member.node != first.node)
        if world.rank != next(deputies, None):
            return False
        deadline = time.monotonic() + EXIT_BARRIER_SECONDS
        while store.get(f"{key}/keeper") is None:
            if probe(first.address) is Probe.REFUSED:
                return store.get(f"{key}/keeper") is None
            if stop.is_requested or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return False

    def _keep_barrier(self, store: KeyValueStore, key: str, world: World, stop: StopSignal) -> None:
        total = self._launch.num_nodes
        counter, flag = exit_barrier_keys(self._launch.run_id, int(self._round))
        others = {rank: member for rank, member in enumerate(world.members) if member.node != world.me.node}
        missing = {member.node for member in others.values()}
        started = next_look = time.monotonic()
        last_seen = dict.fromkeys(others, started)
        arrived = store.add(counter, total - world.num_nodes)
        while arrived < total - 1:  # the last one is our own agent, which waits for this
            now = time.monotonic()
            if stop.is_requested or now - started > EXIT_BARRIER_SECONDS:
                arrived = store.add(counter, total - 1 - arrived)
                break
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                coming = missing & self._nodes_to_come(store, key, others, last_seen)
                store.add(counter, len(missing) - len(coming))
                missing = coming
            time.sleep(0.05)
            arrived = store.add(counter, 0)
        if arrived >= total:
            store.put(flag, "everybody who lives has arrived")

    def _nodes_to_come(
        self, store: KeyValueStore, key: str, others: Mapping[int, Member], last_seen: dict[int, float]
    ) -> set[tuple[str, int]]:
        """The nodes whose agents still arrive, by the workers there: one that has not died lives, or has said goodbye.

        Args:
            others: by rank.
            last_seen: when each of them last accepted a connection; brought up to date.
        """
        found = [probe(member.address) for member in others.values()]
        # Read after the looks: who says goodbye and ends meanwhile has not died.
        byes = store.get_many([f"{key}/bye/{rank}" for rank in others])
        now = time.monotonic()
        living: set[tuple[str, int]] = set()
        leaving: dict[tuple[str, int], float] = {}
        for (rank, member), answer, bye in zip(others.items(), found, byes, strict=True):
            if answer is Probe.ACCEPTED:
                last_seen[rank] = now
            silence = now - last_seen[rank]
            if bye is not None:
                leaving[member.node] = silence
            elif answer is not Probe.REFUSED and silence <= SILENCE_SECONDS:
                living.add(member.node)
        # The agent of one that has gone has probably arrived: to count it as well would end the others too early.
        return living | {node for node, silence in leaving.items() if living or silence <= ARRIVAL_SECONDS}

    def end_own(self, stop: StopSignal) -> None:
        """Leave a job that goes on without this worker: have its agent told to stop, and wait for the agent's SIGTERM.

        Any exit of a worker, with whatever code, makes its agent close the rendezvous for all newcomers; an agent that
        is told to stop does not.
        """
        if self._launch.agent_pid is None or os.getppid() != self._launch.agent_pid:
            return
        os.kill(self._launch.agent_pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while not stop.is_requested and time.monotonic() < deadline:
            time.sleep(0.01)
