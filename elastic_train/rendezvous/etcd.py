"""etcd v3 in the few operations that this package needs, through the `etcd3` client, whose faults end here.

| fault of etcd3 0.12.0                                      | what is done about it                                   |
|------------------------------------------------------------|---------------------------------------------------------|
| its generated code does not load under protobuf 4 or newer | the messages are made from the descriptors it carries   |
| one endpoint, no failover                                  | one client an endpoint; a failed call goes to the next  |
| calls block for ever                                       | a deadline for every attempt and for the whole          |
| the watch thread spins, and is not restored                | not used; `Watch` is a stream of our own                |
| credentials are refused without TLS                        | the token travels as metadata alone                     |
| a token is fetched once and expires                        | a client whose token is refused is made anew            |
| certificate and key without a CA: plaintext                | refused (etcd_settings.py)                              |
| errors lose their details, some come raw                   | the stubs are called directly; one place judges errors  |
| gRPC prints a line for every handshake that fails          | its log is for errors, unless GRPC_VERBOSITY is set     |

Retries are tenacity policies: transient errors only, up to a deadline, with jitter. A transaction that timed out may
have been applied: every value that etcd_store.py writes carries a stamp of its own, by which it is recognised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_train.errors import StoreRefused, StoreUnreachable
from elastic_train.protocol.heartbeat import AwakeTime
from elastic_train.rendezvous.etcd_connections import ATTEMPT_SECONDS, Connections, Entry, end_of, entry_of
from elastic_train.rendezvous.etcd_errors import (
    LeaseExists,
    LeaseLost,
    TlsRefused,
    TokenRefused,
    Transient,
    judge,
    judge_tls,
)

MAX_PAUSE = 0.5
"""seconds between two attempts"""
MAX_OPERATIONS = 100
"""in one transaction; etcd's own limit is 128"""


@dataclass(frozen=True)
class Transaction:
    """What to compare, and what to do then; both made of etcd's own messages (`Etcd.compare`, `put_request`, ...)."""

    compare: Sequence[Any]
    success: Sequence[Any]
    failure: Sequence[Any] = ()


@dataclass(frozen=True)
class TransactionResult:
    """How a transaction went."""

    succeeded: bool
    revision: int
    """of the store, right after it"""
    entries: list[list[Entry]]
    """what each of the `get` operations of the branch taken found"""


@dataclass
class Etcd:
    """One caller's way to the cluster; threads may share it.

    Every call returns within about `deadline` seconds, or raises StoreUnreachable; StoreRefused says what etcd does not
    allow. At the start that is also, at once, where no member and this side accept each other's certificates: that does
    not heal; and where the database is full: there is no training yet that would wait.
    """

    connections: Connections
    deadline: float
    """seconds for a call with all its attempts, without those in which this process is suspended"""
    attempt_seconds: float = ATTEMPT_SECONDS
    before_retry: Callable[[str], None] = field(default=lambda _why: None)
    """called with the last error before each further attempt; may raise to give up"""

    # --- keys ---------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """The key as it stands."""
        request = self._rpc.RangeRequest(key=key.encode())
        entries = self._call(lambda client: client.kvstub.Range, request).kvs
        return entry_of(entries[0]) if entries else None

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The keys as they stand, in one round trip for each MAX_OPERATIONS."""
        found: list[Entry | None] = []
        for start in range(0, len(keys), MAX_OPERATIONS):
            part = keys[start : start + MAX_OPERATIONS]
            outcome = self.transact(Transaction((), [self.get_request(key) for key in part]))
            found += [entries[0] if entries else None for entries in outcome.entries]
        return found

    def below(self, prefix: str, *, keys_only: bool = False) -> tuple[list[Entry], int]:
        """(all entries whose key begins with `prefix`, without their values if asked so; the revision at which they
        stood)."""
        request = self._rpc.RangeRequest(key=prefix.encode(), range_end=end_of(prefix), keys_only=keys_only)
        response = self._call(lambda client: client.kvstub.Range, request)
        return [entry_of(entry) for entry in response.kvs], response.header.revision

    def transact(self, transaction: Transaction) -> TransactionResult:
        """Raises LeaseLost where a put names a lease that is gone."""
        request = self._rpc.TxnRequest(
            compare=transaction.compare, success=transaction.success, failure=transaction.failure
        )
        response = self._call(lambda client: client.kvstub.Txn, request)
        if any(part.WhichOneof("request") == "request_put" for part in transaction.success):
            self.connections.has_written = True
        return TransactionResult(
            succeeded=response.succeeded,
            revision=response.header.revision,
            entries=[
                [entry_of(entry) for entry in part.response_range.kvs]
                for part in response.responses
                if part.WhichOneof("response") == "response_range"
            ],
        )

    def delete(self, key: str, *, is_prefix: bool = False) -> int:
        """The revision that has removed the key, or all that begin with it; 0 where there was none."""
        request = self.delete_request(key, is_prefix=is_prefix).request_delete_range
        response = self._call(lambda client: client.kvstub.DeleteRange, request)
        return int(response.header.revision) if response.deleted else 0

    # --- the parts of a transaction -----------------------------------------------------------------------------------

    def is_at(self, key: str, mod_revision: int) -> Any:
        """True where the key was last changed by this revision; 0: where there is none."""
        return self._equal(key, target="MOD", mod_revision=mod_revision)

    def is_created_at(self, key: str, create_revision: int) -> Any:
        """True where it is still the key that was created by this revision."""
        return self._equal(key, target="CREATE", create_revision=create_revision)

    def is_empty(self, prefix: str) -> Any:
        """True where no key begins with `prefix`."""
        return self._equal(prefix, target="CREATE", create_revision=0, range_end=end_of(prefix))

    def _equal(self, key: str, **fields: Any) -> Any:
        return self._rpc.Compare(key=key.encode(), result=self._rpc.Compare.EQUAL, **fields)

    def get_request(self, key: str) -> Any:
        return self._rpc.RequestOp(request_range=self._rpc.RangeRequest(key=key.encode()))

    def put_request(self, key: str, value: bytes, lease: int = 0) -> Any:
        return self._rpc.RequestOp(request_put=self._rpc.PutRequest(key=key.encode(), value=value, lease=lease))

    def delete_request(self, key: str, *, is_prefix: bool = False) -> Any:
        request = self._rpc.DeleteRangeRequest(key=key.encode(), range_end=end_of(key) if is_prefix else b"")
        return self._rpc.RequestOp(request_delete_range=request)

    # --- leases -------------------------------------------------------------------------------------------------------

    def grant(self, seconds: float, lease: int = 0) -> int:
        """A lease for whole seconds, rounded up; etcd may make it longer (1.5 election timeouts at least).

        Args:
            lease: its number, drawn by the caller, with which a repeated call makes no second one; 0: etcd draws it.
        """
        request = self._rpc.LeaseGrantRequest(TTL=max(1, -int(-seconds // 1)), ID=lease)
        with contextlib.suppress(LeaseExists):  # a call was made whose reply was lost
            lease = int(self._call(lambda client: client.leasestub.LeaseGrant, request).ID)
        self.connections.has_written = True
        return lease

    def refresh(self, lease: int) -> bool:
        """Start a lease's time anew; whether it was still there. etcd reports a lost one as no error."""
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)

        def keep_alive(client: Any) -> Any:
            def call(request: Any, timeout: float, metadata: Any) -> Any:
                return next(client.leasestub.LeaseKeepAlive(iter((request,)), timeout, metadata=metadata))

            return call

        return bool(self._call(keep_alive, request).TTL > 0)

    def revoke(self, lease: int) -> None:
        """End a lease; its keys go at once. None that has ended already is no error."""
        try:
            self._call(lambda client: client.leasestub.LeaseRevoke, self._rpc.LeaseRevokeRequest(ID=lease))
        except LeaseLost:
            return

    # --- calls --------------------------------------------------------------------------------------------------------

    @property
    def _rpc(self) -> Any:
        return self.connections.etcd3.etcdrpc

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """One request, at one endpoint after the other until it is answered."""
        import tenacity

        errors: list[str] = []
        refused: dict[str, TlsRefused] = {}
        """by endpoint, where the last answer was that, for good"""
        endpoints = self.connections.settings.endpoints
        where = ",".join(endpoints)
        waited = AwakeTime(self.connections.clock, longest=self.attempt_seconds + MAX_PAUSE)
        retry = tenacity.Retrying(
            sleep=self.connections.sleep,
            retry=tenacity.retry_if_exception_type(Transient),
            stop=lambda _state: waited.seconds >= self.deadline,
            # A whole round over the endpoints costs no pause; after that, up to half a second, with jitter.
            wait=tenacity.wait_chain(
                *[tenacity.wait_none()] * (len(endpoints) - 1),
                tenacity.wait_random_exponential(multiplier=0.02, min=0.02, max=MAX_PAUSE),
            ),
            before_sleep=lambda _state: self.before_retry(errors[-1]),
            reraise=True,
        )

        def attempt() -> Any:
            try:
                return self._attempt(method, request, self.deadline - waited.seconds)
            except Transient as error:
                errors.append(str(error))
                if not isinstance(error, TlsRefused) or error.may_heal:
                    refused.pop(error.endpoint, None)
                    raise
                refused[error.endpoint] = error
                if len(refused) == len(endpoints) and not self.connections.has_answered:
                    raise StoreRefused(error.what, error.do) from error
                raise

        try:
            return retry(attempt)
        except Transient as error:
            why = "; ".join(dict.fromkeys(map(str, (error, *refused.values()))))
            raise StoreUnreachable(f"etcd at {where} does not answer ({why}; {self.deadline:g} s)") from error
        except StoreRefused as error:
            raise StoreRefused(f"etcd at {where}: {error.what}", error.do) from error

    def _attempt(self, method: Callable[[Any], Any], request: Any, seconds_left: float) -> Any:
        import grpc

        timeout = max(0.05, min(self.attempt_seconds, seconds_left))
        index, client = self.connections.present, None
        self.connections.num_requests += 1
        try:
            index, client = self.connections.client()
            response = method(client)(request, timeout, metadata=client.metadata)
            self.connections.num_bytes += request.ByteSize() + response.ByteSize()
            self.connections.has_answered = True
            return response
        except grpc.RpcError as error:
            settings, answers = self.connections.settings, self.connections
            judged = judge_tls(error.details() or "", settings.endpoints[index], settings) or judge(
                error, has_answered=answers.has_answered, has_written=answers.has_written
            )
            if isinstance(judged, TokenRefused) and client is not None:
                self.connections.drop(index, client)
            elif isinstance(judged, Transient):
                self.connections.rotate(index)
            if isinstance(judged, Transient):
                judged.endpoint = settings.endpoints[index]
            raise judged from error
        except ValueError as error:  # grpc: "Cannot invoke RPC on closed channel!": by another thread, see drop()
            raise Transient(str(error)) from error
