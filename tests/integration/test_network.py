"""Nodes in network namespaces, each with an address, a host name, pids and shared memory of its own.

What processes on one machine cannot show: silence without FIN or RST, a direction that is dropped, two nodes that lose
only each other, an endpoint of several addresses.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from elastic_train.tools.audit.record import FOLDER, Record
from elastic_train.tools.drills.backends import PORT, C10d, Etcd3, backend_of, torchrun
from elastic_train.tools.drills.cluster import Cluster, NodeState, Place
from elastic_train.tools.drills.network import HUB_ADDRESS, Network
from elastic_train.tools.drills.nodes import wait_until
from tests.audits import audit
from tests.cuts import cut_pair, split, split_at_the_hub
from tests.integration.apart import TRAIN_SECONDS, Apart, ending
from tests.integration.cluster import check_ledger, error_lines, events, outcomes, result, running

pytestmark = pytest.mark.timeout(1200)
FLAGS = ("--ledger", "--epochs", "100000", "--eval-every", "100000", "--peer-timeout", "2", "--no-progress")
NUM_STEPS = 20
"""that a world must commit to be called settled"""
ALL = dict.fromkeys(range(4), 4)
FEW_STEPS, STEPS = 5, 150
PACED = ("--task", "elastic_train.tools.drills.task:PacedDigits", "--reduction", "ordered", "--max-steps", str(STEPS))
PACE = 0.015
"""seconds for a sample: some four steps a second with four nodes"""


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    missing = Network.why_not()
    if missing is not None:
        pytest.skip(f"no network namespaces: {missing}")


@pytest.fixture(params=["c10d", pytest.param("etcd3", marks=pytest.mark.slow)])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes that have trained together, and know each other's addresses, or that of an etcd on the bridge."""
    network = Network(3)
    record = Record(tmp_path / "nodes")  # not in the run: for its audit this is no drill
    backend = backend_of(request.param, network)
    cluster = Cluster(tmp_path / "run", record, FLAGS, num_nodes=3, network=network, backend=backend)
    try:
        cluster.backend.start()
        for place in cluster.places:
            cluster.start(place)
        cluster.settle(3, NUM_STEPS, 150)
        yield cluster
    finally:
        cluster.close()
        network.close()
        record.close()


BINDS_ANY = """
ip link set lo up && ip link add v0 type veth peer name v1 && ip link set v1 up && ip link set v0 up || exit 1
ip address add 10.77.9.1/24 dev v0 && ip address add 10.77.9.3/24 dev v0 || exit 1
ip address add 10.77.8.1/32 dev v0 || exit 1
ip address add fd77::1/64 dev v0 nodad || exit 77
echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind && echo 1 > /proc/sys/net/ipv6/ip_nonlocal_bind || exit 77
exec "$@"
"""
OWN = ("127.0.0.1", "::1", "10.77.9.1", "10.77.9.3", "10.77.8.1", "fd77::1")
OTHERS = ("10.77.9.2", "10.77.8.2", "fd77::2")


def test_a_host_that_may_bind_any_address_takes_none_for_its_own() -> None:
    """As beside keepalived: each node would take itself for the first endpoint's host, and begin a job."""
    found = said_beside_others(f"""
from elastic_train.protocol.addresses import _can_bind, own_and_others

print(*(ip for ip in {OWN + OTHERS!r} if own_and_others(ip)[0]), all(map(_can_bind, {OTHERS!r})))
""")
    assert found == [*OWN, "True"]


def test_the_interface_of_any_of_a_hosts_addresses_is_the_one_that_gloo_takes() -> None:
    """Without one it takes what the host's own name leads to: 127.0.0.1, or Debian's 127.0.1.1."""
    found = said_beside_others(f"""
import os
from elastic_train.protocol.addresses import use_interface_of

for ip in {OWN + OTHERS!r}:
    use_interface_of(ip)
    print(os.environ.pop("GLOO_SOCKET_IFNAME", "none"))
""")
    assert found == ["lo", "lo", "v0", "v0", "v0", "v0", "none", "none", "none"]


def said_beside_others(code: str) -> list[str]:
    """What a program prints on a host with the addresses OWN, which may bind OTHERS too."""
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    command = ["unshare", *as_root, "--net", "sh", "-c", BINDS_ANY, "sh", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode == 77:
        pytest.skip(f"no IPv6, or a /proc/sys that cannot be written to: {ended.stderr}")
    assert ended.stderr == ""
    return ended.stdout.split()


def cut_off(*places: Place) -> None:
    """Whom `Cluster.settle` does not wait for."""
    for place in places:
        place.effect = NodeState.CUT_OFF


def log_of(cluster: Cluster, place: Place) -> str:
    return (cluster.run_dir.parent / "nodes" / FOLDER / f"{place.name}-{place.num_started}.log").read_text()


def size_of_world(cluster: Cluster) -> int:
    cluster.poll()
    return len(cluster.watch.world.members) if cluster.watch.world is not None else 0


def back(cluster: Cluster, *places: Place) -> None:
    """They hear again, and train with the others in the processes that they had."""
    members = {place.name: place.members for place in places}
    for place in places:
        place.effect = None
    cluster.settle(len(cluster.places), NUM_STEPS, 60)
    assert {place.name: place.members for place in places} == members


def ended(cluster: Cluster, place: Place) -> bool:
    cluster.poll()
    return not place.is_running


def finish(cluster: Cluster) -> None:
    """Stop everybody politely; what is left must pass the audit, and no committed step may be lost."""
    for place in cluster.running:
        if place.node is not None and (agent := place.node.agent()) is not None:
            agent.send_signal(15)
    wait_until(lambda: all(ended(cluster, place) for place in cluster.places), "end of all nodes", 60)
    found = audit(cluster.run_dir)
    assert found.passed, "\n".join(found.reasons)
    assert outcomes(cluster.run_dir)[-1] == "stopped"
    steps = sorted(event["step"] for event in events(cluster.run_dir, "step"))
    assert steps == list(range(1, len(steps) + 1)), "every committed step once"


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 0])
def test_a_cable_is_pulled_and_plugged_in_again(job: Cluster, index: int) -> None:
    """The others go on without the silent node, the first one too; when it hears again it comes back by itself."""
    assert job.network is not None
    cut = job.places[index]
    job.network.pull_cable(cut.index)
    cut_off(cut)
    job.settle(2, NUM_STEPS, 60)
    job.network.heal(cut.index)
    back(job, cut)
    assert "comes back as a newcomer" in log_of(job, cut)
    finish(job)


@pytest.mark.slow
def test_the_first_node_freezes_and_thaws(job: Cluster) -> None:
    """Under c10d it hosts the endpoint. Its agent does not freeze, and its worker comes back in its process."""
    first = job.places[0]
    [worker] = first.workers()
    worker.suspend()
    first.effect = NodeState.FROZEN
    job.settle(2, NUM_STEPS, 60)
    worker.resume()
    back(job, first)
    assert "comes back as a newcomer" in log_of(job, first)
    finish(job)


@pytest.mark.slow
def test_what_a_node_sends_is_dropped(job: Cluster) -> None:
    assert job.network is not None
    mute = job.places[2]
    job.network.drop_outgoing(mute.index)
    cut_off(mute)
    job.settle(2, NUM_STEPS, 60)
    job.network.heal(mute.index)
    back(job, mute)
    finish(job)


@pytest.mark.slow
def test_two_nodes_lose_each_other(job: Cluster) -> None:
    """Both reach the third: one of them is expelled, the rest go on, and it comes back when they hear each other."""
    assert job.network is not None
    one, other = job.places[0], job.places[2]
    cut_pair(job.network, one.index, other.index)
    cut_off(one, other)
    wait_until(lambda: size_of_world(job) == 2, "world of two", 60)
    job.network.heal(one.index)
    job.network.heal(other.index)
    back(job, one, other)
    finish(job)


@pytest.mark.slow
def test_power_is_lost_and_a_node_comes_back(job: Cluster) -> None:
    """Silence for ever, of the first node; then the same command on the same host."""
    assert job.network is not None
    dead = job.places[0]
    job.network.pull_cable(dead.index)
    job.kill([dead])
    job.settle(2, NUM_STEPS, 60)
    job.start(dead)
    job.settle(3, NUM_STEPS, 150)
    sources = {event["source"] for event in events(job.run_dir, "restore") if event["generation"] > 0}
    assert sources == {"peer"}, "not from an old snapshot"
    finish(job)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the state to which the paced job comes in one process."""
    with running(tmp_path_factory.mktemp("undisturbed")) as alone:
        alone.finish([alone.start_alone(*FLAGS, *PACED)], timeout=600)
        return str(result(alone.run_dir)["state_sha256"])


@pytest.fixture
def network() -> Iterator[Network]:
    """Of four nodes."""
    with contextlib.closing(Network(4)) as network:
        yield network


@pytest.fixture(params=[C10d.name])
def four(network: Network, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Apart]:
    """Its nodes, that have trained together. The parameter: a backend, and perhaps flags, or that they share a run
    directory; else each has its own."""
    name, *more = request.param.split()
    is_shared = more == SHARED.split()[1:]
    backend = backend_of(name, network)
    with contextlib.closing(backend):
        backend.start()
        flags = (*FLAGS, *PACED, *(() if is_shared else more))
        launcher = backend.launcher(0, network.num_nodes, 1)
        given = Apart(network, tmp_path, flags, num_steps=FEW_STEPS, launcher=launcher, is_shared=is_shared)
        with ending(given) as nodes:
            nodes.set_pace(PACE)
            nodes.start(*range(4))
            nodes.train(ALL)
            yield nodes
            assert backend.stop() == [], "nothing of the job is left there"


SPLITS = {
    "2-2": ([0, 3], [1, 2]),
    "1-3": ([0], [1, 2, 3]),
    "3-1": ([0, 1, 3], [2]),
    "2-1-1": ([0, 2], [1], [3]),
    "1-2-1": ([0], [1, 3], [2]),
}
"""groups by rank, the first of which keeps the hub, with etcd"""
BY_VOTES = {"2-2": 0, "1-3": 1, "3-1": 0, "2-1-1": 0}
"""the group that goes on where votes decide, if any"""
ETCD3 = pytest.mark.parametrize("four", [Etcd3.name], indirect=True)
SHARED = f"{C10d.name} shared"
WAIT_SECONDS = 30


@pytest.mark.slow
@pytest.mark.parametrize("form", SPLITS)
def test_four_nodes_are_split(four: Apart, undisturbed: str, form: str) -> None:
    """One group at most goes on, and the others wait; whole again, all train to the end together."""
    groups = groups_of(four, form)
    split(four.network, *groups)
    check_that_one_goes_on(four, groups[BY_VOTES[form]] if form in BY_VOTES else [])
    mend(four, undisturbed)


@pytest.mark.slow
@ETCD3
@pytest.mark.parametrize("form", SPLITS)
def test_of_a_split_the_group_that_reaches_etcd_goes_on(four: Apart, undisturbed: str, form: str) -> None:
    """However small it is: the majority waits."""
    groups = groups_of(four, form)
    split(four.network, *groups)
    check_that_one_goes_on(four, groups[0])
    mend(four, undisturbed)


@pytest.mark.slow
@ETCD3
@pytest.mark.parametrize("form", SPLITS)
def test_of_a_split_whose_groups_all_reach_etcd_one_goes_on(four: Apart, undisturbed: str, form: str) -> None:
    """The one with the votes, where there is one. The others find its claim, and come back when they hear it again."""
    groups = groups_of(four, form)
    split_at_the_hub(four.network, *groups)

    def those_that_went_on() -> list[int]:
        return [index for index in four.nodes if four.last_world(index)["generation"] > 0]

    wait_until(those_that_went_on, "next world", TRAIN_SECONDS)
    [inside] = [group for group in groups if set(group) & set(those_that_went_on())]
    assert inside == (groups[BY_VOTES[form]] if form in BY_VOTES else inside)
    outside = [index for index in four.nodes if index not in inside]
    wait_until(lambda: all("comes back as a newcomer" in four.nodes[index].text() for index in outside), "word", 60)
    check_that_only_these_go_on(four, inside)
    mend(four, undisturbed)


@pytest.mark.slow
@ETCD3
def test_rank_0_alone_loses_etcd_and_then_another_node_falls_silent(four: Apart, undisturbed: str) -> None:
    """The first costs the members nothing. Of the three that are left another one claims, for rank 0 as well."""
    world = four.last_world(0)
    by_rank = four.by_rank(world)
    four.network.hide(by_rank[0], [HUB_ADDRESS])
    wait_until(lambda: "new nodes cannot find the job there" in four.nodes[by_rank[0]].text(), "its warning", 60)
    four.train(ALL)
    assert {four.last_world(index)["generation"] for index in by_rank} == {0}, "nobody re-formed"
    four.network.pull_cable(by_rank[3])
    check_that_one_goes_on(four, by_rank[:3])
    mend(four, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("four", [Etcd3.name, SHARED], indirect=True)
def test_all_but_one_lose_their_power_and_come_back(four: Apart, undisturbed: str) -> None:
    """The one of the highest rank goes on by its claim; the same command brings the others back."""
    dead, last = lose_power(four)
    four.train({last: 1})
    four.set_pace(10 * PACE)  # it must not come to the end meanwhile
    come_back(four, dead)
    mend(four, undisturbed, replaced=dead)


@pytest.mark.slow
@pytest.mark.parametrize("four", [f"{C10d.name} --wait-timeout={WAIT_SECONDS}"], indirect=True)
def test_all_but_one_lose_their_power_and_that_one_waits_in_vain(four: Apart, undisturbed: str) -> None:
    """It exits 1, with its last commit saved, from which the same command on all nodes goes on."""
    dead, last = lose_power(four)
    check_that_one_goes_on(four, [])
    assert four.nodes[last].wait(WAIT_SECONDS + 60) == 1
    [done] = events(four.run_dirs[last], "done")
    assert done["outcome"] == "failed"
    [line] = error_lines(four.nodes[last])
    assert line.endswith(
        f" did not answer for {WAIT_SECONDS} s (--wait-timeout), and without them this side may not go on; "
        f"the state of step {done['step']} is saved, start all nodes again to continue"
    )
    assert all(four.network.host_name(index) in line for index in dead), "it names them"
    assert done["step"] >= max(event["step"] for event in four.events("step")) - 1, "all but the step in hand"
    come_back(four, [*dead, last])
    mend(four, undisturbed, replaced=four.nodes)
    assert {event["restored_step"] for event in events(four.run_dirs[last], "restore")} == {0, done["step"]}


def lose_power(nodes: Apart) -> tuple[list[int], int]:
    """All nodes but that of the highest rank are silent for ever; these, and that one."""
    *dead, last = nodes.by_rank(nodes.last_world(0))
    for index in dead:
        nodes.network.pull_cable(index)
    for index in dead:
        nodes.nodes.pop(index).kill()
    return dead, last


def come_back(nodes: Apart, indices: list[int]) -> None:
    """They are started again, with their power and the same command."""
    for index in sorted(indices):
        nodes.network.heal(index)
    nodes.start(*sorted(indices))


def groups_of(nodes: Apart, form: str) -> list[list[int]]:
    by_rank = nodes.by_rank(nodes.last_world(0))
    return [[by_rank[rank] for rank in group] for group in SPLITS[form]]


def check_that_one_goes_on(nodes: Apart, inside: list[int]) -> None:
    """These nodes train as one world, and all others wait, with what they have saved."""
    outside = [index for index in nodes.nodes if index not in inside]
    wait_until(lambda: all(map(nodes.waits, outside)), "word of those that wait", 60)
    wait_until(lambda: all(map(nodes.has_saved, outside)), "what they have, in case that no other is left", 60)
    check_that_only_these_go_on(nodes, inside)


def check_that_only_these_go_on(nodes: Apart, inside: list[int]) -> None:
    """These nodes train as one world, and all others do not a step."""
    outside = [index for index in nodes.nodes if index not in inside]
    before = {index: nodes.steps_of(index) for index in outside}
    found = nodes.train(dict.fromkeys(inside, len(inside))) if inside else []
    assert {frozenset(nodes.by_rank(world)) for world in found} <= {frozenset(inside)}
    reached = len(nodes.events("step"))
    wait_until(lambda: not inside or len(nodes.events("step")) >= reached + FEW_STEPS, "further steps", 60)
    assert [nodes.last_world(index) for index in inside] == found, "nobody disturbs them"
    assert {index: nodes.steps_of(index) for index in outside} == before, "not a step of those that wait"
    assert {nodes.last_world(index)["generation"] for index in outside} == {0}


def mend(nodes: Apart, state_sha256: str, replaced: Collection[int] = ()) -> None:
    """All hear each other, and train together to the end, but for those `replaced` in the processes that they had."""
    for index in nodes.nodes:
        nodes.network.heal(index)
    nodes.train(ALL)
    nodes.set_pace(0.0)
    check_end(nodes, state_sha256)
    started = Counter(event["host"] for event in nodes.events("start") if "was" not in event)
    assert started == {nodes.network.host_name(index): 1 + (index in replaced) for index in nodes.nodes}


def check_end(nodes: Apart, state_sha256: str) -> None:
    """All come to the end, in the state of the undisturbed job, with every sample exactly once per epoch."""
    assert {index: node.wait(120) for index, node in nodes.nodes.items()} == dict.fromkeys(nodes.nodes, 0)
    ends = [result(nodes.run_dirs[index]) for index in nodes.nodes]
    assert {(end["step"], end["state_sha256"]) for end in ends} == {(STEPS, state_sha256)}
    check_ledger(list(dict.fromkeys(nodes.run_dirs)), length=1437, batch=64, steps=STEPS)
    found = nodes.audit()
    assert found.passed, "\n".join(found.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["the second endpoint", "the run directory"])
def test_a_newcomer_finds_the_job_after_the_first_endpoint_is_gone_for_good(tmp_path: Path, by: str) -> None:
    """Its host is killed, and then silent to whoever asks; the newcomer has the other way alone."""
    has_directory = by == "the run directory"
    with contextlib.closing(Network(3)) as network:
        endpoint = ",".join(f"{network.address(index)}:{PORT}" for index in range(1 if has_directory else 2))
        launcher = torchrun("c10d", endpoint, network.num_nodes, 1)
        given = Apart(network, tmp_path, FLAGS, num_steps=NUM_STEPS, launcher=launcher, is_shared=has_directory)
        with ending(given) as nodes:
            nodes.start(0, 1, last_call=3)
            nodes.train({0: 2, 1: 2})
            nodes.nodes.pop(0).kill()
            network.pull_cable(0)
            nodes.train({1: 1})
            nodes.start(2)
            [world, _] = nodes.train({1: 2, 2: 2})
            assert nodes.by_rank(world) == [1, 2]
            nodes.stop()
            found = nodes.audit()
            assert found.passed, "\n".join(found.reasons)
