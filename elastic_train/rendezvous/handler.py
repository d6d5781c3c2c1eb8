"""torchrun's rendezvous handler for programs of this package, under `--rdzv-backend=c10d` and `etcd3`.

The workers manage membership. Each agent gets a world of its own node at once, and never learns of events on other
nodes. So a join restarts no worker.

Under etcd3 `--rdzv-conf membership=...` selects the mode. `workers` is the default for programs of this package.
`agents`, the default for every other program, is an ordinary torchrun rendezvous (etcd_handler.py).
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elastic_train.errors import UsageError, write_line
from elastic_train.protocol.addresses import own_address, parse_endpoints
from elastic_train.rendezvous.command_line import agent_arguments, launches_elastic_train
from elastic_train.rendezvous.etcd_settings import LAST_CALL_SECONDS, SETTINGS_VARIABLE, EtcdSettings, read_seconds
from elastic_train.rendezvous.launch import (
    ADDRESS_VARIABLE,
    C10D_VARIABLE,
    JOIN_SECONDS,
    NODE_VARIABLE,
    C10dSettings,
)
from elastic_train.world import to_json

MODES = ("workers", "agents")
LEASE_SECONDS, READ_SECONDS = 10.0, 60.0
"""of agents, if --rdzv-conf does not give them"""
TORCHRUNS_LAST_CALL = 30.0
"""seconds, as in torchrun's own rendezvous: in mode `agents` a late node restarts all workers"""
MASTER_ADDR = "workers-meet-by-themselves.elastic-train.invalid"
"""resolves nowhere; with a real address a script that calls init_process_group() would train on each node alone"""
MASTER_PORT = "none: elastic_train makes the process group; call elastic_train.run() in place of init_process_group()"
"""no number, so that torch quotes this at once; with a number it would look the name up again for half an hour"""
C10D_KEYS = ("last_call_timeout", "join_timeout", "is_host", "store_type")
"""keys of --rdzv-conf that have a meaning under c10d"""
TRUE, FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
"""as torch reads them in --rdzv-conf"""


def create_c10d_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of `torchrun --rdzv-backend=c10d`. A wrong option ends the process with an error line."""
    try:
        settings = read_c10d_settings(
            parameters.endpoint, parameters.config, min_nodes=parameters.min_nodes, max_nodes=parameters.max_nodes
        )
    except UsageError as error:
        _exit(error)
    idle = keys_without_meaning(parameters.config)
    if idle:
        has = "has" if len(idle) == 1 else "have"
        write_line(f"{', '.join(idle)} in --rdzv-conf {has} no meaning here: agents do not wait for each other")
    return _workers_handler(parameters, f"at {','.join(settings.endpoints)}", C10D_VARIABLE, settings)


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of `torchrun --rdzv-backend=etcd3`. A wrong option ends the process with an error line."""
    try:
        mode = choose_mode(parameters.config, agent_arguments(sys.orig_argv), os.environ)
        settings = EtcdSettings.from_torchrun(
            parameters.endpoint,
            parameters.config,
            os.environ,
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            last_call=LAST_CALL_SECONDS if mode == "workers" else TORCHRUNS_LAST_CALL,
        )
        if mode == "agents":
            from elastic_train.rendezvous.etcd_handler import AgentsHandler

            conf = parameters.config
            parameters.local_addr = _given_address(parameters)
            return AgentsHandler(
                parameters,
                settings,
                lease=read_seconds(conf, "lease", LEASE_SECONDS),
                join_timeout=read_seconds(conf, "join_timeout", JOIN_SECONDS),
                read_timeout=read_seconds(conf, "read_timeout", READ_SECONDS),
            )
    except UsageError as error:
        _exit(error)
    return _workers_handler(parameters, f"in etcd at {','.join(settings.endpoints)}", SETTINGS_VARIABLE, settings)


def create_fixed_handler(
    parameters: RendezvousParameters, of_torch: Callable[[RendezvousParameters], RendezvousHandler]
) -> RendezvousHandler:
    """Create the handler of another backend by `of_torch`. An unavailable backend ends the process with an error line.

    The world of torch's own rendezvous never changes. For a range of nodes, as in elastic training, a line warns of
    that: without --rdzv-backend torchrun takes static rendezvous, and waits for all nodes.
    """
    low, high = parameters.min_nodes, parameters.max_nodes
    if parameters.backend == "static" and low < high:
        write_line(
            f"--nnodes {low}:{high} under static rendezvous, torchrun's default: it waits for all {high} nodes, and "
            "none can join later; to train with those that are there, add --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        )
    try:
        return of_torch(parameters)
    except (ValueError, ImportError) as error:
        why = str(error).strip().split("\n")[0]
        _exit(UsageError(f"--rdzv-backend={parameters.backend}: give c10d or etcd3; torch says: {why}"))


def choose_mode(conf: Mapping[str, Any], arguments: list[str] | None, environ: Mapping[str, str]) -> str:
    """Return `membership` of --rdzv-conf, or else the default for the launched program.

    Raises:
        UsageError: `membership` is not in `MODES`.
    """
    given = conf.get("membership")
    if given is None:
        return "workers" if launches_elastic_train(arguments, environ) else "agents"
    if given not in MODES:
        raise UsageError(f"membership={given} in --rdzv-conf: give one of {', '.join(MODES)}")
    return str(given)


def read_c10d_settings(endpoint: str, conf: Mapping[str, object], *, min_nodes: int, max_nodes: int) -> C10dSettings:
    """Read `--rdzv-endpoint` and `--rdzv-conf`.

    Raises:
        UsageError: a value is malformed or not supported.
    """
    store_type = str(conf.get("store_type", "tcp")).strip().lower()
    if store_type != "tcp":
        raise UsageError(f"store_type={store_type} in --rdzv-conf: the workers speak TCP; leave it out")
    is_host = str(conf.get("is_host", "")).strip().lower()
    if is_host not in ("", *TRUE, *FALSE):
        raise UsageError(f"is_host={is_host} in --rdzv-conf: give true or false")
    return C10dSettings(
        parse_endpoints(endpoint, "--rdzv-endpoint"),
        min_nodes,
        max_nodes,
        last_call=read_seconds(conf, "last_call_timeout", LAST_CALL_SECONDS),
        is_host=is_host in TRUE if is_host else None,
        join_timeout=read_seconds(conf, "join_timeout", JOIN_SECONDS),
    )


def keys_without_meaning(conf: Mapping[str, object]) -> list[str]:
    """Return the user's keys of `--rdzv-conf` that have no effect under c10d."""
    # torchrun adds `timeout` by itself, as a number; a user's values are text.
    return [key for key, value in conf.items() if key not in C10D_KEYS and isinstance(value, str)]


def announcement(where: str, settings: C10dSettings | EtcdSettings) -> str | None:
    """Return the line that an agent prints for the user; None if the job has one node."""
    min_nodes, max_nodes, last_call = settings.min_nodes, settings.max_nodes, settings.last_call
    if max_nodes == 1:
        return None
    if min_nodes == max_nodes:
        return (
            f"waiting {where} for exactly {max_nodes} nodes, as --nnodes {max_nodes} asks; "
            f"a lost node will then pause training, --nnodes 1:{max_nodes} lets it go on"
        )
    enough = "the first node has" if min_nodes == 1 else f"{min_nodes} nodes have"
    return (
        f"meeting {where}, {min_nodes} to {max_nodes} nodes; training starts {last_call:g} s after {enough} come, "
        f"at once with {max_nodes}; nodes that come later are admitted between two steps"
    )


def _workers_handler(
    parameters: RendezvousParameters, where: str, variable: str, settings: C10dSettings | EtcdSettings
) -> WorkersHandler:
    """Pass the settings to the workers, and create the handler. Not in the hook: torch may log its error and go on."""
    address = _given_address(parameters)
    line = announcement(where, settings)
    if line is not None:
        write_line(line)
    os.environ[variable] = to_json(settings)
    os.environ[NODE_VARIABLE] = _new_node_id()
    if address is not None:
        os.environ[ADDRESS_VARIABLE] = address
    return WorkersHandler(parameters)


def _given_address(parameters: RendezvousParameters) -> str | None:
    """Return the IP address of --local-addr, if it is one that other nodes can reach. A wrong value ends the process
    with an error line. Blocks as `look_up`."""
    try:
        return own_address(parameters.local_addr) if parameters.local_addr else None
    except ValueError as error:
        _exit(
            UsageError(f"--local-addr={parameters.local_addr}: {error}; give an IP address that `ip addr` shows here")
        )


def _new_node_id() -> str:
    return uuid.uuid4().hex[:12]


def _exit(error: UsageError) -> NoReturn:
    write_line(f"error: {error}")
    raise SystemExit(error.exit_code) from error


class WorkersHandler(RendezvousHandler):
    """A rendezvous of one node: complete at once, never joined by another node, and closed without effect elsewhere."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        self._has_started_workers = False

    def get_backend(self) -> str:
        return self._parameters.backend

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once. After a restart the workers have a new node id: to their peers they are a new node."""
        if self._has_started_workers:
            os.environ[NODE_VARIABLE] = _new_node_id()
        self._has_started_workers = True
        no_port = cast(int, MASTER_PORT)  # the agent converts it to text, for the worker's environment
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(MASTER_ADDR, no_port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: other nodes may come and go."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        return True
