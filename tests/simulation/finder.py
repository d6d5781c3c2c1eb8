"""Endpoints as signposts, in the simulated network; a finder.Finder."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.process import Address, Machines, Process

LOOK_SECONDS = 0.3
"""that a look at an endpoint takes which does not answer"""


Sign = tuple[tuple[Address, ...], str]
"""stores, and the token of their job"""


class Signposts:
    """The endpoints of a job, and what is on the disks of its hosts."""

    def __init__(self, machines: Machines, hosts: Sequence[str]) -> None:
        self.machines, self.hosts = machines, tuple(hosts)
        self.keepers: dict[str, Process] = {}
        self.shown: dict[str, dict[bool, Sign]] = {}
        """by host: where the members of the job are, and (False) those of one that begins"""
        self.directories: dict[str, tuple[Address, ...]] = {}
        """by host: the last members' addresses, in its run directory"""


class SimFinder:
    """Of one process."""

    def __init__(self, process: Process, posts: Signposts, known: tuple[Address, ...] = ()) -> None:
        self._process, self._posts, self._known = process, posts, known
        self._seen: tuple[float, tuple[Address, ...]] = (-1.0, ())
        self._other_jobs: tuple[Address, ...] = ()

    def keep(self, *, has_world: bool) -> None:
        if has_world or self._process.host != self._posts.hosts[0]:
            self._serve()

    def _serve(self) -> None:
        process, posts = self._process, self._posts
        keeper = posts.keepers.get(process.host)
        if process.host in posts.hosts and (keeper is None or not keeper.is_alive):
            posts.keepers[process.host] = process
            posts.shown[process.host] = {}

    def is_beginner(self) -> bool:
        if self._process.host == self._posts.hosts[0]:
            self._serve()
        return self._posts.keepers.get(self._posts.hosts[0]) is self._process

    def addresses(self) -> Sequence[Address]:
        process, posts = self._process, self._posts
        looked_at, seen = self._seen
        if process.kernel.now < looked_at + LOOK_SECONDS:
            return seen
        found: list[Address] = []
        for host in posts.hosts:
            process.kernel.step()
            keeper, network = posts.keepers.get(host), process.network
            if not (network.is_open(process.host, host) and network.is_open(host, process.host)) or (
                keeper is not None and keeper.is_frozen
            ):
                process.sleep(LOOK_SECONDS)
            elif keeper is not None and keeper.is_alive:
                signs = [posts.shown[host][is_of_job] for is_of_job in (True, False) if is_of_job in posts.shown[host]]
                found += [address for addresses, _ in signs for address in addresses]
        found += [*self._known, *posts.directories.get(process.host, ())]
        self._seen = process.kernel.now, tuple(dict.fromkeys(found))
        return self._seen[1]

    def called_by(self) -> Sequence[Address]:
        posts, first = self._posts, self._posts.hosts[0]
        addresses, _ = posts.shown[first].get(True, ((), "")) if posts.keepers.get(first) is self._process else ((), "")
        return addresses

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        process, posts = self._process, self._posts
        if not if_missing:
            posts.directories[process.host] = tuple(addresses)
        for host in posts.hosts:
            process.network.send(process.host, host, self._receive, host, (tuple(addresses), job_token), if_missing)

    def _receive(self, host: str, sign: Sign, if_missing: bool) -> None:
        process, keeper = self._process, self._posts.keepers.get(host)
        if keeper is None or not keeper.is_running:
            return
        is_of_job, shown = bool(sign[1]), self._posts.shown[host]
        there = shown.get(is_of_job)
        if is_of_job and there is not None and there[1] != sign[1]:
            process.network.send(host, process.host, process.take, self._note_other_job, there[0])
        if not (if_missing and there is not None):
            shown[is_of_job] = sign

    def _note_other_job(self, addresses: tuple[Address, ...]) -> None:
        self._other_jobs = addresses

    def other_jobs(self) -> Sequence[Address]:
        found, self._other_jobs = self._other_jobs, ()
        return found

    def describe(self) -> str:
        return "the endpoints"

    def close(self) -> None:
        pass
