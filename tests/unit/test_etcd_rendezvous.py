"""Rounds of agents: their start, members and end; and which of the two modes a program gets."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.utils import store as store_util

from elastic_train.errors import UsageError
from elastic_train.rendezvous.etcd_connections import Entry
from elastic_train.rendezvous.etcd_handler import ExitBarrier, exit_barrier_keys, next_round, num_waiting
from elastic_train.rendezvous.etcd_store import Listing
from elastic_train.rendezvous.handler import choose_mode
from elastic_train.tools.drills.nodes import wait_until
from tests.processes import freeze, refuse_threads

RUN_ID = "job"


def decide(
    current: str, alive: str, waiting: str, *, low: int = 1, high: int = 4, seconds: float = 99.0
) -> list[str] | None:
    """The next round; every letter is a node."""
    return next_round(
        list(current), set(alive), list(waiting), min_nodes=low, max_nodes=high, seconds_enough=seconds, last_call=2.0
    )


def test_a_listing_of_an_etcd_that_has_come_back_empty_counts() -> None:
    """Its revisions begin anew. Else an agent would wait on beside its keys that are gone."""
    found = [([Entry("/job/waiting/me", b"", 90, 90, 1, 1)], 100), ([], 7)]
    store: Any = SimpleNamespace(etcd=SimpleNamespace(below=lambda _prefix: found.pop(0)))
    keys = Listing("/job/")
    keys.look(store)
    assert [*keys.below("waiting")] == ["me"]
    keys.look(store)
    assert not keys.below("waiting")


def test_the_first_round_waits_for_its_last_call_or_for_all() -> None:
    assert decide("", "abc", "abc", seconds=1.0) is None
    assert decide("", "abc", "abc", seconds=2.0) == ["a", "b", "c"]
    assert decide("", "abcd", "dcba", seconds=0.0) == ["d", "c", "b", "a"]


def test_too_few_wait_on() -> None:
    assert decide("", "a", "a", low=2) is None
    assert decide("abc", "a", "a", low=2) is None


def test_a_newcomer_waits_until_all_who_live_have_stopped() -> None:
    assert decide("ab", "abc", "c") is None
    assert decide("ab", "abc", "ca") is None
    assert decide("ab", "abc", "cba") == ["a", "b", "c"]


def test_the_dead_are_not_waited_for() -> None:
    assert decide("abc", "bc", "cb") == ["b", "c"]


def test_who_was_in_stays_in_and_keeps_the_order() -> None:
    assert decide("ba", "abcd", "dcab", high=3) == ["b", "a", "d"]


@pytest.mark.parametrize(
    ("alive", "waiting", "expected"),
    [
        ("abc", "", 0),
        ("ab", "", 1),
        ("abcd", "d", 1),
        ("abc", "b", 1),
        ("abc", "a", 0),
        ("abcdef", "def", 1),
    ],
    ids=["quiet", "one is gone", "a newcomer", "one restarts", "only this one", "no more than there is room for"],
)
def test_what_ends_a_round(alive: str, waiting: str, expected: int) -> None:
    assert num_waiting("a", list("abc"), set(alive), set(waiting), 4) == expected


def test_nobody_restarts_for_a_spare() -> None:
    assert num_waiting("a", list("abcd"), set("abcde"), {"e"}, 4) == 0


def test_the_mode_follows_the_program() -> None:
    ours = ["--nnodes=1:4", "-m", "elastic_train", "--epochs", "3"]
    assert choose_mode({}, ours, {}) == "workers"
    assert choose_mode({}, ["--nnodes=1:4", "-m", "somebody.train"], {}) == "agents"
    assert choose_mode({}, ["-m", "somebody.train"], {"ELASTIC_TRAIN": "1"}) == "workers"
    assert choose_mode({}, None, {}) == "agents"


def test_the_user_chooses_the_mode() -> None:
    assert choose_mode({"membership": "agents"}, ["-m", "elastic_train"], {}) == "agents"
    with pytest.raises(UsageError, match="membership=none"):
        choose_mode({"membership": "none"}, None, {})


# --- torch's exit barrier ---------------------------------------------------------------------------------------------


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
    """Three agents, two of them dead: what is counted for them is what the third one waits for."""
    store = HashStore()
    counter, _ = exit_barrier_keys(RUN_ID, 5)
    store.add(counter, 2)
    Agent(agents_store(5, store), 3)._exit_barrier()
    assert store.get(counter) == b"3"


def test_the_dead_are_counted_later_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier = ExitBarrier(store, RUN_ID, 7, ["first", "second", "third"])

    with monkeypatch.context() as patched:
        refuse_threads(patched)
        with pytest.raises(RuntimeError):
            barrier.arrive_for(["second"])
    barrier.arrive_for(["second"])
    barrier.arrive_for(["second"])
    counter, _ = exit_barrier_keys(RUN_ID, 7)
    wait_until(lambda: store.add(counter, 0) == 1, "the arrival for the dead node", 10.0)


def test_the_barrier_on_a_frozen_node_holds_up_no_lease() -> None:
    """torch's calls there have no deadline, and the thread that makes them keeps this node's leases."""
    code = (
        "import time; from torch.distributed import TCPStore as S; s = S('127.0.0.1', 0, is_master=True, "
        "wait_for_workers=False); print(s.port, flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            barrier = ExitBarrier(store, RUN_ID, 7, ["first", "second", "third"])
            assert barrier.is_begun(10.0) is False
            freeze(server.pid)
            threads, began = threading.active_count(), time.monotonic()
            for _ in range(5):
                assert barrier.is_begun(0.2) is None
            barrier.arrive_for(["second"])
            assert time.monotonic() - began < 60.0, "a call of torch waits for as long as the node is frozen"
            assert threading.active_count() <= threads + 2
            server.send_signal(signal.SIGCONT)
            counter, _ = exit_barrier_keys(RUN_ID, 7)
            wait_until(lambda: store.add(counter, 0) == 1, "the arrival for the dead node", 10.0)
            wait_until(lambda: barrier.is_begun(1.0), "an answer", 10.0)
        finally:
            server.kill()
