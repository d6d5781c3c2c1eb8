"""Real etcd members for tests."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from elastic_train.tools.drills.etcd_cluster import HEALTHY_SECONDS, EtcdCallFailed, EtcdCluster, EtcdMember, Tls
from elastic_train.tools.drills.nodes import wait_until


@contextlib.contextmanager
def etcd_running(path: Path, size: int = 1, tls: Tls | None = None) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(path, size, tls, flags=("--auth-token-ttl", "3"))  # so that a test lives to see one expire
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def replace_data(cluster: EtcdCluster, member: EtcdMember) -> None:
    """A member whose disk is lost, as etcd's handbook has it replaced: removed, and added again without data.

    Blocks until it is healthy again. The others must have a majority.
    """
    other = next(one for one in cluster.members if one is not member)
    number = f"{cluster.own_id(member):x}"
    member.kill()
    shutil.rmtree(member.path / member.name)

    def change(*command: str) -> str:
        """Refused until the others have been in touch for 5 s; what did not answer may have been done."""
        with contextlib.suppress(EtcdCallFailed):
            cluster.ctl("member", *command, endpoint=other.endpoint)
        return cluster.ctl("member", "list", endpoint=other.endpoint)

    wait_until(lambda: number not in change("remove", number), f"etcd without {member.name}", HEALTHY_SECONDS)
    address = f"--peer-urls={member.peer_url}"
    wait_until(
        lambda: member.peer_url in change("add", member.name, address), f"etcd with {member.name}", HEALTHY_SECONDS
    )
    member.start(state="existing")
    cluster.wait_until_healthy()
