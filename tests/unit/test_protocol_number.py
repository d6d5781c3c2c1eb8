"""The number of the protocol: builds of one version with different numbers refuse each other."""

from __future__ import annotations

import hashlib
from dataclasses import fields

from elastic_train.branches import Branch, Position
from elastic_train.elastic.membership import versions
from elastic_train.protocol.agreement import Decision, Presence
from elastic_train.protocol.arbiter import Claim
from elastic_train.protocol.ballots import Register, Vote
from elastic_train.protocol.heartbeat import Heartbeat, head_of
from elastic_train.protocol.join_queue import Waiting
from elastic_train.protocol.laws import Voters
from elastic_train.protocol.neighbours import Hearing
from elastic_train.protocol.plan import Plan
from elastic_train.rules import Activity
from elastic_train.training.step import Votes
from elastic_train.version import PROTOCOL
from elastic_train.world import Member, World

TOLD = [Heartbeat, Presence, Decision, Member, Waiting, Register, Voters, Claim, Branch, Position, Plan]
FORMATS = {
    1: "902a7333e18cfb21",
    2: "bbd0d6e08d2f44ef",
    3: "962980790e34a910",
    4: "962980790e34a910",
    5: "51ef7a2c442ce2e5",
    6: "c9938e0fe2828198",
}
"""by number: the digest of all that is told; 4: the key under which the end of a job is told is another"""


def what_is_told() -> str:
    """By the fields of each kind, with their types, and by examples of the lines."""
    lines = [f"{kind.__name__}: {[(one.name, one.type) for one in fields(kind)]}" for kind in TOLD]
    lines += [f"votes: {Votes._fields}", f"activities: {list(Activity)}", f"vote: {list(Vote)}"]
    world = World(0, 3, (Member("host", 0, 7, 1, ("127.0.0.1", 1), "run", "gloo", None),) * 2, None, "w3")
    heartbeat = Heartbeat(3, Activity.REDUCE, 0.031, 10.2, 0.044, (7, 512))
    heads = [head_of(world, None), head_of(world, {}, is_by_vote=True), head_of(world, {1: "host/0/7 (rank 1) died"})]
    lines += [heartbeat.to_line(head) for head in heads]
    one, other = (Hearing(uid, lambda _: True) for uid in "ab")
    for hearing, uid in ((one, "b"), (other, "a")):
        hearing.canary_port, hearing.status = 5, "status"
        hearing.watch([(uid, ("127.0.0.1", 1))], "w3", None)
    lines += [one.ping(one.watched["b"]), other.answer("P a w3 7 status")[0], other.answer("P a w4 8 status")[0]]
    return "\n".join([*lines, other.answer("C")[0]])


def test_a_format_that_has_changed_has_another_number() -> None:
    told = what_is_told()
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    assert FORMATS.get(PROTOCOL) == digest, f"raise PROTOCOL in version.py, and note {digest} for it here: {told}"


def test_members_compare_it_before_they_hear_each_other() -> None:
    assert str(PROTOCOL) in versions().values()
