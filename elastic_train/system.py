"""The operating system that training needs."""

from __future__ import annotations

import sys

from elastic_train.errors import UnsupportedSystem

NAMES = {"darwin": "macOS", "win32": "Windows"}


def require_linux() -> None:
    """Training stands on Linux: /proc, /dev/shm, flock, and signals that follow a parent's death.

    Raises:
        UnsupportedSystem: this is another system.
    """
    if sys.platform != "linux":
        name = NAMES.get(sys.platform, sys.platform)
        raise UnsupportedSystem(f"training needs Linux, and this is {name}: use a container (deploy/docker) or WSL2")
