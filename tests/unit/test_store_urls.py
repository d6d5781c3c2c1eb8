"""URLs of object stores, and secrets, which are neither in them nor in messages."""

from __future__ import annotations

import errno

import pytest

from elastic_train.errors import StoreFault, UsageError
from elastic_train.storage.store_urls import fault_of, is_url, parse_url, scrub


@pytest.mark.parametrize(
    "text", ["s3://bucket/run", "gs://b", "az://b/a/b", "memory://m", "file:///a/b", "file:///a@b/c"]
)
def test_a_url_is_kept_as_it_is(text: str) -> None:
    assert is_url(text)
    assert str(parse_url(text)) == text
    assert str(parse_url(text + "/")) == text


def test_a_path_is_none() -> None:
    for text in ("runs/a", "/runs/a:b/c", "a:b", "C:stays-a-name"):
        assert not is_url(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://AKIAX:hunter2@bucket/run", "credentials do not belong into a URL"),
        ("s3://bucket/run?secret=hunter2", "credentials do not belong into a URL"),
        ("s3://bucket/run#hunter2", "credentials do not belong into a URL"),
        ("ftp://user:hunter2@host/run", "works with a folder, or with s3://, gs://"),
        ("s3:/bucket/run", "a URL has two slashes: s3://"),
        ("s3://", "names no place; such as s3://bucket/run-1"),
        ("file://relative", "names no place; such as file:///"),
        ("s3://bucket/../other", "names no place"),
        ("s3:///key:hunter2@bucket/p", "credentials do not belong into a URL"),
        ("s3:///bucket/hunter2", "names no place"),
        ("s3://bucket/key:hunter2@p", "credentials do not belong into a URL"),
        ("gs://hunter2/..", "names no place"),
        ("s3://[hunter2/p", "is no URL: "),
        ("file://hunter2", "names no place"),
    ],
)
def test_a_url_that_does_not_work_is_told_without_its_secret(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^--snapshot-dir .*{message}") as raised:
        parse_url(text, "--snapshot-dir")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        'Could not connect to "http://user:hunter2@host:9000/bucket/key"',
        "https://bucket/key?X-Amz-Credential=hunter2%2F20260101&X-Amz-Signature=hunter2 refused",
        "the key AKIAHUNTER2HUNTER2AA is unknown",
        "BlobEndpoint=x;AccountKey=hunter2==;EndpointSuffix=core",
        "sig=hunter2&se=2026",
        "the secret is from-the-environment-hunter2",
    ],
)
def test_messages_are_scrubbed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment-hunter2")
    assert "hunter2" not in scrub(text).lower()
    assert "***" in scrub(text)


def test_harmless_messages_stay() -> None:
    text = "s3://bucket/run: cannot write step-000000000020-gen-0001-host/state.pt.00000.a1b2c3d4: SlowDown (503)"
    assert scrub(text) == text


def response(status: int, code: str) -> Exception:
    error = Exception("a message that repeats the secret hunter2")
    error.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}  # type: ignore[attr-defined]
    return error


def of_azure(status: int, code: str | None) -> Exception:
    error = Exception("refused")
    error.status_code, error.error_code = status, code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (of_azure(409, "BlobArchived"), StoreFault.ARCHIVED),
        (of_azure(409, "LeaseIdMissing"), StoreFault.OTHER),
        (of_azure(403, None), StoreFault.DENIED),
        (response(500, "InternalError"), StoreFault.TRANSIENT),
        (response(503, "SlowDown"), StoreFault.TRANSIENT),
        (response(409, "ConditionalRequestConflict"), StoreFault.TRANSIENT),
        (response(403, "SignatureDoesNotMatch"), StoreFault.DENIED),
        (response(400, "ExpiredToken"), StoreFault.DENIED),
        (response(403, "RequestTimeTooSkewed"), StoreFault.OTHER),
        (response(403, "InvalidObjectState"), StoreFault.ARCHIVED),
        (response(404, "NoSuchBucket"), StoreFault.NO_BUCKET),
        (response(412, "PreconditionFailed"), StoreFault.REFUSED),
        (response(507, "InsufficientStorage"), StoreFault.FULL),
        (response(501, "NotImplemented"), StoreFault.OTHER),
        (response(400, "InvalidRequest"), StoreFault.OTHER),
        (ConnectionResetError(errno.ECONNRESET, "reset"), StoreFault.TRANSIENT),
        (TimeoutError(), StoreFault.TRANSIENT),
        (FileNotFoundError(), StoreFault.MISSING),
        (FileExistsError(), StoreFault.REFUSED),
        (PermissionError(), StoreFault.DENIED),
        (OSError(errno.ENOSPC, "full"), StoreFault.FULL),
        (ValueError("a bug"), StoreFault.OTHER),
    ],
)
def test_what_an_error_means(error: Exception, fault: StoreFault) -> None:
    found, text = fault_of(error)
    assert found is fault
    assert text
    assert "hunter2" not in text
    wrapped = OSError("translated")
    wrapped.__cause__ = error
    if hasattr(error, "response"):
        assert fault_of(wrapped)[0] is fault
