"""A membership that has only the parts that a test gives it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastic_train.elastic.membership import Membership
from elastic_train.world import Member


def bare_membership(job: Any, me: Member, watcher: Any = None, limits: Any = None, **parts: Any) -> Membership:
    """`me` alone on its node, in a job of eight nodes at most; `parts` are those of `Membership`."""
    assert me.store is not None, "every member serves one"
    given = {
        "check": lambda: None,
        "answering": lambda members: members,
        "sockets": None,
        "group_store": None,
    } | parts
    return Membership(
        job,
        watcher or SimpleNamespace(),
        limits,
        uid=me.uid,
        address=me.address,
        store_address=me.store,
        local_world_size=1,
        max_nodes=8,
        log=lambda _text: None,
        **given,
    )
