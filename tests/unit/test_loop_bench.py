"""The benchmark of loops, without its measurements."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from elastic_train.tools.bench import loop_speed


def test_a_loader_that_has_ended_since_the_look_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ended:
        gone = psutil.Process(ended.pid)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        there = psutil.Process(alive.pid)
        side = loop_speed.Side.__new__(loop_speed.Side)
        monkeypatch.setattr(side, "_tree", lambda: [gone, there])
        side._signal(signal.SIGKILL)
    assert alive.returncode == -signal.SIGKILL
