"""Runs whose snapshots lie below a URL: they go on from there alone, and two jobs do not write there at once. The S3
server is moto, a fake, or a real one (tests/object_stores.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from elastic_train.errors import ObjectStoreError
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.snapshot import find_snapshots
from elastic_train.storage.store_urls import parse_url
from tests.integration.cluster import (
    PYTHON,
    Cluster,
    check_ledger,
    error_line,
    events,
    last_step,
    outcomes,
    result,
    wait_for_step,
    wait_until,
    worlds,
)
from tests.integration.test_bucket_faults import LASTING
from tests.nodes import Node
from tests.object_stores import ACCESS_KEY, BUCKET, IS_SWIFT, SECRET_KEY, Request, environment, proxy_to, s3_server

LENGTH, BATCH = 1437, 64


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def steps_in(url: str) -> list[int]:
    bucket = Bucket(ObjectStore(parse_url(url)))
    return [info.step for info in find_snapshots(bucket, warn=pytest.fail)]


def start_two(cluster: Cluster, dirs: list[Path], url: str, env: dict[str, str]) -> list[Node]:
    """Two nodes that share nothing but the bucket, one after the other; they train together when this returns."""
    flags = ("--snapshot-dir", url, "--snapshot-every", "500", "--model", "mlp", "--epochs", "100000", "--ledger")
    flags = (*flags, "--peer-timeout", "2")
    nodes = cluster.start(*flags, env=env, run_dir=dirs[0], nnodes="1:2")
    wait_for_step(dirs[0], 1)
    nodes += cluster.start(*flags, env=env, run_dir=dirs[1], nnodes="1:2")
    wait_until(lambda: worlds(dirs[0])[-1] == (1, 2), "world of 2")
    wait_for_step(dirs[0], last_step(dirs[0]) + 20)
    return nodes


def test_a_run_goes_on_from_a_bucket_alone(
    cluster: Cluster, endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment(endpoint)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    flags = ("--snapshot-dir", url, "--snapshot-every", "10", "--model", "mlp")
    cluster.finish([cluster.start_alone(*flags, "--max-steps", "25", env=env)])
    assert steps_in(url)[0] == 25
    new = cluster.path / "new"
    cluster.finish([cluster.start_alone(*flags, "--max-steps", "40", env=env, run_dir=new)])
    [restored] = events(new, "restore")
    assert (restored["source"], restored["restored_step"]) == ("snapshot", 25)
    assert restored["generation"] == 1, "higher than any before"
    assert not (new / "snapshots").exists()
    assert steps_in(url)[0] == 40
    assert 2 <= len(steps_in(url)) <= 3, "--keep-snapshots, whichever were not put off"
    assert len(events(new, "warning")) == IS_SWIFT, "it has no conditional put"
    store = ObjectStore(parse_url(url))
    for stored in map(store.get, store.list()):
        assert stored is not None
        assert not [secret for secret in (ACCESS_KEY, SECRET_KEY) if secret.encode() in stored.data]
    missing = cluster.start_alone("--snapshot-dir", "s3://not-there/run", env=env, run_dir=cluster.path / "other")
    assert missing.wait() == 1
    assert "s3://not-there/run: cannot write" in error_line(missing)
    assert "make the bucket, or correct the URL" in error_line(missing)


def test_training_goes_on_where_nothing_can_be_saved(
    cluster: Cluster, endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials are withdrawn after the first snapshot; the server repeats them in its answer."""

    def withdrawn(request: Request) -> bool:
        return request.is_part and bool(written) and request.answer(403, "AccessDenied", f"{ACCESS_KEY} {SECRET_KEY}")

    with proxy_to(endpoint) as proxy:
        env = environment(proxy.endpoint)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        written: list[int] = []
        proxy.fault = withdrawn
        flags = ("--snapshot-dir", url, "--snapshot-every", "20", "--model", "mlp", "--max-steps", "400")
        node = cluster.start_alone(*flags, env=env)
        wait_until(lambda: bool(events(cluster.run_dir, "snapshot")), "the first snapshot", 60.0)
        written += [int(event["snapshot_step"]) for event in events(cluster.run_dir, "snapshot")]
        assert node.wait() == 1, "what was trained is not there"
        assert outcomes(cluster.run_dir) == ["finished"]
        warnings = [str(event["message"]) for event in events(cluster.run_dir, "warning")]
        assert any("AccessDenied (403); give credentials" in warning for warning in warnings)
        assert any(warning.endswith("training goes on") for warning in warnings)
        [finished] = [line for line in node.text().splitlines() if "finished: 400 steps" in line]
        assert "THIS STATE IS NOT SAVED, a warning above says why; the same command goes on" in finished
        assert set(steps_in(url)) & set(written)
        files = [path for path in cluster.path.rglob("*") if path.is_file()]
        said = b"".join(path.read_bytes() for path in files)
        for secret in (ACCESS_KEY, SECRET_KEY):
            assert secret.encode() not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["errors", "cut connections", "silence", "a full store"])
def test_training_goes_on_through_an_outage(
    cluster: Cluster, endpoint: str, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots do not, and come again after it; at the end the last state is there."""
    num_faults, is_on = [0], [False]

    def outage(request: Request) -> bool:
        if not (request.is_part and is_on[0]):
            return False
        num_faults[0] += 1
        return LASTING[name][0](request)

    with proxy_to(endpoint) as proxy:
        env = environment(proxy.endpoint)
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)
        proxy.fault = outage
        flags = ("--snapshot-dir", url, "--snapshot-every", "20", "--model", "mlp", "--epochs", "100000", "--ledger")
        node = cluster.start_alone(*flags, env=env)
        wait_until(lambda: bool(events(cluster.run_dir, "snapshot")), "the first snapshot", 60.0)
        is_on[0] = True
        wait_until(lambda: num_faults[0] >= 2, "requests that fail", 60.0)
        before = last_step(cluster.run_dir)
        wait_for_step(cluster.run_dir, before + 200)
        is_on[0] = False
        num_written = len(events(cluster.run_dir, "snapshot"))
        wait_until(lambda: len(events(cluster.run_dir, "snapshot")) > num_written, "a snapshot after it", 90.0)
        node.signal(signal.SIGTERM)
        cluster.finish([node], code=143)
        assert steps_in(url)[0] == last_step(cluster.run_dir)
        check_ledger([cluster.run_dir], length=LENGTH, batch=BATCH, steps=last_step(cluster.run_dir))


@pytest.mark.skipif(IS_SWIFT, reason="Swift has no conditional put, and so is no arbiter")
@pytest.mark.slow
def test_it_says_who_goes_on_of_two_nodes_that_share_nothing_else(
    cluster: Cluster, endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first freezes: half of the votes are silent, and the other goes on by a claim in the bucket."""
    env, dirs = environment(endpoint), [cluster.path / "one", cluster.path / "other"]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    nodes = start_two(cluster, dirs, url, env)
    [worker] = nodes[0].workers()
    worker.suspend()
    wait_until(lambda: worlds(dirs[1]) == [(2, 1)], "world of 1", 60)
    wait_for_step(dirs[1], last_step(dirs[1]) + 20)
    claims = [key for key in ObjectStore(parse_url(url)).list("claims/") if key.startswith("claims/claim-")]
    assert [key.rpartition("-")[2] for key in claims][-1] == "1", "of what follows the world of two"
    worker.resume()
    wait_until(lambda: worlds(dirs[1])[-1] == (3, 2), "world of 2 again", 30)
    wait_for_step(dirs[1], last_step(dirs[1]) + 20)
    for node in nodes:
        node.signal(signal.SIGTERM)
    cluster.finish(nodes, code=1)
    check_ledger(dirs, length=LENGTH, batch=BATCH, steps=max(map(last_step, dirs)))


@pytest.mark.slow
def test_who_waits_while_the_store_is_away_answers_the_others(
    cluster: Cluster, endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node falls silent for a moment: the other may not go on, and tries for minutes to save what it has."""
    with proxy_to(endpoint) as proxy:
        env, dirs = environment(proxy.endpoint), [cluster.path / "one", cluster.path / "other"]
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        nodes = start_two(cluster, dirs, url, env)
        proxy.fault = Request.hang
        [worker] = nodes[0].workers()
        worker.suspend()
        wait_until(lambda: any("waiting for contact" in str(one) for one in events(dirs[1], "warning")), "a wait", 30)
        worker.resume()
        wait_until(lambda: worlds(dirs[0])[-1] == (2, 2), "the next world of both", 45)
        wait_for_step(dirs[0], last_step(dirs[0]) + 20)
        proxy.fault = None
        for node in nodes:
            node.signal(signal.SIGTERM)
        cluster.finish(nodes, code=1)
        check_ledger(dirs, length=LENGTH, batch=BATCH, steps=max(map(last_step, dirs)))


@pytest.mark.slow
def test_a_stop_while_the_store_is_away_says_what_is_lost(cluster: Cluster, endpoint: str, url: str) -> None:
    """SIGKILL would follow 30 s after the signal. Here it does not, and the store comes back."""
    with proxy_to(endpoint) as proxy:
        flags = ("--snapshot-dir", url, "--snapshot-every", "20", "--model", "mlp", "--epochs", "100000")
        node = cluster.start_alone(*flags, env=environment(proxy.endpoint))
        wait_until(lambda: bool(events(cluster.run_dir, "snapshot")), "the first snapshot", 60.0)
        proxy.fault = Request.hang
        wait_for_step(cluster.run_dir, last_step(cluster.run_dir) + 20)
        kept = events(cluster.run_dir, "snapshot")[-1]["snapshot_step"]
        node.signal(signal.SIGTERM)

        def warnings() -> list[str]:
            told = [str(one["message"]) for one in events(cluster.run_dir, "warning")]
            return [one for one in told if "if SIGKILL comes first, it is lost" in one]

        wait_until(warnings, "the warning", 40)
        proxy.fault = None
        cluster.finish([node], code=143)
        last = last_step(cluster.run_dir)
        assert f"the state of step {last} is not in {url} yet" in warnings()[0]
        assert warnings()[0].endswith(f"the newest snapshot known here: of step {kept}")
        assert events(cluster.run_dir, "snapshot")[-1]["snapshot_step"] == last


@pytest.mark.slow
def test_a_store_that_is_too_slow_for_a_notice_is_told_of(cluster: Cluster, endpoint: str, url: str) -> None:
    """By the check, and by a run once it has written a snapshot. Training goes on."""

    def slow(request: Request) -> bool:
        if request.is_part:
            request.server.is_over.wait(4.0)
        return False

    says = "a notice of slurm leaves 3"
    with proxy_to(endpoint) as proxy:
        proxy.fault = slow
        env = environment(proxy.endpoint) | {"SLURM_SIGNAL": "USR1@3"}
        flags = ("--snapshot-dir", url, "--model", "mlp", "--notices", "slurm")
        other = ("--run-dir", str(cluster.path / "other"))
        check = cluster.launch([PYTHON, "-m", "elastic_train.check", "--", *flags, *other], env)
        cluster.finish([check], code=1)
        [found] = [line for line in check.text().splitlines() if says in line]
        assert found.startswith("BREAKS   a snapshot takes ")
        node = cluster.start_alone(*flags, "--snapshot-every", "20", "--epochs", "100000", env=env)

        def told() -> list[str]:
            return [line["message"] for line in events(cluster.run_dir, "warning") if says in line["message"]]

        wait_until(lambda: bool(told()), "the warning", 60.0)
        num_written = len(events(cluster.run_dir, "snapshot"))
        wait_until(lambda: len(events(cluster.run_dir, "snapshot")) > num_written, "another snapshot", 60.0)
        node.signal(signal.SIGTERM)
        cluster.finish([node], code=128 + signal.SIGTERM)
        assert len(told()) == 1
        assert "less than that" in told()[0]


@pytest.mark.slow
def test_what_fresh_left_in_a_bucket_is_not_continued_on_an_empty_disk(cluster: Cluster) -> None:
    """The new disk has no run.json that says which of two runs is meant: the bucket does."""
    url = f"file://{cluster.path}/bucket"

    def run(name: str, *flags: str, steps: int) -> Path:
        path = cluster.path / name
        node = cluster.start_alone(
            "--snapshot-dir", url, "--model", "mlp", "--max-steps", str(steps), *flags, run_dir=path
        )
        cluster.finish([node])
        return path

    run("a", steps=30)
    fresh = run("b", "--fresh", steps=10)
    assert "--fresh: 1 snapshot of earlier runs stay in" in cluster.nodes[-1].text()
    assert [event["source"] for event in events(fresh, "restore")] == ["scratch"]
    later = run("c", steps=20)
    assert [event["restored_step"] for event in events(later, "restore")] == [10]


@pytest.mark.slow
def test_two_jobs_at_one_bucket(cluster: Cluster, endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first lives the second is refused. While it is stopped (SIGSTOP) the second takes over; the first finds
    that out when it wakes up, and writes nothing more."""
    env = environment(endpoint)
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    def by_first() -> set[int]:
        bucket = Bucket(ObjectStore(parse_url(url)))
        return {info.step for info in find_snapshots(bucket, warn=pytest.fail) if info.generation == 0}

    flags = ("--snapshot-dir", url, "--snapshot-every", "50", "--epochs", "100000")
    first = cluster.start_alone(*flags, env=env)
    wait_until(lambda: bool(events(cluster.run_dir, "snapshot")), "a snapshot", 60.0)
    refused = cluster.start_alone(*flags, env=env, run_dir=cluster.path / "refused")
    assert refused.wait() == 1
    assert f"the snapshots in {url} are in use by another job (host " in error_line(refused)
    os.kill(first.process.pid, signal.SIGSTOP)
    second_dir = cluster.path / "second"
    second = cluster.start_alone(*flags, env=env, run_dir=second_dir)
    wait_until(lambda: bool(events(second_dir, "snapshot")), "a snapshot of the second job", 120.0)
    before = by_first()
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.wait() == 1
    assert "now belong to another job" in error_line(first)
    assert by_first() <= before, "the second removes old ones"
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143
    third_dir = cluster.path / "third"
    third = cluster.start_alone(*flags, env=env, run_dir=third_dir)
    wait_until(lambda: bool(events(third_dir, "restore")), "a start without a wait: the second has left", 25.0)
    [restored] = events(third_dir, "restore")
    assert restored["restored_step"] == max(int(event["step"]) for event in events(second_dir, "step"))
    third.process.send_signal(signal.SIGTERM)
    third.wait()


@pytest.mark.slow
def test_new_machines_with_empty_disks_go_on_with_the_same_bits(cluster: Cluster, endpoint: str, url: str) -> None:
    """Two nodes with a disk each, all killed; two others. Nothing is lost but what came after the last snapshot."""
    env = environment(endpoint)
    bucket_flags = ("--snapshot-dir", url, "--snapshot-every", "20")
    flags = ("--reduction", "ordered", "--epochs", "8", "--ledger")
    disks = [cluster.path / name for name in ("a", "b", "c", "d")]

    def start(first: Path, second: Path) -> list:
        cluster.nodes.clear()
        return [
            node
            for disk in (first, second)
            for node in cluster.start(*flags, *bucket_flags, run_dir=disk, env=env, nnodes="2:2")
        ]

    start(*disks[:2])
    wait_until(lambda: any(events(disk, "snapshot") for disk in disks[:2]), "a snapshot", 120.0)
    for disk in disks[:2]:
        if events(disk, "step"):
            wait_for_step(disk, 50)
    cluster.kill()
    saved = max(int(event["snapshot_step"]) for disk in disks[:2] for event in events(disk, "snapshot"))
    cluster.finish(start(*disks[2:]))
    for disk in disks[2:]:
        [restored] = events(disk, "restore")
        assert (restored["source"], restored["restored_step"]) == ("snapshot", saved)
        assert {event["generation"] for event in events(disk, "world")} == {1}
    undisturbed = cluster.path / "undisturbed"
    cluster.finish([cluster.start_alone(*flags, run_dir=undisturbed)])
    for disk in disks[2:]:
        assert result(disk)["state_sha256"] == result(undisturbed)["state_sha256"]
    check_ledger(disks, length=LENGTH, batch=BATCH, steps=result(undisturbed)["step"])


# --- children of fork() -----------------------------------------------------------------------------------------------


def num_connections_to(port: int) -> int:
    """Of this process."""
    return sum(bool(one.raddr) and one.raddr.port == port for one in psutil.Process().net_connections("tcp"))


class UsesStore(Dataset):
    """Each sample says whether the store could be used in a child, and how many connections the child has to it."""

    def __init__(self, store: ObjectStore, port: int) -> None:
        self.store, self.port = store, port

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        try:
            self.store.get("o")
            is_refused = 0
        except ObjectStoreError:
            is_refused = 1
        return is_refused, num_connections_to(self.port), os.getpid()


@pytest.mark.timeout(60)
def test_a_loaders_child_has_nothing_of_the_store(endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's thread is not there in a child: it must neither wait for it nor hold the parent's connections."""
    with proxy_to(endpoint) as proxy:  # which keeps connections, as real servers do
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        store = ObjectStore(parse_url(url))
        store.put("o", b"1")
        port = int(proxy.endpoint.rpartition(":")[2])
        assert num_connections_to(port), "the parent keeps its own"
        for _ in range(2):
            loader = DataLoader(UsesStore(store, port), num_workers=2, multiprocessing_context="fork", batch_size=None)
            for is_refused, num_connections, pid in loader:
                assert pid != os.getpid()
                assert is_refused == 1
                assert num_connections == 0
            found = store.get("o")
            assert found is not None, "the parent goes on"
            assert found.data == b"1"
