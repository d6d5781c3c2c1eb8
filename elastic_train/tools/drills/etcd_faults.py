"""Injection to the etcd members under a job, of which training should not notice anything."""

from __future__ import annotations

import signal
from typing import ClassVar

from elastic_train.tools.drills.cluster import Cluster, Place
from elastic_train.tools.drills.etcd_cluster import EtcdCallFailed, EtcdCluster
from elastic_train.tools.drills.injection import Disturbance, Injection, NotInjected


class EtcdSignalFault(Disturbance):
    """Does what a SignalRow says to a member of the drill's own etcd cluster, and puts it right again."""

    to: ClassVar[str]
    signum: ClassVar[signal.Signals]

    def not_yet(self, cluster: Cluster) -> str | None:
        if cluster.backend.members is None:
            return "the etcd cluster is not the drill's own"
        return super().not_yet(cluster)

    def choose(self, injection: Injection) -> list[Place]:
        members = _members(injection)
        try:
            self._member = members.leader() if self.to == "etcd leader" else injection.rng.choice(members.members)
        except EtcdCallFailed as error:
            raise NotInjected(str(error)) from error
        injection.detail = f"etcd member {self._member.name}"
        return []

    def inject(self, injection: Injection) -> str:
        if self.signum == signal.SIGKILL:
            self._member.kill()
        else:
            self._member.signal(self.signum)
        if _members(injection).is_healthy(self._member):
            raise NotInjected("it still answers")
        return "it does not answer"

    def undo(self, injection: Injection) -> None:
        if self._member.process is None:
            self._member.start()
        else:
            self._member.signal(signal.SIGCONT)

    def is_cleared(self, injection: Injection) -> bool:
        return _members(injection).is_healthy(self._member)


def _members(injection: Injection) -> EtcdCluster:
    members = injection.cluster.backend.members
    assert members is not None, "not_yet() asks"
    return members
