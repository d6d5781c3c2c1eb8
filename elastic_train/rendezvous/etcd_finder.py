"""Where newcomers find a job in etcd, and who begins it: a finder.Finder that needs no machine in particular.

Below the job's entry (etcd_job.py), under a lease of the process that writes them:

- `sign`: stores of some members, and the token of their job; rank 0 writes it every half second, and ranks 1 and 2
  where it stands still.
- `begin`: the store of the one that begins, which has created it.

Under the entry's own lease `workers/UID` notes every worker until it leaves, whether etcd hears from it or not.

Nobody trains by them. A sign goes with the lease of who wrote it last; before that, where nobody listens at any store
that it names.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence

from elastic_train.errors import ElasticTrainError, LeftOut, StoreRefused, StoreUnreachable, going_on
from elastic_train.protocol.arbiter import Arbiter, Claims
from elastic_train.protocol.finder import Finder
from elastic_train.protocol.probes import Probe, probe_all
from elastic_train.protocol.store import stores_in
from elastic_train.rendezvous.etcd import Etcd, Transaction
from elastic_train.rendezvous.etcd_arbiter import arbiter_in
from elastic_train.rendezvous.etcd_connections import ATTEMPT_SECONDS, Connections, Entry
from elastic_train.rendezvous.etcd_errors import LeaseLost
from elastic_train.rendezvous.etcd_job import NodeLease, leave_job, note_worker, open_job
from elastic_train.rendezvous.etcd_store import EtcdStore, stamp, text_of
from elastic_train.world import Address

LOOK_SECONDS = 0.3
"""between two looks of a newcomer"""
KEEP_SECONDS = 0.5
"""between two turns of the thread that keeps sign and leases"""
FRESH_SECONDS = 3.0
"""after which a member that is not asked any more to show a sign writes it no longer"""
REFUSED_SECONDS = 3.0
"""in which nobody has written a sign anew, where nobody listens at any store that it names"""
WARN_SECONDS = 5.0
"""of etcd's silence before anybody is told"""
REPORT_SECONDS = 10.0
"""between two lines to the person who waits with us"""
ENTRY_LOST = (
    "etcd has lost the job's entry: it came back empty, or heard of no worker for a day. Training goes on; a node that "
    "falls silent is waited for until the next world forms, which it does in a minute or two"
)
CLOSE_SECONDS = 3.0
"""for tidying up at the end; what is left then runs out with the leases"""
MOST_NAMED = 16
"""stores in a sign"""
ENTRY_SECONDS = 86400.0
"""that the entry outlives the last contact of any worker: with it go its claims, and newcomers need none of it"""


class EtcdSilence:
    """What comes of it that etcd does not answer one worker. For two threads; what is assigned is one reference.

    Args:
        grace: seconds that a worker without a world waits for etcd.
    """

    def __init__(
        self, grace: float, log: Callable[[str], None], warn: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._grace, self._log, self._warn, self._clock = grace, log, warn, clock
        self._since: float | None = None
        self._reported_at = clock()
        self._nobody_since: float | None = None
        """when the first of the looks ended that etcd has not answered, and that have led to nobody"""
        self._leads_to_nobody = False
        """whether the last look is one of them"""
        self._has_warned = False

    def report(self, why: str) -> None:
        now = self._clock()
        if now > self._reported_at + REPORT_SECONDS:
            self._log(f"waiting for etcd, {self._grace:.0f} s at most: {why}")
            self._reported_at = now

    def note_answer(self) -> None:
        since, self._since, self._nobody_since = self._since, None, None
        if self._has_warned and since is not None:
            self._has_warned = False
            self._log(f"etcd answers again, after {self._clock() - since:.0f} s")

    def note_none(self, error: StoreUnreachable | StoreRefused, *, has_world: bool) -> None:
        since = self._since
        if since is None:
            since = self._since = self._clock()
        if has_world and not self._has_warned and self._clock() - since > WARN_SECONDS:
            self._has_warned = True
            self._warn(f"{error}; training goes on without it, but nobody finds the job there")

    def note_look(self) -> None:
        """A worker without a world looks. Where `note_nobody` does not follow, that has led to a host."""
        if not self._leads_to_nobody:
            self._nobody_since = None
        self._leads_to_nobody = False

    def note_nobody(self, error: StoreUnreachable | StoreRefused, *, knows_others: bool) -> None:
        """The look has led to nobody. Raises `error` where that was so for longer than the grace; at once where etcd
        refuses a worker that knows no stores besides."""
        self._leads_to_nobody = True
        now = self._clock()
        since = self._nobody_since = now if self._nobody_since is None else self._nobody_since
        self.report(str(error))
        if now - since > self._grace or (isinstance(error, StoreRefused) and not knows_others):
            raise error


def repeat(seconds: float, turn: Callable[[], None]) -> Callable[[float], None]:
    """Begin a thread that takes a turn every so many seconds, whatever the last one has raised. The returned function
    ends it, and waits for its last turn, for some seconds at most."""
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
    """Connects when it is made. Where etcd does not answer it blocks for the grace; for one
    attempt where `earlier` names somebody: then its thread opens the job's entry, whenever etcd answers.

    The training thread looks, and the watcher's says what is to be shown; a thread of its own writes it, so that
    neither waits for etcd where a job runs. There is no lock: what is assigned is one reference.

    Args:
        connections: to etcd; closed with this.
        uid: of this process.
        address: of the store that it serves.
        lease: seconds after which it is gone to newcomers that cannot reach it.
        check: raises Stopped where this worker was told to stop.
        log: tells the person in front of this node what is being waited for.
        warn: tells of what is not as it should be, while it trains.
        earlier: stores of members that the run directory names, or that this process was in a world with.
        repeat: has the turns of the thread taken, as the function of this name.
        probe_all: whether anybody listens at some addresses.
        bound: makes `arbiter` of the claims in an entry, so that a call of it ends.

    Raises:
        StoreUnreachable, StoreRefused: as every call of etcd; not where `earlier` names somebody.
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
        """None before one could be opened"""
        self._arbiter = bound(arbiter_in(None))
        self._no_entry: ElasticTrainError | None = None  # why
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
        """what was shown, and since when"""
        self._sign: tuple[str, Sequence[Address], str, bool] | None = None
        """what this process shows: a key's name, stores, a job's token, and whether only where nothing is shown"""
        self._looked_at, self._shown_at, self._num_shown = -1e9, -1e9, 0
        self._last_read: str | None = None
        """what was shown, by the last turn of the thread that keeps it"""
        self._other_jobs: tuple[Address, ...] = ()
        """found since they were last asked for"""
        self._end_turns = repeat(KEEP_SECONDS, self._keep)

    def arbiter(self) -> Arbiter:
        """Whose claims lie in the newest entry that this process has opened; the same object as long as that lasts."""
        return self._arbiter

    def _open(self, etcd: Etcd) -> None:
        """Enter the job. Raises: StoreUnreachable, StoreRefused."""
        try:
            while True:
                job = open_job(etcd, self._settings, self._run_id, ENTRY_SECONDS)
                store = EtcdStore(self._etcd, lease=job.lease, guard=job.guard)
                own = NodeLease(store, job, self._uid, json.dumps(self._address), self._seconds)
                with contextlib.suppress(LeftOut):  # the last of the others has taken it away at this moment
                    note_worker(store, job, self._uid, self._address)
                    own.keep()
                    break
        except (StoreUnreachable, StoreRefused) as error:
            self._no_entry = error
            raise
        before, self._own = self._own, own
        self._next_keep = self._clock() + own.seconds_between
        if before is None or before.job.prefix != own.job.prefix:
            self._arbiter = self._bound(arbiter_in(own))
            if before is not None and self._has_world:
                self._warn(ENTRY_LOST)  # the last: it may hang, or raise

    def _before_retry(self, why: str) -> None:
        """Between two attempts of the training thread: it can be stopped, and says what it waits for."""
        self._check()
        self._silence.report(why)

    # --- for who has no world -----------------------------------------------------------------------------------------

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
        """Raises: StoreUnreachable, StoreRefused."""
        if self._own is None:
            assert self._no_entry is not None, "it could not be opened"
            raise self._no_entry.with_traceback(None)
        return self._own

    def is_beginner(self) -> bool:
        try:
            return self._begins()
        except LeaseLost:
            return False  # it hung for a while, and the keeper sees it
        except (StoreUnreachable, StoreRefused) as error:
            self._silence.note_nobody(error, knows_others=bool(self._earlier()))
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
        has_begun = etcd.transact(Transaction(conditions, changes)).succeeded
        if has_begun and theirs:
            self._log(f"every worker of an earlier start of run id {self._run_id!r} is gone: a new start begins")
        return has_begun

    def _are_gone(self, texts: list[str]) -> bool:
        """Whether nobody writes these signs anew, and nobody listens at any store that they name."""
        now = self._clock()
        if texts != self._stood[0]:
            self._stood = texts, now
        if now - self._stood[1] < REFUSED_SECONDS:
            return False
        return set(self._probe_all([store for text in texts for store in stores_in(text)])) == {Probe.REFUSED}

    def _text(self, stores: Sequence[Address], job_token: str) -> str:
        self._num_shown += 1  # who looks whether anybody writes sees it change
        named = list(dict.fromkeys([self._address, *stores]))[:MOST_NAMED]
        return json.dumps({"stores": named, "job": job_token, "by": self._uid, "number": self._num_shown})

    # --- for who keeps the job ----------------------------------------------------------------------------------------

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
        """As `_keep_once`, but for LeftOut."""
        try:
            if self._own is None:
                self._open(self._etcd)
            return self._keep_once()
        except LeftOut:  # its lease is over, or the entry's, for all in that were away for long
            if not self._is_closed:
                self._entry().end(self._etcd)
                self._open(self._etcd)
            return True

    def _keep_once(self) -> bool:
        """Whether etcd was asked for anything. Raises: StoreUnreachable; LeftOut where a lease or the entry is gone."""
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
            if there["by"] == self._uid:  # else it has taken this one's place, or is of the same job
                mine.put(key, self._text(stores, token))
        else:
            if there["job"] != token:
                # Two jobs of one run id that know nothing of each other take turns: each sees the other's sign.
                self._other_jobs = stores_in(text)
            if not if_missing or text == self._last_read:  # who has written it may be dead by now
                mine.put(key, self._text(stores, token))
        self._last_read = text
        return True

    def close(self) -> None:
        """Leave nothing behind: the last one out takes the entry away. Not long where etcd does not answer; then, and
        where one that did not leave gives no answer, the entry goes with its lease."""
        self._is_closed = True
        self._end_turns(2 * ATTEMPT_SECONDS)
        etcd = Etcd(self._connections, CLOSE_SECONDS, CLOSE_SECONDS / 2)
        with contextlib.suppress(StoreUnreachable, StoreRefused, LeftOut):
            own = self._entry()
            own.end(etcd)
            leave_job(etcd, own.job, self._uid, self._probe_all)
        self._connections.close()


def sign_and_begin(own: NodeLease) -> tuple[str, str]:
    """The keys that lead newcomers."""
    return f"{own.job.prefix}/sign", f"{own.job.prefix}/begin"


def shown(own: NodeLease) -> list[Entry | None]:
    """What they lead to. Raises: StoreUnreachable, StoreRefused."""
    return own.store.etcd.get_many(sign_and_begin(own))
