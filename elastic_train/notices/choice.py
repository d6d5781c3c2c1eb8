"""The source that --notices names."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from elastic_train.notices.clouds import AwsSource, AzureSource, GcpSource, find_cloud
from elastic_train.notices.kubernetes import KubernetesSource
from elastic_train.notices.notice import NoticeSource
from elastic_train.notices.own_sources import EndpointSource, FileSource, SlurmSource
from elastic_train.preemption import NoticesFlag


def source_of(
    flag: NoticesFlag, tell: Callable[[str], None], tell_also: Callable[[int, Callable[[], None]], None]
) -> Callable[[], NoticeSource | None]:
    """What comes to the source, which may take a moment. Call this on the main thread: SLURM's takes a signal.

    Args:
        tell_also: `StopSignal.tell_also`.
    """
    match flag.kind:
        case "auto":
            return lambda: _found(tell)
        case "aws":
            return AwsSource
        case "gcp":
            return GcpSource
        case "azure":
            return AzureSource
        case "kubernetes":
            return lambda: KubernetesSource(tell)
        case "slurm":
            slurm = SlurmSource(os.environ)
            tell_also(signal.SIGUSR1, slurm.hear)
            return lambda: slurm
        case "file":
            return lambda: FileSource(Path(flag.target))
    return lambda: EndpointSource(flag.target)


def _found(tell: Callable[[str], None]) -> NoticeSource | None:
    source = find_cloud()
    if source is None:
        tell("--notices auto: no metadata server of AWS, GCP or Azure answers here; nothing is watched")
    else:
        tell(f"--notices auto: this node is in {source.name}, which is asked for notices")
    return source
