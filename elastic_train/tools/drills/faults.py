"""The faults that need only processes: nodes die, hang, leave or join, or all start again."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import psutil

from elastic_train.tools.audit.fault_checks import JOIN_LIMIT_SECONDS, RESTART_LIMIT_SECONDS
from elastic_train.tools.audit.record import Effect
from elastic_train.tools.drills.backends import C10d
from elastic_train.tools.drills.cluster import NodeState, Place
from elastic_train.tools.drills.injection import (
    ENDPOINT_HOST,
    RANK_ZERO,
    Absence,
    Disturbance,
    Fault,
    NotInjected,
    wait_gone,
)
from elastic_train.tools.drills.nodes import wait_until


class Kill(Fault):
    """A signal to nodes, or to one process of a node; each row of KILLS is a subclass."""

    victim: str | None = None
    """`worker` or `agent`; None: every process of its targets"""
    signum = signal.SIGKILL

    def inject(self) -> str:
        if self.victim is None:
            self.cluster.kill(self.targets)
            return "all of its processes are gone"
        process = self.agent() if self.victim == "agent" else self.rng.choice(self.workers())
        process.send_signal(self.signum)
        if self.signum != signal.SIGKILL:
            return f"{self.signum.name} sent"
        wait_gone(process)
        return f"{self.victim} {process.pid} is gone"


def _kill(name: str, says: str, **attributes: Any) -> type[Kill]:
    return type(name, (Kill,), {"name": name, "says": says, **attributes})


KILLS = (
    _kill("kill", "SIGKILL to every process of a node"),
    _kill("kill-rank-0", "the same to the node that has rank 0", holder=RANK_ZERO),
    _kill("kill-endpoint", "the same to the node that hosts the endpoint", holder=ENDPOINT_HOST, backend=C10d.name),
    _kill("kill-two", "two nodes at once", size=-2),
    _kill("kill-worker", "SIGKILL to one worker; its agent ends the node", victim="worker"),
    _kill("kill-agent", "SIGKILL to the agent alone; its workers die with it", victim="agent"),
    _kill(
        "stop", "SIGTERM to a node's agent, as a scheduler does it",
        victim="agent", signum=signal.SIGTERM, effects=frozenset({Effect.ASKS_TO_LEAVE}),
    ),
)  # fmt: skip


class KillAgain(Fault):
    name = "kill-again"
    says = "a node, and another within a fifth of a second, while the others re-form"
    size = -2

    def inject(self) -> str:
        first, second = self.targets
        pause = self.rng.uniform(0.0, 0.2)
        started = time.monotonic()
        self.cluster.kill([first])
        time.sleep(max(0.0, started + pause - time.monotonic()))
        seconds, is_late = time.monotonic() - started, self._has_stepped()
        self.cluster.kill([second])
        when = "after their next step" if is_late or self._has_stepped() else "while the others re-formed"
        return f"the second died {seconds * 1000:.0f} ms after the first, {when}"

    def _has_stepped(self) -> bool:
        """Return whether a step was committed without the first node and with the second."""
        self.cluster.watch.poll()
        world = self.cluster.watch.world
        return world is not None and self.has_stepped_anew() and not set(world.members).isdisjoint(self.members)


class Freeze(Fault):
    """SIGSTOP to a node's workers, and SIGCONT to undo it."""

    def inject(self) -> str:
        workers = self.workers()
        for worker in workers:
            worker.suspend()
        wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in workers), "stop of its workers", 5.0)
        self.place.effect = NodeState.FROZEN
        return f"{len(workers)} stopped"

    def undo(self) -> None:
        for worker in self.place.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
        self.place.effect = NodeState.OUT if self.changes_world else None


class Hang(Freeze, Absence):
    name = "hang"
    says = "SIGSTOP to a node's workers; SIGCONT once the others are through, and it comes back"


class Pause(Freeze, Disturbance):
    name = "pause"
    says = "SIGSTOP for half a second: shorter than --peer-timeout, so that no worker is expelled"
    undo_after = 0.5
    effects = frozenset({Effect.HOLDS_UP})


class Slow(Disturbance):
    name = "slow"
    says = "a node's workers run at nice 19, all on one processor, for three seconds"
    effects = frozenset({Effect.HOLDS_UP})

    def inject(self) -> str:
        workers = self.workers()
        for worker in workers:
            worker.nice(19)
            worker.cpu_affinity(psutil.Process().cpu_affinity()[:1])
        found = sorted({(worker.nice(), *worker.cpu_affinity()) for worker in workers})
        if len(found) != 1 or found[0][0] != 19 or len(found[0]) != 2:
            raise NotInjected(f"nice value and processors are {found}")
        return f"{len(workers)} at nice {found[0][0]}, on processor {found[0][1]}"

    def undo(self) -> None:
        for worker in self.place.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                with contextlib.suppress(psutil.AccessDenied):
                    worker.nice(psutil.Process().nice())  # the drill's own value, which it had inherited
                worker.cpu_affinity(psutil.Process().cpu_affinity())


class Join(Fault):
    name = "join"
    says = "a node starts, a new one or one that died"
    size = 1

    def limit_seconds(self) -> float:
        return JOIN_LIMIT_SECONDS

    def not_yet(self) -> str | None:
        if not self.cluster.is_settled:
            return "the world is not settled"
        return None if self.cluster.vacant else "every node runs"

    def choose(self) -> list[Place]:
        return [self.rng.choice(self.cluster.vacant)]

    def inject(self) -> str:
        self.cluster.start(self.place)
        return "started"

    def may_take(self) -> list[Place]:
        return []

    def is_over(self) -> bool:
        return self.has_stepped_anew() and self.cluster.is_in(self.place)


class KillAll(Fault):
    name = "kill-all"
    says = "every node; as many start again and continue from the newest snapshot"
    size = 0
    effects = frozenset({Effect.LOSES_STEPS})

    def limit_seconds(self) -> float:
        return RESTART_LIMIT_SECONDS

    def choose(self) -> list[Place]:
        return list(self.cluster.inside)

    def inject(self) -> str:
        self.detail = "all nodes"
        self.cluster.kill(self.cluster.running)
        return self.start_again()

    def start_again(self) -> str:
        cluster = self.cluster
        cluster.watch.forget_world()
        first = cluster.places[0]  # under c10d only the node at the first address can begin a job
        others = [place for place in self.targets if place is not first]
        for place in [first, *others][: len(self.targets)]:
            cluster.start(place)
        return f"{len(self.targets)} killed and started again"

    def is_over(self) -> bool:
        return self.has_stepped_anew()


class Damage(KillAll):
    name = "damage"
    says = "a bit of the newest snapshot is flipped and everything killed: the one before it is used"
    effects = frozenset({Effect.LOSES_STEPS, Effect.DAMAGES})

    def not_yet(self) -> str | None:
        return "there are not two snapshots yet" if len(self.newest_snapshots()) < 2 else super().not_yet()

    def inject(self) -> str:
        self.cluster.kill(self.cluster.running)
        newest = self.cluster.run_dir / "snapshots" / self.newest_snapshots()[0].name
        state = newest / "state.pt"
        data = bytearray(state.read_bytes())
        position = self.rng.randrange(len(data))
        data[position] ^= 1
        state.write_bytes(data)
        self.detail = newest.name
        return f"byte {position}; {self.start_again()}"
