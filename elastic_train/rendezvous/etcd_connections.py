"""The etcd3 client, loaded although its generated code is older than protobuf's runtime; one channel per etcd
endpoint."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import random
import sys
import threading
import time
import types
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic_train.errors import StoreUnreachable, UsageError, first_line
from elastic_train.rendezvous.etcd_errors import Transient
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.system import answer_of

ATTEMPT_SECONDS = 2.0
"""seconds of one attempt at one endpoint; the next attempt goes to the next endpoint"""
AUTHENTICATE_SECONDS = 60.0
"""time limit of etcd's check of a password"""
CONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # limit of one attempt to connect; a busy machine needs seconds
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default, 2 minutes, would hide a member that is back
    ("grpc.max_receive_message_length", 64 * 2**20),
    # One name for all members may lead to another one since this one lost its power: only pings show that a connection
    # is dead. etcd refuses more than one in 5 s, and any between calls. One that checks many passwords answers after
    # seconds, and would begin each check anew. The timeout's default is a minute, the grace.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.enable_http_proxy", 0),  # ignores http_proxy and https_proxy, which are for the web
)


@functools.cache
def import_etcd3() -> Any:
    """Import the `etcd3` package, with any version of protobuf, imported before or not.

    The package's generated modules build descriptors by hand, which protobuf refuses since version 4 (unless it is
    switched to its slow Python form before its first import in the process). The modules also carry the serialized
    descriptors. protobuf's own builder makes the same messages from these; the modules themselves are never run.

    Raises:
        UsageError: `etcd3` is not installed.
    """
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("--rdzv-backend=etcd3 needs the etcd3 client, which is missing: pip install etcd3==0.12.0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC reads it on import; it would log every failed handshake
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
    """Return the serialized FileDescriptorProto in a module that protoc generated before 2022."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            literal = node.value.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                return literal.value.encode("latin-1")
    raise UsageError(f"{source} is not of etcd3 0.12.0, the version that this package knows")


def as_unary(client: Any, rpc: Any) -> None:
    """Make the client's LeaseKeepAlive take one request and return one response, which is the same on the wire. As a
    stream it needs threads of gRPC: where one cannot start, that call fails and every later one hangs."""
    client.leasestub.LeaseKeepAlive = client.channel.unary_unary(
        "/etcdserverpb.Lease/LeaseKeepAlive",
        rpc.LeaseKeepAliveRequest.SerializeToString,
        rpc.LeaseKeepAliveResponse.FromString,
    )


class Connections:
    """One etcd3 client per endpoint, made at its first use and shared by all threads."""

    clock = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    """for all calls of etcd over these connections"""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.etcd3 = import_etcd3()
        self._lock = threading.Lock()
        self._clients: dict[int, tuple[Future[Any], tuple[int, ...]]] = {}
        """by endpoint: a client, perhaps not made yet, and the times at which its certificates were written"""
        self.present = random.randrange(len(settings.endpoints))  # spreads the processes over the endpoints
        self._is_closed = False
        self.has_answered = False
        """whether any member ever has: then certificates and password were good, and a refusal may mean a renewal"""
        self.has_written = False
        """whether etcd has answered a write of this process; a full database does not"""
        self.drawn_lease = 0
        """number drawn for the lease of a job entry, perhaps granted by now; 0 once this process has its entry"""

    def client(self) -> tuple[int, Any]:
        """Return (index of the present endpoint, its client). Blocks ATTEMPT_SECONDS at most.

        Raises:
            grpc.RpcError: no connection, or the user or password is refused.
            Transient: it is not authenticated yet; or the certificates are being renewed, or the file of a password
                that was good once.
            UsageError: there is no password, and never was one.
        """
        with self._lock:
            if self._is_closed:
                raise StoreUnreachable("the connection to etcd is closed")
            index = self.present
            if index not in self._clients:
                files = self._written_at()
                if files is None:
                    raise Transient("the certificates are being renewed: a file is missing, empty or cannot be read")
                # Longer than an attempt: etcd needs a tenth of a second of a core, and all workers may come at once.
                made = answer_of(partial(self._connect, self.settings.endpoints[index]), "etcd-client")
                self._clients[index] = made, files
            made, _ = self._clients[index]
        if not wait([made], ATTEMPT_SECONDS).done:
            self.rotate(index)
            raise Transient("it has not authenticated this process yet")
        if made.exception() is not None:
            self._forget(index, made)
        return index, made.result()

    def _connect(self, endpoint: str) -> Any:
        settings = self.settings
        host, _, port = endpoint.rpartition(":")
        try:
            client = self.etcd3.client(
                host,
                int(port),
                ca_cert=settings.ca,
                cert_cert=settings.cert,
                cert_key=settings.key,
                timeout=AUTHENTICATE_SECONDS,
                user=settings.user,
                password=settings.password(os.environ),
                grpc_options=CONNECT_OPTIONS,
            )
            as_unary(client, self.etcd3.etcdrpc)
            return client
        except UsageError as error:
            if not self.has_answered:
                raise
            raise Transient(f"the password is being renewed: {error}") from error
        except OSError as error:  # the file existed a moment ago
            raise Transient(f"the certificates are being renewed: {first_line(error)}") from error

    def rotate(self, index: int) -> None:
        """Go on to the next endpoint, because that of `index` did not answer. No-op if another thread has done so.

        Drops that endpoint's client if its certificates were renewed: a client keeps those that it was made with.
        """
        outdated = None
        files = self._written_at()
        with self._lock:
            if self.present == index:
                self.present = (index + 1) % len(self.settings.endpoints)
            if files is not None and self._clients.get(index, (None, files))[1] != files:
                outdated, _ = self._clients.pop(index)
        if outdated is not None:
            _close(outdated)

    def _written_at(self) -> tuple[int, ...] | None:
        """Return the files' times; None while one is missing, unreadable or empty: at that gRPC aborts the process."""
        files = filter(None, (self.settings.ca, self.settings.cert, self.settings.key))
        with suppress(OSError):
            found = [os.stat(file) for file in files]
            if all(status.st_size for status in found):
                return tuple(status.st_mtime_ns for status in found)
        return None

    def drop(self, index: int, client: Any) -> None:
        """Drop a client whose token is refused; the next call makes a new one."""
        with self._lock:
            made, _ = self._clients.get(index, (None, ()))
        if made is not None and made.done() and made.exception() is None and made.result() is client:
            self._forget(index, made)
            client.close()

    def _forget(self, index: int, made: Future[Any]) -> None:
        """Let the next call make a client anew. No-op if another thread has made one meanwhile."""
        with self._lock:
            if self._clients.get(index, (None, ()))[0] is made:
                del self._clients[index]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            clients, self._clients = list(self._clients.values()), {}
        for client, _ in clients:
            _close(client)


def _close(client: Future[Any]) -> None:
    """Close a client, or do so as soon as it is made."""
    client.add_done_callback(lambda made: None if made.exception() else made.result().close())


@dataclass(frozen=True)
class Entry:
    """A key in etcd with its value and revisions, at one revision."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    """1 at its creation, one more with each change"""
    lease: int


def entry_of(kv: Any) -> Entry:
    return Entry(kv.key.decode(), bytes(kv.value), kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def end_of(prefix: str) -> bytes:
    """Return the first key after all those that begin with `prefix` (etcd's range_end)."""
    data = bytearray(prefix.encode())
    data[-1] += 1  # no byte of UTF-8 is 0xff
    return bytes(data)
