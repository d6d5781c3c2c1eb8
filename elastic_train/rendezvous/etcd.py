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

import ast
import functools
import importlib
import importlib.util
import os
import queue
import random
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from elastic_train.errors import StoreRefused, StoreUnreachable, UsageError
from elastic_train.rendezvous.etcd_settings import EtcdSettings

ATTEMPT_SECONDS = 2.0
"""of one attempt at one endpoint; then the next endpoint has its turn"""
CONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # what one attempt to connect may take; a busy machine needs seconds
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default, 2 minutes, would hide a member that is back
    ("grpc.max_receive_message_length", 64 * 2**20),
)
MAX_OPERATIONS = 100
"""in one transaction; etcd's own limit is 128"""
REMEDIES = {
    "invalid user ID or password": "correct user= and the first line of password_file= in --rdzv-conf",
    "user name is empty": "give user= and password_file= in --rdzv-conf, or cert= and key= of the user's certificate",
    "authentication is not enabled": "leave user= out of --rdzv-conf: this etcd knows no users yet",
}
"""by words of etcd's own"""
Answer = TypeVar("Answer")


class LeaseLost(Exception):
    """A key was to be put under a lease that has run out, or was revoked."""


class Compacted(Exception):
    """A revision of the past is not kept any more."""


@dataclass(frozen=True)
class Entry:
    """A key as it stands, or stood, in etcd."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    """1 when created, one more with each change"""
    lease: int


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
    is_ambiguous: bool
    """whether an earlier attempt got no answer, and may have been applied"""


class Connections:
    """One etcd3 client for each endpoint, made when it is first needed; shared by all threads."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.etcd3 = import_etcd3()
        self._lock = threading.Lock()
        self._clients: dict[int, tuple[Any, tuple[int, ...]]] = {}
        """by endpoint: a client, and when the certificates that it was made with were written"""
        self._current = random.randrange(len(settings.endpoints))  # not everybody at the same one
        self._is_closed = False
        self.has_answered = False
        """whether any member ever has: where certificates were good once, they may be being renewed"""
        self.num_requests = 0
        """attempts made so far, and bytes of the messages both ways: for measurements"""
        self.num_bytes = 0

    def client(self) -> tuple[int, Any]:
        """(index of the present endpoint, its client). Blocks ATTEMPT_SECONDS at most, to authenticate.

        Raises:
            grpc.RpcError: no connection, or the user or password is refused.
            Transient: the certificates are being renewed at this moment.
        """
        with self._lock:
            if self._is_closed:
                raise StoreUnreachable("the connection to etcd is closed")
            index = self._current
            known = self._clients.get(index)
        if known is not None:
            return index, known[0]
        files = self._written_at()
        if files is None:
            raise Transient("the certificates are being renewed: a file is missing or empty")
        made = self._connect(self.settings.endpoints[index])
        with self._lock:
            earlier, _ = self._clients.setdefault(index, (made, files))
        if earlier is not made:
            made.close()
        return index, earlier

    def _connect(self, endpoint: str) -> Any:
        settings = self.settings
        host, _, port = endpoint.rpartition(":")
        return self.etcd3.client(
            host,
            int(port),
            ca_cert=settings.ca,
            cert_cert=settings.cert,
            cert_key=settings.key,
            timeout=ATTEMPT_SECONDS,
            user=settings.user,
            password=settings.password(os.environ),
            grpc_options=CONNECT_OPTIONS,
        )

    def rotate(self, index: int) -> None:
        """The endpoint of `index` did not answer: the next one, unless somebody else has turned already.

        A client keeps the certificates that it was made with: where they were renewed since, it is made anew.
        """
        outdated = None
        files = self._written_at()
        with self._lock:
            if self._current == index:
                self._current = (index + 1) % len(self.settings.endpoints)
            if files is not None and self._clients.get(index, (None, files))[1] != files:
                outdated, _ = self._clients.pop(index)
        if outdated is not None:
            outdated.close()

    def _written_at(self) -> tuple[int, ...] | None:
        """None while a certificate is missing, or empty, at which gRPC would abort the process."""
        files = filter(None, (self.settings.ca, self.settings.cert, self.settings.key))
        with suppress(FileNotFoundError):
            found = [os.stat(file) for file in files]
            if all(status.st_size for status in found):
                return tuple(status.st_mtime_ns for status in found)
        return None

    def drop(self, index: int, client: Any) -> None:
        """Its token is refused: the next call makes a new client."""
        with self._lock:
            if index in self._clients and self._clients[index][0] is client:
                del self._clients[index]
        client.close()

    @property
    def present(self) -> int:
        return self._current

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            clients, self._clients = list(self._clients.values()), {}
        for client, _ in clients:
            client.close()


@dataclass
class Etcd:
    """One caller's way to the cluster; threads may share it.

    Every call returns within about `deadline` seconds, or raises StoreUnreachable; StoreRefused says what etcd does not
    allow. At the start that is also, at once, where no member and this side accept each other's certificates: that does
    not heal.
    """

    connections: Connections
    deadline: float
    """seconds for a call with all its attempts"""
    attempt_seconds: float = ATTEMPT_SECONDS
    before_retry: Callable[[str], None] = field(default=lambda _why: None)
    """called with the last error before each further attempt; may raise to give up"""

    # --- keys ---------------------------------------------------------------------------------------------------------

    def get(self, key: str, revision: int = 0) -> Entry | None:
        """The key as it stands, or as it stood at a revision. Raises Compacted where that is gone."""
        request = self._rpc.RangeRequest(key=key.encode(), revision=revision)
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

    def below(self, prefix: str) -> tuple[list[Entry], int]:
        """(all entries whose key begins with `prefix`, the revision at which they stood)."""
        request = self._rpc.RangeRequest(key=prefix.encode(), range_end=end_of(prefix))
        response = self._call(lambda client: client.kvstub.Range, request)
        return [entry_of(entry) for entry in response.kvs], response.header.revision

    def transact(self, transaction: Transaction) -> TransactionResult:
        """Raises LeaseLost where a put names a lease that is gone."""
        request = self._rpc.TxnRequest(
            compare=transaction.compare, success=transaction.success, failure=transaction.failure
        )
        tried: list[str] = []
        response = self._call(lambda client: client.kvstub.Txn, request, tried)
        return TransactionResult(
            succeeded=response.succeeded,
            revision=response.header.revision,
            entries=[
                [entry_of(entry) for entry in part.response_range.kvs]
                for part in response.responses
                if part.WhichOneof("response") == "response_range"
            ],
            is_ambiguous=bool(tried),
        )

    def delete(self, key: str) -> None:
        self._call(lambda client: client.kvstub.DeleteRange, self._rpc.DeleteRangeRequest(key=key.encode()))

    def delete_prefix(self, prefix: str) -> None:
        request = self._rpc.DeleteRangeRequest(key=prefix.encode(), range_end=end_of(prefix))
        self._call(lambda client: client.kvstub.DeleteRange, request)

    # --- the parts of a transaction -----------------------------------------------------------------------------------

    def is_at(self, key: str, mod_revision: int) -> Any:
        """True where the key was last changed by this revision; 0: where there is none."""
        return self._rpc.Compare(
            key=key.encode(), target="MOD", result=self._rpc.Compare.EQUAL, mod_revision=mod_revision
        )

    def is_created_at(self, key: str, create_revision: int) -> Any:
        """True where it is still the key that was created by this revision."""
        return self._rpc.Compare(
            key=key.encode(), target="CREATE", result=self._rpc.Compare.EQUAL, create_revision=create_revision
        )

    def is_empty(self, prefix: str) -> Any:
        """True where no key begins with `prefix`."""
        return self._rpc.Compare(
            key=prefix.encode(),
            range_end=end_of(prefix),
            target="CREATE",
            result=self._rpc.Compare.EQUAL,
            create_revision=0,
        )

    def get_request(self, key: str) -> Any:
        return self._rpc.RequestOp(request_range=self._rpc.RangeRequest(key=key.encode()))

    def put_request(self, key: str, value: bytes, lease: int = 0) -> Any:
        return self._rpc.RequestOp(request_put=self._rpc.PutRequest(key=key.encode(), value=value, lease=lease))

    def delete_request(self, key: str, *, is_prefix: bool = False) -> Any:
        request = self._rpc.DeleteRangeRequest(key=key.encode(), range_end=end_of(key) if is_prefix else b"")
        return self._rpc.RequestOp(request_delete_range=request)

    # --- leases -------------------------------------------------------------------------------------------------------

    def grant(self, seconds: float) -> int:
        """A lease for whole seconds, rounded up; etcd may make it longer (1.5 election timeouts at least)."""
        request = self._rpc.LeaseGrantRequest(TTL=max(1, -int(-seconds // 1)), ID=0)
        return int(self._call(lambda client: client.leasestub.LeaseGrant, request).ID)

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

    def _call(self, method: Callable[[Any], Any], request: Any, tried: list[str] | None = None) -> Any:
        """One request, at one endpoint after the other until it is answered; `tried` gets the errors on the way."""
        import tenacity

        errors: list[str] = [] if tried is None else tried
        refused: dict[str, TlsRefused] = {}
        """by endpoint, where the last answer was that, for good"""
        endpoints = self.connections.settings.endpoints
        where = ",".join(endpoints)
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Transient),
            stop=tenacity.stop_after_delay(self.deadline),
            # A whole round over the endpoints costs no pause; after that, up to half a second, with jitter.
            wait=lambda state: (
                0.0
                if state.attempt_number < len(endpoints)
                else random.uniform(0.02, min(0.5, 0.02 * 2 ** min(state.attempt_number, 10)))
            ),
            before_sleep=lambda _state: self.before_retry(errors[-1]),
            reraise=True,
        )
        give_up_at = time.monotonic() + self.deadline

        def attempt() -> Any:
            try:
                return self._attempt(method, request, give_up_at)
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

    def _attempt(self, method: Callable[[Any], Any], request: Any, give_up_at: float) -> Any:
        import grpc

        timeout = max(0.05, min(self.attempt_seconds, give_up_at - time.monotonic()))
        index, client = self.connections.present, None
        self.connections.num_requests += 1
        try:
            index, client = self.connections.client()
            response = method(client)(request, timeout, metadata=client.metadata)
            self.connections.num_bytes += request.ByteSize() + response.ByteSize()
            self.connections.has_answered = True
            return response
        except grpc.RpcError as error:
            settings = self.connections.settings
            judged = judge_tls(error.details() or "", settings.endpoints[index], settings) or judge(error)
            if isinstance(judged, TokenRefused) and client is not None:
                self.connections.drop(index, client)
            elif isinstance(judged, Transient):
                self.connections.rotate(index)
            if isinstance(judged, Transient):
                judged.endpoint = settings.endpoints[index]
            raise judged from error
        except ValueError as error:  # grpc: "Cannot invoke RPC on closed channel!": by another thread, see drop()
            raise Transient(str(error)) from error


class Transient(Exception):
    """An attempt failed in a way that another one may not."""

    endpoint = ""
    """at which; empty where it did not come to one"""


class TokenRefused(Transient):
    """The client's token has expired, or is from before a change of the users."""


class TlsRefused(Transient):
    """A member and this side do not accept each other's certificates; other members may be in order."""

    def __init__(self, endpoint: str, what: str, do: str, *, may_heal: bool = False) -> None:
        super().__init__(f"{endpoint}: {what}")
        self.what, self.do = what, do
        self.may_heal = may_heal
        """a clock may be about to be set"""


def judge_tls(text: str, endpoint: str, settings: EtcdSettings) -> TlsRefused | None:
    """What gRPC says of a connection, where it is that one side refuses the other's certificate."""
    if "Hostname Verification Check failed" in text:
        return TlsRefused(
            endpoint,
            f"its certificate is not for {endpoint.rpartition(':')[0]}",
            "name it in --rdzv-endpoint as its certificate does, or make one for this name too (elastic-train certs "
            "--hosts)",
        )
    if found := re.search(r"CERTIFICATE_VERIFY_FAILED(?:: ([^:]+))?", text):
        why = found[1] or "its check has failed"
        if "expired" in why or "not yet valid" in why:
            do = "renew it (elastic-train certs DIR --hosts ... --renew), or set this machine's clock"
            return TlsRefused(endpoint, f"its certificate is not accepted: {why}", do, may_heal=True)
        return TlsRefused(
            endpoint,
            f"its certificate is not signed by ca={settings.ca} ({why})",
            "give ca= in --rdzv-conf the certificate of the authority that has signed etcd's",
        )
    if re.search(r"ALERT_(\w+_)?CERTIFICATE|ALERT_UNKNOWN_CA", text):
        if settings.cert is None:
            return TlsRefused(
                endpoint, "it asks for a client certificate", "give cert=FILE and key=FILE in --rdzv-conf"
            )
        return TlsRefused(
            endpoint,
            f"it does not accept the client certificate cert={settings.cert}",
            "give one in --rdzv-conf that has not expired, signed by the authority that etcd trusts (its "
            "--trusted-ca-file)",
        )
    return None


def judge(error: Any) -> Exception:
    """What a gRPC error means: Transient, TokenRefused, LeaseLost, Compacted, or StoreRefused for all that stays."""
    import grpc

    code, text = error.code(), (error.details() or "").strip()
    codes = grpc.StatusCode
    if code == codes.UNAUTHENTICATED or "revision of auth store is old" in text:
        return TokenRefused(text)
    if code == codes.NOT_FOUND and "lease not found" in text:
        return LeaseLost(text)
    if code == codes.OUT_OF_RANGE:
        return Compacted(text)
    if code == codes.RESOURCE_EXHAUSTED and "too many requests" not in text:
        return StoreRefused(f"it refuses to write: {text}", "a full database must be compacted and defragmented")
    if code == codes.PERMISSION_DENIED:
        return StoreRefused(
            f"{text}: the user's role does not allow this key prefix",
            "give the prefix= (--rdzv-conf) and the --rdzv-id that the role has, or grant it PREFIX/RUN_ID/",
        )
    if code in (codes.INVALID_ARGUMENT, codes.FAILED_PRECONDITION, codes.UNIMPLEMENTED):
        return StoreRefused(text, next((do for words, do in REMEDIES.items() if words in text), ""))
    return Transient(text.splitlines()[0][:200] if text else str(code.name).lower().replace("_", " "))


class Watch:
    """The changes of all keys with a prefix from a revision on, as one stream from one endpoint.

    It ends with Transient when the stream breaks or its member loses the leader, and with Compacted when the revision
    is gone; whoever reads it starts again. `cancel` ends it from another thread.
    """

    def __init__(self, connections: Connections, prefix: str, revision: int) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        rpc = connections.etcd3.etcdrpc
        create = rpc.WatchCreateRequest(key=prefix.encode(), range_end=end_of(prefix), start_revision=revision)
        self._requests.put(rpc.WatchRequest(create_request=create))
        self._connections = connections
        self._is_delete = rpc._event_delete
        self._call: Any = None
        self._index = connections.present
        self._is_cancelled = False

    def __iter__(self) -> Iterator[list[tuple[Entry, bool]]]:
        """Yields the changes of one revision or several: (entry, whether it was deleted)."""
        import grpc

        client = None
        try:
            self._index, client = self._connections.client()
            stub = self._connections.etcd3.etcdrpc.WatchStub(client.channel)
            # Without the header, a member that is cut off from the others keeps its watchers in silence.
            metadata = (*(client.metadata or ()), ("hasleader", "true"))
            self._connections.num_requests += 1
            self._call = stub.Watch(iter(self._requests.get, None), metadata=metadata)
            if self._is_cancelled:
                self._call.cancel()
            for response in self._call:
                self._connections.num_bytes += response.ByteSize()
                if response.canceled:
                    if response.compact_revision:
                        raise Compacted("the changes since then are compacted")
                    raise Transient("the watch was cancelled by etcd")
                if response.events:
                    yield [(entry_of(event.kv), event.type == self._is_delete) for event in response.events]
        except grpc.RpcError as error:
            judged = judge(error)
            if isinstance(judged, TokenRefused) and client is not None:
                self._connections.drop(self._index, client)
            elif isinstance(judged, Transient):
                self._connections.rotate(self._index)
            raise judged from error
        except ValueError as error:  # a closed channel, as in Etcd._attempt
            raise Transient(str(error)) from error
        finally:
            self._requests.put(None)  # lets gRPC's thread go, which waits for requests
        raise Transient("the watch ended")

    def cancel(self) -> None:
        """Callable from any thread."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()


def entry_of(kv: Any) -> Entry:
    return Entry(kv.key.decode(), bytes(kv.value), kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def end_of(prefix: str) -> bytes:
    """The first key after all those that begin with `prefix` (etcd's range_end)."""
    data = bytearray(prefix.encode())
    data[-1] += 1  # no byte of UTF-8 is 0xff
    return bytes(data)


# --- loading the client -----------------------------------------------------------------------------------------------


@functools.cache
def import_etcd3() -> Any:
    """The `etcd3` package, whatever protobuf is installed, and whatever has imported it before.

    Its generated modules build descriptors by hand, which protobuf refuses since version 4 (unless it is switched to
    its slow Python form before its first import in the process). They also carry the serialized descriptors, from
    which protobuf's own builder makes the same messages; the modules themselves are never run.

    Raises:
        UsageError: it is not installed.
    """
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("--rdzv-backend=etcd3 needs the etcd3 client, which is missing: pip install etcd3==0.12.0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when gRPC is loaded; it would log every failed handshake
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.internal import builder

    pool = DescriptorPool()
    for name in ("kv", "auth", "rpc"):
        source = Path(spec.submodule_search_locations[0]) / "etcdrpc" / f"{name}_pb2.py"
        descriptor = pool.AddSerializedFile(serialized_descriptor(source)) or pool.FindFileByName(f"{name}.proto")
        module = types.ModuleType(f"etcd3.etcdrpc.{name}_pb2", "Made by elastic_train from the descriptors.")
        builder.BuildMessageAndEnumDescriptors(descriptor, module.__dict__)
        builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, module.__dict__)
        sys.modules.setdefault(module.__name__, module)
    etcd3 = importlib.import_module("etcd3")
    event = sys.modules["etcd3.etcdrpc.kv_pb2"].Event
    etcd3.etcdrpc._event_delete = event.DELETE
    return etcd3


def serialized_descriptor(source: Path) -> bytes:
    """The serialized FileDescriptorProto in a module that protoc generated before 2022."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            literal = node.value.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                return literal.value.encode("latin-1")
    raise UsageError(f"{source} is not of etcd3 0.12.0, the version that this package knows")
