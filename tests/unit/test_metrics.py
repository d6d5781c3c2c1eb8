"""The endpoint of --metrics-port: its values, which node has the port, and its cost per step."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_train.errors import UsageError
from elastic_train.observe.metrics import CAUSES, Metrics
from elastic_train.tools.drills.nodes import free_port
from elastic_train.world import Member, World


class Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.times_asked = 0

    def totals(self) -> dict[str, float]:
        self.times_asked += 1
        return dict(self.seconds)


def state(step: int = 7, incidents: tuple[dict[str, Any], ...] = (), train: float = 30.0, form: float = 10.0) -> Any:
    """What Metrics looks at in a TrainState."""
    return SimpleNamespace(
        step=step,
        last_loss=0.5,
        incidents=list(incidents),
        clock=Clock({"train": train, "form": form}),
        is_finished=False,
        generation=0,
    )


def world(size: int, generation: int = 0, *, host: str = "n{rank}") -> World:
    return World(
        rank=0,
        generation=generation,
        members=tuple(
            Member(
                host=host.format(rank=rank), local_rank=0, pid=1, agent_pid=2 + rank, address=("127.0.0.1", 1),
                directory_id="", backend="gloo", max_generation=None,
            )
            for rank in range(size)
        ),
    )  # fmt: skip


def scrape(port: int, host: str = "127.0.0.1") -> dict[tuple[str, ...], float]:
    """(name, label values without the run's ...) -> value."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as reply:
        text = reply.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("run") == "mine"
            found[sample.name, *sample.labels.values()] = sample.value
    return found


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make(stack: ExitStack, port: int, warnings: list[str], told: list[str] | None = None) -> Metrics:
    log = pytest.fail if told is None else told.append
    metrics = Metrics("127.0.0.1", port, run="mine", max_nodes=4, log=log, warn=warnings.append)
    return stack.enter_context(closing(metrics))


def test_a_notice_that_stands_is_told(stack: ExitStack) -> None:
    port, notices = free_port(), [True, False]
    metrics = Metrics(
        "127.0.0.1", port, run="mine", max_nodes=4, log=pytest.fail, warn=pytest.fail, is_noticed=notices.pop
    )
    stack.enter_context(closing(metrics)).enter(world(3), state())
    assert [scrape(port)["elastic_train_may_be_taken",] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("was_a_worker", [False, True])
def test_a_spare_tells_of_the_world_alone(stack: ExitStack, warnings: list[str], was_a_worker: bool) -> None:
    """It has no state, or one of before: beside the workers' its numbers would be of another run."""
    port = free_port()
    metrics = make(stack, port, warnings)
    of_state = {"step", "loss", "goodput_ratio", "incidents", "phase_seconds", "recovery_seconds", "samples_per_second"}
    of_state |= {"last_recovery_seconds", "step_committed_time_seconds"}
    if was_a_worker:
        metrics.enter(world(2), state(step=5))
        metrics.step(state(step=6), 0.25, 64)
        assert scrape(port)["elastic_train_step",] > 0
    metrics.enter(replace(world(3, generation=4), rank=2, max_world_size=2), state(step=0))
    found = scrape(port)
    assert not of_state & {name.removeprefix("elastic_train_") for name, *_ in found}
    names = ("generation", "members", "nodes", "training_nodes", "max_nodes", "wanted_nodes", "may_be_taken")
    assert [found[f"elastic_train_{name}",] for name in names] == [4, 2, 3, 2, 4, 1, 0]
    metrics.enter(world(2, generation=5), state(step=9))
    assert scrape(port)["elastic_train_step",] == 9, "it has stepped in"


def test_everything_that_is_promised_is_told(stack: ExitStack, warnings: list[str]) -> None:
    port = free_port()
    metrics = make(stack, port, warnings)
    assert scrape(port) == {}  # before the first world
    incidents = (
        {"cause": "peer_lost", "seconds": {"detect": 0.5, "meet": 0.25}},
        {"cause": "peer_lost", "seconds": {"detect": 1.0}},
        {"cause": "join", "seconds": {"meet": 2.0}},
    )
    metrics.enter(world(3, generation=5), state(incidents=incidents))
    metrics.snapshot(step=6, num_bytes=1000, stall_seconds=0.01, total_seconds=0.3)
    found = scrape(port)
    named = {name: value for (name, *labels), value in found.items() if not labels}
    for moment in ("started", "snapshot"):
        assert abs(named.pop(f"elastic_train_{moment}_time_seconds") - time.time()) < 100
    assert named == {
        "elastic_train_step": 7,
        "elastic_train_loss": 0.5,
        "elastic_train_samples_per_second": 0,
        "elastic_train_generation": 5,
        "elastic_train_members": 3,
        "elastic_train_nodes": 3,
        "elastic_train_training_nodes": 3,
        "elastic_train_max_nodes": 4,
        "elastic_train_wanted_nodes": 1,
        "elastic_train_may_be_taken": 0,
        "elastic_train_goodput_ratio": 0.75,
        "elastic_train_last_recovery_seconds": 2.0,
        "elastic_train_snapshot_step": 6,
        "elastic_train_snapshot_bytes": 1000,
        "elastic_train_snapshot_stall_seconds": 0.01,
        "elastic_train_snapshot_write_seconds": 0.3,
    }
    assert {cause: found["elastic_train_incidents", cause] for cause in CAUSES} == {
        "peer_lost": 2, "leave": 0, "join": 1, "restart": 0,
    }  # fmt: skip
    assert found["elastic_train_recovery_seconds", "peer_lost"] == 1.75
    assert found["elastic_train_phase_seconds", "train"] == 30
    assert warnings == []


def test_hosts_that_wait_until_their_quarantine_is_over(stack: ExitStack, warnings: list[str]) -> None:
    port = free_port()
    metrics = make(stack, port, warnings)
    metrics.enter(world(3), state())
    metrics.quarantines = [{"host": host, "until": time.time() + left} for host, left in (("a", 100.0), ("b", -1.0))]
    found = [(host, left) for (name, *host), left in scrape(port).items() if name == "elastic_train_quarantine_seconds"]
    [(host, left)] = found
    assert host == ["a"]
    assert 80 < left <= 100


def test_a_step_costs_a_look_at_the_clock(
    stack: ExitStack, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(
        "elastic_train.observe.metrics.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    )
    port = free_port()
    metrics, one = make(stack, port, warnings), state()
    metrics.enter(world(1), one)
    for _ in range(1000):
        one.step += 1
        now[0] += 0.01
        metrics.step(one, 0.25, 64)
    assert 9 <= one.clock.times_asked <= 12  # once a second of ten, and for the world
    found = scrape(port)
    assert 900 <= found["elastic_train_step",] <= 1007
    assert found["elastic_train_loss",] == 0.25
    assert 1009 <= found["elastic_train_step_committed_time_seconds",] <= 1010
    one.is_finished = True
    metrics.step(one, 0.125, 64)
    assert scrape(port)["elastic_train_loss",] == 0.125  # the last step is told, whatever the time


def test_another_node_of_the_host_takes_the_port_over_with_the_next_world(
    stack: ExitStack, warnings: list[str]
) -> None:
    port, told = free_port(), list[str]()
    first, second = make(stack, port, []), make(stack, port, warnings, told)
    assert len(told) == 1
    assert f"--metrics-port {port} is taken" in told[0]
    first.enter(world(2, host="both"), state(step=3))
    second.enter(world(2, host="both"), state(step=4))
    assert scrape(port)["elastic_train_step",] == 3
    assert (len(told), warnings) == (1, []), "as the page says: nothing is wrong"
    first.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    second.enter(world(1, generation=1, host="both"), state(step=5))
    assert scrape(port)["elastic_train_step",] == 5


def test_a_port_that_no_node_of_the_run_has_is_warned_of_once(stack: ExitStack, warnings: list[str]) -> None:
    port = free_port()
    stack.enter_context(socket.create_server(("127.0.0.1", port)))
    alone = make(stack, port, warnings, [])
    for generation in range(2):
        alone.enter(world(2, generation), state())
    [warning] = warnings
    assert warning.startswith(f"--metrics-port {port} is taken, and no other node that trains")


def test_it_listens_where_it_is_told_and_nowhere_else(stack: ExitStack, warnings: list[str]) -> None:
    port = free_port()
    make(stack, port, warnings)
    with socket.socket() as other:  # 127.0.0.2 is this machine too
        assert other.connect_ex(("127.0.0.2", port)) != 0
    port = free_port()
    with pytest.raises(UsageError, match=rf"^--metrics-host 192\.0\.2\.1, --metrics-port {port}: Cannot assign "):
        Metrics("192.0.2.1", port, run="mine", max_nodes=1, log=print, warn=warnings.append)


def test_a_port_that_one_may_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("prometheus_client.start_http_server", refuse)
    with pytest.raises(UsageError, match=r"^--metrics-host 127\.0\.0\.1, --metrics-port 80: Permission denied$"):
        Metrics("127.0.0.1", 80, run="mine", max_nodes=1, log=print, warn=print)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'elastic_train\[metrics\]'"):
        Metrics("127.0.0.1", free_port(), run="mine", max_nodes=1, log=print, warn=print)
