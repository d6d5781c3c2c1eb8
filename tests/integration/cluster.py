"""Real nodes for tests: each a torchrun process of its own, on this machine, ended by pid when the test is over."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.runlog.reader import newest_first, read_with_torn
from elastic_train.tools.drills.nodes import (
    clean_environment,
    free_port,
    is_listening,
    is_running,
    kill_at_once,
    wait_until,
)
from tests.nodes import Node

if TYPE_CHECKING:
    from elastic_train.storage.snapshot import SnapshotInfo
    from elastic_train.tools.drills.etcd_cluster import EtcdCluster

__all__ = [
    "Cluster",
    "Node",
    "clean_environment",
    "free_port",
    "is_listening",
    "is_running",
    "kill_at_once",
    "running",
    "wait_until",
]

PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]


class Cluster:
    """The nodes of one test: same endpoint, same flags, one working directory."""

    def __init__(self, path: Path, etcd: EtcdCluster | None = None) -> None:
        self.path = path
        self.etcd = etcd
        """where the nodes meet; None: at each other, under c10d"""
        self.port = free_port()
        self.nodes: list[Node] = []

    @property
    def run_dir(self) -> Path:
        return self.path / "run"

    def start(
        self,
        *flags: str,
        nodes: int = 1,
        nnodes: str | None = None,
        nproc: int = 1,
        run_dir: Path | None = None,
        env: dict[str, str] | None = None,
        conf: str | None = None,
        max_restarts: int = 0,
        terminal: int | None = None,
        port: int | None = None,
        program: Sequence[str] = ("-m", "elastic_train"),
    ) -> list[Node]:
        """Start nodes with `-m elastic_train`, or a `program` that takes its flags; returns at once. Another `port`
        makes them a job of their own.

        By default 1:4 nodes; where several are started together, exactly these make the first world, however slowly
        they start. A test in which more come later says so with `nnodes`.
        """
        nnodes = nnodes or (f"1:{nodes}" if nodes > 1 else "1:4")
        if conf is None and nodes > 1:
            conf = self.last_call(60 if nnodes.startswith("1:") else 2)
        endpoint = f"localhost:{port or self.port}" if self.etcd is None else self.etcd.endpoint
        command = [
            *TORCHRUN, f"--rdzv-backend={'etcd3' if self.etcd else 'c10d'}", f"--rdzv-endpoint={endpoint}",
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}", *([f"--rdzv-conf={conf}"] if conf else []),
            *([f"--max-restarts={max_restarts}"] if max_restarts else []),
            *program, "--run-dir", str(run_dir or self.run_dir), *flags,
        ]  # fmt: skip
        return [self.launch(command, env or {}, terminal) for _ in range(nodes)]

    def last_call(self, seconds: int) -> str:
        """`--rdzv-conf` for how long a first world below its maximum waits for more nodes."""
        return f"last_call{'' if self.etcd else '_timeout'}={seconds}"

    def start_alone(self, *flags: str, run_dir: Path | None = None, env: dict[str, str] | None = None) -> Node:
        """Start `python -m elastic_train`, a world of one without torchrun; returns at once."""
        command = [PYTHON, "-m", "elastic_train", "--run-dir", str(run_dir or self.run_dir), *flags]
        return self.launch(command, env or {})

    def launch(self, command: Sequence[str], env: dict[str, str], terminal: int | None = None) -> Node:
        log = self.path / f"node-{len(self.nodes)}.log"
        machine = {"NCCL_HOSTID": log.stem}  # where there is a GPU, the nodes share it as if each had one
        node = Node(command, log, self.path, clean_environment() | machine | env, terminal=terminal)
        self.nodes.append(node)
        return node

    def kill(self) -> None:
        """SIGKILL to every process of every node: all are gone when it returns."""
        kill_at_once(self.nodes)

    def finish(self, nodes: Sequence[Node], code: int = 0, timeout: float = 240.0) -> None:
        """Wait for nodes; every one must exit with `code`."""
        codes = [node.wait(timeout) for node in nodes]
        logs = "\n".join(f"--- {node.log.name}\n{node.text()[-3000:]}" for node in nodes)
        assert codes == [code] * len(nodes), f"exit codes {codes}\n{logs}"

    def end(self) -> None:
        for node in self.nodes:
            node.kill()


# --- what a run left behind -------------------------------------------------------------------------------------------


def lines(directory: Path) -> list[dict[str, Any]]:
    """All whole lines of a directory of JSON-lines files, by time where they have one."""
    found = [line for path in sorted(directory.glob("*.jsonl")) for line in whole_lines(path)]
    return sorted(found, key=lambda line: line.get("time", 0.0))


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that may be written at this moment; AssertionError where one that was ended is torn."""
    torn: dict[int, str] = {}
    found = list(read_with_torn(path, torn))
    assert not torn, f"{path}: {torn}"
    return found


def events(run_dir: Path, name: str | None = None) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "events") if name in (None, line["event"])]


def last_step(run_dir: Path) -> int:
    """The newest committed step that the events show. Cheap enough to be polled."""
    files = (newest_first(path) for path in (run_dir / "events").glob("*.jsonl"))
    return max((next((int(line["step"]) for line in file if line["event"] == "step"), 0) for file in files), default=0)


def wait_for_step(run_dir: Path, step: int, timeout: float = 120.0) -> None:
    """Wait also for the start: several processes import torch, perhaps on a busy machine."""
    wait_until(lambda: last_step(run_dir) >= step, f"step {step}", timeout)


def worlds(run_dir: Path) -> list[tuple[int, int]]:
    """(generation, world size) of every world, in order, as its rank 0 wrote it."""
    return [(event["generation"], event["world_size"]) for event in events(run_dir, "world") if event["rank"] == 0]


def outcomes(run_dir: Path) -> list[str]:
    """How the workers ended, in order."""
    return [str(event["outcome"]) for event in events(run_dir, "done")]


def snapshot_names(run_dir: Path) -> list[str]:
    """What is in `snapshots/` beside its claim: they, oldest first, and whatever should not be there."""
    claim = re.compile(r"owner\.json|\.claim\.lock|\.owner-[^.]+\.lock")
    return sorted(path.name for path in (run_dir / "snapshots").iterdir() if not claim.fullmatch(path.name))


def newest_snapshot(run_dir: Path) -> tuple[SnapshotInfo, dict[str, Any]]:
    """The newest snapshot and its state; AssertionError unless it is whole and all others are too."""
    from elastic_train.storage.snapshot import find_snapshots, first_whole, verify

    def refuse(message: str) -> None:
        raise AssertionError(message)

    for info in find_snapshots(run_dir / "snapshots", warn=refuse):
        verify(info)
    found = first_whole(find_snapshots(run_dir / "snapshots", warn=refuse), refuse)
    assert found is not None, f"no snapshot in {run_dir}"
    return found


def error_line(node: Node) -> str:
    """The one line with which a worker gave up; AssertionError if it printed a traceback or another error."""
    text = node.text()
    assert "Traceback" not in text, text
    found = error_lines(node)
    assert len(found) == 1, text
    return found[0]


def error_lines(node: Node) -> list[str]:
    """The lines with which its workers gave up; torchrun prints a traceback of its own behind them."""
    return [line for line in node.text().splitlines() if line.startswith("elastic_train: error")]


def check_steps(run_dir: Path, steps: int) -> None:
    """Every committed step has one event: none is lost, none is written twice, but for the last one of a process that
    was killed, which may have been alone with it."""
    told, ended = events(run_dir, "step"), {event["pid"] for event in events(run_dir, "done")}
    written = Counter(event["step"] for event in told)
    for step in {event["pid"]: event["step"] for event in told if event["pid"] not in ended}.values():
        written[step] = min(written[step], 1)
    assert written == Counter(range(1, steps + 1))


def result(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "result.json").read_text()))


def check_lines(run_dir: Path) -> None:
    """Every line is whole. SIGKILL may find a process inside the write of its last one, and cut that off: Linux looks
    for a fatal signal between two pages (events.py). Who came to its end has written `done`."""
    for path in [*run_dir.glob("ledger/*.jsonl"), *run_dir.glob("events/*.jsonl")]:
        whole_lines(path)
        has_ended = any(line["event"] == "done" for line in whole_lines(run_dir / "events" / path.name))
        assert path.read_bytes().endswith(b"\n") or not has_ended, f"{path} ends in a torn line"


def check_ledger(run_dirs: Sequence[Path], *, length: int, batch: int, steps: int) -> None:
    """The law of the contract: of each committed step count the lines of its largest generation; in every whole epoch
    every index occurs exactly once."""
    by_step: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for run_dir in run_dirs:
        check_lines(run_dir)
        for line in lines(run_dir / "ledger"):
            if line["step"] <= steps:
                by_step.setdefault(line["step"], {}).setdefault(line["generation"], []).append(line)
    assert sorted(by_step) == list(range(1, steps + 1))
    used: dict[int, Counter[int]] = {}
    for step in range(1, steps + 1):
        newest = by_step[step][max(by_step[step])]
        assert len({line["rank"] for line in newest}) == len(newest), f"step {step}: a rank wrote twice"
        assert len({line["epoch"] for line in newest}) == 1
        indices = [index for line in newest for index in line["indices"]]
        within = (step - 1) % -(-length // batch)
        assert len(indices) == min(batch, length - within * batch), f"step {step}: {len(indices)} samples"
        used.setdefault(newest[0]["epoch"], Counter()).update(indices)
    for epoch, counter in used.items():
        assert max(counter.values()) == 1, f"epoch {epoch}: an index was used twice"
        if (epoch + 1) * -(-length // batch) <= steps:
            assert sorted(counter) == list(range(length)), f"epoch {epoch}: not every index was used"


@contextlib.contextmanager
def running(path: Path, etcd: EtcdCluster | None = None) -> Iterator[Cluster]:
    cluster = Cluster(path, etcd)
    try:
        yield cluster
    finally:
        cluster.end()
