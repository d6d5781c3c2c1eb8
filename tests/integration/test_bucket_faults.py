"""An S3 server that misbehaves: a proxy of ours before moto, which is a fake. An older whole snapshot is always there,
and what goes wrong is one line without credentials."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.errors import ObjectStoreError, SnapshotError, StoreFault
from elastic_train.storage.bucket import Bucket
from elastic_train.storage.object_store import ObjectStore, Tries
from elastic_train.storage.snapshot import find_snapshots, first_whole
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.store_urls import parse_url
from tests.object_stores import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    Fault,
    Proxy,
    Request,
    environment,
    first,
    proxy_to,
    s3_server,
)

QUICK = Tries(total=10.0, attempt=60.0, silence=1.0, longest_wait=0.1)
"""a machine that is busy, with the libraries of the first request too, must not be taken for a store that is silent"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_to(endpoint) as proxy:
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def bucket(proxy: Proxy, tmp_path: Path) -> Bucket:
    return Bucket(ObjectStore(parse_url(f"s3://{BUCKET}/{tmp_path.name}"), QUICK), part_bytes=20_000)


@pytest.fixture
def writer(bucket: Bucket) -> SnapshotWriter:
    """Has written step 1."""
    writer = SnapshotWriter(bucket, keep=2, host="one", run_uid="run", task={})
    save(writer, 1)
    return writer


def save(writer: SnapshotWriter, step: int) -> None:
    state: dict[str, Any] = {"model": {"w": torch.full((20_000,), float(step))}}
    writer.save(state, step=step, epoch=0, samples_done=0, generation=0, world_size=1)


def of_parts(fault: Fault) -> Fault:
    return lambda request: request.is_part and fault(request)


def internal_error(request: Request) -> bool:
    return request.answer(500, "InternalError")


def throttled(request: Request) -> bool:
    return request.answer(503, "SlowDown")


def denied(request: Request) -> bool:
    return request.answer(403, "SignatureDoesNotMatch", f"not for {ACCESS_KEY} with {SECRET_KEY}")


def full(request: Request) -> bool:
    return request.answer(507, "InsufficientStorage")


def bad_gateway(request: Request) -> bool:
    """Of a load balancer, which knows no S3."""
    request.body()
    request.send_response(502)
    request.send_header("Content-Length", "3")
    request.end_headers()
    request.wfile.write(b"bad")
    return True


PASSING = {
    "errors": internal_error,
    "throttling": throttled,
    "bad gateway": bad_gateway,
    "cut connections": Request.cut,
    "silence": Request.hang,
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_tried_again(name: str, writer: SnapshotWriter, proxy: Proxy, bucket: Bucket) -> None:
    proxy.fault = of_parts(first(2, PASSING[name]))
    save(writer, 2)
    found = first_whole(find_snapshots(bucket, warn=pytest.fail), pytest.fail)
    assert found is not None
    assert found[0].step == 2


LASTING = {
    "errors": (internal_error, r"InternalError \(500\)"),
    "cut connections": (Request.cut, ""),
    "silence": (Request.hang, ""),
    "refused credentials": (denied, r"SignatureDoesNotMatch \(403\); give credentials"),
    "a full store": (full, r"InsufficientStorage \(507\); free some space"),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("parts", "refused credentials"),
        ("parts", "a full store"),
        ("manifest", "errors"),
        *(pytest.param("parts", name, marks=pytest.mark.slow) for name in ("errors", "cut connections", "silence")),
        pytest.param("manifest", "cut connections", marks=pytest.mark.slow),
    ],
)
def test_what_lasts_leaves_the_older_one(
    name: str, where: str, writer: SnapshotWriter, proxy: Proxy, bucket: Bucket
) -> None:
    fault, message = LASTING[name]
    is_hit = [0]

    def at(request: Request) -> bool:
        is_place = request.is_part if where == "parts" else request.command == "PUT" and "manifest" in request.path
        is_hit[0] += is_place
        return is_place and fault(request)

    proxy.fault = at
    with pytest.raises(SnapshotError, match=f"^snapshot .* cannot be written: .*{message}.*older ones") as raised:
        save(writer, 2)
    assert is_hit[0] >= 1
    assert "\n" not in str(raised.value)
    assert ACCESS_KEY not in str(raised.value)
    assert SECRET_KEY not in str(raised.value)
    proxy.fault = None
    assert [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == [1]
    save(writer, 2)
    assert [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == [2, 1]


def test_a_full_store_and_refused_credentials_are_not_asked_again(writer: SnapshotWriter, proxy: Proxy) -> None:
    for fault in (denied, full):
        proxy.fault = of_parts(fault)
        proxy.requests.clear()
        with pytest.raises(SnapshotError):
            save(writer, 2)
        parts = [request for request in proxy.requests if request.startswith("PUT")]
        assert len(parts) == len(set(parts))


def test_a_manifest_whose_answer_is_lost_is_there_once(writer: SnapshotWriter, proxy: Proxy, bucket: Bucket) -> None:
    """The server has it; the second try is refused, and finds its own."""

    def lose_answer(request: Request) -> bool:
        if request.command != "PUT" or "manifest" not in request.path:
            return False
        answer, request.wfile = request.wfile, open("/dev/null", "wb")  # type: ignore[assignment]  # noqa: SIM115
        request.forward()
        request.wfile.close()
        request.wfile = answer
        request.close_connection = True
        request.connection.shutdown(2)
        return True

    proxy.fault = first(1, lose_answer)
    save(writer, 2)
    assert [info.step for info in find_snapshots(bucket, warn=pytest.fail)] == [2, 1]


def test_reading_goes_on_after_faults(writer: SnapshotWriter, proxy: Proxy, bucket: Bucket) -> None:
    def cut_answer(request: Request) -> bool:
        """After half of a part."""
        if request.command != "GET" or "/state.pt." not in request.path:
            return False
        request.send_response(200)
        request.send_header("Content-Length", "20000")
        request.send_header("ETag", '"x"')
        request.end_headers()
        request.wfile.write(bytes(10_000))
        request.wfile.flush()
        request.close_connection = True
        request.connection.shutdown(2)
        return True

    proxy.fault = first(2, cut_answer)
    found = first_whole(find_snapshots(bucket, warn=pytest.fail), pytest.fail)
    assert found is not None
    assert found[0].step == 1
    proxy.fault = cut_answer
    with pytest.raises(ObjectStoreError) as raised:
        first_whole(find_snapshots(bucket, warn=pytest.fail), pytest.fail)
    assert raised.value.fault is StoreFault.TRANSIENT, "no older one is taken because a line is bad"


def test_wrong_credentials_are_told_at_once(proxy: Proxy, bucket: Bucket) -> None:
    proxy.fault = denied
    with pytest.raises(ObjectStoreError, match=r"SignatureDoesNotMatch \(403\); give credentials") as raised:
        bucket.store.require_writable()
    assert SECRET_KEY not in str(raised.value)
    assert raised.value.__context__ is None, "no traceback shows what the library said"
    assert len(proxy.requests) == 1


def test_no_credentials_are_told(proxy: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ObjectStoreError, match="give credentials that may list"):
        ObjectStore(parse_url(str(bucket)), QUICK).require_writable()


def test_credentials_that_are_renewed_in_their_file_are_read_again(
    proxy: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As those of a login that lasts some hours, while the training lasts days."""
    file = tmp_path / "credentials"

    def write(token: str) -> None:
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "aws_session_token": token}
        file.write_text("\n".join(["[default]", *(f"{name} = {value}" for name, value in keys.items())]))

    def expired(request: Request) -> bool:
        return request.headers.get("X-Amz-Security-Token") == "first" and request.answer(400, "ExpiredToken")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write("first")
    own = Bucket(ObjectStore(parse_url(str(bucket)), QUICK), part_bytes=20_000)
    writer = SnapshotWriter(own, keep=2, host="one", run_uid="run", task={})
    save(writer, 1)
    proxy.fault = expired
    with pytest.raises(SnapshotError, match="ExpiredToken"):
        save(writer, 2)
    write("second")
    old = weakref.ref(own.store._arm._filesystem)  # type: ignore[attr-defined]
    save(writer, 3)
    gc.collect()
    assert old() is None, "a run may last for many such files"
    assert [info.step for info in find_snapshots(own, warn=pytest.fail)] == [3, 1]
