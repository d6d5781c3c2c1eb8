"""The changes of keys, as one stream from one endpoint."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic_train.rendezvous.etcd_connections import Connections
from elastic_train.rendezvous.etcd_errors import (
    Compacted,
    TokenRefused,
    Transient,
    judge,
)


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


class Watch:
    """The changes of all keys with a prefix from a revision on, as one stream from one endpoint.

    It ends with Transient when the stream breaks or its member loses the leader, and with Compacted when the revision
    is gone; its reader starts again. `cancel` ends it from another thread.
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
