"""The store that each worker serves, over which process groups form."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore

from elastic_train.errors import FormationFailed
from elastic_train.system import close_in_forked_children
from elastic_train.world import World

START_TIMEOUT = timedelta(seconds=60)
"""time for its first answer; torch then also looks up this host's name, which can take seconds"""
ANSWER_TIMEOUT = timedelta(seconds=1)
"""timeout of the server's own store, until its user sets another one"""


class GroupStoreServer:
    """A TCPStore that this process serves, on one address and a free port. It holds this member's announcements to its
    world. If this member is rank 0, the process group forms over this store."""

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = (host, int(listener.getsockname()[1]))
        # A forked DataLoader process would accept connections in place of a dead parent, and would keep connections
        # open on which other members wait for answers of the parent.
        close_in_forked_children(self.address[1], self)
        fd = listener.detach()
        self.store = TCPStore(
            *self.address, is_master=True, wait_for_workers=False, timeout=START_TIMEOUT, master_listen_fd=fd
        )
        self.store.set_timeout(ANSWER_TIMEOUT)

    def group_store(self, world: World, timeout: timedelta) -> Store:
        """Return the store of the world's rank 0, on a connection of its own, so that it can be broken off.

        Args:
            timeout: of the connection, since hundreds may connect at once, and of each wait for a key.

        Raises:
            FormationFailed: rank 0 is dead.
        """
        first = world.members[0]
        assert first.store is not None, "every member serves one"
        if world.rank > 0:
            host, port = first.store
            try:
                socket.create_connection(first.store, timeout.total_seconds()).close()
            except OSError as error:  # TCPStore would try for seconds
                raise FormationFailed(f"{first.name} (rank 0) does not answer at {host}:{port}") from error
        return TCPStore(*first.store, is_master=False, wait_for_workers=False, timeout=timeout)
