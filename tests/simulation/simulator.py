"""Histories of a job by its real code, and what must hold of every one of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic_train.protocol.agreement import Decision
from elastic_train.protocol.arbiter import Arbiter, Claims
from elastic_train.protocol.finder import Finder
from elastic_train.protocol.peers import PeerJob
from elastic_train.rules import seconds_before_return
from elastic_train.world import World
from tests.simulation.directory import Directory, SimFolder
from tests.simulation.etcd import EtcdForm
from tests.simulation.faults import Faults
from tests.simulation.finder import Signposts
from tests.simulation.peers import PeersForm
from tests.simulation.plan import Fault, Plan
from tests.simulation.process import Machines, Process
from tests.simulation.ring_parts import Commit
from tests.simulation.work import Work
from tests.simulation.worker import Worker

HEAL_SECONDS = 7.0
"""after a full heal: then all are together; one that was frozen may have to learn of two worlds, one after the other"""


@dataclass
class Told:
    """A world that members have entered."""

    uid: str
    generation: int
    members: tuple[str, ...]
    entered_at: float
    """by the first of them"""
    last_entered_at: float
    parent: str | None = None
    branch: str = ""
    """its id, where the members have gone on beyond the laws"""
    commits: list[Commit] = field(default_factory=list)


class Form(Protocol):
    """What keeps the job of a history, and what may be expected of it."""

    def finder(self, worker: Worker) -> Finder:
        """A new worker's."""

    def job(self, worker: Worker) -> PeerJob:
        """A new worker's."""

    def begin(self, founders: Sequence[Worker], decision: Decision) -> None:
        """The first world is there, and everybody in it is told."""

    def decisions(self) -> Iterator[tuple[str, str]]:
        """(uid of a world, uid of the one that follows it), of all that were decided."""

    def may_go_on(self, worker: Worker, side: Sequence[Worker]) -> bool:
        """Whether it may, by what it knows, with all of `side`."""

    def missing_votes(self, worker: Worker, side: Sequence[Worker]) -> set[str]:
        """Uids of the members without whose votes it may not, as `may_go_on`."""

    def finds(self, newcomer: Worker, trainers: Sequence[Worker]) -> bool:
        """Whether one in the queue has a way to those who train."""

    def has_signpost(self) -> bool:
        """Whether every newcomer has."""

    def lose_all(self) -> None:
        """Etcd comes back empty."""

    def lose_replies(self, number: int) -> None:
        """So many of the next replies of etcd are lost."""


class Simulation:
    """One history."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.machines = Machines(plan.seed)
        self.kernel, self.network = self.machines.kernel, self.machines.network
        hosts = [f"h{index}" for index in range(len(plan.hosts))]
        self.posts = Signposts(self.machines, hosts[: plan.num_endpoints])
        self.directory = Directory()
        self.form: Form = PeersForm(self) if plan.lease is None else EtcdForm(self, plan.lease)
        self.workers: list[Worker] = []
        self.worlds: dict[str, Told] = {}
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.starts: dict[str, str] = {}
        """uids of worlds that began without a state, and who had one then"""
        self.is_second_excused = False
        """whether a job was begun beside a running one of which who began it could know nothing"""
        self.last_fault_at = 0.0
        self.on_note: list[Callable[[str], None]] = []
        """called with each"""
        self.num_prepared = 0
        """how often a worker has entered a world that was formed ahead"""
        self._port = 0
        for host, number in zip(hosts, plan.hosts, strict=True):
            for local_rank in range(number):
                self.start(host, local_rank)
        if plan.is_formed:
            self._form()

    def start(self, host: str, local_rank: int = 0, port: int | None = None, was: Worker | None = None) -> Worker:
        self._port += 1
        worker = Worker(self, host, local_rank, port or self._port, was)
        self.workers.append(worker)
        return worker

    def _form(self) -> None:
        hosts = [f"h{index}" for index in range(len(self.plan.hosts))][: self.plan.founders]
        founders = [worker for worker in self.workers if worker.process.host in hosts]
        members = tuple(worker.member for worker in founders)
        is_named = self.plan.has_place or self.plan.work != Work() or self.plan.min_nodes is not None
        facts = {"job_token": "job"} if is_named else {}
        self.form.begin(founders, Decision(0, self.machines.draw_uid(), (), members, facts=facts))

    def arbiter_of(self, process: Process) -> Arbiter | None:
        directories = self.plan.directories
        if not directories:
            return None
        index = int(process.host[1:])
        number = directories[index] if index < len(directories) else directories[0]
        return Claims(SimFolder(process, self.directory, number), self.machines.draw_uid)

    def come_back(self, worker: Worker) -> None:
        """It was left out: its process goes on as a newcomer, where its host has power."""
        host = worker.process.host
        seconds = seconds_before_return(worker.num_fruitless_after, self.plan.peer_timeout)

        def start() -> None:
            if host not in self.network.off:
                worker.process.successor = self.start(host, worker.member.local_rank, was=worker).process

        self.kernel.after(seconds, start)

    def end(self, worker: Worker, ending: str) -> None:
        process = worker.process
        if not process.is_alive:
            return
        process.end(ending)
        if worker.group is not None:
            worker.group.close()
        for other in self.workers:
            if other.process.is_alive:
                other.watcher.links.note_closed(process)  # type: ignore[attr-defined]

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.process.ending is None]

    # --- what is seen -------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.notes.append(f"{self.kernel.now:8.3f} {text}")
        for tell in list(self.on_note):
            tell(text)

    def fail(self, text: str) -> None:
        self.note(f"VIOLATION {text}")
        self.failures.append(text)

    def fail_of(self, worker: Worker, error: Exception) -> None:
        place = "".join(traceback.format_tb(error.__traceback__)[-3:])
        self.fail(f"ends with an error: {worker} {error!r}\n{place}")

    def note_world(self, worker: Worker, world: World, before: World | None) -> None:
        uids = tuple(member.uid for member in world.members)
        now = self.kernel.now
        told = self.worlds.setdefault(world.uid, Told(world.uid, world.generation, uids, now, now))
        told.last_entered_at = now
        if told.members != uids:
            self.fail(f"one world, two lists: {told.members} and {uids}")
        branch = worker.membership.side.branch
        if branch is not None:
            told.branch = branch.id
        if before is not None:
            if told.parent not in (None, before.uid):
                self.fail(f"one world, two parents: {world.uid} of {told.parent} and {before.uid}")
            told.parent = before.uid
        self.note(f"{worker} enters generation {world.generation} {world.uid} of {uids}")

    def note_start(self, worker: Worker, world: World, kept_inside: Commit | None) -> None:
        from tests.simulation import checks

        if world.uid not in self.starts:
            begins = "the start" if kept_inside is None else f"step {kept_inside.step}, which was kept,"
            self.note(f"{worker} begins from {begins} in {world.uid}")
            newest = max((commit.step for told in self.worlds.values() for commit in told.commits), default=0)
            # What somebody kept from before is outdated where those who came further have died.
            least = max(2, newest - 1, 0 if kept_inside is None else kept_inside.step + 2)
            # Who comes back has saved what it keeps: a world with it in it begins with that, where a disk is.
            inside = {member.uid for member in world.workers}
            kept = {one.uid: one.kept.step for one in self.living if one.kept is not None and one.uid not in inside}
            holders = [one for one in self.living if max(one.last_step, kept.get(one.uid, 0)) >= least]
            # A branch may have taken its first step with it, before the others had that.
            branch = self.worlds[world.uid].branch
            holders = [one for one in holders if one.world is None or self.worlds[one.world.uid].branch == branch]
            if holders and checks.could_not_know(self, worker):
                self.is_second_excused, holders = True, []
            self.starts[world.uid] = ", ".join(map(str, holders))  # of more than one step, which may be provisional

    def note_commit(self, worker: Worker, world: World, parent: Commit | None) -> Commit:
        told = self.worlds[world.uid]
        commit = Commit(1 if parent is None else parent.step + 1, world.uid, world.generation, parent, self.kernel.now)
        worker.committed_at = self.kernel.now
        for one in told.commits:
            if one.step == commit.step:
                if one.parent is not parent:
                    self.fail(f"two states: step {one.step} of {world.uid} was computed from both")
                return one
        told.commits.append(commit)
        return commit

    # --- its run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises nothing: see `failures`."""
        from tests.simulation import checks

        faults = Faults(self)
        for seconds, name, *arguments in self.plan.faults:
            self.kernel.after(seconds, faults.cause, name, *arguments)
        recovers_at = self.plan.recovers_at
        if recovers_at is None:
            self.kernel.run(self.plan.seconds)
        else:
            self.kernel.run(recovers_at)
            checks.check_sides(self)
            checks.check_queue(self)
            faults.cause("recover")
            found: str | None = ""
            # Sides meet first; a group with one that was cut off may be given up first.
            is_longer = self.plan.goes_on or any(name == "cut_off_after" for _, name, *_ in self.plan.faults)
            seconds = HEAL_SECONDS * (2 if is_longer else 1)
            while found is not None and self.kernel.now < recovers_at + seconds:
                self.kernel.run(self.kernel.now + 0.5)
                found = checks.what_is_not_well(self)
            if found is not None:
                self.fail(found)
        checks.check_chain(self)
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.process.is_alive = False  # no task goes on
        for worker in self.workers:
            for task in worker.process.tasks:
                task.end()

    def describe(self) -> str:
        return "\n".join(self.notes)


def shrink(plan: Plan) -> Plan:
    """The same with as few faults as still fail."""
    faults: list[Fault] = list(plan.faults)
    index = 0
    while index < len(faults):
        fewer = replace(plan, faults=tuple(faults[:index] + faults[index + 1 :]))
        if failures_of(fewer):
            del faults[index]
        else:
            index += 1
    return replace(plan, faults=tuple(faults))


def failures_of(plan: Plan) -> list[str]:
    simulation = Simulation(plan)
    simulation.run()
    return simulation.failures
