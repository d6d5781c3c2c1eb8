"""The vote of one node on what follows one world: an acceptor of single-decree Paxos, kept in a store.

Whoever proposes changes a register by compare-and-swap, so that a member votes even while its own threads do something
else (Lamport, "The Part-Time Parliament", 1998).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_train.protocol.store import KeyValueStore

Ballot = tuple[int, int]
"""(attempt, rank)"""
LAST_ATTEMPT = 10**9
"""of the ballot by which a member that is left out accepts for good"""


@dataclass(frozen=True)
class Register:
    """What one voter has promised and accepted about the successor of one world."""

    promised: Ballot = (0, -1)
    """the largest ballot that it has answered: it accepts nothing below"""
    ballot: Ballot | None = None
    """of what it has accepted"""
    decision: str | None = None

    def to_json(self) -> str:
        return json.dumps([self.promised, self.ballot, self.decision], separators=(",", ":"))

    @staticmethod
    def from_json(text: str | None) -> Register:
        if not text:
            return Register()
        promised, ballot, decision = json.loads(text)
        return Register(tuple(promised), None if ballot is None else tuple(ballot), decision)


def promise(register: Register, ballot: Ballot) -> Register:
    """The first phase."""
    return replace(register, promised=ballot) if ballot > register.promised else register


def accept(register: Register, ballot: Ballot, decision: str) -> Register:
    """The second phase."""
    return Register(ballot, ballot, decision) if ballot >= register.promised else register


def change(store: KeyValueStore, key: str, rule: Callable[[Register], Register]) -> Register:
    """What stands in a register after a rule was applied. Raises: StoreUnreachable; it may be applied all the same."""
    while True:
        text = store.get(key) or ""
        before = Register.from_json(text)
        after = rule(before)
        if after == before or store.swap(key, text, after.to_json()):
            return after
