"""URLs of object stores, and the meaning of errors of all their libraries; never with secrets in a text."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from elastic_train.config import IS_URL
from elastic_train.errors import (
    ObjectStoreError,
    OwnershipLost,
    SnapshotDenied,
    SnapshotError,
    StoreFault,
    UsageError,
    cause_of,
    first_line,
)

PACKAGES = {
    "s3": "'elastic_train[remote]'",
    "gs": "'elastic_train[remote]' gcsfs",
    "az": "'elastic_train[remote]' adlfs",
    "memory": "'elastic_train[remote]'",
    "file": "'elastic_train[remote]'",
}
"""The arguments of `pip install`, by scheme."""


@dataclass(frozen=True)
class StoreUrl:
    scheme: str
    place: str
    """Bucket and prefix; for `file` an absolute path."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"

    def below(self, name: str) -> StoreUrl:
        return StoreUrl(self.scheme, f"{self.place}/{name}")


def is_url(text: object) -> bool:
    return IS_URL.match(str(text)) is not None


def parse_url(text: str, what: str = "") -> StoreUrl:
    """Parse the URL of a store. `what`, such as a flag, is put before the URL in an error.

    Raises:
        UsageError: the scheme is not supported, the URL names no place, or it holds a secret, which is not repeated.
    """
    name = f"{what} " if what else ""
    scheme = text.partition(":")[0].lower()
    shown = f"{scheme}://..."
    if scheme not in PACKAGES:
        known = ", ".join(f"{one}://" for one in PACKAGES)
        raise UsageError(f"{name}{shown}: works with a folder, or with {known}")
    if not text[len(scheme) :].startswith("://"):
        raise UsageError(f"{name}{scheme}:/...: a URL has two slashes: {scheme}://")
    try:
        parts = urlsplit(text)
    except ValueError as error:  # brackets without an IP address in them
        raise UsageError(f"{name}{shown}: is no URL: {error}") from None
    place = text.partition("://")[2].rstrip("/")
    if parts.query or parts.fragment or "@" in (parts.netloc if scheme == "file" else place):
        raise UsageError(
            f"{name}{shown}: credentials do not belong into a URL, nor does anything behind ? or #; the store's own "
            "environment variables or files give them, such as AWS_ACCESS_KEY_ID or ~/.aws/credentials"
        )
    if (
        not place
        or (place.startswith("/") and scheme != "file")
        or ".." in place.split("/")
        or (scheme == "file" and not place.startswith("/"))
    ):
        example = "file:///shared/run-1" if scheme == "file" else f"{scheme}://bucket/run-1"
        raise UsageError(f"{name}{shown}: names no place; such as {example}")
    return StoreUrl(scheme, place)


_BY_CODE = {
    "PreconditionFailed": StoreFault.REFUSED,
    "ConditionalRequestConflict": StoreFault.TRANSIENT,
    "OperationAborted": StoreFault.TRANSIENT,
    "RequestTimeout": StoreFault.TRANSIENT,
    "SlowDown": StoreFault.TRANSIENT,
    "RequestTimeTooSkewed": StoreFault.OTHER,  # other credentials would not help against a wrong clock
    "NoSuchBucket": StoreFault.NO_BUCKET,
    "InvalidObjectState": StoreFault.ARCHIVED,
    "BlobArchived": StoreFault.ARCHIVED,
    "ExpiredToken": StoreFault.DENIED,
    "InvalidToken": StoreFault.DENIED,
    "QuotaExceeded": StoreFault.FULL,
    "InsufficientStorage": StoreFault.FULL,
    "XMinioStorageFull": StoreFault.FULL,
}
"""Error codes of S3's and Azure's protocols that tell more than the HTTP status."""
_BY_STATUS = {
    401: StoreFault.DENIED,
    403: StoreFault.DENIED,
    404: StoreFault.MISSING,
    408: StoreFault.TRANSIENT,
    412: StoreFault.REFUSED,
    429: StoreFault.TRANSIENT,
    501: StoreFault.OTHER,
    507: StoreFault.FULL,
}
_BY_NAME = {
    "NoCredentialsError": StoreFault.DENIED,
    "PartialCredentialsError": StoreFault.DENIED,
    "ProfileNotFound": StoreFault.DENIED,
    "ParamValidationError": StoreFault.OTHER,
    "FSTimeoutError": StoreFault.TRANSIENT,
}
_NETWORK_LIBRARIES = frozenset({"aiohttp", "aiobotocore", "botocore", "urllib3"})
_BY_ERRNO = {
    errno.ENOSPC: StoreFault.FULL,
    errno.EDQUOT: StoreFault.FULL,
    errno.EACCES: StoreFault.DENIED,
    errno.EPERM: StoreFault.DENIED,
    errno.EROFS: StoreFault.DENIED,
}


def fault_of(error: BaseException) -> tuple[StoreFault, str]:
    """The kind of an error of a store's library, and its text, which may hold secrets."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            return _of_response(response)
        cause = cause.__cause__
    status = getattr(error, "status_code", None) or getattr(error, "code", None)  # in Azure's and Google's libraries
    if isinstance(status, int):
        fault = _BY_CODE.get(getattr(error, "error_code", "")) or _by_status(status)
        return fault, f"{first_line(error)} ({status})"
    text = cause_of(error) if isinstance(error, OSError) else first_line(error)
    return _without_status(error), text or type(error).__name__


def _of_response(response: dict[str, Any]) -> tuple[StoreFault, str]:
    code = str(response["Error"].get("Code", "unknown"))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    fault = _BY_CODE.get(code) or _by_status(status)
    # Not the message: some servers repeat parts of the request in it.
    return fault, code if code == str(status) or not status else f"{code} ({status})"


def _by_status(status: int) -> StoreFault:
    return _BY_STATUS.get(status) or (StoreFault.TRANSIENT if status >= 500 else StoreFault.OTHER)


def _without_status(error: BaseException) -> StoreFault:
    name, module = type(error).__name__, type(error).__module__.partition(".")[0]
    if name in _BY_NAME:
        return _BY_NAME[name]
    if isinstance(error, FileExistsError):
        return StoreFault.REFUSED
    if isinstance(error, FileNotFoundError):
        return StoreFault.MISSING
    if isinstance(error, PermissionError):
        return StoreFault.DENIED
    if isinstance(error, ConnectionError | TimeoutError) or module in _NETWORK_LIBRARIES:
        return StoreFault.TRANSIENT
    if isinstance(error, OSError) and error.errno is not None:
        return _BY_ERRNO.get(error.errno, StoreFault.OTHER)
    return StoreFault.OTHER


_SECRETS = re.compile(
    r"""(?P<user>(?<=://)[^/\s@]+(?=@))                                   # user:password@host
    |(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{12,}                              # an access key's id
    |(?P<name>(?:X-Amz-(?:Credential|Signature|Security-Token)|X-Goog-(?:Credential|Signature)|AWSAccessKeyId|Signature
        |sig|AccountKey|SharedAccessSignature|access_token)=)[^&\s"';,]+  # parameters that sign
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SECRET_VARIABLES = re.compile(r"(?:AWS|AZURE|GOOGLE|GCS|FSSPEC|S3)_.*(?:KEY|SECRET|TOKEN|PASSWORD|CONNECTION).*")


def scrub(text: str) -> str:
    """Mask credentials in a text: those of this process's environment, and anything that looks like one."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_VARIABLES.fullmatch(name):
            text = text.replace(value, "***")
    return _SECRETS.sub(lambda found: f"{found['name'] or ''}***", text)


@contextlib.contextmanager
def translated_errors(place: str) -> Iterator[None]:
    """Turn any error of the store's library or of its content into a SnapshotError, so that training does not end."""
    try:
        yield
    except (SnapshotError, OwnershipLost):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {scrub(first_line(error))}"
        raise SnapshotError(f"snapshot {place} cannot be written: {said}; older ones are untouched") from None


@contextlib.contextmanager
def translated_refusals() -> Iterator[None]:
    """Turn the refusal of a store to return one object into a SnapshotDenied: other snapshots may be readable. (A user
    without any read permission fails earlier, at the owner's record.) An unknown error is no refusal: the next try may
    succeed."""
    try:
        yield
    except ObjectStoreError as error:
        if error.fault not in (StoreFault.DENIED, StoreFault.ARCHIVED):
            raise
        raise SnapshotDenied(str(error)) from error
