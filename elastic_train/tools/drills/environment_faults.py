"""The faults of a node's environment: its network (silence, loss, a slow line), the disk, etcd."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from elastic_train.tools.drills.backends import Etcd3
from elastic_train.tools.drills.cluster import NodeState, Place
from elastic_train.tools.drills.etcd_cluster import EtcdCluster, EtcdMember
from elastic_train.tools.drills.injection import RANK_ZERO, Absence, Disturbance, NotInjected, Silence
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import CommandFailed, output_of, wait_until

LOST_SHARE = 0.2
SLOW_RATE = "2mbit"
EFFECT_SECONDS = 10.0
"""time limit for a first affected packet: a heartbeat at least comes or goes"""
SNAPSHOT_SECONDS = 90.0
"""time limit for a snapshot to become due"""


class Partition(Absence):
    name = "partition"
    says = "a node's cable is pulled; plugged in again once the others are through, and it comes back"
    needs_network = True

    def cut(self) -> None:
        self.network.pull_cable(self.place.index)

    def inject(self) -> str:
        self.cut()
        self.place.effect = NodeState.CUT_OFF
        if self.network.can_reach(self.place.index, seconds=0.3):
            raise NotInjected("it still reaches the others")
        return "it does not reach the bridge"

    def undo(self) -> None:
        self.network.heal(self.place.index)
        self.place.effect = NodeState.OUT


class OneWayDrop(Partition):
    name = "one-way"
    says = "what a node sends is dropped, what it hears is not"

    def cut(self) -> None:
        self.network.drop_outgoing(self.place.index)


class PowerLoss(Silence):
    name = "power-loss"
    says = "a node's port goes down, then all of its processes: silence, no FIN and no RST"
    needs_network = True

    def inject(self) -> str:
        self.network.pull_cable(self.place.index)
        self.cluster.kill(self.targets)  # a later join heals its network
        return "port down, processes gone"


class PacketLoss(Disturbance):
    name = "packet-loss"
    says = "a fifth of the packets to a node is lost for three seconds"
    needs_network = True
    affected = "dropped"

    @classmethod
    def why_not(cls) -> str | None:
        return Network.why_no(lambda network: cls.impair(network, 0))

    @classmethod
    def impair(cls, network: Network, index: int) -> Callable[[], int]:
        """Impair the line of node `index`; return what counts its affected packets."""
        return network.drop_some(index, LOST_SHARE)

    def inject(self) -> str:
        count, started = self.impair(self.network, self.place.index), time.monotonic()
        wait_until(lambda: count() > 0, f"packet was {self.affected}", EFFECT_SECONDS)
        return f"the first packet was {self.affected} after {time.monotonic() - started:.2f} s"

    def may_take(self) -> list[Place]:
        """The target: TCP doubles its wait at each loss of the same packet, so a node may exceed --peer-timeout."""
        return self.targets

    def undo(self) -> None:
        self.network.heal(self.place.index)


class SlowLink(PacketLoss):
    name = "slow-link"
    says = "a node sends at 2 Mbit/s for three seconds"
    needs_company = True
    affected = "held back"

    @classmethod
    def impair(cls, network: Network, index: int) -> Callable[[], int]:
        return network.slow_down(index, SLOW_RATE)


class DiskFull(Disturbance):
    name = "disk-full"
    says = "the disk of the node that writes snapshots is full when one is due; there is room again afterwards"
    holder = RANK_ZERO
    needs_network = True  # then each node has its own mounts
    undo_after = 0.0
    snapshots = 2  # one that finds no room, and one that does

    @classmethod
    def why_not(cls) -> str | None:
        return None if shutil.which("nsenter") else "no nsenter here"

    def limit_seconds(self) -> float:
        return super().limit_seconds() + SNAPSHOT_SECONDS

    def not_yet(self) -> str | None:
        is_writing = any((self.cluster.run_dir / "snapshots").glob(".tmp-*"))
        return super().not_yet() or ("a snapshot is being written" if is_writing else None)

    def inject(self) -> str:
        snapshots = self.cluster.run_dir / "snapshots"
        snapshots.mkdir(exist_ok=True)
        since = time.time()
        self._in_mounts("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(snapshots))

        def warning() -> str | None:
            """The node's warning about a snapshot that found no room."""
            for member, at, message in self.cluster.watch.warnings:
                if member in self.members and at >= since and "No space left" in message:
                    return message
            if not self.place.is_running:
                raise NotInjected("its node ended first")
            return None

        return str(self.cluster.wait_until(warning, "snapshot was due", SNAPSHOT_SECONDS))

    def undo(self) -> None:
        with suppress(NotInjected, CommandFailed):  # the node may be gone; `is_cleared` checks whether there is room
            self._in_mounts("umount", "--lazy", str(self.cluster.run_dir / "snapshots"))

    def is_cleared(self) -> bool:
        """Return whether a snapshot was written since."""
        return any(info.step > (self.undone_at_step or 0) for info in self.newest_snapshots()[:1])

    def _in_mounts(self, *command: str) -> None:
        """Run a command in the target's mount namespace. Raises: NotInjected: it has no worker. CommandFailed."""
        # `umount` reads /proc, which needs the pid namespace too.
        prefix = ["nsenter", "--mount", "--pid", f"--target={self.workers()[0].pid}"]
        output_of([*prefix, *command], what=" ".join(command))


class KillEtcd(Disturbance):
    name = "kill-etcd"
    says = "SIGKILL to a member of the drill's own etcd cluster; started again after three seconds"
    backend = Etcd3.name

    @property
    def etcd(self) -> EtcdCluster:
        assert self.cluster.backend.members is not None, "not_yet() asks"
        return self.cluster.backend.members

    def not_yet(self) -> str | None:
        if self.cluster.backend.members is None:
            return "the etcd cluster is not the drill's own"
        return super().not_yet()

    def choose(self) -> list[Place]:
        try:
            self._member = self.choose_member()
        except CommandFailed as error:
            raise NotInjected(str(error)) from error
        self.detail = f"etcd member {self._member.name}"
        return []

    def choose_member(self) -> EtcdMember:
        return self.rng.choice(self.etcd.members)

    def inject(self) -> str:
        self.silence(self._member)
        if self.etcd.is_healthy(self._member):
            raise NotInjected("it still answers")
        return "it does not answer"

    def silence(self, member: EtcdMember) -> None:
        member.kill()

    def undo(self) -> None:
        self._member.start()

    def is_cleared(self) -> bool:
        return self.etcd.is_healthy(self._member)


class FreezeEtcdLeader(KillEtcd):
    name = "freeze-etcd-leader"
    says = "SIGSTOP to the leader of the drill's own etcd cluster for three seconds"

    def choose_member(self) -> EtcdMember:
        return self.etcd.leader()

    def silence(self, member: EtcdMember) -> None:
        member.signal(signal.SIGSTOP)

    def undo(self) -> None:
        self._member.signal(signal.SIGCONT)
