"""How a worker was started, from the environment that its launcher gives it.

Agents import this module too, before anything else: nothing heavy at module level.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_train.errors import FormationFailed
from elastic_train.protocol.addresses import parse_endpoints
from elastic_train.rendezvous.command_line import (
    agent_above,
    asks_for_c10d,
    has_free_port,
    option,
    parse_nnodes,
)
from elastic_train.rendezvous.etcd_settings import LAST_CALL_SECONDS, SETTINGS_VARIABLE, EtcdSettings
from elastic_train.rendezvous.slurm import torchrun_variables
from elastic_train.world import World, from_json

JOIN_SECONDS = 600.0
"""torchrun's own default of join_timeout"""
NAME_LOOKUP_OPTIONS = "timeout:1 attempts:1"
"""RES_OPTIONS (resolv.conf(5)) of agents and workers: a TCPStore looks up the peer's name for every connection, on the
one thread that serves all clients. A name server that does not answer must not delay a world for the usual 5 s."""
C10D_VARIABLE = "ELASTIC_TRAIN_C10D"
NODE_VARIABLE = "ELASTIC_TRAIN_NODE"
ADDRESS_VARIABLE = "ELASTIC_TRAIN_ADDRESS"
MARKERS = (C10D_VARIABLE, SETTINGS_VARIABLE, NODE_VARIABLE, ADDRESS_VARIABLE)
"""variables that an agent sets for its workers"""
NO_PLUG_IN = (
    "the torchrun plug-in of elastic_train is missing (pip install it on every node), or did not see that the program "
    "is ours (set ELASTIC_TRAIN=1)"
)


@dataclass(frozen=True)
class C10dSettings:
    """The c10d rendezvous of an agent's command line, by which the workers find each other."""

    endpoints: tuple[str, ...]
    """HOST:PORT of --rdzv-endpoint, one or several"""
    min_nodes: int
    max_nodes: int
    last_call: float
    """seconds that a first world below max_nodes waits for more nodes"""
    is_host: bool | None = None
    """whether this node hosts the first endpoint; None: decided by the host's name"""
    join_timeout: float = JOIN_SECONDS
    """seconds within which a first world must form, and within which an endpoint must answer"""


@dataclass(frozen=True)
class Launch:
    """How this worker was started, from the environment that torchrun gives it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    run_id: str = "none"
    restart_count: int = 0
    step: str = ""
    """id of the srun step, which tells apart steps of one job: they share its run id; "" without srun"""
    agent_pid: int | None = None
    """pid of the torchrun process on this node; None without torchrun"""
    agent_arguments: list[str] | None = None
    """arguments on the agent's command line; None if they cannot be read"""
    min_nodes: int = 1
    """fewest nodes that may train, by --nnodes"""
    master: tuple[str, int] | None = None
    """MASTER_ADDR and MASTER_PORT, where the workers of a fixed world find each other; None in an open world"""
    is_agent_store: bool = False
    """whether an agent serves the store at `master`; if not, rank 0 must"""
    c10d: C10dSettings | None = None
    """where workers of all nodes find each other; rank, world_size and num_nodes are then those of this node alone"""
    etcd: EtcdSettings | None = None
    """the same in an etcd cluster; without either the world is fixed, and rank, world_size and num_nodes are its own"""
    node_id: str = ""
    """id that this node's workers share and no other node has; set with `c10d` and with `etcd`"""
    shutdown_seconds: float | None = None
    """from a signal to SIGKILL, if the agent got --shutdown-timeout"""
    local_address: str | None = None
    """IP address by which other nodes reach this node, if --local-addr gives one"""

    @property
    def is_open(self) -> bool:
        """Whether nodes may join and come back; if not, a launcher has fixed the world."""
        return self.c10d is not None or self.etcd is not None

    def variables_in(self, world: World) -> dict[str, str]:
        """Return torchrun's variables for this worker in `world`; none if no launcher started this worker.

        The worker's place in its node and the node's size stay the launcher's, because they choose a device. An agent
        has already set LOCAL_RANK, as its script expects it. A spare's rank is one that no worker has.
        """
        if self.master is None and not self.is_open:
            return {}
        nodes = list(dict.fromkeys(member.node for member in world.members))  # nodes of workers first, then of spares
        rank, size = str(world.rank), str(world.world_size)
        return {
            "RANK": rank,
            "WORLD_SIZE": size,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "GROUP_RANK": str(nodes.index(world.me.node)),
            "GROUP_WORLD_SIZE": str(len({worker.node for worker in world.workers})),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            **({} if self.is_open else {"LOCAL_RANK": str(self.local_rank)}),
        }

    @staticmethod
    def from_environment(environ: Mapping[str, str], store_endpoint: str | None) -> Launch:
        """Read the variables of torchrun or srun. Without RANK the world has one worker.

        Raises:
            FormationFailed: torchrun's own c10d rendezvous has joined several nodes.
            UsageError: `store_endpoint` is not HOST:PORT.
        """
        agent_pid, arguments = None, None
        if "TORCHELASTIC_RUN_ID" in environ:  # set by torchrun alone
            agent_pid, arguments = agent_above(os.getppid()) or (os.getppid(), None)
        of_srun = torchrun_variables(environ)
        environ = {**environ, **of_srun}
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return Launch()
        etcd = from_json(EtcdSettings, environ[SETTINGS_VARIABLE]) if SETTINGS_VARIABLE in environ else None
        c10d = c10d_settings(environ, arguments, store_endpoint) if etcd is None else None
        settings = c10d or etcd
        is_own_node = settings is not None
        master = environ.get("MASTER_ADDR", "localhost"), environ.get("MASTER_PORT", "0")
        return Launch(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            # torchrun's --virtual-local-rank sets LOCAL_RANK=0 for every worker of a node
            local_rank=int(environ["RANK"] if is_own_node else environ.get("LOCAL_RANK", "0")),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            num_nodes=int(environ.get("GROUP_WORLD_SIZE", "1")),
            run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
            restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            step=environ.get("SLURM_STEP_ID", "") if of_srun else "",
            agent_pid=agent_pid,
            agent_arguments=arguments,
            min_nodes=1 if settings is None else settings.min_nodes,
            master=None if is_own_node else (master[0], int(master[1])),
            is_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            c10d=c10d,
            etcd=etcd,
            node_id=environ.get(NODE_VARIABLE) or _derived_node_id(environ, agent_pid) if is_own_node else "",
            shutdown_seconds=_shutdown_seconds(arguments, environ),
            local_address=environ.get(ADDRESS_VARIABLE) if is_own_node else None,
        )


def c10d_settings(
    environ: Mapping[str, str], arguments: list[str] | None, store_endpoint: str | None
) -> C10dSettings | None:
    """Return the agent's settings of the c10d rendezvous; --store-endpoint replaces their endpoints.

    With a bare clone on PYTHONPATH the agent has no hook, and torchrun's own c10d starts the workers. One node alone is
    then a fixed world; with --store-endpoint it is one node of several.

    Raises:
        FormationFailed: without the hook, torchrun's own c10d rendezvous has joined several nodes.
        UsageError: `store_endpoint` is not HOST:PORT.
    """
    endpoints = parse_endpoints(store_endpoint, "--store-endpoint") if store_endpoint else None
    if C10D_VARIABLE in environ:
        settings = from_json(C10dSettings, environ[C10D_VARIABLE])
        return replace(settings, endpoints=endpoints) if endpoints else settings
    if arguments is None or not asks_for_c10d(arguments, environ):
        return None
    num_nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
    if num_nodes > 1:
        raise FormationFailed(
            f"torchrun's own rendezvous has joined {num_nodes} nodes, where the loss of one ends all: {NO_PLUG_IN}"
        )
    if endpoints is None:
        return None
    min_nodes, max_nodes = parse_nnodes(option(arguments, environ, "nnodes") or "1:1")
    return C10dSettings(endpoints, min_nodes, max_nodes, last_call=LAST_CALL_SECONDS)


def alone_warning(launch: Launch, environ: Mapping[str, str]) -> str | None:
    """Return a warning if torchrun's own c10d rendezvous has started this node, so that no other node can join."""
    arguments = None if launch.is_open else launch.agent_arguments
    if arguments is None or not asks_for_c10d(arguments, environ) or max_nodes_of(launch, environ) == 1:
        return None
    endpoint = option(arguments, environ, "rdzv-endpoint") or ""
    if has_free_port(endpoint):
        return (
            f"this node trains alone: no other can find --rdzv-endpoint={endpoint}, whose port is any free one; give "
            f"all nodes the same port, such as {endpoint.rpartition(':')[0]}:29400"
        )
    return f"this node trains alone, and no other can join it: {NO_PLUG_IN}"


def _shutdown_seconds(arguments: list[str] | None, environ: Mapping[str, str]) -> float | None:
    """Return torchrun's shutdown timeout, if given: since torch 2.15 by an option or an inherited variable."""
    text = option(arguments or [], environ, "shutdown-timeout") or environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return float(text) if arguments is not None and text.isdecimal() else None


def _derived_node_id(environ: Mapping[str, str], agent_pid: int | None) -> str:
    """Return a node id that all workers started at once by one agent derive alike; for agents without the hook."""
    names = (platform.node(), agent_pid, *(environ.get(n) for n in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")))
    return uuid.uuid5(uuid.NAMESPACE_OID, repr(names)).hex[:12]


def max_nodes_of(launch: Launch, environ: Mapping[str, str]) -> int:
    """Return how many nodes the job may have: by --nnodes, or without torchrun the present ones."""
    settings = launch.c10d or launch.etcd
    if settings is not None:
        return settings.max_nodes
    if launch.agent_pid is None:
        return launch.num_nodes
    return parse_nnodes(option(launch.agent_arguments or [], environ, "nnodes") or "1:1")[1]
