"""The harm that needs nothing but processes: nodes die, hang, leave, join, and all start again."""

from __future__ import annotations

import contextlib
import signal
import time

import psutil

from elastic_train.tools.audit.harm_checks import JOIN_LIMIT_SECONDS, RESTART_LIMIT_SECONDS
from elastic_train.tools.drills.backends import C10d
from elastic_train.tools.drills.cluster import Cluster, NodeState, Place
from elastic_train.tools.drills.harm import (
    Absence,
    Disturbance,
    Fault,
    Harm,
    NotStruck,
    choose_worker,
    has_stepped_anew,
    snapshots_of,
    wait_gone,
    with_rank_zero,
    workers_of,
)


class Kill(Fault):
    name = "kill"
    says = "SIGKILL to every process of a node"

    def strike(self, harm: Harm) -> str:
        harm.cluster.kill(harm.targets)
        return "all of its processes are gone"


class KillRankZero(Kill):
    name = "kill-rank-0"
    says = "the same to the node that has rank 0"
    wants = "has rank 0"

    def victims(self, cluster: Cluster) -> list[Place]:
        return with_rank_zero(cluster)

    def choose(self, harm: Harm) -> list[Place]:
        return self.victims(harm.cluster)

    def not_yet(self, cluster: Cluster) -> str | None:
        if (missing := super().not_yet(cluster)) is not None:
            return missing
        return None if self.victims(cluster) else f"nobody healthy {self.wants}"


class KillEndpoint(KillRankZero):
    name = "kill-endpoint"
    says = "the same to the node that hosts the endpoint"
    wants = "hosts the endpoint"
    backend = C10d.name

    def victims(self, cluster: Cluster) -> list[Place]:
        return cluster.hosting


class KillTwo(Kill):
    name = "kill-two"
    says = "two nodes at once"
    size = -2


class KillAgain(Kill):
    name = "kill-again"
    says = "a node, and another within a fifth of a second, while the others re-form"
    size = -2

    def strike(self, harm: Harm) -> str:
        first, second = harm.targets
        pause = harm.rng.uniform(0.0, 0.2)
        started = time.monotonic()
        harm.cluster.kill([first])
        time.sleep(max(0.0, started + pause - time.monotonic()))
        seconds, is_late = time.monotonic() - started, self._has_stepped(harm)
        harm.cluster.kill([second])
        hit = "after their next step" if is_late or self._has_stepped(harm) else "while the others re-formed"
        return f"the second died {seconds * 1000:.0f} ms after the first, {hit}"

    def _has_stepped(self, harm: Harm) -> bool:
        """Whether a step was committed without the first, and with the second."""
        harm.cluster.watch.poll()
        world = harm.cluster.watch.world
        return world is not None and has_stepped_anew(harm) and not set(world.members).isdisjoint(harm.members)


class KillWorker(Fault):
    name = "kill-worker"
    says = "SIGKILL to one worker; its agent ends the node"

    def strike(self, harm: Harm) -> str:
        worker = choose_worker(harm)
        worker.kill()
        wait_gone(worker)
        return f"worker {worker.pid} is gone"


class KillAgent(Fault):
    name = "kill-agent"
    says = "SIGKILL to the agent alone; its workers die with it"

    def strike(self, harm: Harm) -> str:
        place = harm.targets[0]
        agent = place.node.agent() if place.node else None
        if agent is None:
            raise NotStruck("its agent had ended")
        agent.kill()
        wait_gone(agent)
        return f"agent {agent.pid} is gone"


class Stop(Fault):
    name = "stop"
    says = "SIGTERM to a node's agent, as a scheduler does it"

    def strike(self, harm: Harm) -> str:
        assert harm.targets[0].node is not None
        harm.targets[0].node.signal(signal.SIGTERM)
        return "SIGTERM sent"


class Hang(Absence):
    name = "hang"
    says = "SIGSTOP to a node's workers; SIGCONT once the others are through, and it comes back"

    def strike(self, harm: Harm) -> str:
        workers = workers_of(harm.targets[0])
        _freeze(workers)
        harm.targets[0].affliction = NodeState.FROZEN
        return f"{len(workers)} stopped"

    def undo(self, harm: Harm) -> None:
        harm.targets[0].affliction = NodeState.OUT
        _thaw(workers_of(harm.targets[0]))


class Pause(Disturbance):
    name = "pause"
    says = "SIGSTOP for half a second: shorter than --peer-timeout, so that nobody is expelled"
    undo_after = 0.5

    def strike(self, harm: Harm) -> str:
        workers = workers_of(harm.targets[0])
        _freeze(workers)
        harm.targets[0].affliction = NodeState.FROZEN
        return f"{len(workers)} stopped"

    def undo(self, harm: Harm) -> None:
        _thaw(workers_of(harm.targets[0]))
        harm.targets[0].affliction = None


class Slow(Disturbance):
    name = "slow"
    says = "a node's workers run at nice 19, all on one processor, for three seconds"

    def strike(self, harm: Harm) -> str:
        workers = workers_of(harm.targets[0])
        for worker in workers:
            worker.nice(19)
            worker.cpu_affinity(psutil.Process().cpu_affinity()[:1])
        found = sorted({(worker.nice(), *worker.cpu_affinity()) for worker in workers})
        if len(found) != 1 or found[0][0] != 19 or len(found[0]) != 2:
            raise NotStruck(f"nice value and processors are {found}")
        return f"{len(workers)} at nice {found[0][0]}, on processor {found[0][1]}"

    def undo(self, harm: Harm) -> None:
        for worker in workers_of(harm.targets[0]):
            with contextlib.suppress(psutil.NoSuchProcess):
                with contextlib.suppress(psutil.AccessDenied):
                    worker.nice(psutil.Process().nice())  # as the drill itself, from which it had it
                worker.cpu_affinity(psutil.Process().cpu_affinity())


class Join(Fault):
    name = "join"
    says = "a node starts, a new one or one that died"
    size = 1

    def limit_seconds(self, harm: Harm) -> float:
        return JOIN_LIMIT_SECONDS

    def not_yet(self, cluster: Cluster) -> str | None:
        if not cluster.is_settled:
            return "the world is not settled"
        return None if cluster.vacant else "every node runs"

    def choose(self, harm: Harm) -> list[Place]:
        return [harm.rng.choice(harm.cluster.vacant)]

    def strike(self, harm: Harm) -> str:
        harm.cluster.start(harm.targets[0])
        return "started"

    def may_take(self, harm: Harm) -> list[Place]:
        return []

    def is_over(self, harm: Harm) -> bool:
        return has_stepped_anew(harm) and harm.cluster.is_in(harm.targets[0])


class KillAll(Fault):
    name = "kill-all"
    says = "every node; as many start again and continue from the newest snapshot"
    size = 0
    undo_after = None

    def limit_seconds(self, harm: Harm) -> float:
        return RESTART_LIMIT_SECONDS

    def choose(self, harm: Harm) -> list[Place]:
        return list(harm.cluster.inside)

    def strike(self, harm: Harm) -> str:
        cluster = harm.cluster
        harm.detail = "all nodes"
        cluster.kill(cluster.running)
        return self.start_again(harm)

    def start_again(self, harm: Harm) -> str:
        cluster = harm.cluster
        cluster.watch.forget_world()
        first = cluster.places[0]  # under c10d only the node at the first address begins a job
        others = [place for place in harm.targets if place is not first]
        for place in [first, *others][: len(harm.targets)]:
            cluster.start(place)
        return f"{len(harm.targets)} killed and started again"

    def is_over(self, harm: Harm) -> bool:
        return has_stepped_anew(harm)


class Damage(KillAll):
    name = "damage"
    says = "a bit of the newest snapshot is flipped and everything killed: the one before it is used"

    def not_yet(self, cluster: Cluster) -> str | None:
        if len(snapshots_of(cluster)) < 2:
            return "there are not two snapshots yet"
        return super().not_yet(cluster)

    def strike(self, harm: Harm) -> str:
        cluster = harm.cluster
        cluster.kill(cluster.running)
        newest = snapshots_of(cluster)[0].path
        state = newest / "state.pt"
        data = bytearray(state.read_bytes())
        position = harm.rng.randrange(len(data))
        data[position] ^= 1
        state.write_bytes(data)
        harm.detail = newest.name
        return f"byte {position}; {self.start_again(harm)}"


def _freeze(workers: list[psutil.Process]) -> None:
    if not workers:
        raise NotStruck("it had no worker any more")
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5.0
    while any(worker.status() != psutil.STATUS_STOPPED for worker in workers):
        if time.monotonic() > deadline:
            raise NotStruck("it did not stop")
        time.sleep(0.005)


def _thaw(workers: list[psutil.Process]) -> None:
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)
