"""What every object store must do for snapshots; one class of tests for all. The S3 server is moto, a fake, or a real
one (tests/object_stores.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.errors import ObjectStoreError, StoreFault
from elastic_train.storage import store_arms
from elastic_train.storage.atomic_files import write_atomic
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.store_arms import PlainArm, Stored
from elastic_train.storage.store_urls import parse_url
from tests.object_stores import BUCKET, IS_SWIFT, environment, s3_server


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(params=["memory", "file", "s3", "plain"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    name = f"{tmp_path.name}-{request.node.name.replace('[', '-').rstrip(']')}"
    if request.param == "file":
        return ObjectStore(parse_url(f"file://{tmp_path}/store"))
    if request.param == "s3":
        for variable, value in environment(request.getfixturevalue("endpoint")).items():
            monkeypatch.setenv(variable, value)
        return ObjectStore(parse_url(f"s3://{BUCKET}/{name}"))
    url = parse_url(f"memory://{name}")
    if request.param == "plain":
        import fsspec

        return ObjectStore(url, arm=PlainArm(fsspec.filesystem("memory"), url))
    return ObjectStore(url)


def test_an_object_is_read_as_it_was_written_last(store: ObjectStore) -> None:
    assert store.get("a/b") is None
    store.put("a/b", b"1")
    store.put("a/b", bytearray(b"two"))
    found = store.get("a/b")
    assert found is not None
    assert found.data == b"two"


def test_a_listing_has_keys_and_sizes(store: ObjectStore) -> None:
    assert store.list() == {}
    for key, data in (("a/1", b"1"), ("a/2", b"22"), ("ab", b"333")):
        store.put(key, data)
    assert store.list() == {"a/1": 1, "a/2": 2, "ab": 3}
    assert store.list("a/") == {"a/1": 1, "a/2": 2}
    store.delete("a/1")
    store.delete("a/1")
    assert store.list() == {"a/2": 2, "ab": 3}


def test_a_condition_is_kept(store: ObjectStore) -> None:
    version = store.put_if("o", b"1", None)
    assert version is not None
    assert store.put_if("o", b"second", None) is None
    later = store.put_if("o", b"2", version)
    assert later is not None
    assert store.put_if("o", b"3", version) is None
    assert store.get("o") == Stored(b"2", later)
    assert store.put_if("nothing there", b"x", later) is None


def test_what_is_written_already_counts_as_written(store: ObjectStore) -> None:
    """The answer to the first try was lost."""
    version = store.put_if("o", b"1", None)
    assert store.put_if("o", b"1", None) == version


def test_of_many_one_wins(store: ObjectStore) -> None:
    if not store.is_conditional:
        pytest.skip("which is why it says so")
    written: list[str | None] = []
    threads = [
        threading.Thread(target=lambda number=number: written.append(store.put_if("o", b"%d" % number, None)))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(version is not None for version in written) == 1


def test_a_child_that_is_forked_amid_a_write_blocks_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's record of file:// is renewed by a thread, while another one starts DataLoader processes."""
    store = ObjectStore(parse_url(f"file://{tmp_path}/store"))
    version = store.put_if("o", b"1", None)
    read_end, write_end = os.pipe()
    children: list[int] = []

    def fork_and_write(path: Path, data: bytes) -> None:
        if (pid := os.fork()) == 0:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
        children.append(pid)
        write_atomic(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(store_arms, "write_atomic", fork_and_write)
        version = store.put_if("o", b"2", version)
    later = threading.Thread(target=lambda: store.put_if("o", b"3", version), daemon=True)
    later.start()
    later.join(10.0)
    try:
        assert not later.is_alive()
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(children[0], 0)
    found = store.get("o")
    assert found is not None
    assert found.data == b"3"


def test_the_probe_leaves_nothing_and_tells_the_truth(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    store.require_writable()
    assert store.list() == {}
    has_no_conditions = "plain" in request.node.name or ("s3" in request.node.name and IS_SWIFT)
    assert store.is_conditional != has_no_conditions


def test_an_object_above_the_limit_is_not_read(store: ObjectStore) -> None:
    store.put("o", b"12345")
    assert store.get("o", limit=5) is not None
    with pytest.raises(ObjectStoreError, match="5 bytes"):
        store.get("o", limit=4)


def test_a_store_that_ignores_conditions_is_found_out(tmp_path: Path) -> None:
    class Careless(PlainArm):
        is_atomic = True

        def put_if(self, key: str, data: bytes, version: str | None) -> str:
            self.put(key, data)
            return self.read(key).version

    import fsspec

    url = parse_url(f"memory://{tmp_path.name}-careless")
    store = ObjectStore(url, arm=Careless(fsspec.filesystem("memory"), url))
    assert not store.is_conditional
    assert store.put_if("o", b"1", None) is not None
    assert store.put_if("o", b"2", None) is None, "it looks before it writes"


def test_no_such_bucket_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environment(endpoint).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ObjectStoreError, match=r"s3://not-there/run: cannot .*NoSuchBucket.*make the bucket") as raised:
        ObjectStore(parse_url("s3://not-there/run")).require_writable()
    with pytest.raises(ObjectStoreError, match=r"cannot list: NoSuchBucket.*make the bucket"):
        ObjectStore(parse_url("s3://not-there/run")).list()
    assert raised.value.fault is StoreFault.NO_BUCKET


@pytest.mark.skipif(not IS_SWIFT, reason="moto takes any secret")
def test_a_wrong_secret_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environment(endpoint).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another/secret")
    with pytest.raises(ObjectStoreError) as raised:
        ObjectStore(parse_url(f"s3://{BUCKET}/run")).require_writable()
    assert raised.value.fault is StoreFault.DENIED
    assert "another/secret" not in str(raised.value)
