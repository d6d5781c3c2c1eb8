"""Faults of the etcd members under a job, of which training should not notice anything."""

from __future__ import annotations

import signal

from elastic_train.tools.drills.backends import Etcd3
from elastic_train.tools.drills.cluster import Place
from elastic_train.tools.drills.etcd_cluster import EtcdCallFailed, EtcdCluster, EtcdMember
from elastic_train.tools.drills.injection import Disturbance, NotInjected


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
        except EtcdCallFailed as error:
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
