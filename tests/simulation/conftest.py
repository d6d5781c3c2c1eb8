"""How many histories were run, in the summary of a run."""

from __future__ import annotations

import pytest


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
