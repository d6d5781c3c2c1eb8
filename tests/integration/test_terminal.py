"""The output at terminals: one progress bar, on the terminal of rank 0, and never a silent screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.integration.cluster import PYTHON, Cluster, events, free_port, outcomes, wait_until, worlds
from tests.integration.test_own_loop import SCRIPT
from tests.processes import cpu_seconds_of_torch

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Screen:
    """A terminal and everything that was ever printed on it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self._bytes = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # the last one to hold the slave has closed it
                return
            self._bytes += data

    @property
    def raw(self) -> str:
        return self._bytes.decode(errors="replace")

    @property
    def text(self) -> str:
        return ESCAPE.sub("", self.raw)

    def close(self) -> None:
        os.close(self.slave)
        self._thread.join(10)
        os.close(self._master)


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    made = [Screen(), Screen()]
    yield made
    for screen in made:
        screen.close()


@pytest.mark.slow
def test_one_bar_on_the_terminal_of_rank_0(cluster: Cluster, screens: list[Screen]) -> None:
    flags = ("--max-steps", "200", "--snapshot-every", "20")
    nodes = []
    for host, screen in zip(("a", "b"), screens, strict=True):
        started_at = time.monotonic()
        env = {"TERM": "xterm-256color"}
        [node] = cluster.start(*flags, nnodes="2:4", run_dir=cluster.path / host, env=env, terminal=screen.slave)
        nodes.append(node)
        agent = psutil.Process(node.process.pid)
        wait_until(lambda screen=screen: "meeting at" in screen.text, "announcement")
        took = time.monotonic() - started_at
        busy = agent.cpu_times()
        # On a machine that is busy with other things the seconds of this process count, and how slow it makes torch.
        assert took < 3 or busy.user + busy.system < max(3.0, 2 * cpu_seconds_of_torch()), f"silent for {took:.1f} s"
        assert f"localhost:{cluster.port}" in screen.text
        assert "2 to 4 nodes" in screen.text
        assert "training starts 2 s after 2 nodes have come" in screen.text
    cluster.finish(nodes)
    [rank_0] = [host for host in "ab" if events(cluster.path / host, "step")]
    speaker, other = screens if rank_0 == "a" else screens[::-1]

    assert worlds(cluster.path / rank_0) == [(0, 2)]
    assert "in world generation=0 as rank 1 of 2" in other.text
    assert re.search(r"rank 0 on \S+ reports", other.text)
    bar = re.compile(r"epoch (\d+)/30 .*?(\d+)/1437 step (\d+) +loss \d\.\d{4} +[\d,]+ samples/s +(\d) workers?")
    drawn = bar.findall(speaker.text)
    assert len(drawn) >= 2, speaker.text[-3000:]
    assert drawn[-1][2] == "200"
    assert {shown[3] for shown in drawn} == {"2"}
    assert re.search(r"snapshot step \d+", speaker.text)
    assert "test accuracy" in speaker.text
    assert "loss" not in other.text
    assert not bar.search(other.text)
    assert "error" not in speaker.text + other.text
    # the cursor, which the bar hides, is given back
    assert speaker.raw.count("\x1b[?25l") == speaker.raw.count("\x1b[?25h") >= 1


PRINTING = "import time; time.sleep(0.02); print('step', training.state.step + 1, flush=True)"


@pytest.mark.slow
def test_terminals_that_close_end_no_more_than_their_nodes(cluster: Cluster) -> None:
    """A loop of one's own prints in each step. That fails there, and with it the same step on two members: no reason
    for the third to take the job for broken."""
    script = cluster.path / "script.py"
    script.write_text(SCRIPT.replace("BEFORE_COMMIT", PRINTING))
    command = [
        PYTHON,
        str(script),
        "--run-dir",
        str(cluster.run_dir),
        "--epochs",
        "100000",
        "--global-batch-size",
        "16",
    ]
    where = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    terminals = [pty.openpty() for _ in range(2)]
    third = cluster.launch(command, where | {"RANK": "0"})
    nodes = [
        cluster.launch(command, where | {"RANK": str(rank)}, terminal=slave)
        for rank, (_, slave) in enumerate(terminals, 1)
    ]
    for screen, slave in terminals:
        os.set_blocking(screen, False)
        os.close(slave)

    def have_printed() -> bool:
        for screen, _ in terminals:
            with suppress(BlockingIOError):
                os.read(screen, 65536)
        return max((event["step"] for event in events(cluster.run_dir, "step")), default=0) >= 10

    wait_until(have_printed, "ten steps", 60)
    for node in nodes:  # a print between the two would fail as ever
        node.signal(signal.SIGSTOP)
    for screen, _ in terminals:
        os.close(screen)
    for node in nodes:
        node.signal(signal.SIGHUP)
        node.signal(signal.SIGCONT)
    cluster.finish(nodes, code=129, timeout=60)
    wait_until(lambda: worlds(cluster.run_dir)[-1] == (1, 1), "the third trains on")
    third.signal(signal.SIGTERM)
    cluster.finish([third], code=143, timeout=60)
    assert [event["signal"] for event in events(cluster.run_dir, "signal")] == ["SIGHUP", "SIGHUP", "SIGTERM"]
    assert outcomes(cluster.run_dir) == ["stopped"] * 3
