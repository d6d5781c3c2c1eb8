"""Harm to the etcd members under a job, of which training should not notice anything."""

from __future__ import annotations

import signal

from elastic_train.tools.drills.backends import Etcd3
from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.etcd_cluster import EtcdCallFailed, EtcdCluster, EtcdMember
from elastic_train.tools.drills.harm import Disturbance, Harm, NotStruck


class KillEtcd(Disturbance):
    name = "kill-etcd"
    says = "SIGKILL to a member of the drill's own etcd cluster; started again after three seconds"
    backend = Etcd3.name

    def not_yet(self, cluster: Cluster) -> str | None:
        if cluster.backend.members is None:
            return "the etcd cluster is not the drill's own"
        return super().not_yet(cluster)

    def choose(self, harm: Harm) -> list[Place]:
        self._member = self.pick(harm, _members(harm))
        harm.detail = f"etcd member {self._member.name}"
        return []

    def pick(self, harm: Harm, members: EtcdCluster) -> EtcdMember:
        return harm.rng.choice(members.members)

    def strike(self, harm: Harm) -> str:
        self.hurt(self._member)
        if _members(harm).is_healthy(self._member):
            raise NotStruck("it still answers")
        return "it does not answer"

    def hurt(self, member: EtcdMember) -> None:
        member.kill()

    def heal(self, member: EtcdMember) -> None:
        member.start()

    def undo(self, harm: Harm) -> None:
        self.heal(self._member)

    def is_cleared(self, harm: Harm) -> bool:
        return _members(harm).is_healthy(self._member)


class FreezeEtcdLeader(KillEtcd):
    name = "freeze-etcd-leader"
    says = "SIGSTOP to the leader of the drill's own etcd cluster for three seconds"

    def pick(self, harm: Harm, members: EtcdCluster) -> EtcdMember:
        try:
            return members.leader()
        except EtcdCallFailed as error:
            raise NotStruck(str(error)) from error

    def hurt(self, member: EtcdMember) -> None:
        member.signal(signal.SIGSTOP)

    def heal(self, member: EtcdMember) -> None:
        member.signal(signal.SIGCONT)


def _members(harm: Harm) -> EtcdCluster:
    members = harm.cluster.backend.members
    assert members is not None, "not_yet() asks"
    return members
