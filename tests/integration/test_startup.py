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
    assert packages(imported(agent)) - packages(modules_of("torch.distributed.run")) <= {"elastic_train"}

    assert {"elastic_train.elastic.run", "torch._dynamo"} <= imported(worker)
    needed = packages(modules_of("torch, torch._dynamo")) | {"elastic_train"} | OF_THE_FLAGS
    assert packages(imported(worker)) <= needed


def imported(log: str) -> set[str]:
    """What `-X importtime` tells of."""
    return set(re.findall(r"^import time: .*\| +(\S+)$", log, re.MULTILINE))


def modules_of(names: str) -> set[str]:
    """All that is there once these are imported."""
    program = f"import sys, {names}\nprint(*sys.modules)"
    return set(subprocess.run([PYTHON, "-c", program], check=True, capture_output=True, text=True).stdout.split())


def packages(modules: set[str]) -> set[str]:
    """Those of others that are installed: what is looked for in vain is told of, too."""
    names = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"__main__"}
    return {name for name in names if not name.startswith("__") and PathFinder.find_spec(name) is not None}
