"""Objects by key below a URL: what snapshots need of s3://, gs://, az://, memory:// and file://, through fsspec.

Objects are written whole by one request each, so that no unfinished upload is ever left. A conditional put is what an
owner's record and a manifest rest on; whether a store really has it is probed, for some answer such a request as if it
were a plain one.
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
from elastic_train.storage.store_arms import Arm, Stored, open_arm
from elastic_train.storage.store_urls import StoreUrl, fault_of, scrub

Value = TypeVar("Value")


@dataclass(frozen=True)
class Tries:
    """How long a store is asked before it is given up; seconds."""

    total: float = 120.0
    """no try begins later than this after the first one"""
    attempt: float = 300.0
    """of one try: a part over a slow line takes its time"""
    silence: float = 30.0
    """of a connection on which nothing moves"""
    longest_wait: float = 8.0
    """between two tries; it grows from 0.2, with jitter"""

    def call(self, function: Callable[[], Value], may_pass: Callable[[BaseException], bool]) -> Value:
        """What it gives, tried again after errors that may pass. Raises: what the last try does."""
        import tenacity

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            stop=tenacity.stop_after_delay(self.total),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=self.longest_wait),
            reraise=True,
        )
        return retrying(function)


START = Tries(total=15.0, attempt=30.0, silence=10.0)
"""of the first look at a store: whoever starts a job waits for it"""
PROBE = re.compile("probe-[0-9a-f]{16}")
"""keys; a person's own objects may begin alike"""
PROBE_SECONDS = 900.0
"""after which a start was killed whose probe is still there: it asks a dozen times, as long as START lets it"""


class ObjectStore:
    """The objects below one URL. Any thread may use it; a child of fork() may not.

    Every method blocks, tries again what may pass (a server's error, throttling, a lost connection, silence), and
    raises ObjectStoreError, in one line and without secrets, for the rest.
    """

    def __init__(
        self,
        url: StoreUrl,
        tries: Tries = Tries(),
        arm: Arm | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.tries = tries
        self._arm = arm or open_arm(url, attempt_seconds=tries.attempt, silence_seconds=tries.silence)
        self._is_conditional: bool | None = None
        self._clock = clock
        self._probes: dict[str, float] = {}
        """keys, and since when a listing of all shows them"""

    def __str__(self) -> str:
        return str(self.url)

    def impatient(self, seconds: float = 0.0) -> ObjectStore:
        """The same, asked once, or again for so long."""
        other = ObjectStore(self.url, replace(self.tries, total=seconds), self._arm)
        other._is_conditional = self._is_conditional
        return other

    def get(self, key: str, limit: int | None = None) -> Stored | None:
        """An object and its version; None where there is none. One of more bytes than `limit` is not read."""
        return self._call(f"read {key}", lambda: self._arm.read(key, limit), missing=None)

    def put(self, key: str, data: bytes | bytearray) -> None:
        """Write an object, whatever is there."""
        self._call(f"write {key}", lambda: self._arm.put(key, data))

    def put_if(self, key: str, data: bytes, version: str | None) -> str | None:
        """Write an object only where it still has that version; for None, only where there is none. Returns the new
        version; None where it was refused. Best effort where the store has no conditional put."""
        if self.is_conditional:
            return self._put_conditionally(key, data, version)
        there = self.get(key)
        if (None if there is None else there.version) == version:
            self.put(key, data)
        return self._version_of(key, data)

    def _put_conditionally(self, key: str, data: bytes, version: str | None) -> str | None:
        def attempt() -> str | None:
            return self._arm.put_if(key, data, version)

        # A try whose answer was lost may have written it.
        return self._call(f"write {key}", attempt, missing=None, refused=None) or self._version_of(key, data)

    def _version_of(self, key: str, data: bytes) -> str | None:
        """None where the object holds something else."""
        there = self.get(key)
        return there.version if there is not None and there.data == data else None

    def list(self, prefix: str = "") -> dict[str, int]:
        """The keys below a prefix that ends with a slash, or all, and their bytes."""
        nothing: dict[str, int] = {}
        found = self._call("list", lambda: self._arm.list(prefix), missing=nothing)
        if not prefix:
            now = self._clock()
            self._probes = {key: self._probes.get(key, now) for key in found if PROBE.fullmatch(key)}
        return found

    def delete_old_probes(self) -> None:
        """Of starts that were killed: those that listings have shown for so long that none that lives has them."""
        for key, since in list(self._probes.items()):
            if self._clock() - since >= PROBE_SECONDS:
                self.delete(key)

    def delete(self, key: str) -> None:
        """Delete an object, where it is there."""
        self._call(f"delete {key}", lambda: self._arm.remove(key), missing=None)

    def require_writable(self) -> None:
        """Write, read and delete an object, and find out what a conditional put is worth here.

        Raises:
            ObjectStoreError: it cannot be written to, as with wrong credentials or without such a bucket.
        """
        quick = ObjectStore(self.url, replace(START, total=min(START.total, self.tries.total)), self._arm)
        key = f"probe-{secrets.token_hex(8)}"
        quick.put(key, b"0")
        try:
            quick.list("claims/")  # not all that others keep there
            quick.delete(key)
            self._is_conditional = self._arm.is_atomic and quick._obeys_conditions(key)
        finally:
            quick.delete(key)

    def _obeys_conditions(self, key: str) -> bool:
        """Whether puts go through whose condition holds, and no others. No such object is there."""
        try:
            version = self._put_conditionally(key, b"1", None)
            if version is None or self._put_conditionally(key, b"not", None) is not None:
                return False
            wrong = version.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
            if self._put_conditionally(key, b"nor", wrong) is not None:
                return False
            there = self.get(key)
            is_version_told = there is not None and there.version == version
            return is_version_told and self._put_conditionally(key, b"2", version) is not None
        except ObjectStoreError as error:
            if error.fault is not StoreFault.OTHER:
                raise
            return False  # it does not know the request

    @property
    def may_be_conditional(self) -> bool:
        """Whether a conditional put is one here, as far as is known. Asks nobody."""
        return self._arm.is_atomic and self._is_conditional is not False

    @property
    def is_conditional(self) -> bool:
        """Whether a conditional put is one here. Asks the store the first time."""
        if self._is_conditional is None:
            self.require_writable()
        return bool(self._is_conditional)

    def _call(self, what: str, function: Callable[[], Value], **otherwise: Any) -> Value:
        """Args: otherwise: what is returned in place of raising a fault, by the fault's name."""
        if self._arm.pid != os.getpid():
            raise ObjectStoreError(f"{self}: a child of fork() cannot use it", StoreFault.OTHER)
        try:
            return self.tries.call(function, lambda error: fault_of(error)[0] is StoreFault.TRANSIENT)
        except Exception as error:  # of any library below fsspec: each has errors of its own
            fault, text = fault_of(error)
            if fault.value in otherwise:
                fallback: Value = otherwise[fault.value]
                return fallback
            secret_free = scrub(text)
            advice = ADVICE.get(fault, "")
        # Out here, without the library's error as its context: a traceback would print that as it is.
        raise ObjectStoreError(f"{self}: cannot {what}: {secret_free}{advice}", fault)


_NO_BUCKET = "; make the bucket, or correct the URL"
ADVICE = {
    StoreFault.DENIED: "; give credentials that may list, read, write and delete there",
    StoreFault.MISSING: _NO_BUCKET,  # of a write, where the store does not say what is missing
    StoreFault.NO_BUCKET: _NO_BUCKET,
    StoreFault.FULL: "; free some space there",
}
