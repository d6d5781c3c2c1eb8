"""The state that torchrun's agents of a c10d rendezvous share: what workers read of it, and what is mended in it.

It is a pickle of private classes (torch 2.11 to 2.15, dynamic_rendezvous.py), of which no code is run here.
"""

from __future__ import annotations

import base64
import datetime
import io
import ipaddress
import pickle
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "127.0.1.1", "::1")
KEEP_ALIVE_SECONDS = 15.0
"""after which torchrun takes a silent agent for dead"""


@dataclass(frozen=True)
class AgentsState:
    """The part of the agents' shared state that workers need, as plain values."""

    round: int
    is_complete: bool
    is_closed: bool
    """whether newcomers are refused: set by an agent that ends, for whatever reason"""
    num_waiting: int
    """nodes that wait to be let in: the agents are about to restart all workers"""
    ranks_by_pid: dict[int, set[int]]
    """node ranks of the participants by the pid of their agent (several hosts may have equal pids)"""


def agents_key(run_id: str) -> str:
    """Where the agents of a c10d rendezvous keep their state (c10d_rendezvous_backend.py)."""
    return f"torch.rendezvous.{run_id}"


def read_agents_state(encoded: str) -> AgentsState:
    """Decode torch's `_RendezvousState` (dynamic_rendezvous.py) into plain values; runs no code from it.

    Raises:
        ValueError: it is not what torch 2.11 to 2.15 write.
    """

    class Record:
        """Stands in for torch's private classes, whose import takes a while: keeps what the pickle says of them."""

        def __setstate__(self, state: Any) -> None:
            self.fields = dict(state)

    state = _unpickle_agents_state(encoded, Record, Record)
    try:
        fields = state.fields
        ranks_by_pid: dict[int, set[int]] = {}
        for node, rank in fields["participants"].items():
            ranks_by_pid.setdefault(int(node.fields["pid"]), set()).add(int(rank))
        return AgentsState(
            round=int(fields["round"]),
            is_complete=bool(fields["complete"]),
            is_closed=bool(fields["closed"]),
            num_waiting=len(fields["wait_list"]),
            ranks_by_pid=ranks_by_pid,
        )
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"the state of torchrun's agents has an unknown form: {error!r}") from error


def mend_agents_state(encoded: str, dead_agents: Collection[tuple[str, int]]) -> str | None:
    """The agents' state with newcomers let in again and dead agents dropped; None where nothing is to be mended.

    With --max-restarts 0, torchrun's default, the agent of one crashed worker closes the rendezvous for all newcomers
    when it ends; and a dead agent's entry keeps its place until its keep-alive expires, 15 s later. Workers that train
    on without it know better. The result goes back by compare-and-swap.

    Args:
        dead_agents: (host name, pid) of agents that are proven dead, as their own workers named them.
    """
    state = _decode(encoded)
    dead = {(same_host(host), pid) for host, pid in dead_agents}
    # Where a machine's name stands beside localhost in /etc/hosts, its agent calls itself that (socket.getfqdn).
    dead |= {(nameless, pid) for _, pid in dead for nameless in LOOPBACK_NAMES}
    dropped = [node for node in state.participants if (same_host(node.addr), node.pid) in dead]
    if not state.complete or not (state.closed or dropped):
        return None
    state.closed = False
    for node in dropped:
        del state.participants[node]
        state.last_heartbeats.pop(node, None)
    return _encode(state)


def reopened(encoded: str) -> str:
    """The agents' state as the first of a next round finds it, when nobody of this one is left."""
    state = _decode(encoded)
    if state.complete:
        state.round += 1
    state.complete = state.closed = False
    state.deadline = None
    for emptied in (state.participants, state.wait_list, state.redundancy_list, state.last_heartbeats):
        emptied.clear()
    return _encode(state)


def same_host(name: str) -> str:
    """A host's name in the one form in which agents' and workers' are compared: no domain, letters and digits only."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    return re.sub(r"[^A-Za-z0-9]", "_", name.split(".")[0])


def _decode(encoded: str) -> Any:
    """As torch's own classes, which can be written back."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    return _unpickle_agents_state(encoded, _RendezvousState, _NodeDesc)


def _encode(state: Any) -> str:
    return base64.b64encode(pickle.dumps(state)).decode()


def _unpickle_agents_state(encoded: str, state_class: type, node_class: type) -> Any:
    module = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    allowed: dict[tuple[str, str], Any] = {
        (module, "_RendezvousState"): state_class,
        (module, "_NodeDesc"): node_class,
        ("datetime", "datetime"): datetime.datetime,
        ("datetime", "timezone"): datetime.timezone,
        ("datetime", "timedelta"): datetime.timedelta,
        ("builtins", "set"): set,
    }

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in allowed:
                raise pickle.UnpicklingError(f"{module}.{name} does not belong into a rendezvous state")
            return allowed[module, name]

    try:
        return Reader(io.BytesIO(base64.b64decode(encoded))).load()
    except (pickle.UnpicklingError, AttributeError, TypeError, EOFError, ValueError) as error:
        raise ValueError(f"the state of torchrun's agents has an unknown form: {error!r}") from error


def exit_barrier_keys(run_id: str, round_: int) -> tuple[str, str]:
    """(counter of agents that have arrived, flag that lets them go) of the agents' exit barrier.

    `torch/distributed/elastic/utils/store.py` counts arrivals up to the number of agents of the last rendezvous and
    waits 300 s for those that died.
    """
    prefix = f"{agents_key(run_id)}.{round_}/torchelastic/agent/terminal_state"
    return f"{prefix}/num_members", f"{prefix}/last_member"
