"""The real PeerJob: each member serves a store, and they decide together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elastic_train.protocol.agreement import Decision, Liveness
from elastic_train.protocol.arbiter import Arbiter
from elastic_train.protocol.finder import Finder
from elastic_train.protocol.laws import Voters, may_go_on, missing_votes
from elastic_train.protocol.peers import PeerJob
from elastic_train.world import to_json
from tests.simulation.finder import SimFinder
from tests.simulation.process import SimStore

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation
    from tests.simulation.worker import Worker


class PeersForm:
    """A job that its members keep; as simulator.Form."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def job(self, worker: Worker) -> PeerJob:
        process, simulation = worker.process, self._simulation
        reach: Callable[[Any], SimStore] = lambda address: SimStore.connect(process, address)  # noqa: E731
        return PeerJob(
            SimStore(process, process),
            process.address,
            reach,
            worker.finder,
            simulation.plan.size(),
            uid=worker.uid,
            run_id="run",
            peer_timeout=simulation.plan.peer_timeout,
            max_world_size=simulation.plan.max_world_size,
            refused=worker.refused,
            draw_uid=simulation.machines.draw_uid,
            clock=process.clock,
            arbiter=self.arbiter(worker),
            goes_on=simulation.plan.goes_on,
            probe_all=worker.probe_stores,
            knows=worker.known,
        )

    def finder(self, worker: Worker) -> Finder:
        return SimFinder(worker.process, self._simulation.posts, worker.known)

    def arbiter(self, worker: Worker) -> Callable[[], Arbiter] | None:
        arbiter = self._simulation.arbiter_of(worker.process)
        return None if arbiter is None else lambda: arbiter

    def begin(self, founders: Sequence[Worker], decision: Decision) -> None:
        worlds = [Voters.of(decision.uid, decision.new, self._simulation.plan.max_world_size)]
        told = to_json({"decision": decision.to_fields(), "old": [], "worlds": worlds})
        for worker in founders:
            worker.process.memory.put("admitted", told)

    def decisions(self) -> Iterator[tuple[str, str]]:
        for worker in self._simulation.workers:
            for key, text in worker.process.memory.values.items():
                if key.startswith("world-") and key.endswith("/next"):
                    found = json.loads(text)
                    uid = json.loads(found["decision"])["uid"] if "decision" in found else found["uid"]
                    yield key.removesuffix("/next").split("-", 2)[2], str(uid)

    def may_go_on(self, worker: Worker, side: Sequence[Worker]) -> bool:
        return self.suffices(worker, self._worlds(worker, side), {one.uid for one in side})

    def missing_votes(self, worker: Worker, side: Sequence[Worker]) -> set[str]:
        known, waiting = worker.job.worlds, [one.member for one in worker.job.entrance.queue()]
        gone = known._heard_released[1] | known.given_up(waiting)
        worlds = [voters.without(gone) for voters in self._worlds(worker, side)]
        return set(missing_votes(worlds, {one.uid for one in side}))

    def _worlds(self, worker: Worker, side: Sequence[Worker]) -> list[Voters]:
        """Those that count for it, without the votes of whom the side has proven dead."""
        world = worker.world
        assert world is not None, "it has been in one"
        dead = set()
        for one in side:
            if one.world is not None and one.world.uid == world.uid:
                others = (rank for rank in one.watcher.contacts.watched if rank != one.world.rank)
                dead |= {
                    world.members[rank].uid
                    for rank in others
                    if one.watcher.contacts.status(world.members[rank], one.watcher.verdicts.get(rank), False)
                    is Liveness.DEAD
                }
        return [voters.without(dead) for voters in worker.job.worlds.voters]

    def suffices(self, worker: Worker, worlds: Sequence[Voters], side: set[str]) -> bool:
        """Whether it may, where these are not proven dead in its worlds."""
        del worker
        return may_go_on(worlds, side)

    def finds(self, newcomer: Worker, trainers: Sequence[Worker]) -> bool:
        host, posts = newcomer.process.host, self._simulation.posts
        addresses = {one.process.address for one in trainers}
        return self.has_signpost() or not addresses.isdisjoint({*newcomer.known, *posts.directories.get(host, ())})

    def has_signpost(self) -> bool:
        return any(keeper.is_alive for keeper in self._simulation.posts.keepers.values())

    def lose_all(self) -> None:
        raise AssertionError("there is no store that all share")

    def lose_replies(self, number: int) -> None:
        raise AssertionError("there is no store that all share")
