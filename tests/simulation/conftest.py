"""Histories are short: the package's constants fit them. How many were run is in the summary of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_train.elastic import joins, next_world
from elastic_train.protocol import arbiter, known_worlds


@pytest.fixture(autouse=True, scope="package")
def short_history() -> Iterator[None]:
    """Longer polls make fewer events. A history has few worlds, and old ones are to be removed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(next_world, "POLL_SECONDS", 0.02)
        patch.setattr(next_world, "SPARE_POLL_SECONDS", 0.1)
        patch.setattr(joins, "QUEUE_POLL_SECONDS", 0.1)
        patch.setattr(arbiter, "OUTDATED", 1)
        patch.setattr(arbiter, "OLD_SECONDS", 3.0)
        patch.setattr(known_worlds, "KEPT_DECISIONS", 1)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what tests have recorded as `histories`."""
    told = [
        text
        for report in terminalreporter.stats.get("passed", ())
        for name, text in report.user_properties
        if name == "histories"
    ]
    if told:
        terminalreporter.section("histories")
        for text in sorted(told):
            terminalreporter.line(text)
