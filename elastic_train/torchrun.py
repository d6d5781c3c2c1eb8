"""What this package knows about torchrun, in the agent and in its workers.

The entry-point group `torchrun.handlers` is loaded by every torchrun process, whatever the rendezvous backend.
`prepare_agent` uses it, only when the launched program is ours, to answer `--rdzv-backend=c10d` with a rendezvous of
its own node (rendezvous.py). The workers of all nodes then find each other by themselves.

The agent hands what it knows to its workers in environment variables; `Launch` reads them there.

This module imports nothing heavy at module level: agents load it before anything else.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic_train.errors import FormationFailed, UsageError
from elastic_train.etcd_settings import SETTINGS_VARIABLE, EtcdSettings
from elastic_train.slurm import torchrun_variables

DEFAULT_PORT, MAX_PORT = 29400, 65535
LAST_CALL_SECONDS = 2.0
"""how long a first world below --nnodes' maximum waits for more nodes, where the user gives no last_call_timeout"""
JOIN_SECONDS = 600.0
"""torchrun's own default of join_timeout"""
NAME_LOOKUP_OPTIONS = "timeout:1 attempts:1"
"""RES_OPTIONS (resolv.conf(5)) of agents and workers: every connection to a TCPStore looks the peer's name up, on the
one thread that serves everybody, and a name server that does not answer must not hold a world up for its usual 5 s"""
C10D_VARIABLE = "ELASTIC_TRAIN_C10D"
MIN_NODES_VARIABLE = "ELASTIC_TRAIN_MIN_NODES"
NODE_VARIABLE = "ELASTIC_TRAIN_NODE"
MARKERS = (C10D_VARIABLE, SETTINGS_VARIABLE, MIN_NODES_VARIABLE, NODE_VARIABLE)
"""what an agent sets for its workers"""

# torchrun's own options, of torch 2.11 to 2.15, to tell its arguments from the program's.
SWITCHES = ("standalone", "module", "no-python", "run-path", "virtual-local-rank", "help")
OPTIONS = (
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "log-line-prefix-template", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters",
    "node-rank", "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle",
    "shutdown-timeout", "print-completion",
)  # fmt: skip
SHORT_OPTIONS = {"-m": "module", "-r": "redirects", "-t": "tee", "-h": "help"}


# --- in the agent -----------------------------------------------------------------------------------------------------


def prepare_agent() -> Any:
    """Entry point of `torchrun.handlers`: prepares this process if it is an agent that launches our program.

    Returns a creator, as the entry-point contract wants it; its backend name is not for use.
    """
    if launches_elastic_train(agent_arguments(sys.orig_argv), os.environ):
        from torch.distributed.elastic.rendezvous import registry  # loaded by now: its package is what calls this

        os.environ.setdefault("RES_OPTIONS", NAME_LOOKUP_OPTIONS)
        answer_c10d(registry)
    return refuse_as_backend


def answer_c10d(registry: Any) -> None:
    """Answer `--rdzv-backend=c10d` with our handler, for the rest of this process.

    torch's launcher asks this function of this module for its handler. `register` refuses a second creator for c10d;
    rewriting `sys.argv` would miss the PET_ variables and callers of `torch.distributed.run.run(args)`.

    Args:
        registry: the module `torch.distributed.elastic.rendezvous.registry`.
    """
    of_torch = registry.get_rendezvous_handler

    def get_rendezvous_handler(params: Any) -> Any:
        for marker in MARKERS:  # an agent that a worker of another job has started inherits that job's
            os.environ.pop(marker, None)
        if params.backend != "c10d" or has_free_port(params.endpoint):
            return of_torch(params)
        from elastic_train.rendezvous import create_c10d_handler  # heavy, and only for those who asked for it

        return create_c10d_handler(params)

    registry.get_rendezvous_handler = get_rendezvous_handler


def has_free_port(endpoint: str) -> bool:
    """Whether an endpoint is `HOST:0`, as --standalone and launches of one node have it: nobody else can find it."""
    return re.search(r":0+$", endpoint.strip()) is not None and "," not in endpoint


def refuse_as_backend(_parameters: Any) -> Any:
    raise RuntimeError("elastic_train is no rendezvous backend; use --rdzv-backend=c10d or etcd3")


def etcd3_backend() -> Any:
    """Entry point `etcd3` of `torchrun.handlers`: what makes the handler of `--rdzv-backend=etcd3`."""

    def create(parameters: Any) -> Any:
        from elastic_train.rendezvous import create_handler  # heavy, and only for those who asked for it

        return create_handler(parameters)

    return create


@dataclass(frozen=True)
class C10dSettings:
    """What an agent's command line says of a c10d rendezvous; its workers find each other by it."""

    endpoints: tuple[str, ...]
    """HOST:PORT of --rdzv-endpoint, one or several"""
    min_nodes: int
    max_nodes: int
    last_call: float
    """seconds that a first world below max_nodes waits for more nodes"""
    is_host: bool | None = None
    """whether this node hosts the first endpoint; None: decided by the host's name"""
    join_timeout: float = JOIN_SECONDS
    """seconds in which a first world has to form"""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> C10dSettings:
        values = json.loads(text)
        return C10dSettings(**values | {"endpoints": tuple(values["endpoints"])})


def agent_arguments(command: Sequence[str]) -> list[str] | None:
    """The arguments of torchrun in a process's full command line; None if it is no torchrun process."""
    for position, word in enumerate(command[:6]):
        if Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch"):
            return list(command[position + 1 :])
    return None


def launches_elastic_train(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> bool:
    """Whether the program that torchrun is told to start is ours.

    It is when it is the module `elastic_train` or one below it, a Python file or module whose own source imports it, or
    when ELASTIC_TRAIN=1 is set. Only the last counts under another launcher, which has no `arguments` of torchrun.
    """
    if environ.get("ELASTIC_TRAIN") == "1":
        return True
    if arguments is None:
        return False
    command = read_command(arguments)
    program = command.program or ""
    if "module" in command.options or environ.get("PET_MODULE", "0") == "1":
        return re.fullmatch(r"elastic_train(\..+)?", program) is not None or _imports_us(_module_file(program))
    if Path(program).name == "elastic-train":  # torchrun --no-python elastic-train check
        return True
    return program.endswith(".py") and _imports_us(Path(program))


def _imports_us(file: Path | None) -> bool:
    if file is None or not file.is_file():
        return False
    source = file.read_text(encoding="utf-8", errors="replace")
    return re.search(r"^\s*(from\s+|import\s+([\w. ]+,\s*)*)elastic_train\b", source, re.MULTILINE) is not None


def _module_file(name: str) -> Path | None:
    """The file of a module that `python -m` would run, where it lies in the current directory or on PYTHONPATH."""
    for folder in (os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(folder, *name.split("."))
        for file in (path.with_suffix(".py"), path / "__main__.py"):
            if folder and file.is_file():
                return file
    return None


@dataclass(frozen=True)
class AgentCommand:
    """An agent's command line, taken apart as torchrun's own parser does."""

    options: dict[str, str]
    """by long name with dashes; "" for a switch"""
    program: str | None
    """the script or module that is launched; its arguments are left out"""


def read_command(arguments: Sequence[str]) -> AgentCommand:
    """Take torchrun's arguments apart; nothing is refused here, torchrun does that itself."""
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        if word == "--" or not word.startswith("-"):
            return AgentCommand(options, next(words, None) if word == "--" else word)
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            flag, equals, value = flag[:2], word[2:], word[2:].removeprefix("=")  # -t3 is -t 3
        name = _full_name(flag)
        options[name] = "" if name in SWITCHES else value if equals else next(words, "")
    return AgentCommand(options, None)


def _full_name(flag: str) -> str:
    """The long name of an option, which may be short, spelled with underscores or abbreviated."""
    name = SHORT_OPTIONS.get(flag) or flag.removeprefix("--").replace("_", "-")
    meant = [option for option in (*OPTIONS, *SWITCHES) if option.startswith(name)]
    return name if name in meant or len(meant) != 1 else meant[0]


def option(arguments: Sequence[str], environ: Mapping[str, str], name: str) -> str | None:
    """The value of torchrun's option `--name`, else of its PET_ variable."""
    options = read_command(arguments).options
    return options[name] if name in options else environ.get("PET_" + name.replace("-", "_").upper())


def parse_nnodes(text: str) -> tuple[int, int]:
    """(min, max) nodes of torchrun's `--nnodes`; (1, 1) for what torchrun itself will refuse."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        return 1, 1


def normalize_endpoint(text: str) -> str:
    """HOST:PORT with torchrun's defaults, localhost and 29400."""
    host, port = split_endpoint(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoints(text: str, option_name: str) -> tuple[str, ...]:
    """HOST:PORT of each part of a comma-separated list; an empty one is torchrun's default, localhost:29400.

    Raises:
        UsageError: a part is not HOST:PORT.
    """
    parts = [part for part in text.split(",") if part.strip()] or [""]
    try:
        found = [(part.strip(), *split_endpoint(part)) for part in parts]
    except ValueError as error:
        raise UsageError(f"{option_name}: {error}") from error
    for part, _, port in found:
        if not 0 < port <= MAX_PORT:
            raise UsageError(f"{option_name} {part}: a port is 1 to {MAX_PORT}")
    return tuple(dict.fromkeys(normalize_endpoint(part) for part in parts))


def split_endpoint(text: str) -> tuple[str, int]:
    """(host, port) of `HOST`, `HOST:PORT` or `[V6]:PORT`.

    Raises:
        ValueError: the port is no number.
    """
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](:(?P<v6port>\d+))?|(?P<host>[^:]*)(:(?P<port>\d+))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    host = match["v6"] or match["host"] or "localhost"
    return host, int(match["v6port"] or match["port"] or DEFAULT_PORT)


# --- in the worker ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """How this worker was started, from the environment that torchrun gives it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    run_id: str = "none"
    restart_count: int = 0
    agent_pid: int | None = None
    """pid of the torchrun process on this node; None without torchrun"""
    min_nodes: int = 1
    """fewest nodes that may train, by --nnodes"""
    master: tuple[str, int] | None = None
    """MASTER_ADDR and MASTER_PORT, where the workers of a fixed world find each other; None in another one"""
    is_agent_store: bool = False
    """whether an agent serves the store at `master`; else rank 0 has to"""
    c10d: C10dSettings | None = None
    """where workers of all nodes find each other; rank, world_size and num_nodes are then those of this node alone"""
    etcd: EtcdSettings | None = None
    """the same in a cluster of etcd; a world with neither is fixed, and rank, world_size and num_nodes are its own"""
    node_id: str = ""
    """what the workers of this node have in common and no other node has; set with `c10d` and with `etcd`"""

    @property
    def is_open(self) -> bool:
        """Whether nodes may join, and come back; else a launcher has fixed the world."""
        return self.c10d is not None or self.etcd is not None

    @staticmethod
    def from_environment(environ: Mapping[str, str], store_endpoint: str | None) -> Launch:
        """Read torchrun's variables, or those of srun. Without them (no RANK): a world of one.

        Raises:
            FormationFailed: torchrun's own c10d rendezvous has joined several nodes.
            UsageError: `store_endpoint` is not HOST:PORT.
        """
        agent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in environ else None  # not srun, nor another launcher
        environ = {**environ, **torchrun_variables(environ)}
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return Launch()
        etcd = environ.get(SETTINGS_VARIABLE)
        c10d = c10d_settings(environ, agent_pid, store_endpoint) if etcd is None else None
        is_own_node = c10d is not None or etcd is not None
        master = environ.get("MASTER_ADDR", "localhost"), environ.get("MASTER_PORT", "0")
        return Launch(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            node_rank=int(environ.get("GROUP_RANK", "0")),
            num_nodes=int(environ.get("GROUP_WORLD_SIZE", "1")),
            run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
            restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            agent_pid=agent_pid,
            min_nodes=c10d.min_nodes if c10d is not None else int(environ.get(MIN_NODES_VARIABLE, "1")),
            master=None if is_own_node else (master[0], int(master[1])),
            is_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            c10d=c10d,
            etcd=EtcdSettings.from_json(etcd) if etcd is not None else None,
            node_id=environ.get(NODE_VARIABLE) or _derived_node_id(environ, agent_pid) if is_own_node else "",
        )


def c10d_settings(environ: Mapping[str, str], agent_pid: int | None, store_endpoint: str | None) -> C10dSettings | None:
    """What the agent says of the c10d rendezvous, with --store-endpoint in place of its endpoints.

    A bare clone on PYTHONPATH has no hook in the agent. A node that torchrun's own c10d then starts alone is a fixed
    world, or by --store-endpoint one of several.

    Raises:
        FormationFailed: without the hook, torchrun's own c10d rendezvous has joined several nodes.
        UsageError: `store_endpoint` is not HOST:PORT.
    """
    endpoints = parse_endpoints(store_endpoint, "--store-endpoint") if store_endpoint else None
    if C10D_VARIABLE in environ:
        settings = C10dSettings.from_json(environ[C10D_VARIABLE])
        return replace(settings, endpoints=endpoints) if endpoints else settings
    arguments = arguments_of_agent(agent_pid) if agent_pid is not None else None
    if arguments is None or not asks_for_c10d(arguments, environ):
        return None
    num_nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
    if num_nodes > 1:
        raise FormationFailed(
            f"torchrun's own rendezvous has joined {num_nodes} nodes, where the loss of one ends all: the torchrun "
            "plug-in of elastic_train is missing (pip install it on every node), or did not see that the program is "
            "ours (set ELASTIC_TRAIN=1)"
        )
    if endpoints is None:
        return None
    min_nodes, max_nodes = parse_nnodes(option(arguments, environ, "nnodes") or "1:1")
    return C10dSettings(endpoints, min_nodes, max_nodes, last_call=LAST_CALL_SECONDS)


def asks_for_c10d(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether torchrun is told to use c10d; what it chooses by itself for one node does not count."""
    is_standalone = "standalone" in read_command(arguments).options or environ.get("PET_STANDALONE", "0") == "1"
    return option(arguments, environ, "rdzv-backend") == "c10d" and not is_standalone


def _derived_node_id(environ: Mapping[str, str], agent_pid: int | None) -> str:
    """The same for all workers that one agent starts at once, where no hook has told them an id."""
    names = (platform.node(), agent_pid, *(environ.get(n) for n in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")))
    return uuid.uuid5(uuid.NAMESPACE_OID, repr(names)).hex[:12]


def max_nodes_of(launch: Launch, environ: Mapping[str, str]) -> int:
    """How many nodes the job may have: by --nnodes, without torchrun those that there are."""
    settings = launch.c10d or launch.etcd
    if settings is not None:
        return settings.max_nodes
    if launch.agent_pid is None:
        return launch.num_nodes
    return parse_nnodes(option(arguments_of_agent(launch.agent_pid) or [], environ, "nnodes") or "1:1")[1]


def arguments_of_agent(agent_pid: int) -> list[str] | None:
    try:
        command = Path(f"/proc/{agent_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return agent_arguments(command)
