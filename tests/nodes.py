"""Nodes of tests: they can also be signalled and waited for."""

from __future__ import annotations

import subprocess

from elastic_train.tools.drills import nodes
from elastic_train.tools.drills.nodes import TooSlow


class Node(nodes.Node):
    def signal(self, signum: int) -> None:
        """Signal the agent, as a scheduler or a terminal would."""
        if (agent := self.agent()) is not None:
            agent.send_signal(signum)

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for the node's end and return its exit code. Raises TooSlow with the end of its log after `timeout`."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TooSlow(f"{self.name} still runs after {timeout:.0f} s:\n{self.text()[-4000:]}") from None
