"""The page and the classes name the same events, with the same fields; and readers ask for no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_train
from elastic_train.runlog import event_types
from elastic_train.runlog.event_types import Event, Warned
from elastic_train.runlog.events import EventLog
from elastic_train.runlog.reader import read_all
from elastic_train.world import World
from tests.unit.test_liveness import make_member

PACKAGE = Path(elastic_train.__file__).parent
PAGE = (PACKAGE / "observe" / "README.md").read_text()
TYPES = [one for one in vars(event_types).values() if isinstance(one, type) and issubclass(one, Event)]
FIELDS = {one.name: set(one.__slots__) for one in TYPES if one is not Event}
WORD = re.compile(r"`([a-z_]+)`")
PROMISED = {
    "start": set(),
    "world": {"cause", "members", "seconds"},
    "step": {"epoch", "loss", "samples_done"},
    "restore": {"source", "restored_step"},
    "snapshot": {"path", "bytes", "stall_seconds", "total_seconds"},
    "peer_lost": set(),
    "signal": set(),
    "warning": set(),
    "done": {"outcome"},
}
"""what users script against: it stays, whatever comes"""
ALWAYS = {"time", "event", "rank", "world_size", "generation", "step", "pid", "host"}
"""the same, of every line"""


def common_words() -> set[str]:
    """Of the paragraph on what every line has."""
    [paragraph] = re.findall(r"^Every line of `events/` has .*?\.$", PAGE, re.MULTILINE | re.DOTALL)
    return set(WORD.findall(paragraph))


def rows() -> Iterator[tuple[str, set[str]]]:
    """(event, fields of its own) of the table; what is between parentheses are values and parts."""
    table = PAGE.split("| event | who writes it, and when | fields of its own |\n")[1].split("\n\n")[0]
    for row in table.splitlines()[1:]:
        event, _, fields = row.strip("| ").split(" | ")
        yield event.strip("`"), set(WORD.findall(re.sub(r"\([^()]*\)", "", fields)))


def test_there_is_one_class_for_each_event() -> None:
    assert len(FIELDS) == len(TYPES) - 1 > 15


def test_the_page_has_every_event_and_every_field_and_no_other() -> None:
    of_step = {"step", "generation"}  # which every line has
    assert dict(rows()) == {event: fields - of_step for event, fields in FIELDS.items()}


def test_the_page_has_what_every_line_has(tmp_path: Path) -> None:
    log = EventLog(tmp_path, host="a", local_rank=0, rank=0, world_size=1)
    members = (make_member(0), make_member(1))
    log.enter(World(0, 1, members, max_world_size=1))
    log.is_noticed, log.quarantines = True, [{"host": "a", "deaths": 3, "until": 1e12}]
    log.write(Warned(message=""))
    log.close()
    [line] = read_all(next(tmp_path.iterdir()))
    assert line.keys() >= ALWAYS
    assert line.keys() - {"message"} <= common_words()
    assert {"nodes", "spare_nodes", "noticed", "quarantined"} <= line.keys()


@pytest.mark.parametrize("event", PROMISED)
def test_what_is_promised_is_there(event: str) -> None:
    assert FIELDS[event] >= PROMISED[event]


def test_readers_ask_for_events_that_there_are() -> None:
    asked = re.compile(r"""(?:\["event"\]|\.get\("event"\)|\bevent) (?:==|!=) "(\w+)"|\bhistory\.of\("(\w+)"\)""")
    found = {name for path in PACKAGE.rglob("*.py") for pair in asked.findall(path.read_text()) for name in pair}
    assert len(found) > 10
    assert found - {""} <= FIELDS.keys()
