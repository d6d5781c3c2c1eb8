"""A notice that a node is taken away: it leaves at a step's end, and no step is lost or redone."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elastic_train.notices.metadata import ANSWER_SECONDS, LINK_LOCAL
from elastic_train.snapshot_interval import num_failures
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import clean_environment
from tests.audits import audit
from tests.integration.cluster import (
    PYTHON,
    TORCHRUN,
    Cluster,
    Node,
    check_ledger,
    check_steps,
    error_lines,
    events,
    last_step,
    newest_snapshot,
    outcomes,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_in_place import BATCH, ENDLESS, LENGTH, check_run
from tests.integration.test_joins import stop_all
from tests.metadata_server import iso_time, learn, serving

pytestmark = pytest.mark.timeout(240)


def notices(run_dir: Path, state: str) -> list[dict[str, Any]]:
    return [event for event in events(run_dir, "notice") if event["state"] == state]


def start_two(cluster: Cluster, gone: Path, **of_noticed: Any) -> tuple[Node, Node]:
    """Start one node with notices from a file, and one without notices. They train until they are stopped."""
    flags, common = (*ENDLESS, "--max-steps", "1000000"), {"nnodes": "1:2", "conf": cluster.last_call(60)}
    [noticed] = cluster.start(*flags, "--notices", f"file:{gone}", **common, **of_noticed)
    [other] = cluster.start(*flags, **common)
    return noticed, other


def causes(cluster: Cluster) -> list[str]:
    """Of the worlds, as rank 0 of each tells it."""
    return [event["cause"] for event in events(cluster.run_dir, "world") if event["rank"] == 0]


def test_a_noticed_node_leaves_as_a_whole(cluster: Cluster) -> None:
    """Both of its workers leave at one step, and its agent starts no others, though --max-restarts would let it."""
    gone = cluster.path / "gone"
    noticed, other = start_two(cluster, gone, nproc=2, max_restarts=3)
    wait_for_step(cluster.run_dir, 20)
    pids = {worker.pid for worker in noticed.workers()}
    deadline = time.time() + 60
    gone.write_text(json.dumps({"deadline": deadline, "reason": "spot"}))
    assert noticed.wait(40) == 1, "as after a SIGTERM to it"
    stopped = [event for event in events(cluster.run_dir, "done") if event["outcome"] == "stopped"]
    left = notices(cluster.run_dir, "left")
    assert {event["pid"] for event in left} == {event["pid"] for event in stopped} == pids
    assert len({event["step"] for event in left}) == 1
    assert all(0 < event["seconds_left"] < 60 for event in left)
    wait_for_step(cluster.run_dir, left[0]["step"] + 20)
    stop_all(cluster, [other])
    assert causes(cluster) == ["start", "leave"]
    assert [size for _, size in worlds(cluster.run_dir)] == [3, 1]
    [given] = notices(cluster.run_dir, "given")
    assert (given["source"], given["reason"], given["deadline"], given["certain"]) == ("file", "spot", deadline, True)
    assert len(events(cluster.run_dir, "start")) == 3, "nobody was started again"
    assert events(cluster.run_dir, "peer_lost") == []
    assert "is taken away in " in noticed.text()
    assert not error_lines(other)
    found = audit(cluster.run_dir)
    assert found.passed, "\n".join(found.reasons)


@pytest.mark.slow
def test_spawns_first_worker_is_dead_and_the_others_leave_as_a_whole(cluster: Cluster) -> None:
    gone = cluster.path / "gone"
    node = cluster.start_alone(
        *ENDLESS, "--max-steps", "1000000", "--notices", f"file:{gone}", "--spawn", "3", "--peer-timeout", "2",
        env={"ELASTIC_TRAIN_FAULT": "kill@step:rank=0,step=10,generation=0"},
    )  # fmt: skip
    wait_until(lambda: worlds(cluster.run_dir)[-1:] == [(1, 2)], "the world of two", 60)
    wait_for_step(cluster.run_dir, 20)
    gone.touch()
    assert node.wait(40) != 0, "the first worker's"
    left = notices(cluster.run_dir, "left")
    assert len({event["pid"] for event in left}) == 2
    assert len({event["step"] for event in left}) == 1
    assert len(notices(cluster.run_dir, "given")) == 1
    assert outcomes(cluster.run_dir) == ["stopped", "stopped"]


@pytest.mark.slow
def test_a_notice_that_is_withdrawn(cluster: Cluster) -> None:
    gone = cluster.path / "gone"
    noticed, other = start_two(cluster, gone)
    wait_for_step(cluster.run_dir, 20)
    gone.touch()
    wait_until(lambda: notices(cluster.run_dir, "given"), "the notice")
    gone.unlink()
    wait_until(lambda: notices(cluster.run_dir, "withdrawn"), "the end of the notice")
    withdrawn_at = time.time()
    wait_until(lambda: time.time() > withdrawn_at + 6, "the moment at which it would have left")
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    assert worlds(cluster.run_dir) == [(0, 2)]
    assert "training goes on" in noticed.text()
    stop_all(cluster, [noticed, other])
    assert notices(cluster.run_dir, "left") == [], "they were stopped by SIGTERM"


@pytest.mark.slow
def test_a_notice_that_never_comes_true(cluster: Cluster) -> None:
    """One that is not sure, and one of a far day, keep nobody from training. One that is sure and near is followed;
    where the machine is still there afterwards, its node is started again and lacks nothing."""
    gone = cluster.path / "gone"
    noticed, other = start_two(cluster, gone)
    wait_for_step(cluster.run_dir, 20)
    for number, said in enumerate(({"certain": False, "reason": "perhaps"}, {"deadline": time.time() + 3600}), 1):
        gone.write_text(json.dumps(said))
        wait_until(lambda number=number: len(notices(cluster.run_dir, "given")) == number, "the notice")
        given_at = time.time()
        wait_until(lambda given_at=given_at: time.time() > given_at + 6, "the moment at which it would have left")
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
        assert worlds(cluster.run_dir) == [(0, 2)]
    gone.write_text("")
    assert noticed.wait(40) == 1
    gone.unlink()
    flags = (*ENDLESS, "--max-steps", "1000000", "--notices", f"file:{gone}")
    [again] = cluster.start(*flags, nnodes="1:2", conf=cluster.last_call(60))
    wait_until(lambda: worlds(cluster.run_dir)[-1] == (2, 2), "the world of two", 60)
    wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
    stop_all(cluster, [again, other])
    assert causes(cluster) == ["start", "leave", "join"]
    assert len(notices(cluster.run_dir, "left")) == 1
    assert events(cluster.run_dir, "peer_lost") == []


ASKER = """
import runpy, sys, threading
port = int(sys.argv.pop(1))
def tell(event, arguments):
    if event == "socket.connect" and arguments[1] == ("127.0.0.1", port):
        print("asked by", threading.current_thread().name, flush=True)
sys.addaudithook(tell)
runpy.run_module("elastic_train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_no_step_waits_for_an_answer(cluster: Cluster) -> None:
    """One thread asks, which does nothing else, whatever the server does; steps are committed beside it."""
    known = cluster.path / "known.json"
    learn(known, fault="hangs")
    with serving("nobody's", known) as server:
        source = f"http://127.0.0.1:{server.server_port}/gone"
        command = [PYTHON, "-c", ASKER, str(server.server_port), "--run-dir", str(cluster.run_dir), *ENDLESS]
        node = cluster.launch([*command, "--max-steps", "1000000", "--notices", source], {})
        wait_for_step(cluster.run_dir, 1)
        for fault in ("hangs", "lies"):
            learn(known, fault=fault)
            num_asked = len(server.asked)
            wait_until(lambda num_asked=num_asked: len(server.asked) > num_asked, f"a question, {fault}", 20)
            wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 5)
        node.signal(signal.SIGTERM)
        assert node.wait(40) == 128 + signal.SIGTERM
        asked = re.findall(r"^asked by (.*)$", node.text(), re.MULTILINE)
        assert len(asked) >= len(server.asked) > 1
    assert set(asked) == {"notice-request"}


def test_slurm_signals_torchrun_as_well(cluster: Cluster) -> None:
    """`srun --signal=USR1@60 torchrun ...`: whoever has no handler for that signal would end at once."""
    [node] = cluster.start(*ENDLESS, "--max-steps", "1000000", "--notices", "slurm")
    wait_for_step(cluster.run_dir, 5)
    workers = node.workers()
    node.signal(signal.SIGUSR1)
    for worker in workers:
        worker.send_signal(signal.SIGUSR1)
    assert node.wait(60) == 1, "as after a SIGTERM to it"
    assert outcomes(cluster.run_dir) == ["stopped"]
    assert newest_snapshot(cluster.run_dir)[0].step == last_step(cluster.run_dir)


def test_slurm_signals_the_parent_of_spawned_workers_as_well(cluster: Cluster) -> None:
    """Alone, where it is the batch script that is told: `--signal=B:USR1@60`, and `exec python`."""
    node = cluster.start_alone(*ENDLESS, "--max-steps", "1000000", "--notices", "slurm", "--spawn", "2")
    wait_for_step(cluster.run_dir, 5)
    node.signal(signal.SIGUSR1)
    assert node.wait(60) == 128 + signal.SIGTERM, "as after a SIGTERM to it"
    assert outcomes(cluster.run_dir) == ["stopped", "stopped"]
    assert newest_snapshot(cluster.run_dir)[0].step == last_step(cluster.run_dir)


@pytest.mark.slow
def test_all_nodes_are_noticed(cluster: Cluster) -> None:
    """Not at the same moment. The state is saved before the first deadline, and the next start is no failure."""
    gone = [cluster.path / f"gone-{number}" for number in range(2)]
    flags, common = (*ENDLESS, "--snapshot-every", "auto"), {"nnodes": "1:2", "conf": cluster.last_call(60)}
    nodes = [cluster.start(*flags, "--max-steps", "1000000", "--notices", f"file:{path}", **common)[0] for path in gone]
    wait_for_step(cluster.run_dir, 20)
    for path in gone:
        path.write_text(json.dumps({"deadline": time.time() + 30}))
    cluster.finish(nodes, code=1)
    step = last_step(cluster.run_dir)
    left = notices(cluster.run_dir, "left")
    assert {event["step"] for event in left if "save_seconds" in event} == {step}
    assert all(0 < event["seconds_left"] < 30 for event in left)
    assert newest_snapshot(cluster.run_dir)[0].step == step
    again = [cluster.start(*flags, "--max-steps", str(step + 20), **common)[0] for _ in gone]
    cluster.finish(again)
    incidents = check_run(cluster, step + 20)["incidents"]
    assert [(one["cause"], one.get("planned")) for one in incidents if one["cause"] != "leave"] == [("restart", True)]
    assert num_failures(incidents) == 0


# --- metadata servers, each in the network namespace of a node --------------------------------------------------------

NO_NAMESPACES = Network.why_not()
SERVER = Path(__file__).parents[1] / "metadata_server.py"
QUIET: dict[str, dict[str, Any]] = {
    "aws": {},
    "gcp": {"instance": "", "preempted": "FALSE", "maintenance": "NONE"},
    "azure": {"machine": "vm-1", "events": {"DocumentIncarnation": 1, "Events": []}},
}


def reclaim(cloud: str) -> dict[str, Any]:
    """What the server knows from the moment on at which the machine is wanted back."""
    not_before = formatdate(time.time() + 30, usegmt=True)
    event = {"EventType": "Preempt", "Resources": ["vm-1"], "EventStatus": "Scheduled", "NotBefore": not_before}
    changes: dict[str, dict[str, Any]] = {
        "aws": {"action": {"action": "terminate", "time": iso_time(120)}},
        "gcp": {"preempted": "TRUE"},
        "azure": {"events": {"DocumentIncarnation": 2, "Events": [event]}},
    }
    return QUIET[cloud] | changes[cloud]


@contextlib.contextmanager
def metadata(network: Network, index: int, cloud: str, known: Path) -> Iterator[None]:
    """A server at the link-local address, for one node alone."""
    host, port = LINK_LOCAL
    command = f"ip addr add {host}/32 dev lo && exec {sys.executable} {SERVER} {cloud} {host} {port} {known}"
    process = subprocess.Popen([*network.node_prefix(index), "sh", "-c", command])
    try:
        wait_until(known.with_suffix(".ready").exists, "the metadata server", 20)
        yield
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def network() -> Iterator[Network]:
    if NO_NAMESPACES is not None:
        pytest.skip(f"no network namespaces: {NO_NAMESPACES}")
    with contextlib.closing(Network(2)) as network:
        yield network


def start_in(network: Network, index: int, cluster: Cluster, notices: str) -> Node:
    command = [
        *TORCHRUN, "--rdzv-backend=c10d", f"--rdzv-endpoint={network.address(0)}:29400", "--nnodes=1:2",
        f"--rdzv-conf={cluster.last_call(60)}", "-m", "elastic_train", "--run-dir", str(cluster.run_dir), *ENDLESS,
        "--max-steps", "1000000", "--notices", notices,
    ]  # fmt: skip
    node = Node(
        command, cluster.path / f"node-{index}.log", cluster.path, clean_environment(),
        host=network.host_name(index), prefix=network.node_prefix(index), is_wrapped=True,
    )  # fmt: skip
    cluster.nodes.append(node)
    return node


@pytest.mark.slow
@pytest.mark.parametrize("cloud", list(QUIET))
def test_a_cloud_wants_a_machine_back(cluster: Cluster, network: Network, cloud: str) -> None:
    """`auto` finds out which; the other node's server hangs, lies and floods meanwhile, and delays no step."""
    known, wicked = cluster.path / "known.json", cluster.path / "wicked.json"
    learn(known, **QUIET[cloud])
    learn(wicked, fault="hangs")
    with metadata(network, 0, cloud, known), metadata(network, 1, cloud, wicked):
        nodes = [start_in(network, 0, cluster, "auto"), start_in(network, 1, cluster, cloud)]
        wait_until(lambda: f"this node is in {cloud}" in nodes[0].text(), "the cloud's name", 60)
        for fault in ("hangs", "lies", "floods"):
            learn(wicked, fault=fault)
            until = time.time() + 8
            wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
            wait_until(lambda until=until: time.time() > until, "some questions", 20)
        told_at = time.time()
        learn(known, **reclaim(cloud))
        nodes[0].wait(40)
        left_after = time.time() - told_at
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
        nodes[1].signal(signal.SIGTERM)
        nodes[1].wait(40)
    assert causes(cluster) == ["start", "leave"]
    assert outcomes(cluster.run_dir) == ["stopped"] * 2
    [left] = notices(cluster.run_dir, "left")
    assert (left["source"], left["certain"], left["host"]) == (cloud, True, network.host_name(0))
    assert left_after < 30, "as long as the shortest notice"
    steps = [event for event in events(cluster.run_dir, "step") if event["generation"] == 0]
    check_steps(cluster.run_dir, last_step(cluster.run_dir))
    check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=last_step(cluster.run_dir))
    gaps = [after["time"] - before["time"] for before, after in pairwise(steps)]
    assert max(gaps) < ANSWER_SECONDS, "a step that waited for an answer would take as long"
    warnings = [event for event in events(cluster.run_dir, "warning") if "no notices from" in event["message"]]
    assert len(warnings) == 1
