"""One channel for each etcd endpoint, made when it is needed."""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from typing import Any

from elastic_train.errors import StoreUnreachable, UsageError, first_line
from elastic_train.rendezvous.etcd_client import import_etcd3
from elastic_train.rendezvous.etcd_errors import Transient
from elastic_train.rendezvous.etcd_settings import EtcdSettings

ATTEMPT_SECONDS = 2.0
"""of one attempt at one endpoint; then the next endpoint has its turn"""
CONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # what one attempt to connect may take; a busy machine needs seconds
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default, 2 minutes, would hide a member that is back
    ("grpc.max_receive_message_length", 64 * 2**20),
)


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
        """whether any member ever has: where certificates and password were good once, they may be being renewed"""
        self.num_requests = 0
        """attempts made so far, and bytes of the messages both ways: for measurements"""
        self.num_bytes = 0

    def client(self) -> tuple[int, Any]:
        """(index of the present endpoint, its client). Blocks ATTEMPT_SECONDS at most, to authenticate.

        Raises:
            grpc.RpcError: no connection, or the user or password is refused.
            Transient: the certificates, or a password that was good once, are being renewed at this moment.
            UsageError: there is no password, and never was one.
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
            raise Transient("the certificates are being renewed: a file is missing, empty or cannot be read")
        made = self._connect(self.settings.endpoints[index])
        with self._lock:
            earlier, _ = self._clients.setdefault(index, (made, files))
        if earlier is not made:
            made.close()
        return index, earlier

    def _connect(self, endpoint: str) -> Any:
        settings = self.settings
        host, _, port = endpoint.rpartition(":")
        try:
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
        except UsageError as error:
            if not self.has_answered:
                raise
            raise Transient(f"the password is being renewed: {error}") from error
        except OSError as error:  # it was there a moment ago
            raise Transient(f"the certificates are being renewed: {first_line(error)}") from error

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
        """None while a certificate is missing, cannot be read, or is empty, at which gRPC would abort the process."""
        files = filter(None, (self.settings.ca, self.settings.cert, self.settings.key))
        with suppress(OSError):
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
