"""The fault seam: injects a fault into this worker at a named point, when ELASTIC_TRAIN_FAULT asks for it.

Drills and tests use it to hit a moment that a signal from outside could not be timed for. The variable holds faults
separated by `;`, each as `ACTION@POINT` with conditions after a colon:

    ELASTIC_TRAIN_FAULT="kill-node@step:rank=1,step=40"
    ELASTIC_TRAIN_FAULT="freeze@init:generation=1;error@step:step=7"

Actions: `kill` (SIGKILL to this worker), `kill-node` (to its agent too), `freeze` (SIGSTOP), `stop` (SIGTERM to the
agent), `error` (a RuntimeError, as from the trained code), `memory` (a MemoryError), `hang` (the training thread never
returns). Points, in the order of a worker's life: `meet` (before it asks to be in a world), `init` (in the decided
world, before the process group is made), `sync` (the group stands, before the state is compared), `send` (this worker
has the freshest state, and another waits for its bytes), `step` (before a step's reduction), `commit` (right after a
commit), `finish` (training is complete, before result.json), `exit` (the process is about to end). Points of an
agreement and of a join: `proposed` (on the proposer, before its proposal is decided), `planned` (on rank 0, before it
invites the newcomers of a planned world), `formed` (the group of that world stands beside the present one, and no
member was told). The last two, and the first in a join, are reached on other threads than the training thread.
Conditions: `rank` and `generation` (at `planned` and `formed` those of the planned world), `step` (committed steps),
`local_rank`, `host`. A fault is injected once per process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from elastic_train.errors import UsageError
from elastic_train.world import Point

VARIABLE = "ELASTIC_TRAIN_FAULT"
ACTIONS = ("kill", "kill-node", "freeze", "stop", "error", "memory", "hang")
POINTS = get_args(Point)
CONDITIONS = ("rank", "generation", "step", "local_rank", "host")


@dataclass(frozen=True)
class InjectedFault:
    action: str
    point: str
    conditions: Mapping[str, str]


def parse(text: str) -> list[InjectedFault]:
    """Return the faults that `text` describes. Raises: UsageError, which quotes what is wrong."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        head, _, tail = part.partition(":")
        action, _, point = head.partition("@")
        conditions = dict(pair.partition("=")[::2] for pair in tail.split(",") if pair)
        if action not in ACTIONS or point not in POINTS or not conditions.keys() <= set(CONDITIONS):
            raise UsageError(
                f"{VARIABLE} {part!r}: write ACTION@POINT:CONDITION=VALUE,... with one of {', '.join(ACTIONS)} at one "
                f"of {', '.join(POINTS)}; conditions are {', '.join(CONDITIONS)}"
            )
        faults.append(InjectedFault(action, point, conditions))
    return faults


class FaultSeam:
    """The faults that this process has yet to inject."""

    def __init__(self, text: str, agent_pid: int | None) -> None:
        self._pending = parse(text)
        self._agent_pid = agent_pid

    def reach(self, point: Point, **here: int | str) -> None:
        """Inject a fault that matches `point` and the values `here`, by which its conditions are checked."""
        if not self._pending:
            return
        for fault in self._pending:
            if fault.point == point and all(str(here.get(name)) == value for name, value in fault.conditions.items()):
                self._pending.remove(fault)
                self._inject(fault)
                return

    def _inject(self, fault: InjectedFault) -> None:
        print(f"elastic_train: fault: {fault.action} at {fault.point} (pid {os.getpid()})", file=sys.stderr, flush=True)
        if fault.action == "error":
            raise RuntimeError(f"fault {fault.action}@{fault.point}")
        if fault.action == "memory":
            raise MemoryError(f"fault {fault.action}@{fault.point}")
        if fault.action == "hang":
            threading.Event().wait()
        if fault.action in ("kill-node", "stop") and self._agent_pid is not None:
            os.kill(self._agent_pid, signal.SIGKILL if fault.action == "kill-node" else signal.SIGTERM)
        if fault.action in ("kill", "kill-node"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
