"""One snapshot that several nodes write together: each its share, the first one the manifest. The nodes are threads."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import fsspec
import pytest
import torch

from elastic_train.errors import OwnershipLost
from elastic_train.storage import shares, state_bytes
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.parts import AT_ONCE
from elastic_train.storage.shares import (
    BODY,
    HEAD,
    TAIL,
    Cutter,
    Fleet,
    SharedState,
    SharedStream,
    ShareProgress,
    is_given_up,
    senders,
    silence_limit,
    taken_over,
)
from elastic_train.storage.snapshot import find_snapshots, first_whole
from elastic_train.storage.state_bytes import HostBuffers, read_state
from elastic_train.storage.store_arms import MemoryArm
from elastic_train.storage.store_urls import parse_url
from tests.unit.test_bucket import CountingArm, Stops, bucket_of, newest, save, writer_to

HOSTS = ("one", "two", "three")
EQUAL = frozenset({"w", "v"})


@pytest.fixture(autouse=True)
def _quick_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for others: where this machine is busy, one is given up that would have come. As tensors are in
    a real state, those here are longer than one piece of what the first node hashes."""
    monkeypatch.setattr(state_bytes, "AT_ONCE", 1000)
    monkeypatch.setattr(shares, "LEAST_BYTES", 0)
    monkeypatch.setattr(shares, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(shares, "LEAST_SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(shares, "IDLE_SECONDS", 0.2)


@pytest.fixture
def _patient(_quick_and_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is given up because it is slow."""
    monkeypatch.setattr(shares, "LEAST_SILENCE_SECONDS", 60.0)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"memory://shares/{request.node.name.replace('[', '/').rstrip(']')}"


def fleet(index: int, seconds_left: float | None = None) -> Fleet:
    return Fleet(HOSTS, index, EQUAL, lambda: seconds_left)


def state_of(step: int, node: int) -> dict[str, Any]:
    """What a node holds: `b`, a buffer, an extra and `run` are its own; of averaged weights only `b` is."""
    generator = torch.Generator().manual_seed(step)
    model = {
        "w": torch.full((5000,), float(step)),
        "b": torch.full((700 * (node + 1),), float(node)),
        "v": torch.rand(3000, generator=generator),
    }
    momentum = torch.rand(5000, generator=generator)
    averaged = {name: value if name == "b" else value / 2 for name, value in model.items()}
    return {
        "extras": {"critic": {"w": torch.full((300,), float(node))}, "ema": averaged},
        "model": model,
        "optimizer": {"state": {0: {"momentum": momentum, "step": torch.tensor(float(step))}}, "param_groups": []},
        "run": {"step": step, "who": "x" * 100 * node, "extras": [torch.ones(1)] * node},
    }


class Node:
    """One that saves a state, or its share; `arm` may end it."""

    def __init__(self, url: str, index: int, arm: MemoryArm | None = None) -> None:
        self.index = index
        self.bucket = bucket_of(url, arm)
        self.writer = writer_to(self.bucket, host=HOSTS[index])
        self.result: Any = None
        self._thread: threading.Thread | None = None

    def save(self, step: int, state: dict[str, Any] | None = None, *, generation: int = 0) -> None:
        state = state_of(step, self.index) if state is None else state
        if self.index == 0:
            self.result = self.writer.save(
                state, step=step, epoch=0, samples_done=step, generation=generation, world_size=3, fleet=fleet(0)
            )
        else:
            self.result = self.writer.save_share(state, fleet(self.index), step=step, generation=generation)

    def start(self, *arguments: Any, **options: Any) -> None:
        def run() -> None:
            try:
                self.save(*arguments, **options)
            except BaseException as error:
                self.result = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> Any:
        assert self._thread is not None
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        return self.result


def counting_arm(url: str) -> CountingArm:
    return CountingArm(fsspec.filesystem("memory"), parse_url(url))


def save_together(url: str, step: int, arms: dict[int, MemoryArm] | None = None, **options: Any) -> list[Any]:
    """What each of three nodes came to."""
    nodes = [Node(url, index, (arms or {}).get(index)) for index in range(3)]
    for node in nodes:
        node.start(step, **options)
    return [node.end() for node in nodes]


def parts_of(bucket: Bucket) -> list[dict[str, Any]]:
    """Of the newest one, as its manifest has them."""
    info = find_snapshots(bucket, warn=pytest.fail)[0]
    return list(json.loads(bucket.store.get(f"{info.name}/manifest.json").data)["parts"])  # type: ignore[union-attr]


def body_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for part in parts if f".{BODY}-" in part["name"]]


def require_whole(bucket: Bucket, step: int) -> None:
    found = first_whole(find_snapshots(bucket, warn=pytest.fail), pytest.fail)
    assert found is not None
    info, state = found
    assert info.step == step
    wanted = state_of(step, 0)
    for name in wanted["model"]:
        assert torch.equal(state["model"][name], wanted["model"][name])
    assert torch.equal(state["optimizer"]["state"][0]["momentum"], wanted["optimizer"]["state"][0]["momentum"])
    assert state["run"] == wanted["run"]


# --- what is cut ------------------------------------------------------------------------------------------------------


def cut(state: dict[str, Any], part_bytes: int = 4096) -> tuple[list[tuple[str, int, str]], bytes]:
    found, whole = [], bytearray()

    def take(zone: str, number: int, sha256: str, size: int, data: bytearray | None) -> None:
        assert data is not None
        assert len(data) == size
        found.append((zone, number, sha256))
        whole.extend(data)

    shared = SharedState(state, fleet(0))
    cutter = Cutter(shared, part_bytes, lambda _zone, _number: True, take)
    shared(cutter)
    cutter.close()
    return found, bytes(whole)


@pytest.mark.parametrize("part_bytes", [4096, 1000, 2**20])
def test_what_all_have_alike_is_cut_alike_wherever_it_lies(part_bytes: int) -> None:
    found = [cut(state_of(1, node), part_bytes) for node in range(3)]
    bodies = [[part for part in parts if part[0] == BODY] for parts, _ in found]
    assert bodies[0] == bodies[1] == bodies[2]
    assert len(bodies[0]) >= (5000 + 2 * (3000 + 5000)) * 4 // part_bytes, "averaged weights, too"
    assert [zone for zone, _ in itertools.groupby(zone for zone, _, _ in found[0][0])] == [HEAD, BODY, TAIL]
    heads = [[part for part in parts if part[0] == HEAD] for parts, _ in found]
    assert heads[0] != heads[1]
    changed = state_of(1, 0)
    changed["model"]["v"][0] += 1
    assert cut(changed, part_bytes)[0] != found[0][0]


def test_what_is_cut_is_what_torch_reads(tmp_path: Any) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(cut(state_of(3, 1))[1])
    with open(path, "rb") as file:
        state = read_state(file, "cpu", "test")
    wanted = state_of(3, 1)
    assert set(state) == set(wanted)
    assert state["run"] == wanted["run"]
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in wanted["model"].items())
    found, wanted = state["extras"]["ema"], wanted["extras"]["ema"]
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_modules_metadata_stays_and_a_state_without_tensors_is_no_ones_share() -> None:
    model = torch.nn.BatchNorm1d(4)
    state = {"model": model.state_dict(), "optimizer": {"state": {}}, "extras": {}}
    shared = SharedState(state, Fleet(HOSTS, 0, frozenset({"weight", "bias"}), lambda: None))
    assert shared._state["model"]._metadata == state["model"]._metadata  # type: ignore[attr-defined]
    assert shared.num_bytes == 32
    assert {zone for zone, _, _ in cut({"model": {}, "optimizer": {}, "extras": {}})[0]} == {HEAD}


def test_the_copy_of_a_state_is_as_large_as_the_state() -> None:
    """The first node asks of its copy whether to share, and the others of the state. In the copy a slice of a large
    tensor is a small one."""
    tied, large = torch.zeros(8), torch.zeros(1000)
    state = {"model": {"w": tied, "v": tied}, "optimizer": {"state": large[:8]}, "extras": {}}
    fleet = Fleet(HOSTS, 0, EQUAL, lambda: None)
    assert SharedState(state, fleet).num_bytes == SharedState(HostBuffers().copy(state), fleet).num_bytes == 96


# --- who sends what ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_patient")
def test_each_node_sends_every_third_part_and_the_first_one_the_rest(url: str) -> None:
    arms = {index: counting_arm(url) for index in range(3)}
    first, *others = save_together(url, 5, dict(arms))
    assert others == [True, True], "they see that it is there"
    bucket = bucket_of(url)
    require_whole(bucket, 5)
    parts = parts_of(bucket)
    body = body_of(parts)
    assert len(body) == 21
    assert [part["host"] for part in body] == [HOSTS[number % 3] for number in range(21)]
    assert {part["host"] for part in parts if part not in body} == {"one"}
    assert first.bytes == sum(part["bytes"] for part in parts)
    assert [arms[index].calls for index in (1, 2)] == [7, 7]
    assert arms[0].calls == 7 + len(parts) - len(body) + 1, "and the manifest"


def test_a_small_state_is_left_to_the_first(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEAST_BYTES", 2**20)
    arms = {index: counting_arm(url) for index in range(3)}
    _, *others = save_together(url, 5, dict(arms))
    assert others == [False, False]
    require_whole(bucket_of(url), 5)
    assert [arms[index].calls for index in (1, 2)] == [0, 0]
    assert body_of(parts_of(bucket_of(url))) == []


@pytest.mark.parametrize(
    ("num_nodes", "num_bytes", "is_bucket", "expected"),
    [(3, 2**26, True, 3), (3, 2**26 - 1, True, 1), (3, 2**40, False, 1), (1, 2**40, True, 1)],
)
def test_how_many_nodes_send_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, num_bytes: int, *, is_bucket: bool, expected: int
) -> None:
    monkeypatch.undo()
    assert senders(num_nodes, num_bytes, is_bucket=is_bucket) == expected


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_node_that_dies_at_any_call_of_its_share(url: str, moment: str) -> None:
    """The two others send what is missing of it."""
    for number in range(1, 8):
        place = f"{url}/{number}"
        arms = {index: counting_arm(place) for index in range(3)}
        setattr(arms[2], f"stops_{moment}", number)
        _, second, third = save_together(place, 5, dict(arms))
        assert not isinstance(second, BaseException)
        assert isinstance(third, Stops)
        bucket = bucket_of(place)
        require_whole(bucket, 5)
        body = body_of(parts_of(bucket))
        by_host = Counter(part["host"] for part in body)
        assert by_host["one"] + by_host["two"] + by_host["three"] == 21
        assert by_host["three"] <= number + 1, "the manifest names those who wrote"
        sent_again = sum(arms[index].calls for index in (0, 1)) - 14 - (len(parts_of(bucket)) - len(body)) - 1
        missing = 7 - (number - (moment == "before"))
        assert missing - 2 <= sent_again, "two of its threads may still have put theirs"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_first_dies_at_any_call_and_it_is_whole_or_absent(url: str, moment: str) -> None:
    seen = set()
    counted = counting_arm(f"{url}/counted")
    save_together(f"{url}/counted", 5, {0: counted})
    assert counted.calls >= 8
    for number in range(1, counted.calls + 1):
        place = f"{url}/{number}"
        save(writer_to(bucket_of(place)), 1)
        arm = counting_arm(place)
        setattr(arm, f"stops_{moment}", number)
        first, *others = save_together(place, 5, {0: arm})
        bucket = bucket_of(place)
        is_there = [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == [5, 1]
        if is_there:
            require_whole(bucket, 5)
        else:
            assert isinstance(first, Stops)
            assert newest(bucket) == 1, "the next start takes the older one"
            assert others == [False, False]
        seen.add(is_there)
        save(writer_to(bucket, host="four", keep=5), 7, generation=1)
        left = {key.partition("/")[0] for key in bucket.store.list()}
        assert left == {info.name for info in find_snapshots(bucket, warn=pytest.fail)}, "leftovers are deleted"
    assert False in seen
    assert True in seen or moment == "before"


@pytest.mark.usefixtures("_patient")
def test_nobody_waits_for_the_first_once_it_is_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM leaves 30 s, in which those that are left can save it all."""
    one = fleet(1)
    monkeypatch.setattr(shares, "IDLE_SECONDS", 60.0)
    node, is_lost = Node(url, 1), threading.Event()
    monkeypatch.setattr("tests.unit.test_shares.fleet", lambda _: replace(one, is_first_lost=is_lost.is_set))
    node.start(5)
    assert node._thread is not None
    node._thread.join(0.2)
    assert node._thread.is_alive(), "the first may be about to put the manifest"
    is_lost.set()
    assert node.end() is False


@pytest.mark.usefixtures("_patient")
def test_a_node_that_holds_other_bytes_puts_none_in_their_place(url: str) -> None:
    nodes = [Node(url, index) for index in range(3)]
    wrong = state_of(5, 2)
    wrong["model"]["w"] += 1.0
    for node in nodes:
        node.start(5, wrong if node.index == 2 else None)
    assert [node.end() for node in nodes][1] is True
    require_whole(nodes[0].bucket, 5)


def test_the_first_that_was_replaced_makes_nothing_visible(url: str) -> None:
    def replaced() -> None:
        raise OwnershipLost("another job")

    nodes = [Node(url, index) for index in range(3)]
    nodes[0].writer = writer_to(nodes[0].bucket, host="one", before_rename=replaced)
    for node in nodes:
        node.start(5)
    first, *others = [node.end() for node in nodes]
    assert isinstance(first, OwnershipLost)
    assert others == [False, False]
    assert find_snapshots(nodes[0].bucket, warn=pytest.fail) == []
    assert [key for key in nodes[0].bucket.store.list() if key.endswith("manifest.json")] == []


def test_who_has_been_silent_meanwhile_is_not_waited_for_any_more() -> None:
    """The second node has died at once, and the first is through with its own parts after some seconds."""
    now, slept, there = [0.0], list[float](), dict[str, int]()

    def put(name: str, data: bytearray) -> None:
        now[0] += 1.0
        there[name] = len(data)

    two = Fleet(HOSTS[:2], 0, EQUAL, lambda: None)
    shared = SharedState(state_of(5, 0), two)
    stream = SharedStream(
        shared, str, "nonce", put, lambda: dict(there), 4096, clock=lambda: now[0], sleep=slept.append
    )
    shared(stream)
    parts = stream.finish()
    assert [there[part.name] for part in parts] == [part.bytes for part in parts]
    assert {part.host for part in parts} == {"one"}
    assert slept == []


# --- the rule ---------------------------------------------------------------------------------------------------------


def progress_of(missing: dict[int, int], given_up: set[int], num_nodes: int = 3) -> list[ShareProgress]:
    """So many of each are missing: its last ones."""
    return [
        ShareProgress(
            tuple(range(node, 30, num_nodes))[-missing[node] :] if missing.get(node) else (), node in given_up
        )
        for node in range(num_nodes)
    ]


def test_those_that_are_through_share_what_is_missing_and_the_first_is_never_idle() -> None:
    for num_nodes in (2, 3, 5):
        for dead in itertools.chain.from_iterable(itertools.combinations(range(1, num_nodes), n) for n in (1, 2)):
            for number in range(1, 6):
                progress = progress_of(dict.fromkeys(dead, number), set(dead), num_nodes)
                through = [node for node in range(num_nodes) if node not in dead]
                sent = [taken_over(progress, node, 1.0, None) for node in through]
                assert Counter(itertools.chain(*sent)) == Counter(
                    itertools.chain(*(one.missing for one in progress))
                ), "each part by one"
                assert sent[0]


def test_who_still_sends_is_waited_for_while_there_is_time() -> None:
    progress = progress_of({1: 4, 2: 2}, set())
    for seconds_left in (None, 100.0, 6.0 + shares.SPARE_SECONDS):
        assert taken_over(progress, 0, 1.0, seconds_left) == []
    assert taken_over(progress, 0, 1.0, 5.0) == [25, 28, 29], "the later half of each one's"
    assert taken_over(progress, 0, 1.0, -10.0) == [25, 28, 29]


def test_who_is_given_up() -> None:
    assert not is_given_up(silence_limit(1.0), 1.0, has_other_bytes=False)
    assert is_given_up(silence_limit(1.0) + 0.1, 1.0, has_other_bytes=False)
    assert is_given_up(0.0, 1.0, has_other_bytes=True)
    assert silence_limit(1.0) > AT_ONCE, "as many may come at one moment"
    assert silence_limit(0.0) == shares.LEAST_SILENCE_SECONDS
