"""What a member needs of the machine, and of the configuration, to wait for others."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic_train.world import World


class Limits(Protocol):
    """What the configuration says of waiting."""

    @property
    def peer_timeout(self) -> float: ...
    @property
    def wait_timeout(self) -> float: ...


@dataclass(frozen=True)
class Surroundings:
    """Everything that a member needs of the machine; the simulator has its own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw_uid: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    start: Callable[[str, Callable[[], None]], None] = lambda name, task: threading.Thread(
        target=task, name=name, daemon=True
    ).start()
    finish: Callable[[float], None] = lambda _seconds: None
    """waits so long at most for all that was started to end"""
    poll_seconds: float = 0.001
    """between two looks at a store"""
    reach: Callable[[str, World], None] = lambda _point, _world: None
    """told at the points of an agreement and a join at which a drill may inject a fault, on any thread"""
