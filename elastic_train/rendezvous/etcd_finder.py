"""Find or begin a job through etcd: a finder.Finder that depends on no particular node.

Keys below the job's entry (etcd_job.py), under a lease of the process that writes them:

- `sign`: stores of some members, and the token of their job. Rank 0 writes it every half second, ranks 1 and 2 if it
  stops changing.
- `begin`: the store of the worker that begins the job, which created the key.

`workers/UID`, under the entry's own lease, lists every worker until it leaves, even if it cannot reach etcd.

Training does not depend on these keys. A sign expires with the lease of its last writer. It is ignored earlier if it
stops changing and all stores that it names refuse connections.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial

from elastic_train.errors import ElasticTrainError, LeftOut, StoreRefused, StoreUnreachable, going_on
from elastic_train.protocol.arbiter import Arbiter, Claims
from elastic_train.protocol.finder import Finder
from elastic_train.protocol.probes import Probe, probe_all
from elastic_train.protocol.store import stores_in
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_arbiter import arbiter_in
from elastic_train.rendezvous.etcd_connections import ATTEMPT_SECONDS, Connections, Entry
from elastic_train.rendezvous.etcd_errors import LeaseLost
from elastic_train.rendezvous.etcd_job import JobEntry, NodeLease, leave_job, note_worker, open_job
from elastic_train.rendezvous.etcd_store import stamp, text_of
from elastic_train.world import Address

LOOK_SECONDS = 0.3
"""between two requests of a newcomer to etcd"""
KEEP_SECONDS = 0.5
"""between two turns of the thread that renews sign and leases"""
FRESH_SECONDS = 3.0
"""after the last call of `show`; then the member stops writing its sign"""
REFUSED_SECONDS = 3.0
"""without a change of a sign, before it is ignored if all stores that it names refuse connections"""
WARN_SECONDS = 5.0
"""without an answer of etcd, before a member warns"""
REPORT_SECONDS = 10.0
"""between two log lines of a worker that waits for etcd"""
ENTRY_LOST = (
    "etcd has lost the job's entry: it came back empty, or heard of no worker for a day. Training goes on; a node that "
    "falls silent is waited for until the next world forms, which it does in a minute or two"
)
CLOSE_SECONDS = 3.0
"""limit for the cleanup in `close`; keys left then expire with their leases"""
MOST_NAMED = 16
"""most stores in a sign"""
ENTRY_SECONDS = 86400.0
"""lease of the entry after the last contact of any worker; its claims expire with it, newcomers do not need them"""


class EtcdSilence:
    """Reports and warns while etcd does not answer. Two threads use it without a lock: assignments are atomic.

    Args:
        grace: seconds that a worker without a world waits for etcd.
    """

    def __init__(
        self, grace: float, log: Callable[[str], None], warn: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._grace, self._log, self._warn, self._clock = grace, log, warn, clock
        self._since: float | None = None
        self._reported_at = clock()
        self._no_host_since: float | None = None
        """end of the first in the present row of looks in which etcd did not answer and no job was found"""
        self._has_no_host = False
        """whether the last look belongs to that row"""
        self._has_warned = False

    def report(self, why: str) -> None:
        now = self._clock()
        if now > self._reported_at + REPORT_SECONDS:
            self._log(f"waiting for etcd, {self._grace:.0f} s at most: {why}")
            self._reported_at = now

    def note_answer(self) -> None:
        since, self._since, self._no_host_since = self._since, None, None
        if self._has_warned and since is not None:
            self._has_warned = False
            self._log(f"etcd answers again, after {self._clock() - since:.0f} s")

    def note_none(self, error: StoreUnreachable | StoreRefused, *, has_world: bool) -> None:
        since = self._since
        if since is None:
            since = self._since = self._clock()
        if has_world and not self._has_warned and self._clock() - since > WARN_SECONDS:
            self._has_warned = True
            self._warn(f"{error}; training goes on without it, but new nodes cannot find the job there")

    def note_look(self) -> None:
        """Note that a worker without a world looks for a job. Unless `note_no_host` follows, the look found a host."""
        if not self._has_no_host:
            self._no_host_since = None
        self._has_no_host = False

    def note_no_host(self, error: StoreUnreachable | StoreRefused, *, knows_others: bool) -> None:
        """Note that the look found no host. Raises `error` if that lasts longer than the grace; at once if etcd refuses
        a worker that knows no other stores."""
        self._has_no_host = True
        now = self._clock()
        since = self._no_host_since = now if self._no_host_since is None else self._no_host_since
        self.report(str(error))
        if now - since > self._grace or (isinstance(error, StoreRefused) and not knows_others):
            raise error


def repeat(seconds: float, turn: Callable[[], None]) -> Callable[[float], None]:
    """Start a thread that calls `turn` every `seconds`, even after an error. The returned function ends the thread, and
    waits for the last turn for at most the given timeout."""
    is_over, told = threading.Event(), set[str]()

    def run() -> None:
        while not is_over.wait(seconds):
            with going_on(told, "keeping signs in etcd"):
                turn()

    def end(timeout: float) -> None:
        is_over.set()
        thread.join(timeout)

    thread = threading.Thread(target=run, name="signs", daemon=True)
    thread.start()
    return end


class EtcdFinder(Finder):
    """A finder through etcd. Its constructor opens the job's entry, and blocks for the grace if etcd does not answer.
    If `earlier` names a store, it makes one attempt only; its own thread then opens the entry once etcd answers.

    The training thread looks for jobs, and the watcher thread sets the sign. A thread of the finder writes the sign,
    so neither waits for etcd while a job runs. There is no lock: each assignment is of one reference.

    Args:
        connections: to etcd; `close` closes them.
        uid: of this process.
        address: address of the store that this process serves.
        lease: seconds without contact to etcd after which newcomers that cannot reach this process count it as gone.
        check: raises Stopped if this worker is to stop.
        log: takes messages about what this worker waits for.
        warn: takes warnings while this worker trains.
        earlier: returns stores of members that the run directory names, or that shared a world with this process.
        repeat: runs the turns of the thread, as the function of this name.
        probe_all: probes whether programs listen at addresses.
        bound: makes `arbiter` from the claims in an entry, with calls that are limited in time.

    Raises:
        StoreUnreachable, StoreRefused: as every call of etcd; not if `earlier` names a store.
    """

    def __init__(
        self,
        connections: Connections,
        run_id: str,
        *,
        uid: str,
        address: Address,
        lease: float,
        check: Callable[[], None],
        log: Callable[[str], None],
        warn: Callable[[str], None],
        earlier: Callable[[], Sequence[Address]] = lambda: (),
        repeat: Callable[[float, Callable[[], None]], Callable[[float], None]] = repeat,
        probe_all: Callable[[Sequence[Address]], Sequence[Probe]] = probe_all,
        bound: Callable[[Claims], Arbiter] = lambda claims: claims,
    ) -> None:
        self._connections, self._settings, self._clock = connections, connections.settings, connections.clock
        self._run_id, self._uid, self._address, self._seconds = run_id, uid, address, lease
        self._check, self._log, self._warn = check, log, warn
        self._earlier, self._probe_all, self._bound = earlier, probe_all, bound
        self._etcd = Etcd(connections, deadline=ATTEMPT_SECONDS, attempt_seconds=ATTEMPT_SECONDS / 2)
        grace = self._settings.grace
        self._silence, self._next_keep = EtcdSilence(grace, log, warn, self._clock), 0.0
        self._has_world = self._is_closed = False
        patient = Etcd(connections, deadline=grace, before_retry=self._before_retry)
        self._own: NodeLease | None = None
        """lease in the job's entry; None until the entry could be opened"""
        self._arbiter = bound(arbiter_in(None))
        self._no_entry: ElasticTrainError | None = None  # why `_own` is None
        is_known = bool(earlier())
        try:
            self._open(self._etcd if is_known else patient)
        except BaseException as error:
            if not is_known or not isinstance(error, StoreUnreachable | StoreRefused):
                connections.close()
                raise
            log(f"no entry of the job in etcd yet, so this node asks the members that it knows: {error}")
        self._seen: tuple[Address, ...] = ()
        self._stood: tuple[list[str], float] = ([], 0.0)
        """the last signs read by `_are_gone`, and since when they are unchanged"""
        self._sign: tuple[str, Sequence[Address], str, bool] | None = None
        """what this process shows: name of the key, stores, token of the job, whether only if no other member writes"""
        self._looked_at, self._shown_at, self._num_shown = -1e9, -1e9, 0
        self._last_read: str | None = None
        """text of the key at the last turn of the thread"""
        self._other_jobs: tuple[Address, ...] = ()
        """stores of other jobs with this run id, found since the last call of `other_jobs`"""
        self._end_turns = repeat(KEEP_SECONDS, self._keep)

    def arbiter(self) -> Arbiter:
        """Return the arbiter with claims in the newest entry opened; the same object until a new entry is opened."""
        return self._arbiter

    def _open(self, etcd: Etcd) -> None:
        """Open the job's entry and note this worker in it. Raises: StoreUnreachable, StoreRefused."""
        try:
            own = open_job(etcd, self._settings, self._run_id, partial(self._enter, etcd), ENTRY_SECONDS)
        except (StoreUnreachable, StoreRefused) as error:
            self._no_entry = error
            raise
        before, self._own = self._own, own
        self._next_keep = self._clock() + own.seconds_between
        if before is None or before.job.prefix != own.job.prefix:
            self._arbiter = self._bound(arbiter_in(own))
            if before is not None and self._has_world:
                self._warn(ENTRY_LOST)  # last, as it may hang or raise

    def _enter(self, etcd: Etcd, job: JobEntry) -> NodeLease:
        note_worker(job.store(etcd), job, self._uid, self._address)
        own = NodeLease(self._etcd, job, self._uid, json.dumps(self._address), self._seconds)
        own.keep()
        return own

    def _before_retry(self, why: str) -> None:
        """Raise Stopped if this worker is to stop, else report the wait. For the training thread, between attempts."""
        self._check()
        self._silence.report(why)

    # --- for a worker without a world ---------------------------------------------------------------------------------

    def addresses(self) -> Sequence[Address]:
        self._silence.note_look()
        if self._clock() < self._looked_at + LOOK_SECONDS:
            return self._seen
        found: list[Address] = []
        try:
            for entry in shown(self._entry()):
                found += stores_in(text_of(entry))
            self._silence.note_answer()
        except (StoreUnreachable, StoreRefused) as error:
            self._silence.note_none(error, has_world=self._has_world)
        self._seen = tuple(dict.fromkeys([*found, *self._earlier()]))
        self._looked_at = self._clock()
        return self._seen

    def _entry(self) -> NodeLease:
        """Return the lease in the entry. Raises: StoreUnreachable, StoreRefused."""
        if self._own is None:
            assert self._no_entry is not None, "it could not be opened"
            raise self._no_entry.with_traceback(None)
        return self._own

    def is_beginner(self) -> bool:
        try:
            return self._begins()
        except LeaseLost:
            return False  # this process hung; the finder's thread opens a new lease
        except (StoreUnreachable, StoreRefused) as error:
            self._silence.note_no_host(error, knows_others=bool(self._earlier()))
            return False

    def _begins(self) -> bool:
        own = self._entry()
        sign, begin = shown(own)
        is_mine = begin is not None and json.loads(text_of(begin) or "{}").get("by") == self._uid
        if sign is None and is_mine:
            return True
        theirs = [text for text in (text_of(sign), None if is_mine else text_of(begin)) if text is not None]
        if theirs and not self._are_gone(theirs):
            return False
        etcd, (sign_key, begin_key) = own.store.etcd, sign_and_begin(own)
        conditions = [
            etcd.is_created_at(own.job.guard.key, own.job.guard.create_revision),
            etcd.is_at(sign_key, sign.mod_revision if sign else 0),
            etcd.is_at(begin_key, begin.mod_revision if begin else 0),
        ]
        value = stamp() + self._text([self._address], "").encode()
        changes = [etcd.delete_request(sign_key), etcd.put_request(begin_key, value, own.lease)]
        has_begun, _ = etcd.transact(conditions, changes)
        if has_begun and theirs:
            self._log(f"every worker of an earlier start of run id {self._run_id!r} is gone: a new start begins")
        return has_begun

    def _are_gone(self, texts: list[str]) -> bool:
        """Return whether these signs have stopped changing, and all stores that they name refuse connections."""
        now = self._clock()
        if texts != self._stood[0]:
            self._stood = texts, now
        if now - self._stood[1] < REFUSED_SECONDS:
            return False
        return set(self._probe_all([store for text in texts for store in stores_in(text)])) == {Probe.REFUSED}

    def _text(self, stores: Sequence[Address], job_token: str) -> str:
        self._num_shown += 1  # readers tell by the change that the sign is still written
        named = list(dict.fromkeys([self._address, *stores]))[:MOST_NAMED]
        return json.dumps({"stores": named, "job": job_token, "by": self._uid, "number": self._num_shown})

    # --- for workers of the job ---------------------------------------------------------------------------------------

    def show(self, addresses: Sequence[Address], job_token: str, *, if_missing: bool = False) -> None:
        self._shown_at = self._clock()
        self._sign = ("sign" if job_token else "begin", addresses, job_token, if_missing)

    def keep(self, *, has_world: bool) -> None:
        self._has_world = has_world
        sign = self._sign
        is_of_job = sign is not None and sign[0] == "sign"
        if (has_world or is_of_job) and self._clock() - self._shown_at > FRESH_SECONDS:
            self._sign = None

    def other_jobs(self) -> Sequence[Address]:
        found, self._other_jobs = self._other_jobs, ()
        return found

    def describe(self) -> str:
        return ",".join(self._settings.endpoints)

    def _keep(self) -> None:
        try:
            if self._turn():
                self._silence.note_answer()
        except (StoreUnreachable, StoreRefused) as error:
            if not self._is_closed:
                self._silence.note_none(error, has_world=self._has_world)

    def _turn(self) -> bool:
        """Call `_keep_once`, and open the entry again after LeftOut. Returns whether etcd was asked."""
        try:
            if self._own is None:
                self._open(self._etcd)
            return self._keep_once()
        except LeftOut:  # its lease has expired, or the entry's, after all its workers were away for long
            if not self._is_closed:
                self._entry().end(self._etcd)
                self._open(self._etcd)
            return True

    def _keep_once(self) -> bool:
        """Renew lease and sign. Returns whether etcd was asked. Raises: StoreUnreachable; LeftOut: either is gone."""
        own, sign = self._entry(), self._sign
        is_due = self._clock() >= self._next_keep
        if is_due:
            own.keep()
            self._next_keep = self._clock() + own.seconds_between
        if sign is None:
            return is_due
        name, stores, token, if_missing = sign
        key = f"{own.job.prefix}/{name}"
        text, mine = own.store.get(key), own.store.under(own.lease)
        there = None if text is None else json.loads(text)
        if there is None:
            mine.create(key, self._text(stores, token))
        elif name == "begin":
            if there["by"] == self._uid:  # else another beginner replaced this one, or belongs to the same job
                mine.put(key, self._text(stores, token))
        else:
            if there["job"] != token:
                # Two jobs of one run id that do not know each other overwrite the sign in turn: each sees the other's.
                self._other_jobs = stores_in(text)
            if not if_missing or text == self._last_read:  # unchanged: its writer may be dead
                mine.put(key, self._text(stores, token))
        self._last_read = text
        return True

    def close(self) -> None:
        """Delete this worker's keys; the last worker deletes the entry. Blocks some seconds at most. The entry expires
        with its lease if etcd does not answer, or if a worker that did not leave gives no answer."""
        self._is_closed = True
        self._end_turns(2 * ATTEMPT_SECONDS)
        etcd = Etcd(self._connections, CLOSE_SECONDS, CLOSE_SECONDS / 2)
        with contextlib.suppress(StoreUnreachable, StoreRefused):
            own = self._entry()
            own.end(etcd)
            leave_job(etcd, own.job, self._uid, self._probe_all)
        self._connections.close()


def sign_and_begin(own: NodeLease) -> tuple[str, str]:
    """Return the keys that newcomers read."""
    return f"{own.job.prefix}/sign", f"{own.job.prefix}/begin"


def shown(own: NodeLease) -> list[Entry | None]:
    """Return the entries at these keys. Raises: StoreUnreachable, StoreRefused."""
    return own.store.etcd.get_many(sign_and_begin(own))
