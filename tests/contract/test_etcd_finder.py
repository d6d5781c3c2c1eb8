"""A job's entry in etcd, with real members: which worker begins, what is found, and which claim counts."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from elastic_train.elastic.claims import Bounded
from elastic_train.errors import Stopped, StoreRefused, StoreUnreachable
from elastic_train.protocol.arbiter import MOST_REMOVED, OUTDATED, Arbiter, ArbiterSilent, Claims
from elastic_train.rendezvous import etcd_finder, etcd_job
from elastic_train.rendezvous.etcd import Etcd
from elastic_train.rendezvous.etcd_connections import Connections, Entry
from elastic_train.rendezvous.etcd_errors import Transient
from elastic_train.rendezvous.etcd_finder import EtcdFinder
from elastic_train.rendezvous.etcd_settings import EtcdSettings
from elastic_train.tools.drills.nodes import free_port, wait_until
from elastic_train.world import Address
from tests.claims import check_all_read_the_same, check_first_claim_stands

PATIENCE = 60.0
Make = Callable[..., EtcdFinder]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def said() -> list[str]:
    """The lines of the finders for the user."""
    return []


@pytest.fixture
def make(etcd_settings: EtcdSettings, said: list[str], request: pytest.FixtureRequest) -> Iterator[Make]:
    finders: list[EtcdFinder] = []

    def make(address: Address, **changes: object) -> EtcdFinder:
        named: dict[str, object] = {
            "uid": f"uid{len(finders)}", "address": address, "lease": PATIENCE, "check": lambda: None,
            "log": said.append, "warn": said.append,
        }  # fmt: skip
        finders.append(EtcdFinder(Connections(etcd_settings), request.node.name, **(named | changes)))  # type: ignore[arg-type]
        return finders[-1]

    yield make
    for finder in finders:
        finder.close()
    connections = Connections(etcd_settings)
    assert Etcd(connections, PATIENCE).below(f"/elastic_train/{request.node.name}/")[0] == [], "nothing is left"
    connections.close()


@pytest.fixture
def listener() -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]


def found(finder: EtcdFinder) -> list[Address]:
    finder._looked_at = -1e9
    return list(finder.addresses())


def test_one_of_many_begins_and_the_others_find_it(make: Make, listener: Address) -> None:
    finders = [make((f"h{number}", number)) for number in range(6)]
    gate = threading.Barrier(6)

    def begin(finder: EtcdFinder) -> bool:
        gate.wait(PATIENCE)
        return finder.is_beginner()

    with ThreadPoolExecutor(6) as threads:
        begun = list(threads.map(begin, finders, timeout=PATIENCE))
    assert sum(begun) == 1
    first = begun.index(True)
    assert finders[first].is_beginner(), "it still is"
    assert all(found(finder) == [(f"h{first}", first)] for finder in finders)


def test_where_a_job_runs_nobody_begins(make: Make, listener: Address) -> None:
    one, other = make(listener), make(("h", 1))
    stores = [listener, ("h2", 2)]
    one.show(stores, "token")
    wait_until(lambda: found(other) == stores, "the sign", PATIENCE)
    assert not other.is_beginner()
    time.sleep(etcd_finder.REFUSED_SECONDS + 1.0)
    assert not other.is_beginner(), "somebody listens"


def test_a_newcomer_finds_the_members_that_its_run_directory_names_too(make: Make) -> None:
    assert found(make(("h", 1), earlier=lambda: [("h9", 9)])) == [("h9", 9)]


def test_a_dead_job_is_taken_over_by_one(make: Make, said: list[str]) -> None:
    """None of its stores answers, and no worker renews its sign, though the lease of the sign's writer lasts."""
    dead, finders = make(("127.0.0.1", free_port())), [make(("h", number)) for number in range(3)]
    assert dead.is_beginner()
    dead.show([dead._address], "token")
    wait_until(lambda: dead._address in found(finders[0]), "the sign", PATIENCE)
    for finder in finders:
        assert not finder.is_beginner()
    time.sleep(etcd_finder.REFUSED_SECONDS + 1.0)
    assert not any(finder.is_beginner() for finder in finders), "it is written anew"
    stop(dead)
    deadline = time.monotonic() + PATIENCE
    while not (begun := [finder.is_beginner() for finder in finders]).count(True):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert begun.count(True) == 1
    assert found(finders[0]) == [finders[begun.index(True)]._address]
    assert said == [f"every worker of an earlier start of run id {dead._run_id!r} is gone: a new start begins"]


def stop(finder: EtcdFinder) -> None:
    """As where its process is frozen, or killed: it writes no more."""
    finder._end_turns(PATIENCE)


def test_a_job_that_cannot_be_reached_is_taken_over_when_its_lease_is_over(make: Make, listener: Address) -> None:
    frozen, newcomer = make(listener, lease=5.0), make(("h", 1))
    frozen.show([listener], "token")
    wait_until(lambda: found(newcomer) == [listener], "the sign", PATIENCE)
    stop(frozen)
    assert not newcomer.is_beginner()
    wait_until(newcomer.is_beginner, "the end of its lease", PATIENCE)


def test_two_jobs_of_one_run_id_see_each_other(make: Make, listener: Address) -> None:
    one, other = make(listener), make(("h", 1))
    one.show([listener], "first")
    wait_until(lambda: found(other) == [listener], "the sign", PATIENCE)
    seen: dict[str, Sequence[Address]] = {}

    def both() -> bool:
        one.show([listener], "first")
        other.show([("h", 1)], "second")
        for name, finder in (("one", one), ("other", other)):
            seen[name] = finder.other_jobs() or seen.get(name, ())
        return all(seen.values())

    wait_until(both, "word of each other", PATIENCE)
    assert seen == {"one": (("h", 1),), "other": (listener,)}


def test_a_sign_is_repeated_no_longer_than_somebody_asks_for_it(make: Make, listener: Address) -> None:
    finder = make(listener)
    finder.show([listener], "token")
    finder.keep(has_world=True)
    assert finder._sign is not None
    finder._shown_at -= etcd_finder.FRESH_SECONDS + 1.0
    finder.keep(has_world=False)
    assert finder._sign is None


def test_who_is_headless_writes_a_sign_anew_that_stands_still_and_no_other(make: Make, listener: Address) -> None:
    """Newcomers would take a sign that nobody writes, and whose stores refuse, for that of a dead job; so they would
    none, once the lease of who wrote it last is over."""
    first, headless, newcomer = make(("h", 1), lease=5.0), make(listener), make(("h", 2))
    first.show([("h", 1), listener], "token")
    headless.show([("h", 1), listener], "token", if_missing=True)
    wait_until(lambda: found(newcomer) == [("h", 1), listener], "the sign", PATIENCE)
    time.sleep(3 * etcd_finder.KEEP_SECONDS)
    stop(first)
    wait_until(lambda: found(newcomer) == [listener, ("h", 1)], "its own one", PATIENCE)
    wait_until(lambda: newcomer._etcd.get(first._own.key) is None, "the end of the first one's lease", PATIENCE)
    assert not newcomer.is_beginner()


def test_an_entry_that_has_run_out_is_opened_anew(make: Make, listener: Address, said: list[str]) -> None:
    """All its workers were away for long. Nothing can be claimed there any more; workers that train get a warning."""
    finder = make(listener)
    finder.keep(has_world=True)
    arbiter, before = finder.arbiter(), finder._own.job
    assert arbiter.claim("job", 0, "a") == "a"
    finder._own.store.etcd.revoke(before.lease)
    finder._next_keep = 0.0
    finder.show([listener], "token")
    wait_until(lambda: finder._own.job.prefix != before.prefix, "another entry", PATIENCE)
    wait_until(lambda: found(make(("h", 1))) == [listener], "its sign there", PATIENCE)
    with pytest.raises(ArbiterSilent):
        arbiter.claim("job", 0, "b")
    assert not arbiter.sees("world")
    assert finder.arbiter().claim("job", 0, "b") == "b"
    assert finder.arbiter() is finder.arbiter()
    assert said == [etcd_finder.ENTRY_LOST]


def test_a_warning_that_raises_leaves_no_worker_between_two_entries(make: Make, listener: Address) -> None:
    """Each entry has one arbiter: another one would end one more world."""

    def bound(claims: Claims) -> Arbiter:
        made.append(Bounded(claims))
        return made[-1]

    def warn(text: str) -> None:
        told.append((text, finder.arbiter(), finder._own.job.prefix))
        raise OSError("the disk is full")

    made: list[Arbiter] = []
    told: list[tuple[str, Arbiter, str]] = []
    finder = make(listener, bound=bound, warn=warn)
    finder.keep(has_world=True)
    before = finder._own.job
    assert finder.arbiter() is made[-1]
    finder._own.store.etcd.revoke(before.lease)
    finder._next_keep = 0.0
    wait_until(lambda: finder._own.job.prefix != before.prefix, "another entry", PATIENCE)
    wait_until(lambda: bool(told), "the warning", PATIENCE)
    finder._next_keep = 0.0
    wait_until(lambda: finder._next_keep > 0.0, "a turn after it", PATIENCE)
    assert told == [(etcd_finder.ENTRY_LOST, made[-1], finder._own.job.prefix)]
    assert finder.arbiter() is made[-1]
    assert len(made) == 3, "without an entry, in the first, and in the second"


def test_an_entry_with_a_shorter_lease_than_the_workers_does_not_run_out(
    make: Make, etcd_settings: EtcdSettings, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, seconds = Connections(etcd_settings), 4.0
    with monkeypatch.context() as patch:
        patch.setattr(etcd_job, "MIN_LEASE_SECONDS", seconds)
        shorter = replace(etcd_settings, grace=1.0)
        opened = etcd_job.open_job(Etcd(connections, PATIENCE), shorter, request.node.name, lambda job: job)
    finder = make(("h", 1), lease=600.0)
    assert finder._own.job == opened
    time.sleep(2.5 * seconds)
    entry = Etcd(connections, PATIENCE).get(opened.guard.key)
    connections.close()
    assert entry is not None
    assert entry.create_revision == opened.guard.create_revision
    assert finder._own.job == opened


def entry_of(finder: EtcdFinder) -> Entry | None:
    return finder._etcd.get(finder._own.job.guard.key)


def test_who_is_closed_leaves_the_entry_to_those_of_whom_etcd_has_not_heard_for_long(
    make: Make, listener: Address
) -> None:
    member, newcomer, watcher = make(listener), make(("h", 1)), make(("h", 2))
    for finder in (member, watcher):
        stop(finder)
        finder._etcd.revoke(finder._own.lease)
    assert member.arbiter().claim("job", 0, "a") == "a"
    newcomer.close()
    assert entry_of(watcher) is not None
    assert member.arbiter().claim("job", 0, "b") == "a"


def test_who_is_closed_removes_an_entry_of_the_dead(make: Make) -> None:
    """Their leases last longer than they."""
    killed, last = make(("127.0.0.1", free_port())), make(("h", 1))
    stop(killed)
    job, etcd = last._own.job, Etcd(Connections(last._settings), PATIENCE)
    last.close()
    assert etcd.get(job.guard.key) is None
    assert etcd.below(f"{job.prefix}/")[0] == []


def test_a_keeper_that_outlives_the_end_opens_nothing(make: Make, listener: Address) -> None:
    """A call of its own that etcd did not answer for a while."""
    finder = make(listener)
    stop(finder)
    finder._is_closed = True
    own = finder._own
    own.end(finder._etcd)
    finder._next_keep = 0.0
    finder._turn()
    assert finder._own is own
    assert finder._etcd.below(f"{own.job.prefix}/nodes/")[0] == []
    finder.show([listener], "token")
    finder._turn()
    assert found(finder) == []


def test_who_was_frozen_takes_nobodys_place_again(make: Make, listener: Address) -> None:
    frozen, other = make(listener, lease=3.0), make(("h", 1))
    assert frozen.is_beginner()
    stop(frozen)
    wait_until(other.is_beginner, "the end of its lease", PATIENCE)
    frozen.show([listener], "")
    with suppress(Exception):  # its lease is gone
        frozen._keep_once()
    frozen._open(frozen._etcd)
    frozen._keep_once()
    assert not frozen.is_beginner()
    assert found(frozen) == [("h", 1)]


def test_the_wait_for_a_silent_etcd_can_be_stopped_and_ends_with_the_grace() -> None:
    nowhere = EtcdSettings(("127.0.0.1:1",), grace=1.0)
    named: dict[str, object] = {"uid": "u", "address": ("h", 1), "lease": 5.0, "log": print, "warn": print}

    def stopped() -> None:
        raise Stopped(signal.SIGTERM)

    with pytest.raises(StoreUnreachable, match="does not answer"):
        EtcdFinder(Connections(nowhere), "run", check=lambda: None, **named)  # type: ignore[arg-type]
    with pytest.raises(Stopped):
        EtcdFinder(Connections(replace(nowhere, grace=60.0)), "run", check=stopped, **named)  # type: ignore[arg-type]


REFUSED = StoreRefused("invalid user ID or password", "correct it")


def silent(patch: pytest.MonkeyPatch, error: Exception) -> None:
    def attempt(*_arguments: object) -> None:
        raise error

    patch.setattr(Etcd, "_attempt", attempt)


@pytest.mark.parametrize("error", [Transient("away"), REFUSED], ids=["away", "refuses"])
def test_who_knows_members_asks_them_while_etcd_is_away(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the grace, which begins with the first look that found no host. It begins no job and claims nothing."""
    silent(monkeypatch, error)
    connections, now, said = Connections(EtcdSettings(("127.0.0.1:1",), grace=20.0)), [1000.0], list[str]()
    monkeypatch.setattr(connections, "clock", lambda: now[0])
    monkeypatch.setattr(connections, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    finder = EtcdFinder(
        connections, "run", uid="u", address=("h", 1), lease=5.0, check=lambda: None, log=said.append, warn=said.append,
        earlier=lambda: [("h9", 9)], repeat=lambda _seconds, _turn: lambda _timeout: None,
    )  # fmt: skip
    assert "so this node asks the members that it knows" in said[0]
    with pytest.raises(ArbiterSilent):
        finder.arbiter().claim("job", 0, "a")
    for later, leads_to_a_host in ((1.0, False), (8.0, True), (3600.0, False), (8.0, False), (8.0, False)):
        now[0] += later
        assert list(finder.addresses()) == [("h9", 9)]
        assert leads_to_a_host or not finder.is_beginner()
    now[0] += 8.0
    assert list(finder.addresses()) == [("h9", 9)]
    with pytest.raises((StoreUnreachable, StoreRefused)):
        finder.is_beginner()
    finder.close()


def test_who_knows_members_opens_the_entry_when_etcd_is_back(make: Make, listener: Address) -> None:
    with pytest.MonkeyPatch.context() as patch:
        silent(patch, REFUSED)
        late = make(("h", 1), earlier=lambda: [("h9", 9)])
        assert found(late) == [("h9", 9)]
    running = make(listener)
    running.show([listener], "token")
    wait_until(lambda: found(late) == [listener, ("h9", 9)], "the sign", PATIENCE)
    assert not late.is_beginner()
    assert running.arbiter().claim("job", 0, "a") == "a"
    assert late.arbiter().claim("job", 0, "b") == "a"


@pytest.mark.parametrize("error", [Transient("away"), StoreRefused("etcd's database is full")], ids=["away", "refuses"])
def test_training_goes_on_without_etcd_and_is_told_so_once(
    error: Exception, make: Make, listener: Address, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    finder = make(listener, warn=warned.append)
    finder.keep(has_world=True)
    finder.show([listener], "token")
    with monkeypatch.context() as patch:
        patch.setattr(etcd_finder, "WARN_SECONDS", 0.5)
        silent(patch, error)
        wait_until(lambda: bool(warned), "a warning", PATIENCE)
        assert found(finder) == []
        time.sleep(1.0)
    wait_until(lambda: bool(said), "word of its return", PATIENCE)
    assert ["training goes on without it" in line for line in warned] == [True]
    assert ["etcd answers again" in line for line in said] == [True], "a line, for nothing is wrong any more"


def test_who_trains_is_not_ended_by_a_password_that_is_changed(
    make: Make, listener: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = make(listener)
    with monkeypatch.context() as patch:
        silent(patch, REFUSED)
        assert found(finder) == []
        with pytest.raises(StoreRefused):
            finder.is_beginner()
        finder.keep(has_world=True)
        assert found(finder) == []


# --- claims -----------------------------------------------------------------------------------------------------------


def test_the_first_claim_of_a_generation_stands(make: Make) -> None:
    one, other = make(("h", 1)).arbiter(), make(("h", 2)).arbiter()
    check_first_claim_stands(one, other)


def test_many_claim_at_once_and_all_read_the_same(make: Make) -> None:
    check_all_read_the_same([make(("h", number)).arbiter() for number in range(6)])


def test_a_claim_stands_though_its_reply_was_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make(("h", 1)).arbiter(), make(("h", 2)).arbiter()
    real, lost = Etcd._attempt, list[str]()

    def attempt(self: Etcd, method: object, request: object, give_up_at: float) -> object:
        answer = real(self, method, request, give_up_at)  # type: ignore[arg-type]
        if b"claim-job-0" in request.SerializeToString() and not lost:  # type: ignore[attr-defined]
            lost.append("reply")
            raise Transient("the answer was lost")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Etcd, "_attempt", attempt)
        assert one.claim("job", 0, "a") == "a"
    assert lost
    assert other.claim("job", 0, "b") == "a"


def test_a_shown_name_is_seen_in_that_job_alone(make: Make) -> None:
    one, other = make(("h", 1)).arbiter(), make(("h", 2)).arbiter()
    for number in range(4):
        one.show(f"world{number}")
        one.tidy()
        assert other.sees(f"world{number}")
    assert other.sees("world2"), "members of that world may be about to look"
    assert not other.sees("world0"), "nothing piles up"
    assert not other.sees("another")


def test_old_claims_are_removed_and_count_for_nothing(make: Make) -> None:
    one, frozen = make(("h", 1)).arbiter(), make(("h", 2)).arbiter()
    newest = 2 * OUTDATED + MOST_REMOVED - 1
    for generation in range(newest + 1):
        assert one.claim("job", generation, f"after {generation}") == f"after {generation}"
    one.show("world")
    one.tidy()
    for decision in (None, "its own"):
        assert frozen.claim("job", 0, decision) == f"after {newest}"


def test_an_etcd_that_is_away_is_silent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    finder = make(("h", 1))
    arbiter = finder.arbiter()
    with monkeypatch.context() as patch:
        silent(patch, Transient("away"))
        for ask in (lambda: arbiter.claim("job", 0, "a"), lambda: arbiter.show("world"), lambda: arbiter.sees("world")):
            with pytest.raises(ArbiterSilent):
                ask()
        arbiter.tidy()
    assert arbiter.claim("job", 0, "b") == "b"
