"""Objects by key below a URL: the operations that snapshots need, on s3://, gs://, az://, memory:// and file://.

One request writes a whole object, so no unfinished upload is ever left. The owner's record and manifests rely on
conditional puts. A probe finds out whether a store really has them, because some stores treat such a request as a plain
put. All requests go through fsspec.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from elastic_train.errors import ObjectStoreError, StoreFault
from elastic_train.storage.store_arms import PlainArm, Stored, open_arm
from elastic_train.storage.store_urls import StoreUrl, fault_of, scrub

Value = TypeVar("Value")


@dataclass(frozen=True)
class Tries:
    """The time limits of requests to a store, and of their retries, in seconds."""

    total: float = 120.0
    """No try begins later than this after the first one."""
    attempt: float = 300.0
    """The timeout of one try: a part over a slow network takes long."""
    silence: float = 30.0
    """The timeout of a connection on which no bytes move."""
    longest_wait: float = 8.0
    """The longest wait between two tries. The wait grows from 0.2, with jitter."""

    def call(self, function: Callable[[], Value], may_pass: Callable[[BaseException], bool]) -> Value:
        """Call a function, again after errors that `may_pass`, and return its value. Raises: the last try's error."""
        import tenacity

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            stop=tenacity.stop_after_delay(self.total),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=self.longest_wait),
            reraise=True,
        )
        return retrying(function)


START = Tries(total=15.0, attempt=30.0, silence=10.0)
"""The limits for the first request to a store, for which the start of a job waits."""
PROBE = re.compile("probe-[0-9a-f]{16}")
"""The keys of probes. Exact, because a user's own objects may begin with the same word."""
PROBE_SECONDS = 900.0
"""The age after which a probe belongs to a start that was killed. A start makes a dozen requests within START."""


class ObjectStore:
    """The objects below one URL. Thread-safe, but not usable in a child of fork().

    Every method blocks, and retries after a server error, throttling, a lost connection or silence, and with renewed
    credentials. For other errors it raises ObjectStoreError, with one line without secrets.
    """

    def __init__(
        self,
        url: StoreUrl,
        tries: Tries = Tries(),
        arm: PlainArm | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.tries = tries
        self._arm = arm or open_arm(url, attempt_seconds=tries.attempt, silence_seconds=tries.silence)
        self._is_conditional: bool | None = None
        self._clock = clock
        self._probes: dict[str, float] = {}
        """Keys of probes, with the time at which a full listing first showed them."""

    def __str__(self) -> str:
        return str(self.url)

    def impatient(self, seconds: float = 0.0) -> ObjectStore:
        """The same store with a single try per request, or with retries for `seconds`."""
        other = ObjectStore(self.url, replace(self.tries, total=seconds), self._arm)
        other._is_conditional = self._is_conditional
        return other

    def get(self, key: str, limit: int | None = None) -> Stored | None:
        """Read an object and its version; None if there is none. An object of more than `limit` bytes is an error."""
        return self._call(f"read {key}", lambda: self._arm.read(key, limit), missing=None)

    def put(self, key: str, data: bytes | bytearray) -> None:
        """Write an object, and replace an existing one."""
        self._call(f"write {key}", lambda: self._arm.put(key, data))

    def put_if(self, key: str, data: bytes, version: str | None) -> str | None:
        """Write an object if its version is still `version`, or with None if it does not exist. Return the new version,
        or None if the condition does not hold. Best effort if the store has no conditional put."""
        if self.is_conditional:
            return self._put_conditionally(key, data, version)
        there = self.get(key)
        if (None if there is None else there.version) == version:
            self.put(key, data)
        return self._version_of(key, data)

    def _put_conditionally(self, key: str, data: bytes, version: str | None) -> str | None:
        def attempt() -> str | None:
            return self._arm.put_if(key, data, version)

        # A try whose answer was lost may have written the object.
        return self._call(f"write {key}", attempt, missing=None, refused=None) or self._version_of(key, data)

    def _version_of(self, key: str, data: bytes) -> str | None:
        """The version of an object if it holds these bytes, else None."""
        there = self.get(key)
        return there.version if there is not None and there.data == data else None

    def list(self, prefix: str = "") -> dict[str, int]:
        """List the sizes in bytes by key: of all objects, or of those below a prefix that ends with a slash."""
        nothing: dict[str, int] = {}
        found = self._call("list", lambda: self._arm.list(prefix), missing=nothing)
        if not prefix:
            now = self._clock()
            self._probes = {key: self._probes.get(key, now) for key in found if PROBE.fullmatch(key)}
        return found

    def delete_old_probes(self) -> None:
        """Delete the probes of starts that were killed: those that listings have shown for PROBE_SECONDS."""
        for key, since in list(self._probes.items()):
            if self._clock() - since >= PROBE_SECONDS:
                self.delete(key)

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        self._call(f"delete {key}", lambda: self._arm.remove(key), missing=None)

    def require_writable(self) -> None:
        """Write, read and delete an object, and find out whether the store has conditional puts.

        Raises:
            ObjectStoreError: the store cannot be written to, as with wrong credentials or a missing bucket.
        """
        quick = ObjectStore(self.url, replace(START, total=min(START.total, self.tries.total)), self._arm)
        key = f"probe-{secrets.token_hex(8)}"
        quick.put(key, b"0")
        try:
            quick.list("claims/")  # not everything: the bucket may hold many other objects
            quick.delete(key)
            self._is_conditional = self._arm.is_atomic and quick._obeys_conditions(key)
        finally:
            quick.delete(key)

    def _obeys_conditions(self, key: str) -> bool:
        """Whether puts succeed exactly if their condition holds. The object must not exist at the beginning."""
        try:
            version = self._put_conditionally(key, b"1", None)
            if version is None or self._put_conditionally(key, b"not", None) is not None:
                return False
            wrong = version.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
            if self._put_conditionally(key, b"nor", wrong) is not None:
                return False
            there = self.get(key)
            has_version = there is not None and there.version == version
            return has_version and self._put_conditionally(key, b"2", version) is not None
        except ObjectStoreError as error:
            if error.fault is not StoreFault.OTHER:
                raise
            return False  # the store does not know the request

    @property
    def may_be_conditional(self) -> bool:
        """Whether the store has conditional puts, as far as is known. Makes no request."""
        return self._arm.is_atomic and self._is_conditional is not False

    @property
    def is_conditional(self) -> bool:
        """Whether the store has conditional puts. The first call probes the store."""
        if self._is_conditional is None:
            self.require_writable()
        return bool(self._is_conditional)

    def _call(self, what: str, function: Callable[[], Value], **otherwise: Any) -> Value:
        """Args: otherwise: return values in place of errors, by the name of the fault."""
        if self._arm.pid != os.getpid():
            raise ObjectStoreError(f"{self}: a child of fork() cannot use it", StoreFault.OTHER)
        known = self._arm.credentials

        def may_pass(error: BaseException) -> bool:
            nonlocal known
            if (fault := fault_of(error)[0]) is not StoreFault.DENIED:
                return fault is StoreFault.TRANSIENT
            before, known = known, self._arm.renew()
            return known != before

        try:
            return self.tries.call(function, may_pass)
        except Exception as error:  # each library below fsspec has its own error types
            fault, text = fault_of(error)
            if fault.value in otherwise:
                fallback: Value = otherwise[fault.value]
                return fallback
            secret_free = scrub(text)
            advice = ADVICE.get(fault, "")
        # Outside the `except`, without the library's error as context: a traceback would print its secrets.
        raise ObjectStoreError(f"{self}: cannot {what}: {secret_free}{advice}", fault)


_NO_BUCKET = "; make the bucket, or correct the URL"
ADVICE = {
    StoreFault.DENIED: "; give credentials that may list, read, write and delete there",
    StoreFault.MISSING: _NO_BUCKET,  # of a write, if the store does not say what is missing
    StoreFault.NO_BUCKET: _NO_BUCKET,
    StoreFault.FULL: "; free some space there",
}
