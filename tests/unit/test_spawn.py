"""Workers that --spawn starts, and the signals that it passes on to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.errors import UsageError
from elastic_train.rendezvous import spawn as spawning
from elastic_train.rendezvous.spawn import is_spawner, spawn
from elastic_train.system import AGENT_VARIABLE

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class FakeWorker:
    """Ends by the first signal that it is told; SIGTERM comes while the first one is started."""

    started: list[FakeWorker]

    def __init__(self, *_command: Any, env: dict[str, str], **_kinds: Any) -> None:
        self.told: list[int] = []
        self.environ = env
        if not self.started:
            os.kill(os.getpid(), signal.SIGTERM)
        self.started.append(self)

    def send_signal(self, signum: int) -> None:
        self.told.append(signum)

    def wait(self) -> int:
        return -self.told[0] if self.told else 0


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeWorker]]:
    before = [signal.getsignal(signum) for signum in HANDLED]
    FakeWorker.started = []
    monkeypatch.setattr(spawning, "subprocess", SimpleNamespace(Popen=FakeWorker))  # torch starts processes, too
    yield FakeWorker.started
    for signum, handler in zip(HANDLED, before, strict=True):
        signal.signal(signum, handler)


def test_a_signal_that_comes_while_workers_are_started_reaches_each_once(workers: list[FakeWorker]) -> None:
    """Twice means to end at once."""
    assert spawn(3, []) == 128 + signal.SIGTERM
    assert [worker.told for worker in workers] == [[signal.SIGTERM]] * 3


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_terminal_that_closes_and_a_notice_are_passed_on(
    before: signal.Handlers, signum: signal.Signals, workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not under nohup or `trap '' USR1`, which ignore them; workers, which have no handler, would die."""
    signal.signal(signum, before)
    monkeypatch.setattr(FakeWorker, "wait", lambda _self: os.kill(os.getpid(), signum) or 0)
    assert spawn(1, []) == 0
    assert [worker.told for worker in workers] == [[signal.SIGTERM] + [signum] * (before is signal.SIG_DFL)]


TORCHRUN = {"TORCHELASTIC_RUN_ID": "run", AGENT_VARIABLE: "1 1"}
SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "0"}, {"RANK": "0", "TORCHELASTIC_RUN_ID": "run"}, {"RANK": "1"} | TORCHRUN, SRUN, SRUN | {"RANK": "0"}],
    ids=["another launcher", "torchrun without the hook", "torchrun", "srun", "by hand under srun"],
)
def test_where_a_launcher_starts_workers_none_is_spawned(environ: dict[str, str]) -> None:
    seen = "RANK" if "RANK" in environ else "SLURM_PROCID"
    with pytest.raises(UsageError, match=f"^--spawn 4: a launcher has started this worker already, {seen} is set: "):
        is_spawner(4, environ)


def test_a_terminal_on_a_node_may_spawn() -> None:
    """Of `srun --ntasks-per-node=4 --pty bash`: its shell is the first of four tasks, but no worker."""
    assert is_spawner(4, SRUN | {"SLURM_STEP_ID": "0", "SLURM_TASK_PID": "1", "SLURM_PTY_PORT": "40001"})


def test_workers_know_that_they_are_spawned(workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what their parent hands them; it stands in a batch script of SLURM's, perhaps, or below another run."""
    batch = SRUN | {"SLURM_TASK_PID": "1"}
    for environ in ({}, batch, SRUN | {"SLURM_NTASKS": "1"}, TORCHRUN):
        assert is_spawner(2, environ)
        with monkeypatch.context() as patched:
            for name, value in environ.items():
                patched.setenv(name, value)
            spawn(2, [])
    assert [is_spawner(2, worker.environ) for worker in workers] == [False] * 8
