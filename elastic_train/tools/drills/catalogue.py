"""Every fault that there is, by name."""

from __future__ import annotations

import signal

from elastic_train.tools.drills import clock_faults, faults, network_faults, resource_faults
from elastic_train.tools.drills.backends import C10d, Etcd3
from elastic_train.tools.drills.etcd_faults import EtcdSignalFault
from elastic_train.tools.drills.faults import SignalRow
from elastic_train.tools.drills.injection import Fault

_TABLE: tuple[SignalRow | type[Fault], ...] = (
    SignalRow("kill", "SIGKILL to every process of a node"),
    SignalRow("kill-rank-0", "the same to the node that has rank 0", holder="has rank 0"),
    SignalRow("kill-two", "two nodes at once", size=-2),
    faults.KillAgain,
    SignalRow("kill-worker", "SIGKILL to one worker; its agent ends the node", to="worker"),
    SignalRow("kill-agent", "SIGKILL to the agent alone; its workers die with it", to="agent"),
    SignalRow("stop", "SIGTERM to a node's agent, as a scheduler does it", to="agent", signum=signal.SIGTERM),
    faults.Hang, faults.Pause, faults.Slow, faults.Join, faults.KillAll, faults.Damage,
    SignalRow(
        "kill-endpoint", "the same to the node that hosts the endpoint", holder="hosts the endpoint", backend=C10d.name
    ),
    network_faults.Partition, network_faults.OneWayDrop, network_faults.PowerLoss, network_faults.PacketLoss,
    network_faults.SlowLink,
    SignalRow(
        "kill-etcd", "SIGKILL to a member of the drill's own etcd cluster; started again after three seconds",
        to="etcd member", size=0, backend=Etcd3.name, acts=EtcdSignalFault,
    ),
    SignalRow(
        "freeze-etcd-leader", "SIGSTOP to the leader of the drill's own etcd cluster for three seconds",
        to="etcd leader", signum=signal.SIGSTOP, size=0, backend=Etcd3.name, acts=EtcdSignalFault,
    ),
    resource_faults.OutOfMemory, resource_faults.DiskFull, clock_faults.SetClock,
)  # fmt: skip
FAULTS: dict[str, type[Fault]] = {row.name: row.fault() if isinstance(row, SignalRow) else row for row in _TABLE}
"""name -> class"""
assert len(FAULTS) == len(_TABLE), "a name is there twice"
