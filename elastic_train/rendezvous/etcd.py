"""etcd v3 in the few operations that this package needs. It hides the faults of the `etcd3` client.

| fault of etcd3 0.12.0                                      | what is done about it                                   |
|------------------------------------------------------------|---------------------------------------------------------|
| its generated code does not load under protobuf 4 or newer | the messages are made from the descriptors it carries   |
| one endpoint, no failover                                  | one client an endpoint; a failed call goes to the next  |
| calls block for ever                                       | a deadline for every attempt and for the whole          |
| the watch thread spins, and is not restored                | not used; who waits for a change lists the keys again   |
| credentials are refused without TLS                        | the token travels as metadata alone                     |
| a token is fetched once and expires                        | a client whose token is refused is made anew            |
| leases are kept by a stream, which hangs without threads   | one request, one response (etcd_connections.py)         |
| certificate and key without a CA: plaintext                | refused (etcd_settings.py)                              |
| errors lose their details, some come raw                   | the stubs are called directly; one place judges errors  |
| gRPC prints a line for every handshake that fails          | its log is for errors, unless GRPC_VERBOSITY is set     |

Retries are tenacity policies: transient errors only, up to a deadline, with jitter. A transaction that timed out may
have been applied. So every value that etcd_store.py writes carries a unique stamp, by which it is recognised.
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


@dataclass
class Etcd:
    """One caller's access to the cluster; threads may share it.

    Every call returns within about `deadline` seconds, or raises StoreUnreachable; StoreRefused reports what etcd does
    not allow. At the start two more cases raise StoreRefused at once. The TLS handshake fails with every member, which
    does not heal. Or the database is full, while no training is in progress that could wait.
    """

    connections: Connections
    deadline: float
    """seconds for a call with all its attempts; seconds in which this process is suspended do not count"""
    attempt_seconds: float = ATTEMPT_SECONDS
    before_retry: Callable[[str], None] = field(default=lambda _why: None)
    """called with the last error before each further attempt; may raise to give up"""

    # --- keys ---------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """Return the present entry of the key."""
        request = self._rpc.RangeRequest(key=key.encode())
        entries = self._call(lambda client: client.kvstub.Range, request).kvs
        return entry_of(entries[0]) if entries else None

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return the present entries of a few keys, in one round trip."""
        _, results = self.transact((), [self.get_request(key) for key in keys])
        return [entries[0] if entries else None for entries in results]

    def below(self, prefix: str, *, keys_only: bool = False) -> tuple[list[Entry], int]:
        """Return (all entries whose key begins with `prefix`, their revision); without values if `keys_only`."""
        request = self._rpc.RangeRequest(key=prefix.encode(), range_end=end_of(prefix), keys_only=keys_only)
        response = self._call(lambda client: client.kvstub.Range, request)
        return [entry_of(entry) for entry in response.kvs], response.header.revision

    def transact(
        self, compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any] = ()
    ) -> tuple[bool, list[list[Entry]]]:
        """Execute a transaction: comparisons, and operations for either outcome, as etcd's own messages (`is_at`,
        `put_request`, ...). Return whether the comparisons held, and the results of each `get` operation that was
        executed. Raises: LeaseLost: a put names a lease that is gone."""
        request = self._rpc.TxnRequest(compare=compare, success=success, failure=failure)
        response = self._call(lambda client: client.kvstub.Txn, request)
        if any(part.WhichOneof("request") == "request_put" for part in success):
            self.connections.has_written = True
        ranges = (part for part in response.responses if part.WhichOneof("response") == "response_range")
        return response.succeeded, [[entry_of(entry) for entry in part.response_range.kvs] for part in ranges]

    def delete(self, key: str) -> None:
        """Delete the key, which may not exist."""
        self.transact((), [self.delete_request(key)])

    # --- the parts of a transaction -----------------------------------------------------------------------------------

    def is_at(self, key: str, mod_revision: int) -> Any:
        """Make the comparison: this revision last changed the key; 0: the key does not exist."""
        return self._equal(key, target="MOD", mod_revision=mod_revision)

    def is_created_at(self, key: str, create_revision: int) -> Any:
        """Make the comparison: the key is still the one that this revision created."""
        return self._equal(key, target="CREATE", create_revision=create_revision)

    def is_under(self, key: str, lease: int) -> Any:
        """Make the comparison: the key is under this lease."""
        return self._equal(key, target="LEASE", lease=lease)

    def is_empty(self, prefix: str) -> Any:
        """Make the comparison: no key begins with `prefix`."""
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
        """Grant a lease for whole seconds, rounded up; etcd may make it longer (1.5 election timeouts at least).

        Args:
            lease: a number drawn by the caller, so that a repeated call grants no second lease; 0: etcd draws it.
        """
        request = self._rpc.LeaseGrantRequest(TTL=max(1, -int(-seconds // 1)), ID=lease)
        with contextlib.suppress(LeaseExists):  # the reply to an earlier call was lost
            lease = int(self._call(lambda client: client.leasestub.LeaseGrant, request).ID)
        self.connections.has_written = True
        return lease

    def refresh(self, lease: int) -> bool:
        """Start a lease's time anew; return whether the lease still exists, because etcd raises no error for that."""
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)
        return bool(self._call(lambda client: client.leasestub.LeaseKeepAlive, request).TTL > 0)

    def revoke(self, lease: int) -> None:
        """End a lease, which deletes its keys at once. A lease that has ended already is no error."""
        try:
            self._call(lambda client: client.leasestub.LeaseRevoke, self._rpc.LeaseRevokeRequest(ID=lease))
        except LeaseLost:
            return

    # --- calls --------------------------------------------------------------------------------------------------------

    @property
    def _rpc(self) -> Any:
        return self.connections.etcd3.etcdrpc

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Send one request, to one endpoint after the other, until one answers."""
        import tenacity

        errors: list[str] = []
        refused: dict[str, TlsRefused] = {}
        """by endpoint: its last error, if that was a TLS refusal that does not heal"""
        endpoints = self.connections.settings.endpoints
        where = ",".join(endpoints)
        waited = AwakeTime(self.connections.clock, longest=self.attempt_seconds + MAX_PAUSE)
        retry = tenacity.Retrying(
            sleep=self.connections.sleep,
            retry=tenacity.retry_if_exception_type(Transient),
            stop=lambda _state: waited.seconds >= self.deadline,
            # No pause in the first round over the endpoints; after that up to half a second, with jitter.
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
        try:
            index, client = self.connections.client()
            response = method(client)(request, timeout, metadata=client.metadata)
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
        except (ValueError, RuntimeError) as error:
            # "Cannot invoke RPC on closed channel!": another thread called drop(); or "can't start new thread".
            raise Transient(str(error)) from error
