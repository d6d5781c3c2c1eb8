"""Histories are short: the package's constants fit them. How many were run is in the summary of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.processes import SHORT


@pytest.fixture(autouse=True, scope="package")
def short_history() -> Iterator[None]:
    """In this process; those of `two_processes` set the constants themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SHORT:
            patch.setattr(module, name, value)
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
