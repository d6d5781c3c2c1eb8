"""The faults that need nothing but processes: nodes die, hang, leave, join, and all start again."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import psutil

from elastic_train.tools.audit.fault_checks import JOIN_LIMIT_SECONDS, RESTART_LIMIT_SECONDS
from elastic_train.tools.audit.record import Effect
from elastic_train.tools.drills.cluster import Cluster, NodeState, Place
from elastic_train.tools.drills.injection import (
    Absence,
    Disturbance,
    Fault,
    Injection,
    NotInjected,
    agent_of,
    choose_worker,
    has_stepped_anew,
    snapshots_of,
    some_workers,
    wait_gone,
    with_rank_zero,
    workers_of,
)

HOLDERS: dict[str, Callable[[Cluster], list[Place]]] = {
    "has rank 0": with_rank_zero,
    "hosts the endpoint": lambda cluster: cluster.hosting,
}
"""what one node alone does -> that node, if it is healthy"""


class SignalFault(Fault):
    """Does what a SignalRow says to nodes, or to one process of a node."""

    to: ClassVar[str]
    signum: ClassVar[signal.Signals]
    holder: ClassVar[str | None]

    def not_yet(self, cluster: Cluster) -> str | None:
        missing = super().not_yet(cluster)
        if missing is None and self.holder is not None and not HOLDERS[self.holder](cluster):
            return f"nobody healthy {self.holder}"
        return missing

    def choose(self, injection: Injection) -> list[Place]:
        return super().choose(injection) if self.holder is None else HOLDERS[self.holder](injection.cluster)

    def inject(self, injection: Injection) -> str:
        if self.to == "node":
            injection.cluster.kill(injection.targets)
            return "all of its processes are gone"
        process = choose_worker(injection) if self.to == "worker" else agent_of(injection)
        process.send_signal(self.signum)
        if self.signum != signal.SIGKILL:
            return f"{self.signum.name} sent"
        wait_gone(process)
        return f"{self.to} {process.pid} is gone"


@dataclass(frozen=True)
class SignalRow:
    """A fault of the catalogue that is one signal."""

    name: str
    says: str
    to: str = "node"
    """`node`: to every process of the targets at once; `agent`; `worker`, `etcd member`: to one; `etcd leader`"""
    signum: signal.Signals = signal.SIGKILL
    size: int = -1
    holder: str | None = None
    """a key of HOLDERS: it is for that node and no other"""
    backend: str | None = None
    acts: type[Fault] = SignalFault
    """what does it; reads the other fields as class attributes"""

    def __post_init__(self) -> None:
        if self.acts is not SignalFault:
            return
        if self.to not in ("node", "agent", "worker") or (self.to == "node" and self.signum != signal.SIGKILL):
            raise ValueError(f"fault {self.name}: {self.signum.name} cannot be sent to {self.to!r}")
        if self.signum == signal.SIGSTOP:
            raise ValueError(f"fault {self.name}: a signal that has to be undone takes a class of its own")
        if self.holder not in (None, *HOLDERS):
            raise ValueError(f"fault {self.name}: nobody {self.holder!r}; write one of {', '.join(HOLDERS)}")

    def fault(self) -> type[Fault]:
        effects = frozenset({Effect.ASKS_TO_LEAVE} if self.signum == signal.SIGTERM else ())
        return cast("type[Fault]", type(self.name, (self.acts,), {**vars(self), "effects": effects}))


class KillAgain(Fault):
    name = "kill-again"
    says = "a node, and another within a fifth of a second, while the others re-form"
    size = -2

    def inject(self, injection: Injection) -> str:
        first, second = injection.targets
        pause = injection.rng.uniform(0.0, 0.2)
        started = time.monotonic()
        injection.cluster.kill([first])
        time.sleep(max(0.0, started + pause - time.monotonic()))
        seconds, is_late = time.monotonic() - started, self._has_stepped(injection)
        injection.cluster.kill([second])
        when = "after their next step" if is_late or self._has_stepped(injection) else "while the others re-formed"
        return f"the second died {seconds * 1000:.0f} ms after the first, {when}"

    def _has_stepped(self, injection: Injection) -> bool:
        """Whether a step was committed without the first, and with the second."""
        injection.cluster.watch.poll()
        world = injection.cluster.watch.world
        return (
            world is not None and has_stepped_anew(injection) and not set(world.members).isdisjoint(injection.members)
        )


class Freeze(Fault):
    """SIGSTOP to a node's workers, and SIGCONT."""

    def inject(self, injection: Injection) -> str:
        workers = some_workers(injection.place)
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5.0
        while any(worker.status() != psutil.STATUS_STOPPED for worker in workers):
            if time.monotonic() > deadline:
                raise NotInjected("it did not stop")
            time.sleep(0.005)
        injection.place.effect = NodeState.FROZEN
        return f"{len(workers)} stopped"

    def undo(self, injection: Injection) -> None:
        for worker in workers_of(injection.place):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGCONT)
        injection.place.effect = NodeState.OUT if self.changes_world else None


class Hang(Freeze, Absence):
    name = "hang"
    says = "SIGSTOP to a node's workers; SIGCONT once the others are through, and it comes back"


class Pause(Freeze, Disturbance):
    name = "pause"
    says = "SIGSTOP for half a second: shorter than --peer-timeout, so that nobody is expelled"
    undo_after = 0.5
    effects = frozenset({Effect.HOLDS_UP})


class Slow(Disturbance):
    name = "slow"
    says = "a node's workers run at nice 19, all on one processor, for three seconds"
    effects = frozenset({Effect.HOLDS_UP})

    def inject(self, injection: Injection) -> str:
        workers = workers_of(injection.place)
        for worker in workers:
            worker.nice(19)
            worker.cpu_affinity(psutil.Process().cpu_affinity()[:1])
        found = sorted({(worker.nice(), *worker.cpu_affinity()) for worker in workers})
        if len(found) != 1 or found[0][0] != 19 or len(found[0]) != 2:
            raise NotInjected(f"nice value and processors are {found}")
        return f"{len(workers)} at nice {found[0][0]}, on processor {found[0][1]}"

    def undo(self, injection: Injection) -> None:
        for worker in workers_of(injection.place):
            with contextlib.suppress(psutil.NoSuchProcess):
                with contextlib.suppress(psutil.AccessDenied):
                    worker.nice(psutil.Process().nice())  # as the drill itself, from which it had it
                worker.cpu_affinity(psutil.Process().cpu_affinity())


class Join(Fault):
    name = "join"
    says = "a node starts, a new one or one that died"
    size = 1

    def limit_seconds(self, injection: Injection) -> float:
        return JOIN_LIMIT_SECONDS

    def not_yet(self, cluster: Cluster) -> str | None:
        if not cluster.is_settled:
            return "the world is not settled"
        return None if cluster.vacant else "every node runs"

    def choose(self, injection: Injection) -> list[Place]:
        return [injection.rng.choice(injection.cluster.vacant)]

    def inject(self, injection: Injection) -> str:
        injection.cluster.start(injection.place)
        return "started"

    def may_take(self, injection: Injection) -> list[Place]:
        return []

    def is_over(self, injection: Injection) -> bool:
        return has_stepped_anew(injection) and injection.cluster.is_in(injection.place)


class KillAll(Fault):
    name = "kill-all"
    says = "every node; as many start again and continue from the newest snapshot"
    size = 0
    undo_after = None
    effects = frozenset({Effect.LOSES_STEPS})

    def limit_seconds(self, injection: Injection) -> float:
        return RESTART_LIMIT_SECONDS

    def choose(self, injection: Injection) -> list[Place]:
        return list(injection.cluster.inside)

    def inject(self, injection: Injection) -> str:
        cluster = injection.cluster
        injection.detail = "all nodes"
        cluster.kill(cluster.running)
        return self.start_again(injection)

    def start_again(self, injection: Injection) -> str:
        cluster = injection.cluster
        cluster.watch.forget_world()
        first = cluster.places[0]  # under c10d only the node at the first address begins a job
        others = [place for place in injection.targets if place is not first]
        for place in [first, *others][: len(injection.targets)]:
            cluster.start(place)
        return f"{len(injection.targets)} killed and started again"

    def is_over(self, injection: Injection) -> bool:
        return has_stepped_anew(injection)


class Damage(KillAll):
    name = "damage"
    says = "a bit of the newest snapshot is flipped and everything killed: the one before it is used"
    effects = frozenset({Effect.LOSES_STEPS, Effect.DAMAGES})

    def not_yet(self, cluster: Cluster) -> str | None:
        if len(snapshots_of(cluster)) < 2:
            return "there are not two snapshots yet"
        return super().not_yet(cluster)

    def inject(self, injection: Injection) -> str:
        cluster = injection.cluster
        cluster.kill(cluster.running)
        newest = cluster.run_dir / "snapshots" / snapshots_of(cluster)[0].name
        state = newest / "state.pt"
        data = bytearray(state.read_bytes())
        position = injection.rng.randrange(len(data))
        data[position] ^= 1
        state.write_bytes(data)
        injection.detail = newest.name
        return f"byte {position}; {self.start_again(injection)}"
