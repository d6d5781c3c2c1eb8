"""The pings of one simulated member: links.Links as the watcher sees it, with messages instead of sockets. What it
hears is noted by the real Hearing."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic_train.protocol.heartbeat import AwakeTime
from elastic_train.protocol.neighbours import Heard, Hearing, head
from tests.simulation.process import Address, Process


class _Peer:
    def __init__(self, uid: str, address: Address, heard: Heard) -> None:
        self.uid, self.address, self.heard = uid, address, heard
        self.connection: Process | None = None
        """who accepted it"""
        self.began_at: float | None = None
        """of an attempt to connect that is under way"""


class SimLinks:
    """As links.Links."""

    def __init__(self, process: Process, interval: float, suspended_after: float) -> None:
        self._process, self._interval = process, interval
        self._peers: dict[str, _Peer] = {}
        self._hearing = Hearing(process.uid, lambda _: True, process.clock, process.clock)
        self._is_ping_due, self._next_ping = True, 0.0
        self._awake = AwakeTime(process.clock, suspended_after)
        self._matters = self._is_waiting = False
        process.links = self  # type: ignore[attr-defined]
        self._arrived: list[tuple[object, ...]] = []

    # --- as Links -----------------------------------------------------------------------------------------------------

    def watch(
        self, members: Iterable[tuple[str, Address]], epoch: str, answered: Collection[str] | None = None
    ) -> None:
        self._hearing.watch(members, epoch, answered)
        self._is_ping_due = True
        self.wake()

    def announce(self, status: str, *, at_once: bool = False) -> None:
        self._hearing.status = status
        if at_once:
            self._is_ping_due = True
            self.wake()

    def heard(self, uid: str) -> Heard | None:
        return self._hearing.watched.get(uid)

    def answered(self) -> dict[str, float]:
        now = self._process.clock()
        return {uid: now - at for uid, at in self._hearing.answered.items()}

    def wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._process.watcher_task.wake()  # type: ignore[attr-defined]

    def turn(self, seconds: float) -> bool:
        process = self._process
        now = process.clock()
        self._excuse_suspension()
        if (wanted := self._hearing.take_wanted()) is not None:
            for uid, (address, heard) in wanted.items():
                self._peers.setdefault(uid, _Peer(uid, address, heard))
            self._peers = {uid: peer for uid, peer in self._peers.items() if uid in wanted}
        if self._is_ping_due or now >= self._next_ping:
            self._is_ping_due, self._next_ping = False, now + self._interval
            for peer in self._peers.values():
                self._ping(peer, now)
        self._matters = False
        arrived, self._arrived = self._arrived, []
        for run, *arguments in arrived:
            run(*arguments)  # type: ignore[operator]
        if not arrived and not self._is_ping_due:
            self._is_waiting = True
            process.sleep(max(0.0, min(seconds, self._next_ping - now)))
            self._is_waiting = False
        else:
            process.kernel.step()
        self._excuse_suspension()
        return self._matters

    def _excuse_suspension(self) -> None:
        """Nobody was silent while this process was frozen."""
        if self._awake.look() > 0:
            now = self._process.clock()
            self._hearing.excuse_silence(now, now - self._interval)

    def close(self) -> None:
        self._peers.clear()

    # --- messages -----------------------------------------------------------------------------------------------------

    def _take(self, run: object, *arguments: object) -> None:
        """Something has arrived for the watcher's thread, which may be busy."""
        if not self._process.is_alive:
            return
        if self._is_waiting:
            run(*arguments)  # type: ignore[operator]
            if self._matters:
                self.wake()
        else:
            self._arrived.append((run, *arguments))

    def _ping(self, peer: _Peer, now: float) -> None:
        process = self._process
        if peer.connection is None:
            if peer.began_at is None or now - peer.began_at > 1.0:
                self._connect(peer)
            return
        line = self._hearing.ping(peer.heard)
        process.network.send(process.host, peer.address[0], self._arrive, peer, peer.connection, line)

    def _connect(self, peer: _Peer) -> None:
        process = self._process
        peer.connection, peer.began_at = None, process.clock()
        process.network.send(process.host, peer.address[0], self._accept, peer, peer.began_at)

    def _accept(self, peer: _Peer, began_at: float) -> None:
        """In the kernel of the host at the address."""
        process, target = self._process, self._process.machines.at[peer.address]
        found = target if target.is_alive else None
        process.network.send(
            target.host, process.host, process.take, self._take, self._connected, peer, found, began_at
        )

    def _connected(self, peer: _Peer, found: Process | None, began_at: float) -> None:
        if began_at != peer.began_at:
            return
        peer.began_at = None
        is_other = found is not None and found.uid != peer.uid and self._process.machines.checks_uid
        if found is None or is_other:
            peer.heard.refuse(began_at)
            self._matters = True
            return
        peer.connection = found
        self._ping(peer, self._process.clock())

    def _arrive(self, peer: _Peer, target: Process, line: str) -> None:
        """In the kernel of the host at the address."""
        process = self._process
        if not target.is_alive:
            self.note_closed(target)
            return
        links: SimLinks = target.links  # type: ignore[attr-defined]
        target.take(links._take, links._answer, process, peer, line)

    def note_closed(self, target: Process) -> None:
        """The kernel of a dead process's host answers."""
        process = self._process
        process.network.send(target.host, process.host, process.take, self._take, self._reconnect, target)

    def _reconnect(self, target: Process) -> None:
        for peer in self._peers.values():
            if peer.connection is target:
                self._connect(peer)
                self._matters = True

    def _answer(self, caller: Process, peer: _Peer, line: str) -> None:
        """On the thread of the one that is pinged."""
        process, links = self._process, caller.links  # type: ignore[attr-defined]
        answer, matters = self._hearing.answer(line.removesuffix("\n"))
        self._matters |= matters
        process.network.send(process.host, caller.host, caller.take, links._take, links._note, peer, process, answer)

    def _note(self, peer: _Peer, target: Process, answer: str) -> None:
        if peer.connection is not target:
            return  # of a connection that is closed
        kind, _, *rest = answer.removesuffix("\n").split(" ", 4)
        before = head(peer.heard.status)
        assert self._hearing.note(peer.heard, kind, rest), f"all can read {answer!r}"
        self._matters |= head(peer.heard.status) != before
