"""Copies beside a step, by fakes of CUDA's streams and events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_train.training.state_lock import StepStart


class Gpu:
    """What is done with streams and events, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=self._note("record")))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
        monkeypatch.setattr(torch.cuda, "set_device", self._note("device"))
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: self.calls.append(("stream", stream.device)))

    def _note(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def _stream(self, device: torch.device, priority: int) -> Any:
        return SimpleNamespace(device=device, wait_event=lambda _event: self.calls.append(("wait", priority)))


def test_a_thread_copies_behind_the_beginning_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    device = torch.device("cuda", 1)
    model: Any = SimpleNamespace(parameters=lambda: [SimpleNamespace(is_cuda=True, device=device)] * 2)
    start = StepStart(model)
    start.copy_beside()
    assert gpu.calls == [], "no step has begun"
    start.note()
    start.note()
    start.copy_beside()
    assert gpu.calls == [("record", "that of cuda:1")] * 2 + [("wait", -1), ("device", device), ("stream", device)]


def test_on_the_cpu_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    start = StepStart(torch.nn.Linear(1, 1))
    start.note()
    start.copy_beside()
    assert gpu.calls == []
