"""Every fault by name. The order is that of --list, and it decides which faults a seed draws."""

from __future__ import annotations

from elastic_train.tools.drills import environment_faults, faults
from elastic_train.tools.drills.injection import Fault

_ALL: tuple[type[Fault], ...] = (
    *faults.KILLS, faults.KillAgain, faults.Hang, faults.Pause, faults.Slow, faults.Join, faults.KillAll, faults.Damage,
    environment_faults.Partition, environment_faults.OneWayDrop, environment_faults.PowerLoss,
    environment_faults.PacketLoss, environment_faults.SlowLink,
    environment_faults.KillEtcd, environment_faults.FreezeEtcdLeader, environment_faults.DiskFull,
)  # fmt: skip
FAULTS = {kind.name: kind for kind in _ALL}
"""name -> class"""
