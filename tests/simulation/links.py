"""The pings of one simulated member: links.Links as the watcher sees it, with messages instead of sockets."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic_train.protocol.heartbeat import AwakeTime
from elastic_train.protocol.neighbours import Heard, head
from tests.simulation.process import Address, Process


class _Peer:
    def __init__(self, uid: str, address: Address, heard: Heard) -> None:
        self.uid, self.address, self.heard = uid, address, heard
        self.pings: dict[int, float] = {}
        self.connection: Process | None = None
        """who accepted it"""
        self.began_at: float | None = None
        """of an attempt to connect that is under way"""


class SimLinks:
    """As links.Links."""

    def __init__(self, process: Process, interval: float, suspended_after: float) -> None:
        self._process, self._interval = process, interval
        self._peers: dict[str, _Peer] = {}
        self._wanted: tuple[tuple[str, Address], ...] | None = None
        self._answers: frozenset[str] = frozenset()
        self._epoch = self._status = ""
        self._is_ping_due, self._next_ping = True, 0.0
        self._seq = 0
        self._answered: dict[str, float] = {}
        self._awake = AwakeTime(process.clock, suspended_after)
        self._matters = self._is_waiting = False
        process.links = self  # type: ignore[attr-defined]
        self._arrived: list[tuple[object, ...]] = []

    # --- as Links -----------------------------------------------------------------------------------------------------

    def watch(
        self, members: Iterable[tuple[str, Address]], epoch: str, answered: Collection[str] | None = None
    ) -> None:
        wanted = tuple((uid, address) for uid, address in members if uid != self._process.uid)
        now = self._process.clock()
        is_new = epoch != self._epoch
        if is_new:
            before = self._answers
            for uid, peer in self._peers.items():
                peer.heard.pinged_at = peer.heard.pinged_at if uid in before else None
                peer.heard.elsewhere_since = None
                peer.pings.clear()
        self._epoch, self._wanted = epoch, wanted
        self._answers = frozenset(uid for uid, _ in wanted) if answered is None else frozenset(answered)
        for uid, address in wanted:
            if uid not in self._peers:
                self._peers[uid] = _Peer(uid, address, Heard(now))
            elif is_new:
                self._peers[uid].heard.heard_at = max(self._peers[uid].heard.heard_at, now)
        self._is_ping_due = True
        self.wake()

    def announce(self, status: str, *, at_once: bool = False) -> None:
        self._status = status
        if at_once:
            self._is_ping_due = True
            self.wake()

    def heard(self, uid: str) -> Heard | None:
        peer = self._peers.get(uid)
        return None if peer is None else peer.heard

    def answered(self) -> dict[str, float]:
        now = self._process.clock()
        return {uid: now - at for uid, at in self._answered.items()}

    def wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._process.watcher_task.wake()

    def turn(self, seconds: float) -> bool:
        process = self._process
        now = process.clock()
        self._excuse_suspension()
        if self._wanted is not None:
            uids = {uid for uid, _ in self._wanted}
            self._peers = {uid: peer for uid, peer in self._peers.items() if uid in uids}
            self._wanted = None
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
            for heard in (peer.heard for peer in self._peers.values()):
                heard.heard_at = max(heard.heard_at, now - self._interval)
                heard.elsewhere_since = None if heard.elsewhere_since is None else now

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
        self._seq += 1
        peer.pings[self._seq] = now
        process.network.send(
            process.host, peer.address[0], self._arrive, peer, peer.connection, self._epoch, self._seq, self._status
        )

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
            if peer.heard.refused_at is None:
                peer.heard.refused_at = began_at
            self._matters = True
            return
        peer.connection = found
        self._ping(peer, self._process.clock())

    def _arrive(self, peer: _Peer, target: Process, epoch: str, seq: int, status: str) -> None:
        """In the kernel of the host at the address."""
        process = self._process
        if not target.is_alive:
            self.note_closed(target)
            return
        links: SimLinks = target.links  # type: ignore[attr-defined]
        target.take(links._take, links._answer, process, peer, epoch, seq, status)

    def note_closed(self, target: Process) -> None:
        """The kernel of a dead process's host answers."""
        process = self._process
        process.network.send(target.host, process.host, process.take, self._take, self._reconnect, target)

    def _reconnect(self, target: Process) -> None:
        for peer in self._peers.values():
            if peer.connection is target:
                self._connect(peer)
                self._matters = True

    def _answer(self, caller: Process, peer: _Peer, epoch: str, seq: int, status: str) -> None:
        """On the thread of the one that is pinged."""
        process, links = self._process, caller.links  # type: ignore[attr-defined]
        kind = "A" if epoch == self._epoch and caller.uid in self._answers else "N"
        if kind == "A":
            self._answered[caller.uid] = process.clock()
            mine = self._peers.get(caller.uid)
            if mine is not None:
                self._matters |= head(mine.heard.status) != head(status)
                mine.heard.status, mine.heard.epoch, mine.heard.heard_at = status, epoch, process.clock()
                mine.heard.elsewhere_since = None
        answer = (peer, process, kind, epoch, seq, self._status)
        process.network.send(process.host, caller.host, caller.take, links._take, links._note, *answer)

    def _note(self, peer: _Peer, target: Process, kind: str, epoch: str, seq: int, status: str) -> None:
        if peer.connection is not target:
            return  # of a connection that is closed
        heard = peer.heard
        before = head(heard.status)
        heard.heard_at, heard.has_answered, heard.refused_at = self._process.clock(), True, None
        if kind == "N" and heard.elsewhere_since is None:
            heard.elsewhere_since = heard.heard_at
        if kind == "A":
            heard.status, heard.epoch, heard.elsewhere_since = status, epoch, None
            sent_at = peer.pings.pop(seq, None)
            if sent_at is not None and epoch == self._epoch:
                heard.pinged_at = max(sent_at, heard.pinged_at or sent_at)
        self._matters |= head(heard.status) != before
