"""Audits of the injected faults, and of the recovery and its time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from elastic_train.runlog.reader import read_all
from elastic_train.tools.audit.audit import CheckOutcome
from elastic_train.tools.audit.history import read_history
from elastic_train.tools.audit.lost_time import lost_time
from tests.audits import audit
from tests.drills.planting import (
    drawn,
    events_of,
    fail,
    ledger_of,
    only_failure,
    restart,
    verdicts,
    with_wall,
)
from tests.drills.small_run import (
    LAST_STEP,
    MEMBERS,
    START,
    Line,
    change,
    delay,
    edit_json,
    edit_lines,
    is_of,
    is_second_world,
    mark_as_drill,
    write_lines,
)

# --- incidents and faults ---------------------------------------------------------------------------------------------


def test_an_outage_beyond_its_limit(run_dir: Path) -> None:
    for member in MEMBERS[:2]:
        delay(events_of(run_dir, member), 40, is_of(1))
    edit_json(run_dir / "result.json", lambda result: {**result, **with_wall(result, 42.0)})
    assert "peer_lost before generation 1: 40.50 s without a step, limit 36 s" in only_failure(run_dir, "incidents")


def test_a_join_in_place_that_stands_still(run_dir: Path) -> None:
    """Who is taken in was there before the others stopped."""

    def join(lost: list[str]) -> None:
        members = {"lost_members": lost, "members": [*MEMBERS[:2], "d/0/14"], "joined_members": ["d/0/14"]}
        for member in MEMBERS[:2]:
            change(events_of(run_dir, member), is_second_world, cause="join", **members)

    for member in MEMBERS[:2]:
        delay(events_of(run_dir, member), 40, is_of(1))
    edit_json(run_dir / "result.json", lambda result: {**result, **with_wall(result, 42.0)})
    join([])
    assert "incidents: join before generation 1: 40.50 s without a step, limit 30 s" in audit(run_dir).reasons
    join([MEMBERS[2]])
    assert verdicts(audit(run_dir))["incidents"] is CheckOutcome.PASS, "it may have waited for --min-nodes"


EVALUATION = {"event": "evaluation", "epoch": 1, "accuracy": 0.5}
SNAPSHOT = {"event": "snapshot", "snapshot_step": 5, "path": "/s/5", "stall_seconds": 50.0}


def _with_gaps(run_dir: Path, places: list[tuple[int, int]], said: list[Line]) -> None:
    """50 s before each of some steps (generation, step), and an outage of 40.5 s; rank 0 says something after step 5,
    before the gap that may be there."""
    for member, place in itertools.product(MEMBERS, places):
        delay(
            events_of(run_dir, member), 50, lambda line, place=place: (line["generation"] or 0, line["step"]) >= place
        )
    for member in MEMBERS[:2]:
        delay(events_of(run_dir, member), 40, is_of(1))
    edit_json(run_dir / "result.json", lambda result: {**result, **with_wall(result, 42.0 + 50 * len(places))})

    def say(lines: list[Line]) -> list[Line]:
        at = next(i for i, line in enumerate(lines) if (line["event"], line["step"]) == ("step", 5))
        own = ("time", "monotonic", "rank", "world_size", "generation", "step", "pid", "host")
        return [*lines[: at + 1], *({**{name: lines[at][name] for name in own}, **it} for it in said), *lines[at + 1 :]]

    edit_lines(events_of(run_dir), say)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([(0, 1)], []),
        ([(1, 6)], [EVALUATION]),
        ([(1, 6)], [SNAPSHOT]),
        ([(0, 3), (1, 6)], []),
    ],
    ids=["a first step", "an evaluation", "a snapshot", "what comes again"],
)
def test_what_a_job_stands_still_by_itself_belongs_to_the_limit_of_an_outage(
    run_dir: Path, places: list[tuple[int, int]], said: list[Line]
) -> None:
    """Of one that compiles, or evaluates, for 50 s."""
    _with_gaps(run_dir, places, said)
    assert audit(run_dir).reasons == []
    mark_as_drill(run_dir)
    assert "incidents: peer_lost before generation 1: 40.50 s without a step, limit 36 s" in audit(run_dir).reasons


@pytest.mark.parametrize(
    "said", [[], [{**EVALUATION, "step": 4}], [{**SNAPSHOT, "stall_seconds": 0.1}]], ids=["alone", "evaluated", "saved"]
)
def test_a_hang_within_a_world_widens_no_limit(run_dir: Path, said: list[Line]) -> None:
    """Of 50 s, once, beside an evaluation and a snapshot that take next to none."""
    _with_gaps(run_dir, [(1, 6)], said)
    told = "incidents: peer_lost before generation 1: 40.50 s without a step, limit 36 s"
    assert only_failure(run_dir, "incidents") == told


def test_an_outage_beyond_its_limit_when_the_drill_had_let_its_job_run_free(run_dir: Path) -> None:
    mark_as_drill(run_dir, released=START + 1.4)
    test_an_outage_beyond_its_limit(run_dir)
    assert lost_time(read_history(run_dir)).outages == (), "which is no part of the goodput"


def test_a_restart_that_took_too_long(run_dir: Path) -> None:
    restart(run_dir, 3, "snapshot")
    delay(events_of(run_dir), 700, is_of(2))
    assert verdicts(audit(run_dir))["incidents"] is CheckOutcome.PASS, "its user may have come back late"
    mark_as_drill(run_dir)
    assert any(reason.startswith("incidents: restart before generation 2: 70") for reason in audit(run_dir).reasons)


def test_an_incident_of_which_the_result_says_that_it_took_too_long(run_dir: Path) -> None:
    def lengthen(result: Line) -> Line:
        result["incidents"][0]["seconds"] = {"detect": 40.0}
        return result

    edit_json(run_dir / "result.json", lengthen)
    assert "peer_lost: result.json says 40.00 s, limit 36 s" in only_failure(run_dir, "incidents")


def test_an_incident_of_which_the_result_does_not_tell(run_dir: Path) -> None:
    edit_json(run_dir / "result.json", lambda result: {**result, "incidents": []})
    told = "incidents: peer_lost before generation 1: result.json has no incident of it"
    assert only_failure(run_dir, "incidents") == told
    edit_lines(events_of(run_dir), lambda lines: [line for line in lines if line["event"] != "step"])
    assert told not in audit(run_dir).reasons, "a world that broke at once is told of in the next one's"


def test_an_incident_of_which_the_result_does_not_name_who_was_lost(run_dir: Path) -> None:
    def rename(result: Line) -> Line:
        return {**result, "incidents": [{**result["incidents"][0], "lost_members": ["d/0/14"]}]}

    edit_json(run_dir / "result.json", rename)
    assert only_failure(run_dir, "incidents") == (
        "incidents: peer_lost before generation 1: its incident in result.json does not name c/0/13, lost by the events"
    )


def test_incidents_of_which_the_result_need_not_tell(run_dir: Path) -> None:
    def of_before(result: Line) -> Line:
        """Of a version that noted no generation, and named the lost by other names."""
        one = {name: value for name, value in result["incidents"][0].items() if name != "generation"}
        return {**result, "incidents": [{**one, "lost_members": []}]}

    edit_json(run_dir / "result.json", of_before)
    assert audit(run_dir).passed, audit(run_dir).reasons
    edit_json(run_dir / "result.json", lambda result: {**result, "incidents": []})
    restart(run_dir, 3, "snapshot", 3)
    assert verdicts(audit(run_dir))["incidents"] is CheckOutcome.PASS, "the state of a snapshot is from before it"


def test_a_fault_that_was_got_over_too_late(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    path = run_dir / "drill" / "faults.jsonl"
    edit_lines(path, lambda lines: [lines[0], {**lines[1], "seconds": 15.5}])
    assert "kill of node3): next committed step after 15.50 s, limit 15 s" in only_failure(run_dir, "incidents")


def test_committed_steps_that_were_lost(run_dir: Path) -> None:
    def lose(result: Line) -> Line:
        result["incidents"][0]["committed_steps_lost"] = 2
        return result

    edit_json(run_dir / "result.json", lose)
    assert "peer_lost: 2 committed steps lost" in only_failure(run_dir, "incidents")


def test_only_who_kills_everything_may_lose_committed_steps(run_dir: Path) -> None:
    def restart(result: Line) -> Line:
        result["incidents"][0] |= {"cause": "restart", "committed_steps_lost": 2}
        return result

    edit_json(run_dir / "result.json", restart)
    assert audit(run_dir).passed, "its user may have killed everything"
    mark_as_drill(run_dir)
    assert "restart: 2 committed steps lost" in only_failure(run_dir, "incidents")
    faults = run_dir / "drill" / "faults.jsonl"
    edit_lines(faults, lambda lines: [{**lines[0], **drawn("kill-all")}, lines[1]])
    assert audit(run_dir).passed

    def restart_again(result: Line) -> Line:
        return {**result, "incidents": [*result["incidents"], {**result["incidents"][0], "time": START + 2.3}]}

    edit_json(run_dir / "result.json", restart_again)
    assert "restart: 2 committed steps lost" in only_failure(run_dir, "incidents"), "once was because of it"


def test_a_fault_that_was_not_injected(run_dir: Path) -> None:
    skipped = {"what": "skipped", "number": 0, "time": START, "name": "hang", "reason": "training had ended"}
    mark_as_drill(run_dir, [skipped])
    found = audit(run_dir)
    assert "faults: fault 0 (hang) was not injected: training had ended" in found.reasons
    assert verdicts(found)["losses"] is CheckOutcome.FAIL, "then somebody was lost without it"


def test_a_fault_without_effect(run_dir: Path) -> None:
    mark_as_drill(run_dir, num_faults=2)
    faults = run_dir / "drill" / "faults.jsonl"
    at_b = {"number": 1, "target": "node2", "may_take": ["node2"], "injected_at": START + 1.9}
    edit_lines(faults, lambda lines: [*lines, *({**line, **at_b, "seconds": 0.2} for line in lines)])
    told = "faults: fault 1 (kill of node2) was injected, and b/0/12 trained on in generation 1"
    assert only_failure(run_dir, "faults") == told
    edit_lines(faults, lambda lines: [*lines, {"what": "undone", "number": 1, "time": START + 2.0}])
    assert audit(run_dir).passed, "it was to pass"
    edit_lines(faults, lambda lines: [{**line, "seconds": 0.0} for line in lines if line["what"] != "undone"])
    assert verdicts(audit(run_dir))["faults"] is CheckOutcome.PASS, "its node was in no world"


def test_a_notice_to_a_node_that_was_still_starting(run_dir: Path) -> None:
    """In a trace: the job had recovered, in that very world, as soon as it trained. The node leaves at its deadline."""
    mark_as_drill(run_dir, num_faults=2)
    told = {"number": 1, "target": "node2", "may_take": ["node2"], "injected_at": START + 0.95, "seconds": 0.15}
    edit_lines(run_dir / "drill" / "faults.jsonl", lambda lines: [*lines, *({**line, **told} for line in lines)])
    assert verdicts(audit(run_dir))["faults"] is CheckOutcome.PASS


def test_a_worker_that_failed_although_no_fault_was_injected_there(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    fail(run_dir, MEMBERS[2], 1.4)
    assert audit(run_dir).passed, "it was the fault's target"
    edit_lines(run_dir / "drill" / "faults.jsonl", lambda lines: [{**lines[0], "may_take": ["node2"]}, lines[1]])
    reasons = audit(run_dir).reasons
    assert reasons[1:] == [
        "losses: c/0/13 of node3 failed: AttributeError: x, and no fault was injected there",
        "losses: c/0/13 of node3 was lost before generation 1, and no fault was injected there",
    ]


@pytest.mark.parametrize("told_by", ["world", "peer_lost", "nobody"])
def test_a_worker_that_was_lost_before_a_world_that_never_stood(run_dir: Path, told_by: str) -> None:
    """Generation 1, without c, broke while it formed: a went on alone as generation 2, and b was told to end."""
    a, b, c = MEMBERS
    of_b = {line["step"]: line["indices"] for line in read_all(ledger_of(run_dir, b)) if line["generation"] == 1}

    def go_on_alone(lines: list[Line]) -> list[Line]:
        alone = {"generation": 2, "world_size": 1}
        world = {"members": [a], "lost_members": [b] if told_by == "world" else []}
        lines = [{**line, **world} if is_second_world(line) else line for line in lines]
        lost = next(line for line in lines if line["event"] == "peer_lost")
        also = {**lost, "time": lost["time"] + 0.02, "lost_members": [b], "error": "b/0/12 is silent"}
        if told_by == "peer_lost":
            lines.insert(lines.index(lost) + 1, also)
        return [{**line, **alone} if line["generation"] == 1 else line for line in lines]

    def is_left_out(lines: list[Line]) -> list[Line]:
        lines = [line for line in lines if line["event"] not in ("done", "peer_lost") and not is_second_world(line)]
        cut_off = {**lines[-1], "event": "peer_lost", "time": START + 1.76, "lost_members": [a, c]}
        return [*lines, cut_off, {**cut_off, "event": "done", "outcome": "failed", "error": "LeftOut: by the others"}]

    edit_lines(events_of(run_dir, a), go_on_alone)
    edit_lines(events_of(run_dir, b), is_left_out)
    edit_lines(
        ledger_of(run_dir, a),
        lambda lines: [
            {**line, "generation": 2, "indices": line["indices"] + of_b[line["step"]]} if is_of(1)(line) else line
            for line in lines
        ],
    )
    edit_lines(ledger_of(run_dir, b), lambda lines: list(filter(is_of(0), lines)))

    def tell(result: Line) -> Line:
        return {**result, "incidents": [{**result["incidents"][0], "generation": 2, "lost_members": [c, b]}]}

    edit_json(run_dir / "result.json", tell)
    mark_as_drill(run_dir)
    lost = "losses: b/0/12 of node2 was lost before generation 2, and no fault was injected there"
    assert only_failure(run_dir, "losses") == lost
    for member in MEMBERS[:2]:  # as after a restart, in whose first world nothing has stood yet
        change(events_of(run_dir, member), lambda line: line["event"] == "peer_lost", generation=None)
    assert only_failure(run_dir, "losses") == lost


def test_a_worker_that_stopped_before_a_world_that_never_stood_had_left(run_dir: Path) -> None:
    """Generation 1, without b and c, broke while it formed: a went on alone as generation 2."""
    a, b, _ = MEMBERS
    for member in MEMBERS[:2]:
        change(events_of(run_dir, member), is_of(1), generation=2, world_size=1)
    change(events_of(run_dir, a), lambda line: line["event"] == "world" and line["generation"] == 2, members=[a])

    def stop(lines: list[Line]) -> list[Line]:
        return [*filter(is_of(0), lines), {**lines[-1], "generation": 0, "time": START + 1.5, "outcome": "stopped"}]

    edit_lines(events_of(run_dir, b), stop)
    mark_as_drill(run_dir)
    left = "losses: b/0/12 of node2 left before generation 2, and no fault was injected there"
    assert [reason for reason in audit(run_dir).reasons if reason.startswith("losses")] == [left]
    injected = {"what": "injected", "number": 1, **drawn("stop"), "target": "node2", "step": 3, "limit_seconds": 0.2}
    injected |= {"time": START + 1.4, "injected_at": START + 1.4, "evidence": "gone", "may_take": ["node2"]}
    over = [{"what": "undone", "number": 1, "time": START + 1.4}]
    edit_lines(run_dir / "drill" / "faults.jsonl", lambda lines: [*lines, injected, *over])
    assert verdicts(audit(run_dir))["losses"] is CheckOutcome.PASS, "it left in time, whenever the next world stood"


def test_a_job_that_was_restarted_has_lost_nobody_of_the_one_before(run_dir: Path) -> None:
    """All were killed and started again, without node 3, as generation 2, which broke before it stood: the first world
    of the new processes that stood is 3, and says that a peer was lost."""
    change_to = {member: f"{member[:-2]}2{number}" for number, member in enumerate(MEMBERS, 1)}
    again = [change_to[member] for member in MEMBERS]

    def end(lines: list[Line]) -> list[Line]:
        return [line for line in lines if line["event"] != "done"]

    def live(member: str, number: int) -> list[Line]:
        first, *_ = read_all(events_of(run_dir, member))
        line = {**first, "world_size": 2, "rank": number, "pid": int(again[number].rpartition("/")[2])}
        formed = {**line, "generation": 3, "step": LAST_STEP - 1, "time": START + 5.5}
        world = {
            "cause": "peer_lost",
            "members": again[:2],
            "lost_members": again[2:],
            "left_members": [],
            "seconds": {},
        }
        return [
            {**line, "time": START + 4.5},
            {**line, "time": START + 5.2, "event": "peer_lost", "error": "x", "lost_members": again[2:]},
            {**formed, "event": "world", **world},
            {**formed, "event": "restore", "source": "snapshot", "restored_step": LAST_STEP - 1},
            {**formed, "time": START + 5.8, "step": LAST_STEP, "event": "done", "outcome": "finished"},
        ]

    lives = {again[number]: live(member, number) for number, member in enumerate(MEMBERS)}
    lives[again[2]] = lives[again[2]][:1]
    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), end)
    for member, lines in lives.items():
        write_lines(events_of(run_dir, member), lines)
    faults: list[Line] = []
    for number, (name, time, nodes) in enumerate(
        [("kill", 1.35, ["node3"]), ("kill-all", 3.0, ["node1", "node2"]), ("kill", 5.1, ["node3"])]
    ):
        injected = {"what": "injected", "number": number, **drawn(name), "target": ",".join(nodes), "may_take": nodes}
        injected |= {"step": 3, "limit_seconds": 600.0, "time": START + time, "injected_at": START + time}
        faults += [injected, {"what": "recovered", "number": number, "time": START + time + 0.5, "seconds": 0.5}]
    mark_as_drill(run_dir, faults, num_faults=3)

    def start_again(lines: list[Line]) -> list[Line]:
        ends = {"node1": 3.01, "node2": 3.01, "node3": 1.36}
        lines = [
            {**line, "time": START + ends[line["node"]], "code": -9} if line["what"] == "ended" else line
            for line in lines
        ]
        for number, member in enumerate(again, 1):
            node, is_lost = {"node": f"node{number}"}, member == again[2]
            lines.append({**node, "time": START + 4.0, "what": "started"})
            lines.append({**node, "time": START + 4.6, "what": "worker", "member": member})
            end, code = (5.11, -9) if is_lost else (6.0, 0)
            lines.append({**node, "time": START + end, "what": "ended", "code": code})
        return lines

    edit_lines(run_dir / "drill" / "nodes.jsonl", start_again)
    assert verdicts(audit(run_dir))["losses"] is CheckOutcome.PASS, audit(run_dir).reasons
    edit_lines(run_dir / "drill" / "faults.jsonl", lambda lines: [line for line in lines if line["number"] != 2])
    assert [reason for reason in audit(run_dir).reasons if reason.startswith("losses")] == [
        "losses: c/0/23 of node3 was lost before generation 3, and no fault was injected there",
        "losses: node3 ended with code -9, and no fault was injected there",
    ]


def test_a_fault_accounts_for_no_later_loss_of_its_node(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    edit_lines(
        run_dir / "drill" / "nodes.jsonl",
        lambda lines: [*lines, {"time": START + 1.6, "what": "started", "node": "node3"}],
    )
    assert "was lost before generation 1" in only_failure(run_dir, "losses"), "it had been started again"


def test_a_node_that_was_expelled_by_a_fault_that_is_to_pass(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    faults = run_dir / "drill" / "faults.jsonl"
    undone = {"what": "undone", "number": 0, "time": START + 1.5}
    edit_lines(faults, lambda lines: [{**lines[0], **drawn("pause"), "may_take": []}, undone, lines[1]])
    assert "c/0/13 of node3 was lost before generation 1" in only_failure(run_dir, "losses")


def test_a_standstill_is_that_of_the_next_fault_from_its_injection_on(run_dir: Path) -> None:
    """`slow` is undone between two steps, and the second of them is held up by what is injected then."""
    kill = {"what": "injected", "number": 1, "name": "kill", "step": 3, "limit_seconds": 15.0, "may_take": ["node3"]}
    slow = {**kill, "number": 0, **drawn("slow"), "may_take": []}

    over = [{"what": "recovered", "number": number, "time": START + 1.9, "seconds": 0.55} for number in (0, 1)]
    undone = {"what": "undone", "number": 0, "time": START + 1.32}
    injected = [{**fault, "time": at, "injected_at": at} for fault, at in ((slow, START + 1.0), (kill, START + 1.35))]
    mark_as_drill(run_dir, [*injected, undone, *over], num_faults=2)

    for member in MEMBERS:
        delay(events_of(run_dir, member), 5, lambda line: line["time"] > START + 1.35)
    assert "slow" not in "\n".join(audit(run_dir).reasons)
    change(run_dir / "drill" / "faults.jsonl", lambda line: line.get("name") == "kill", injected_at=START + 5.0)
    assert "losses: fault 0 (slow of ): 3." in "\n".join(audit(run_dir).reasons)


def test_a_standstill_while_an_etcd_member_is_away(run_dir: Path) -> None:
    kill = {"what": "injected", "number": 0, "name": "kill", "step": 3, "limit_seconds": 15.0, "may_take": ["node3"]}
    away = {**kill, "number": 1, "name": "kill-etcd", "may_take": [], "time": START + 2.05, "injected_at": START + 2.05}
    over = [{"what": "recovered", "number": number, "time": START + 1.9, "seconds": 0.55} for number in (0, 1)]
    undone = {"what": "undone", "number": 1, "time": START + 5.05}
    mark_as_drill(
        run_dir, [{**kill, "time": START + 1.35, "injected_at": START + 1.35}, away, undone, *over], num_faults=2
    )
    assert audit(run_dir).passed, audit(run_dir).reasons

    for member in MEMBERS[:2]:
        delay(events_of(run_dir, member), 5, lambda line: line["time"] > START + 2.05)
    told = "losses: fault 1 (kill-etcd of ): {} s without a step while it lasted, limit 1.20 s"
    assert told.format("5.10") in audit(run_dir).reasons
    change(events_of(run_dir), lambda line: (line["event"], line["step"]) == ("step", 6), time=START + 2.1)
    assert told.format("5.10") in audit(run_dir).reasons, "that one had been in hand"
    change(run_dir / "drill" / "faults.jsonl", lambda line: line.get("name") == "kill-etcd", **drawn("slow"))
    assert "fault 1 (slow of ): 5.10 s without a step" in "\n".join(audit(run_dir).reasons)
    delay(events_of(run_dir), -2, lambda line: line["event"] == "step" and line["step"] > 6)
    assert verdicts(audit(run_dir))["losses"] is CheckOutcome.PASS, "a step may take as long as its slowest worker"


@pytest.mark.parametrize(("standstill", "passes"), [(3.0, False), (5.0, True)])
def test_a_job_may_stand_still_by_itself_while_a_fault_passes(run_dir: Path, standstill: float, passes: bool) -> None:
    """A hiccup of a loader, an evaluation: the job's, and none of the fault's."""
    away = {"what": "injected", "number": 0, "name": "kill-etcd", "step": 3, "limit_seconds": 15.0, "may_take": []}
    over = {"what": "recovered", "number": 0, "time": START + 1.9, "seconds": 0.55}
    kill = {
        **away,
        "number": 1,
        "name": "kill",
        "may_take": ["node3"],
        "time": START + 1.35,
        "injected_at": START + 1.35,
    }
    lines = [
        kill, {**over, "number": 1}, {**away, "time": START + 2.05, "injected_at": START + 2.05}, over,
        {"what": "undone", "number": 0, "time": START + 5.05},
    ]  # fmt: skip
    mark_as_drill(run_dir, lines, num_faults=2, standstill=standstill)
    for member in MEMBERS[:2]:
        delay(events_of(run_dir, member), 5, lambda line: line["time"] > START + 2.05)
    assert (verdicts(audit(run_dir))["losses"] is CheckOutcome.PASS) is passes


@pytest.mark.parametrize(("standstill", "passes"), [(4.0, False), (5.0, True)])
def test_what_a_job_takes_by_itself_belongs_to_the_limit_of_an_outage(
    run_dir: Path, standstill: float, passes: bool
) -> None:
    for member in MEMBERS[:2]:
        delay(events_of(run_dir, member), 40, is_of(1))
    kill = {"what": "injected", "number": 0, "name": "kill", "step": 3, "limit_seconds": 60.0, "may_take": ["node3"]}
    over = {"what": "recovered", "number": 0, "time": START + 41.9, "seconds": 40.55}
    mark_as_drill(run_dir, [{**kill, "time": START + 1.35, "injected_at": START + 1.35}, over], standstill=standstill)
    assert (verdicts(audit(run_dir))["incidents"] is CheckOutcome.PASS) is passes


def test_a_node_that_ends_without_a_fault_between_worlds_of_new_processes(run_dir: Path) -> None:
    mark_as_drill(run_dir, [])

    def start_anew(lines: list[Line]) -> list[Line]:
        anew = {"cause": "start", "lost_members": []}
        return [{**line, **anew} if is_second_world(line) else line for line in lines if line["event"] != "peer_lost"]

    for member in MEMBERS[:2]:
        edit_lines(events_of(run_dir, member), start_anew)
    nodes = run_dir / "drill" / "nodes.jsonl"
    for time, code in ((1.6, 1), (1.6, 0), (3, 1)):
        edit_lines(
            nodes,
            lambda lines, end={"time": START + time, "code": code}: [
                {**line, **end} if (line["what"], line["node"]) == ("ended", "node3") else line for line in lines
            ],
        )
        reason = f"losses: node3 ended with code {code}, and no fault was injected there"
        assert reason in audit(run_dir).reasons


def test_a_node_that_was_to_stop_and_crashed(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    edit_lines(run_dir / "drill" / "faults.jsonl", lambda lines: [{**lines[0], **drawn("stop")}, lines[1]])
    crashed = "fault 0 (stop of node3): c/0/13 was asked to leave, and was lost"
    assert crashed in only_failure(run_dir, "losses")

    def stop(lines: list[Line]) -> list[Line]:
        return [*lines, {**lines[-1], "event": "done", "time": START + 1.5, "outcome": "stopped"}]

    edit_lines(events_of(run_dir, MEMBERS[2]), stop)
    assert crashed in only_failure(run_dir, "losses"), "the others went on without it all the same"
    for member in MEMBERS[:2]:
        change(events_of(run_dir, member), is_second_world, cause="leave", lost_members=[], left_members=[MEMBERS[2]])
    assert audit(run_dir).passed, audit(run_dir).reasons


@pytest.mark.parametrize("name", ["drill.json", "nodes.jsonl", "faults.jsonl"])
def test_a_drill_whose_files_are_gone(run_dir: Path, name: str) -> None:
    mark_as_drill(run_dir)
    (run_dir / "drill" / name).unlink()
    assert f"faults: drill/{name} is missing or torn" in audit(run_dir).reasons


def test_a_drill_whose_settings_are_torn(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    (run_dir / "drill" / "drill.json").write_text('{"seed": 1, "num_')
    assert "drill/drill.json is missing or torn" in only_failure(run_dir, "faults")


def test_a_fault_of_which_a_line_is_missing(run_dir: Path) -> None:
    mark_as_drill(run_dir)
    edit_lines(run_dir / "drill" / "faults.jsonl", lambda lines: lines[1:])
    reasons = audit(run_dir).reasons
    assert "faults: drill/faults.jsonl lacks the line that says what fault 0 was" in reasons
    assert not any("None" in reason for reason in reasons)


def test_a_drill_that_was_interrupted_says_so_first(run_dir: Path) -> None:
    mark_as_drill(run_dir, interrupted=True, num_faults=3)
    assert audit(run_dir).reasons[0].startswith("end: the drill was interrupted")


# --- the time ---------------------------------------------------------------------------------------------------------


def test_phases_that_do_not_sum_to_the_wall(run_dir: Path) -> None:
    def lose(result: Line) -> Line:
        result["goodput"]["train"] -= 0.2
        return result

    edit_json(run_dir / "result.json", lose)
    assert "the phases sum to 2.400 s, the wall is 2.600 s" in only_failure(run_dir, "phases")


@pytest.mark.parametrize(
    ("name", "told", "says"),
    [("wall", 12345.0, "the wall is 12345, and it is 2.6"), ("ratio", 0.99, "the ratio is 0.99, and it is 0.384615")],
)
def test_a_goodput_that_is_not_of_its_phases(run_dir: Path, name: str, told: float, says: str) -> None:
    edit_json(run_dir / "result.json", lambda result: {**result, "goodput": {**result["goodput"], name: told}})
    assert only_failure(run_dir, "phases") == f"phases: goodput says that {says}"


def test_a_wall_that_forgets_a_part_of_the_run(run_dir: Path) -> None:
    for member in MEMBERS[:2]:
        delay(events_of(run_dir, member), 10, is_of(1))
    assert "the wall is 2.6 s, but the events span" in only_failure(run_dir, "phases")


def test_a_wall_beyond_the_whole_run(run_dir: Path) -> None:
    edit_json(run_dir / "result.json", lambda result: {**result, **with_wall(result, 130.0)})
    assert "the wall is 130.0 s, but the startup and all events together span 4.1 s" in only_failure(run_dir, "phases")
    mark_as_drill(run_dir)
    assert "the wall is 130.0 s, but the startup and all events together span 2.5 s" in "".join(audit(run_dir).reasons)


def test_lost_time_sums_to_the_wall_and_names_the_cause(run_dir: Path) -> None:
    lost = lost_time(read_history(run_dir))
    assert lost.wall == pytest.approx(1.1)
    assert lost.useful == pytest.approx(0.6)
    assert lost.by_cause["peer_lost"] == pytest.approx(0.5)
    assert lost.useful + sum(lost.by_cause.values()) == pytest.approx(lost.wall)
    assert lost.ratio == pytest.approx(0.6 / 1.1)


def test_the_pace_that_a_drill_sets_is_no_lost_time(run_dir: Path) -> None:
    """Ten times as slow for the last third of the steps."""

    def go_on(lines: list[Line]) -> list[Line]:
        last = next(line for line in reversed(lines) if line["event"] == "step")
        times = [0.1 * n for n in range(1, 21)] + [2.0 + 1.0 * n for n in range(1, 11)]
        steps = [
            {**last, "step": LAST_STEP + n, "time": last["time"] + time, "epoch": (LAST_STEP + n - 1) // 3}
            for n, time in enumerate(times, start=1)
        ]
        return [*lines, *steps]

    edit_lines(events_of(run_dir), go_on)
    mark_as_drill(run_dir)
    assert lost_time(read_history(run_dir)).ratio < 0.5
    slower = START + 1.0 + 0.1 * LAST_STEP + 0.5 + 1.95
    edit_json(run_dir / "drill" / "drill.json", lambda found: {**found, "paces": [(START, 0.01), (slower, 0.1)]})
    lost = lost_time(read_history(run_dir))
    assert lost.wall - lost.useful == pytest.approx(0.5, abs=1e-3)
    assert lost.by_cause["slow steps"] == pytest.approx(0.0, abs=1e-3)


def test_an_evaluation_after_the_release_of_a_drill_is_none_of_its_lost_time(run_dir: Path) -> None:
    mark_as_drill(run_dir, released=START + 2.3)
    edit_json(
        run_dir / "result.json",
        lambda result: {**result, "goodput": {**result["goodput"], "train": 0.9, "evaluate": 0.1}},
    )

    def evaluate(time: float) -> None:
        edit_lines(
            events_of(run_dir), lambda lines: [*lines, {**lines[0], "event": "evaluation", "time": START + time}]
        )

    evaluate(2.35)
    delay(events_of(run_dir), 0.1, lambda line: line["step"] >= 6)
    assert "evaluation" not in lost_time(read_history(run_dir)).by_cause
    evaluate(2.05)
    assert lost_time(read_history(run_dir)).by_cause["evaluation"] == pytest.approx(0.05)
