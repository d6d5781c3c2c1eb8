"""The ring's stages and their order, with fake parts that record the calls."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_train.elastic.barriers import Barriers, Surroundings, Waits
from elastic_train.elastic.exits import Exits
from elastic_train.elastic.membership import Change
from elastic_train.elastic.next_world import Survivors
from elastic_train.elastic.restore import Restored
from elastic_train.elastic.resume import Resumed
from elastic_train.elastic.ring import MAX_FRUITLESS_WORLDS, Ring, RingParts
from elastic_train.elastic.whole_steps import ALONE
from elastic_train.errors import FormationFailed, LeftOut, StatesDiffer, Stopped, StoreUnreachable
from elastic_train.protocol.heartbeat import FIRST_SECONDS
from elastic_train.rules import Activity, Failure
from elastic_train.training.state_lock import StateLock
from elastic_train.training.step import NO_VOTES, Outcome, Votes
from elastic_train.world import World
from tests.unit.test_liveness import make_member

PAIR = World(rank=0, generation=0, members=(make_member(0), make_member(1)), uid="pair")
SINGLE = World(rank=0, generation=1, members=(make_member(0),), uid="single")
SPARE = replace(PAIR, rank=1, max_world_size=1, uid="spare")

Script = list[Any]
"""what a part answers, one after the other; exceptions are raised"""


class Thing:
    """Something that is to be let go."""


class Fake:
    """All parts of a ring; each call is noted in `calls`, and answered by a script of its name."""

    def __init__(self, **scripts: Script) -> None:
        self.calls: list[str] = []
        self.told: dict[str, list[dict[str, Any]]] = {}
        self.scripts = scripts
        self.now = 0.0
        self.has_state = False
        self.step_started = 0.0
        self.last_votes = NO_VOTES
        self.was_applied = False
        self.is_open = False
        self.held: weakref.ref[Thing] | None = None
        self.error_of_end: Exception | None = None
        self.device = torch.device("cpu")
        self.environments: list[str] = []
        """worlds that the environment was set for"""
        self.paid_nodes: list[int] = []
        self.could_save: list[str] = []
        """calls during which another thread than this one could have saved the state"""
        self.is_alone_in_error = True
        self.is_told_to_stop = False
        self.is_ready: Callable[[World], bool] = lambda _world: False
        """whether another member has begun a world that waits for nodes"""
        self.when_slept: Callable[[], None] = lambda: None
        self.doing: tuple[Activity | None, float | None] = (None, None)
        """what the others are told, with its limit in seconds"""
        self.state = SimpleNamespace(
            step=0,
            is_finished=False,
            generation=-1,
            generations=0,
            lock=StateLock(),
            clock=SimpleNamespace(enter=lambda _phase: None, count_nodes=self.paid_nodes.append),
        )

    def answer(self, name: str, default: Any = None, **told: Any) -> Any:
        self.calls.append(name)
        self.told.setdefault(name, []).append(told)
        if self.state.lock.acquire(0.0):
            self.could_save.append(name)
            self.state.lock.give_back()
        found = self.scripts[name].pop(0) if self.scripts.get(name) else default
        if isinstance(found, Exception):
            try:
                raise found
            finally:
                del found  # a cycle by way of this frame
        return found

    @contextmanager
    def open_group(self, _world: World, _formed: Any) -> Iterator[None]:
        self.answer("group")
        self.is_open = True
        try:
            yield
        except BaseException:
            self.calls.append("group broken off")
            raise
        finally:
            self.is_open = False
            self.calls.append("group gone")
            if self.error_of_end is not None:
                raise self.error_of_end

    def do(self, activity: Activity, limit: float | None = None) -> None:
        self.doing = activity, limit

    def next_world(self, world: World, **flags: Any) -> tuple[World, Change]:
        assert not self.is_open, "its sockets are closed before the others are asked"
        assert self.held is None or self.held() is None, "what belonged to the world is gone"
        found: tuple[World, Change] = self.answer("agree", (SINGLE, Change(lost=world.members[1:])), **flags)
        return found

    def into(self, _world: World, _change: Change, *, is_formed_ahead: bool) -> Resumed:
        restored = self.answer("into", Restored("scratch", 0, 0) if not self.has_state else None)
        self.has_state = True
        return Resumed(restored, ALONE)

    def run(self, _world: World, _steps: Any, _begin: Any) -> Outcome:
        self.state.step += self.scripts.get("steps", [1]).pop(0) if self.scripts.get("steps") else 1
        outcome: Outcome = self.answer("train", Outcome.FINISHED)
        return outcome

    def ring(self) -> Ring:
        def noting(name: str, default: Any = None) -> Callable[..., Any]:
            return lambda *_values, **told: self.answer(name, default, **told)

        watcher = SimpleNamespace(
            expect=noting("expect"),
            enter=noting("enter"),
            do=self.do,
            announce_broken=noting("broken"),
            thread=SimpleNamespace(check=noting("check the watcher")),
            reason=None,
        )
        job: Any = SimpleNamespace(
            heard=self.heard,
            is_over=lambda: False,
            announcements=SimpleNamespace(
                announce=lambda *_: None, not_ready=lambda world: range(world.world_size - self.is_ready(world))
            ),
            place=SimpleNamespace(show=lambda _world, is_decided: None),
        )
        limits, around = Waits(10.0, 10.0, 10.0), Surroundings(lambda: self.now, self.sleep)
        nothing: Any = None
        membership: Any = SimpleNamespace(
            watcher=watcher,
            side=SimpleNamespace(branch=None),
            job=job,
            joins=SimpleNamespace(take_formed=noting("formed"), is_end_due=True),
            barriers=SimpleNamespace(
                wait_for_workers=noting("wait for workers"),
                wait_for_left_out=noting("wait for left out"),
                stand_by=noting("stand by"),
                wait_for_nodes=Barriers(job, watcher, limits, around, noting("check")).wait_for_nodes,
            ),
            survivors=Survivors(
                job,
                watcher,
                limits,
                around,
                newcomers=nothing,
                check=nothing,
                require_no_better=nothing,
                holds_state=nothing,
                leave=noting("tell that it leaves"),
                log=nothing,
            ),
            next_world=self.next_world,
        )
        worker: Any = SimpleNamespace(
            state=self.state,
            device=self.device,
            config=SimpleNamespace(wait_timeout=10.0),
            stop=SimpleNamespace(check=noting("check"), is_requested=self.is_told_to_stop),
            reporter=SimpleNamespace(debug=lambda text: self.calls.append(text.split(" (")[0]), log=noting("log")),
            reach=lambda _point, _world: None,
            set_environment=lambda world: self.environments.append(world.uid),
            share_cores=lambda _world: None,
        )
        part: Any = SimpleNamespace(
            begin=lambda _state: None,
            run=self.run,
            warm_up=noting("warm up"),
            evaluate_if_missed=lambda _world: None,
            claim=lambda _world, has_state: None,
            finish_claim=lambda: None,
            hold_bucket=noting("hold bucket"),
            enter=lambda _world: None,
            wait=lambda: self.answer("wait for the one in flight", doing=self.doing),
            begins=noting("begins"),
            stands=noting("stands"),
            stands_by=noting("stands by"),
            lost=noting("lost"),
        )
        parts = RingParts(
            find=noting("find", PAIR),
            open_group=self.open_group,
            batches=lambda _world, _first_ranks: (),
            trainer=self,  # type: ignore[arg-type]
            resume=self,  # type: ignore[arg-type]
            files=part,
            saver=part,
            report=part,
            exits=SimpleNamespace(
                finish=lambda _world, outcome, is_saved: self.answer("finish", 0, outcome=outcome, is_saved=is_saved),
                finish_as_spare=noting("finish as spare", 0),
                stop=noting("stop", 143),
                stop_between_worlds=noting("stop between worlds", 143),
                leave=noting("leave", 143),
                fail=self.fail,
            ),  # type: ignore[arg-type]
        )
        return Ring(worker, membership, parts, lambda: self.now)

    def heard(self, _key: str) -> str:
        """The first report of an error of the code that is trained."""
        node = "/".join(map(str, PAIR.me.node)) if self.is_alone_in_error else "another"
        return json.dumps([node, 1, "a bug"])

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.when_slept()

    def fail(self, error: Exception, verdict: Failure, _world: World, *, has_state: bool) -> None:
        self.answer("fail", error=error, verdict=verdict, has_state=has_state)
        raise error

    def warm_up(self) -> None:
        self.answer("warm up")

    def evaluate_if_missed(self, _world: World) -> None:
        pass

    def lose_step(self, _seconds: float) -> None:
        self.answer("lose step")

    def stand_by(self) -> None:
        self.answer("hold a spare's place")

    def drop_wrong_states(self, _world: World, _differ: StatesDiffer, _seconds: float) -> None:
        self.answer("drop wrong states")

    @property
    def stages(self) -> list[str]:
        """The transitions that were logged."""
        return [call.split(" generation")[0] for call in self.calls if " -> " in call]


LOST = FormationFailed("a peer is lost")


def test_a_run_without_a_fault() -> None:
    fake = Fake()
    assert fake.ring().run() == 0
    assert fake.stages == ["meet -> form", "form -> sync", "sync -> train", "train -> finish", "finish -> 0"]
    assert "train -> finish generation=0 rank=0 step=1" in fake.calls
    assert fake.told["finish"] == [{"outcome": "finished", "is_saved": False}]
    assert fake.calls.index("finish") < fake.calls.index("group gone"), "the last collectives need it"


def test_a_lost_peer_leads_to_the_next_world() -> None:
    fake = Fake(train=[LOST, Outcome.FINISHED])
    assert fake.ring().run() == 0
    calls = [call for call in fake.calls if " -> " not in call]
    broken = calls.index("broken")
    assert calls[broken : broken + 6] == ["broken", "group broken off", "group gone", "lose step", "agree", "lost"]
    assert fake.told["agree"] == [{"has_formed": True, "is_by_vote": False, "is_planned": False}]
    assert fake.calls.count("find") == 1


def test_a_peer_lost_before_the_group_stood() -> None:
    fake = Fake(**{"wait for workers": [LOST]})
    assert fake.ring().run() == 0
    assert fake.told["agree"][0]["has_formed"] is False
    assert "meet -> form" in fake.stages
    assert "form -> meet" in fake.stages


@pytest.mark.parametrize("breaks", ["wait for workers", "group", "into"])
def test_what_led_to_a_world_is_noted_wherever_that_breaks(breaks: str) -> None:
    """Whom it has lost the next one does not know: its change is from this one."""
    fake = Fake(**{breaks: [LOST]})
    assert fake.ring().run() == 0
    calls = [call for call in fake.calls if call in ("find", "begins", breaks, "agree", "stands")]
    assert calls == ["find", "begins", breaks, "agree", "begins", breaks, "stands"]


def test_while_others_are_waited_for_a_late_stop_may_save() -> None:
    """They may be in a step, or stuck, for longer than is left."""
    fake = Fake(train=[LOST, LOST, Outcome.FINISHED], agree=[(PAIR, Change())] * 2, formed=[None, object()])
    assert fake.ring().run() == 0
    assert fake.could_save == ["agree", "wait for left out", "group", "agree", "wait for workers", "group"]
    assert not fake.state.lock.acquire(0.0)


def test_before_there_is_a_state_a_late_stop_waits_for_it() -> None:
    fake = Fake(**{"wait for workers": [LOST]})
    assert fake.ring().run() == 0
    assert fake.could_save == []


@pytest.mark.parametrize("stage", ["wait for workers", "into", "train"])
def test_who_is_told_to_stop_while_it_waits_for_the_store_saves(stage: str) -> None:
    """The store of etcd3 says so between two attempts, wherever this thread is by then."""
    fake = Fake(**{stage: [Stopped(15)]}, **{"stop between worlds": [143]})
    fake.has_state = True
    assert fake.ring().run() == 143
    calls = [call for call in fake.calls if call in ("broken", "group broken off", "lose step", "stop between worlds")]
    assert calls == [
        "broken",
        *["group broken off"] * (stage != "wait for workers"),
        "lose step",
        "stop between worlds",
    ]
    assert "fail" not in fake.calls
    assert fake.stages[-1] == "stop -> 143"


def test_a_loader_that_dies_by_the_signal_to_stop_is_no_failure() -> None:
    """torchrun signals the worker's whole process group, and with it the loaders of a user's own DataLoader."""
    died = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")
    fake = Fake(train=[died], **{"stop between worlds": [143]})
    fake.is_told_to_stop = True
    assert fake.ring().run() == 143
    assert "fail" not in fake.calls
    fake = Fake(train=[died])
    with pytest.raises(RuntimeError, match="killed by signal"):
        fake.ring().run()


def test_who_has_no_state_then_has_nothing_to_save() -> None:
    fake = Fake(**{"wait for workers": [Stopped(15)]})
    with pytest.raises(Stopped):
        fake.ring().run()
    assert "stop between worlds" not in fake.calls


def test_what_ends_an_agreement_is_not_judged() -> None:
    fake = Fake(train=[LOST], agree=[StoreUnreachable("the store is gone")])
    with pytest.raises(StoreUnreachable):
        fake.ring().run()
    assert fake.calls.count("broken") == 1, "the lost peer's"


@pytest.mark.parametrize("verdict", [Failure.OWN, Failure.JOB])
def test_an_error_of_the_code_that_is_trained_ends_this_worker(verdict: Failure) -> None:
    error = ValueError("a bug")
    fake = Fake(train=[error])
    fake.is_alone_in_error = verdict is Failure.OWN
    with pytest.raises(ValueError, match="a bug"):
        fake.ring().run()
    assert fake.told["fail"] == [{"error": error, "verdict": verdict, "has_state": True}]
    assert not fake.is_open


@pytest.mark.parametrize("fails_in", ["group", "train"])
def test_a_fault_of_the_own_gpu_is_no_lost_peer_whatever_nccl_calls_it(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By fakes. Taken for a survivor it would be in the next world again, which would not form either."""
    fault = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    told = dist.DistBackendError("NCCL error: unhandled cuda error")

    def query() -> bool:
        raise fault

    fake = Fake(**{fails_in: [told]})
    fake.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(query=query))
    with pytest.raises(RuntimeError, match="uncorrectable"):
        fake.ring().run()
    assert [one["verdict"] for one in fake.told["fail"]] == [Failure.OWN]
    assert fake.told["fail"][0]["error"] is fault
    assert "tell that it leaves" in fake.calls
    assert "agree" not in fake.calls


def test_a_gpu_that_still_works_on_something_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(train=[LOST])
    fake.device = torch.device("cuda", 1)
    asked: list[torch.device] = []

    def current_stream(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(query=lambda: False)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    assert fake.ring().run() == 0
    assert asked == [fake.device]
    assert "lost" in fake.calls


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_what_the_group_s_end_raises_hides_no_error_of_the_code_that_is_trained(kind: type[Exception]) -> None:
    error = kind("CUDA error: uncorrectable ECC error encountered")
    fake = Fake(train=[error])
    fake.error_of_end = dist.DistBackendError("NCCL error: unhandled cuda error")
    with pytest.raises(kind, match="uncorrectable"):
        fake.ring().run()
    assert fake.told["fail"] == [{"error": error, "verdict": Failure.OWN, "has_state": True}]


@pytest.mark.parametrize(("outcome", "is_planned"), [(Outcome.SOME_JOIN, True), (Outcome.SOME_LEAVE, False)])
def test_a_world_that_ends_by_a_vote(outcome: Outcome, is_planned: bool) -> None:
    fake = Fake(train=[outcome, Outcome.FINISHED])
    assert fake.ring().run() == 0
    assert fake.told["agree"] == [{"has_formed": True, "is_by_vote": True, "is_planned": is_planned}]
    assert not {"broken", "lose step", "lost"} & set(fake.calls)


@pytest.mark.parametrize(("wrong", "waits"), [([1], True), ([0, 1], False)])
def test_before_a_snapshot_is_restored_the_one_in_flight_is_there(wrong: list[int], waits: bool) -> None:
    """It would be visible in the midst of that, and its writer delete the one that is read."""
    has_majority = not waits
    fake = Fake(train=[StatesDiffer(wrong, 3, has_majority=has_majority), Outcome.FINISHED])
    fake.ring().run()
    calls = [call for call in fake.calls if call in ("wait for the one in flight", "drop wrong states")]
    assert calls == (["wait for the one in flight"] if waits else []) + ["drop wrong states"]
    told = fake.told.get("wait for the one in flight", [])
    assert told == ([{"doing": (Activity.FORM, FIRST_SECONDS)}] if waits else []), "the others are not to give it up"


def test_who_was_told_to_stop_leaves_alone() -> None:
    fake = Fake(train=[Outcome.SOME_LEAVE])
    fake.last_votes = Votes(told_to_stop=1, leaving=1)
    assert fake.ring().run() == 143
    assert fake.stages[-2:] == ["train -> leave", "leave -> 143"]


def test_all_were_told_to_stop() -> None:
    fake = Fake(train=[Outcome.STOPPED])
    assert fake.ring().run() == 143
    assert fake.calls.index("stop") < fake.calls.index("group gone")


def test_told_to_stop_between_two_worlds() -> None:
    fake = Fake(train=[LOST], agree=[Stopped(15)])
    assert fake.ring().run() == 143
    assert fake.calls[-2] == "stop between worlds"


def test_told_to_stop_before_there_is_a_state() -> None:
    fake = Fake(**{"wait for workers": [LOST]}, agree=[Stopped(15)], check=[Stopped(15)])
    with pytest.raises(Stopped):
        fake.ring().run()
    assert "stop between worlds" not in fake.calls, "there is nothing to save"


def test_a_spare_steps_in() -> None:
    fake = Fake(find=[SPARE], agree=[(SINGLE, Change())], **{"stand by": [None]})
    assert fake.ring().run() == 0
    assert fake.stages[:2] == ["meet -> stand by", "stand by -> meet"]
    assert fake.told["agree"] == [{"has_formed": True, "is_by_vote": False, "is_planned": False}]
    assert fake.environments == ["spare", "single"]


def test_a_spare_is_not_needed() -> None:
    fake = Fake(find=[SPARE], **{"stand by": ["the result"]})
    assert fake.ring().run() == 0
    assert "finish as spare" in fake.calls
    assert "group" not in fake.calls


def test_too_few_nodes_wait_for_others() -> None:
    few = replace(SINGLE, members=(replace(make_member(0), min_nodes=2),))
    back = replace(PAIR, generation=2)
    lost = PAIR.members[1]
    agreed = [(few, Change(lost=(lost,))), (back, Change(joined=(lost,)))]
    fake = Fake(train=[LOST, Outcome.FINISHED], agree=agreed)
    ring = fake.ring()
    assert ring.run() == 0
    broken = fake.stages.index("train -> meet")
    assert fake.stages[broken : broken + 3] == ["train -> meet", "meet -> wait", "wait -> form"]
    assert ring._change.lost == (lost,), "the world that waited has trained nothing"
    assert ring._change.joined == (lost,)
    assert "hold bucket" in fake.calls, "nobody else says that the job lives"
    assert fake.paid_nodes == [1], "those that are gone are not paid while it waits"


def test_where_another_one_gives_up_the_wait_for_nodes_goes_on_and_does_not_begin_anew() -> None:
    """Whose deadline passes first saves and ends: a lost member to the others, who agree on a world that waits."""
    members = tuple(replace(make_member(rank), min_nodes=3) for rank in range(2))
    two, one = replace(PAIR, generation=1, members=members), replace(SINGLE, generation=2, members=members[:1])
    fake = Fake(train=[LOST], agree=[(two, Change()), (one, Change(lost=members[1:]))])
    ring = fake.ring()
    membership: Any = ring._membership
    agree = fake.next_world

    def look() -> None:
        membership.joins.is_end_due = fake.calls.count("agree") == 1 and fake.now > 9.8

    def next_world(world: World, **flags: Any) -> tuple[World, Change]:
        membership.joins.is_end_due = False
        return agree(world, **flags)

    fake.when_slept, membership.next_world = look, next_world
    with pytest.raises(FormationFailed, match="only 1 of at least 3 nodes after 10 s"):
        ring.run()
    assert fake.calls.count("agree") == 2
    assert 10.0 <= fake.now < 10.2


def test_who_waits_for_nodes_notices_that_its_watcher_has_ended() -> None:
    few = replace(SINGLE, members=(replace(make_member(0), min_nodes=2),))
    fake = Fake(train=[LOST], agree=[(few, Change())])
    ring = fake.ring()
    membership: Any = ring._membership
    membership.joins.is_end_due = False

    def check() -> None:
        if fake.now > 3.0:
            raise LeftOut("the job is over")

    membership.watcher.thread.check = check
    with pytest.raises(LeftOut, match="the job is over"):
        ring.run()
    assert fake.now < 3.2, "it waits no longer"


@pytest.mark.parametrize("is_over", [False, True], ids=["it has begun the world", "the job is over"])
@pytest.mark.parametrize(("world", "stage"), [(PAIR, "form"), (SPARE, "stand by")], ids=["a worker", "a spare"])
def test_who_waits_for_nodes_goes_on_with_one_whose_training_is_through(
    world: World, stage: str, *, is_over: bool
) -> None:
    """A death in the last step's reduction: it has ended on one survivor, who needs no more nodes, and not here."""
    few = replace(world, members=tuple(replace(member, min_nodes=3) for member in world.members), uid="few")
    fake = Fake(train=[LOST], agree=[(few, Change())])
    ring = fake.ring()
    membership: Any = ring._membership
    membership.joins.is_end_due = False
    if is_over:
        membership.job.is_over = lambda: fake.now > 3.0
    else:
        fake.is_ready = lambda world: world is few and fake.now > 3.0
    assert ring.run() == 0
    assert f"wait -> {stage}" in fake.stages
    assert fake.now < 3.2
    assert "few" in fake.environments


def test_a_world_that_trains_ends_the_wait_for_nodes() -> None:
    few = replace(SINGLE, members=(replace(make_member(0), min_nodes=2),))
    agreed = [(few, Change()), (PAIR, Change()), (few, Change()), (PAIR, Change())]
    fake = Fake(train=[LOST, LOST, Outcome.FINISHED], agree=agreed)
    ring = fake.ring()
    run = fake.run

    def run_long(world: World, steps: Any, begin: Any) -> Outcome:
        fake.now += 100.0
        return run(world, steps, begin)

    fake.run = run_long  # type: ignore[method-assign]
    assert ring.run() == 0
    assert fake.stages.count("wait -> form") == 2


def test_members_with_other_states_take_over_those_of_most() -> None:
    fake = Fake(train=[StatesDiffer([1], 3, has_majority=True), Outcome.FINISHED])
    assert fake.ring().run() == 0
    assert "drop wrong states" in fake.calls
    assert "broken" not in fake.calls
    assert fake.told["agree"][0]["is_by_vote"] is True, "all have found the same"


def test_worlds_that_commit_nothing_come_to_an_end() -> None:
    fake = Fake(train=[LOST] * 50, steps=[0] * 50, agree=[(PAIR, Change())] * 50)
    with pytest.raises(FormationFailed, match="worlds in a row committed no step; the last error: a peer is lost"):
        fake.ring().run()
    assert fake.calls.count("train") == MAX_FRUITLESS_WORLDS + PAIR.world_size + 2


def test_a_run_that_was_finished_before() -> None:
    fake = Fake(into=[Restored("snapshot", 8, 0)])
    fake.state.is_finished = True
    assert fake.ring().run() == 0
    assert fake.stages[-2:] == ["sync -> finish", "finish -> 0"]
    assert fake.told["finish"] == [{"outcome": "already_finished", "is_saved": True}]


def test_a_newcomer_warms_up_before_it_enters_a_group_that_was_formed_ahead() -> None:
    fake = Fake(formed=[object()])
    assert fake.ring().run() == 0
    calls = [call for call in fake.calls if call in ("wait for workers", "wait for left out", "warm up", "group")]
    assert calls == ["wait for left out", "warm up", "group"]


@pytest.mark.parametrize("fails_in", ["wait for left out", "into"])
def test_a_group_that_was_formed_ahead_is_gone_with_its_world(fails_in: str) -> None:
    thing = Thing()
    fake = Fake(formed=[thing], **{fails_in: [FormationFailed("a peer is lost")]})
    fake.held = weakref.ref(thing)
    del thing
    gc.disable()
    try:
        assert fake.ring().run() == 0
    finally:
        gc.enable()


def test_what_a_step_held_is_gone_where_its_group_ends_with_an_error_too() -> None:
    fake = Fake()

    def run(_world: World, _steps: Any, _begin: Any) -> Outcome:
        if fake.held is not None:
            return Outcome.FINISHED
        thing = Thing()
        fake.held, fake.error_of_end = weakref.ref(thing), FormationFailed("the group does not end")
        raise FormationFailed("a peer is lost")

    fake.run = run  # type: ignore[method-assign]
    ring = fake.ring()
    agree = fake.next_world

    def agree_once(world: World, **flags: Any) -> tuple[World, Change]:
        fake.error_of_end = None
        return agree(world, **flags)

    ring._membership.next_world = agree_once  # type: ignore[method-assign]
    gc.disable()
    try:
        assert ring.run() == 0
    finally:
        gc.enable()
    assert "lost" in fake.calls


def test_what_ends_the_wait_for_nodes_is_not_judged() -> None:
    few = replace(SINGLE, members=(replace(make_member(0), min_nodes=2),))
    fake = Fake(train=[LOST], agree=[(few, Change()), FormationFailed("nobody came")])
    with pytest.raises(FormationFailed, match="nobody came"):
        fake.ring().run()
    assert fake.calls.count("broken") == 1


@pytest.mark.parametrize("way", ["finish", "stop", "leave"])
def test_a_peer_that_is_lost_on_the_way_out_leads_to_the_next_world(way: str) -> None:
    outcome = {"finish": Outcome.FINISHED, "stop": Outcome.STOPPED, "leave": Outcome.SOME_LEAVE}[way]
    fake = Fake(train=[outcome, outcome], **{way: [FormationFailed("a peer is lost")]})
    fake.last_votes = Votes(told_to_stop=1, leaving=1)
    assert fake.ring().run() in (0, 143)
    assert fake.calls.count(way) == 2


def test_a_spare_that_is_told_to_stop_leaves() -> None:
    fake = Fake(find=[SPARE], **{"stand by": [Stopped(15)]})
    assert fake.ring().run() == 143
    assert fake.stages[-2:] == ["stand by -> leave", "leave -> 143"]


@pytest.mark.parametrize(
    ("world", "verdict", "is_saved"),
    [(PAIR, Failure.OWN, False), (PAIR, Failure.JOB, True), (SINGLE, Failure.OWN, True)],
    ids=["of two", "of all", "alone"],
)
def test_who_saves_before_an_error_ends_it(
    world: World, verdict: Failure, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[World] = []
    monkeypatch.setattr(Exits, "_save_for_mended_code", lambda _self, world, _error: saved.append(world))
    exits = object.__new__(Exits)
    with pytest.raises(ValueError, match="a bug"):
        exits.fail(ValueError("a bug"), verdict, world, has_state=True)
    with pytest.raises(Stopped):
        exits.fail(Stopped(15), verdict, world, has_state=True)
    assert bool(saved) is is_saved
    assert len(saved) < 2, "our own errors are none of the code that is trained"
