"""Real nodes in network namespaces, with run directories of their own: only votes decide which side goes on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_train.storage.snapshot import find_snapshots
from elastic_train.tools.audit.audit import Audit
from elastic_train.tools.audit.node_directories import as_one_run
from elastic_train.tools.audit.record import PACE_FILE, PACE_VARIABLE, set_pace
from elastic_train.tools.drills.backends import C10d
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import clean_environment, dying_with_parent, wait_until
from tests.audits import audit
from tests.integration.cluster import events
from tests.nodes import Node

TRAIN_SECONDS = 300.0
"""for the start of some nodes on a busy machine"""


class Apart:
    """The nodes of one job.

    Args:
        launcher: what starts a node, before its program; by default torchrun under c10d, with the addresses of all.
        num_steps: that a world must commit before the next thing happens.
        is_shared: whether they have one run directory.
    """

    def __init__(
        self,
        network: Network,
        path: Path,
        flags: Sequence[str],
        *,
        num_steps: int,
        launcher: Sequence[str] = (),
        is_shared: bool = False,
    ) -> None:
        self.network, self.path = network, path
        self.run_dirs = [path / ("run" if is_shared else f"run{index}") for index in range(network.num_nodes)]
        self._flags, self._num_steps = flags, num_steps
        self._launcher = launcher or C10d(network).launcher(0, network.num_nodes, 1)
        self._pace_file = path / PACE_FILE
        self.nodes: dict[int, Node] = {}

    def set_pace(self, seconds_per_sample: float) -> None:
        """Of the task that goes by one."""
        set_pace(self._pace_file, seconds_per_sample)

    def start(self, *indices: int, last_call: int = 60) -> None:
        """Start these nodes, the first one of which is to begin; `last_call`: seconds that it waits for others."""
        for index in indices:
            command = [
                *self._launcher, f"--rdzv-conf=last_call_timeout={last_call}",
                "-m", "elastic_train", "--run-dir", str(self.run_dirs[index]), *self._flags,
            ]  # fmt: skip
            temporary = self.path / f"tmp{index}"
            temporary.mkdir(exist_ok=True)
            prefix = [*dying_with_parent(), *self.network.node_prefix(index)]
            env = clean_environment() | {"TMPDIR": str(temporary), PACE_VARIABLE: str(self._pace_file)}
            log = self.path / f"node{index}.log"
            self.nodes[index] = Node(command, log, self.path, env, prefix=prefix, is_wrapped=True)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of all nodes."""
        return [line for run_dir in dict.fromkeys(self.run_dirs) for line in events(run_dir, name)]

    def train(self, sizes: Mapping[int, int]) -> list[dict[str, Any]]:
        """Wait until these nodes are in worlds of so many members, all of which have committed; their last `world`
        events."""

        def found() -> list[dict[str, Any]] | None:
            worlds = [self.last_world(index) for index in sizes]
            if [len(world.get("members", ())) for world in worlds] != list(sizes.values()):
                return None
            lines = self.events("step")
            return worlds if all(self._num_committed(world, lines) >= self._num_steps for world in worlds) else None

        return wait_until(found, f"worlds of {sizes} members", TRAIN_SECONDS)  # type: ignore[no-any-return]

    def last_world(self, index: int) -> dict[str, Any]:
        """What a node has written of its newest world; empty before its first."""
        return (events(self.run_dirs[index], "world") or [{}])[-1]

    def _num_committed(self, world: dict[str, Any], lines: Sequence[dict[str, Any]]) -> int:
        by_members = (line for line in lines if f"{line['host']}/0/{line['pid']}" in world["members"])
        return len({line["step"] for line in by_members if line["generation"] == world["generation"]})

    def by_rank(self, world: dict[str, Any]) -> list[int]:
        """The nodes of a world's members."""
        indices = {self.network.host_name(index): index for index in range(self.network.num_nodes)}
        return [indices[member.partition("/")[0]] for member in world["members"]]

    def waits(self, index: int) -> bool:
        """Whether a node has said that it may not go on without others."""
        return "may train on: waiting for contact" in self.nodes[index].text()

    def has_saved(self, index: int) -> bool:
        """Whether a node that waits has a snapshot of its last commit."""
        saved = re.search(r"the state of step (\d+) is saved, in case that no other is left", self.nodes[index].text())
        if saved is None:
            return False
        infos = find_snapshots(self.run_dirs[index] / "snapshots", warn=lambda _damaged: None)
        assert int(saved[1]) in {info.step for info in infos}
        return True

    def steps_of(self, index: int) -> list[tuple[int, int]]:
        """(generation, step) of all that a node's worker has written down."""
        return [(line["generation"], line["step"]) for line in events(self.run_dirs[index], "step")]

    def stop(self) -> None:
        """SIGTERM to all; they save and end."""
        for node in self.nodes.values():
            node.signal(15)
        for node in self.nodes.values():
            node.wait(60)

    def audit(self) -> Audit:
        """Of all run directories together."""
        with as_one_run([run_dir for run_dir in dict.fromkeys(self.run_dirs) if run_dir.exists()]) as run_dir:
            return audit(run_dir)


@contextlib.contextmanager
def ending(nodes: Apart) -> Iterator[Apart]:
    """Nodes that end with the block. Where it fails, what each last said is shown."""
    try:
        yield nodes
    except BaseException:
        for node in nodes.nodes.values():
            print(f"--- {node.name}, exit code {node.process.poll()}\n{node.text()[-3000:]}")
        raise
    finally:
        for node in nodes.nodes.values():
            node.kill()
