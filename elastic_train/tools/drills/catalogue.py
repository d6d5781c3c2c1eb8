"""Every fault that there is, by name, in the order of --list, by which a seed draws them."""

from __future__ import annotations

from elastic_train.tools.drills import etcd_faults, faults, network_faults, resource_faults
from elastic_train.tools.drills.injection import Fault

_ALL: tuple[type[Fault], ...] = (
    *faults.KILLS, faults.KillAgain, faults.Hang, faults.Pause, faults.Slow, faults.Join, faults.KillAll, faults.Damage,
    network_faults.Partition, network_faults.OneWayDrop, network_faults.PowerLoss, network_faults.PacketLoss,
    network_faults.SlowLink,
    etcd_faults.KillEtcd, etcd_faults.FreezeEtcdLeader,
    resource_faults.DiskFull,
)  # fmt: skip
FAULTS = {kind.name: kind for kind in _ALL}
"""name -> class"""
