"""Checks that no test changes the environment, and a process group for tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A member sets variables of its own process, as GLOO_SOCKET_IFNAME: nodes that a later test starts must not
    inherit them."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group that every rank of a larger one goes through alike."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
