"""The state that torchrun's agents share: what we read of it and what we mend in it, against torch's own classes."""

from __future__ import annotations

import base64
import datetime
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.distributed.elastic.utils import store as store_util

from elastic_train.agents_state import (
    agents_key,
    exit_barrier_keys,
    mend_agents_state,
    read_agents_state,
    reopened,
    same_host,
)

RUN_ID = "job"
ALIVE = _NodeDesc("alive.example.org", 11, 0)
DEAD = _NodeDesc("dead.example.org", 22, 0)
WAITING = _NodeDesc("new.example.org", 33, 0)


def make_state(*, is_closed: bool = False, is_complete: bool = True, waiting: Iterable[_NodeDesc] = ()) -> Any:
    state = _RendezvousState()
    state.round = 3
    state.complete = is_complete
    state.closed = is_closed
    state.participants = {ALIVE: 0, DEAD: 1}
    state.wait_list = set(waiting)
    now = datetime.datetime.now(datetime.UTC)
    state.last_heartbeats = dict.fromkeys((ALIVE, DEAD, *waiting), now)
    state.deadline = now + datetime.timedelta(seconds=5)
    return state


def encode(state: Any) -> str:
    return base64.b64encode(pickle.dumps(state)).decode()


def decode(encoded: str) -> Any:
    return pickle.loads(base64.b64decode(encoded))


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("num_waiting", [0, 1])
def test_what_is_read_of_it(is_closed: bool, is_complete: bool, num_waiting: int) -> None:
    waiting = [WAITING][:num_waiting]
    found = read_agents_state(encode(make_state(is_closed=is_closed, is_complete=is_complete, waiting=waiting)))
    assert found.round == 3
    assert (found.is_closed, found.is_complete, found.num_waiting) == (is_closed, is_complete, num_waiting)
    assert found.ranks_by_pid == {11: {0}, 22: {1}}


def test_a_fresh_state_of_torch_is_read() -> None:
    found = read_agents_state(encode(_RendezvousState()))
    assert (found.round, found.is_complete, found.is_closed, found.num_waiting) == (0, False, False, 0)


class Crafted:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("use", [read_agents_state, lambda encoded: mend_agents_state(encoded, {("dead", 22)})])
def test_a_crafted_state_runs_no_code(use: Any, tmp_path: Path) -> None:
    state = make_state(is_closed=True)
    state.deadline = Crafted(tmp_path / "ran")
    with pytest.raises(ValueError, match="unknown form"):
        use(encode(state))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("encoded", ["", "!", encode({"round": 1}), encode(5), encode(make_state())[:-40]])
def test_what_is_no_state_is_refused(encoded: str) -> None:
    with pytest.raises(ValueError, match="unknown form"):
        read_agents_state(encoded)


# --- mending ----------------------------------------------------------------------------------------------------------


def test_a_closed_rendezvous_is_opened_again() -> None:
    mended = mend_agents_state(encode(make_state(is_closed=True)), set())
    assert mended is not None
    expected = make_state()
    found = decode(mended)
    assert not found.closed
    assert (found.round, found.complete, found.participants) == (3, True, expected.participants)


def test_a_dead_agent_is_dropped_with_its_heartbeat() -> None:
    mended = mend_agents_state(encode(make_state()), {("dead", 22)})
    assert mended is not None
    found = decode(mended)
    assert set(found.participants) == set(found.last_heartbeats) == {ALIVE}
    assert found.participants == {ALIVE: 0}


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1"])
def test_a_dead_agent_that_calls_itself_localhost_is_dropped(address: str) -> None:
    """So that who comes in its place, where all places were taken, does not wait for its keep-alive to run out."""
    state = make_state()
    nameless = _NodeDesc(address, DEAD.pid, 0)
    state.participants = {ALIVE: 0, nameless: 1}
    state.last_heartbeats = dict.fromkeys((ALIVE, nameless), state.last_heartbeats[ALIVE])
    mended = mend_agents_state(encode(state), {("dead", DEAD.pid)})
    assert mended is not None
    assert decode(mended).participants == {ALIVE: 0}
    assert mend_agents_state(encode(state), {("dead", 999)}) is None


@pytest.mark.parametrize(
    ("state", "dead"),
    [
        (make_state(), set()),
        (make_state(), {("dead", 999)}),  # another agent on that host
        (make_state(), {("other", 22)}),  # the same pid on another host
        (make_state(is_closed=True, is_complete=False), {("dead", 22)}),  # a rendezvous that is under way
    ],
)
def test_nothing_is_to_be_mended(state: Any, dead: set[tuple[str, int]]) -> None:
    assert mend_agents_state(encode(state), dead) is None


def test_mending_twice_finds_nothing_left() -> None:
    mended = mend_agents_state(encode(make_state(is_closed=True)), {("dead", 22)})
    assert mended is not None
    assert mend_agents_state(mended, {("dead", 22)}) is None


@pytest.mark.parametrize(("is_complete", "round_"), [(True, 4), (False, 3)])
def test_who_comes_when_nobody_is_left_begins_a_round_of_his_own(is_complete: bool, round_: int) -> None:
    """As torch's own agents would, once they had dropped the dead one after the other."""
    found = decode(reopened(encode(make_state(is_closed=True, is_complete=is_complete, waiting=[WAITING]))))
    begun = _RendezvousState()
    begun.round = round_
    assert vars(found) == vars(begun)


@pytest.mark.parametrize(
    ("address", "host"),
    [("node", "node"), ("node.example.org", "node"), ("10.0.0.7", "10.0.0.7"), ("fe80::1", "fe80::1")],
)
def test_an_agents_address_as_its_workers_name_their_host(address: str, host: str) -> None:
    assert same_host(address) == host


@pytest.mark.parametrize("name", ["gpu-node-3", "ip-10-0-0-1"])
def test_hosts_with_a_hyphen_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_train import world

    monkeypatch.setattr(world.platform, "node", lambda: name)
    state = make_state()
    state.participants = {ALIVE: 0, _NodeDesc(f"{name}.example.org", 22, 0): 1}
    assert mend_agents_state(encode(state), {(world.host_name(), 22)}) is not None


# --- against torch's own rendezvous -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=30))


def test_torchs_own_backend_reads_what_was_mended(server: TCPStore) -> None:
    backend = C10dRendezvousBackend(server, RUN_ID)
    stored = backend.set_state(pickle.dumps(make_state(is_closed=True, waiting=[WAITING])), None)
    assert stored is not None
    assert stored[2]
    before = server.get(agents_key(RUN_ID)).decode()
    assert read_agents_state(before).is_closed
    mended = mend_agents_state(before, {("dead", 22)})
    assert mended is not None
    assert server.compare_set(agents_key(RUN_ID), before, mended).decode() == mended
    found = backend.get_state()
    assert found is not None
    state = pickle.loads(found[0])
    assert isinstance(state, _RendezvousState)
    assert not state.closed
    assert state.participants == {ALIVE: 0}
    assert state.wait_list == {WAITING}
    # And torch goes on from there: its next write is accepted, by its own token.
    state.round += 1
    assert (backend.set_state(pickle.dumps(state), found[1]) or (None, None, False))[2]
    assert read_agents_state(server.get(agents_key(RUN_ID)).decode()).round == 4


def test_a_mend_that_comes_too_late_changes_nothing(server: TCPStore) -> None:
    backend = C10dRendezvousBackend(server, "late")
    backend.set_state(pickle.dumps(make_state(is_closed=True)), None)
    before = server.get(agents_key("late")).decode()
    mended = mend_agents_state(before, set())
    assert mended is not None
    found = backend.get_state()
    assert found is not None
    newer = make_state(is_closed=True)
    newer.round = 7
    backend.set_state(pickle.dumps(newer), found[1])
    server.compare_set(agents_key("late"), before, mended)
    assert read_agents_state(server.get(agents_key("late")).decode()).round == 7


class Agent(agent_api.SimpleElasticAgent):
    """torch's agent as far as its exit barrier goes."""

    def __init__(self, store: Any, num_agents: int) -> None:
        self._store = store
        self._exit_barrier_timeout = 2.0
        self._worker_group = type("Group", (), {"group_world_size": num_agents, "state": None, "group_rank": 0})()

    _start_workers = _stop_workers = _monitor_workers = _shutdown = None  # type: ignore[assignment]


def agents_store(round_: int, store: Any) -> PrefixStore:
    """As DynamicRendezvousHandler wraps it for the agents."""
    handler = dynamic_rendezvous.DynamicRendezvousHandler.__new__(dynamic_rendezvous.DynamicRendezvousHandler)
    handler._settings = type("Settings", (), {"run_id": RUN_ID})()
    handler._state_holder = type("Holder", (), {"state": type("State", (), {"round": round_})()})()
    return handler._wrap_store(store)


def test_the_exit_barrier_is_where_torch_has_it() -> None:
    store = HashStore()
    counter, flag = exit_barrier_keys(RUN_ID, 3)
    assert not store.check([counter])
    assert not store.check([flag])
    store_util.barrier(agents_store(3, store), 1, agent_api._TERMINAL_STATE_SYNC_ID, 2.0)
    assert store.get(counter) == b"1"
    assert store.check([flag])


def test_the_barrier_of_torchs_agent_lets_go_when_the_dead_are_counted() -> None:
    """Three agents, two of them dead: what release_agents() writes is what the third one waits for."""
    store = HashStore()
    counter, _ = exit_barrier_keys(RUN_ID, 5)
    store.add(counter, 2)
    Agent(agents_store(5, store), 3)._exit_barrier()
    assert store.get(counter) == b"3"
