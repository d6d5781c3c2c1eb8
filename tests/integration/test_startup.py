"""A newcomer waits for no import that its first step does not need, in the agent and in the worker."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.machinery import PathFinder

from tests.integration.cluster import PYTHON, Cluster

ANNOUNCED, BEGAN = "elastic_train: meeting", "elastic_train: world generation=0"
OF_THE_AGENT = {"elastic_train", *(f"elastic_train.{name}" for name in ("errors", "protocol", "rendezvous", "system"))}
OF_THE_AGENT |= {f"elastic_train.protocol.{name}" for name in ("addresses", "names")}
OF_THE_AGENT |= {f"elastic_train.rendezvous.{name}" for name in ("command_line", "etcd_settings", "handler", "hook")}
OF_THE_AGENT |= {f"elastic_train.rendezvous.{name}" for name in ("launch", "slurm")}
OF_THE_AGENT |= {"elastic_train.version", "elastic_train.wording"}  # names of torchrun's flags
OF_THE_AGENT |= {"elastic_train.world"}  # the form in which workers get its settings
OF_THE_AGENT |= {"elastic_train.torchrun"}  # of an older editable install
OF_THE_FLAGS = {"simple_parsing", "docstring_parser", "yaml"}


def test_a_node_imports_torch_and_hardly_anything_else(cluster: Cluster) -> None:
    """A newcomer imports the same before it meets the others."""
    [node] = cluster.start("--max-steps", "2", nnodes="1:2", env={"PYTHONPROFILEIMPORTTIME": "1"})
    cluster.finish([node])
    agent, announced, worker = node.text().partition(ANNOUNCED)
    assert announced
    worker, began, _ = worker.partition(BEGAN)
    assert began

    assert {name for name in imported(agent) if name.startswith("elastic_train")} <= OF_THE_AGENT
    assert "torch._dynamo" not in imported(agent)
    of_agents, of_workers = modules_beside_torch("torch.distributed.run", "torch._dynamo")
    assert packages(imported(agent)) - packages(of_agents) <= {"elastic_train"}

    assert {"elastic_train.elastic.run", "torch._dynamo"} <= imported(worker)
    assert packages(imported(worker)) <= packages(of_workers) | {"elastic_train"} | OF_THE_FLAGS


def imported(log: str) -> set[str]:
    """What `-X importtime` tells of."""
    return set(re.findall(r"^import time: .*\| +(\S+)$", log, re.MULTILINE))


ALL_OF_EACH = """
import importlib, os, sys, torch
for name in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(name)
        print(*sys.modules, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def modules_beside_torch(*names: str) -> list[set[str]]:
    """All that is there once torch and this is imported, for each of them."""
    command = [PYTHON, "-c", ALL_OF_EACH, *names]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [set(line.split()) for line in told.splitlines()]


def packages(modules: set[str]) -> set[str]:
    """Those of others that are installed: what is looked for in vain is told of, too."""
    names = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"__main__"}
    return {name for name in names if not name.startswith("__") and PathFinder.find_spec(name) is not None}
