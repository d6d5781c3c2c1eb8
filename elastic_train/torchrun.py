"""What this package knows about torchrun. Its private state is the affair of agents_state.py and keep_alive.py.

Three things torchrun does not do by itself are done here:

- **A hook in the agent.** The entry-point group `torchrun.handlers` is loaded by every torchrun process, whatever the
  rendezvous backend. `prepare_agent` uses it, only when the launched program is ours, to switch off the sharing of
  the agents' TCPStore (with it, torch 2.11 to 2.15 cannot take in a new node: the bootstrap address is cached for
  ever; see pytorch/pytorch#182221 for the half that was mended), to shorten the silent 30 s "last call" of a job
  below its maximum, to tell the workers the rendezvous endpoint, to open a rendezvous again that was closed by agents
  of which none is left (agents_state.py), and to have the agents' keep-alive go without their wall clocks
  (keep_alive.py).
- **The endpoint.** torchrun does not export it; `Launch` finds it (our flag, the hook, the agent's command line).
- **The round.** Workers of one rendezvous round need a key prefix of their own on the endpoint's store.
  `torchrun_round` reads it from the agents' state (agents_state.py).

This module imports nothing heavy at module level: agents load it before anything else.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train import keep_alive
from elastic_train.agents_state import KEEP_ALIVE_SECONDS, agents_key, read_agents_state, reopened
from elastic_train.etcd_settings import SETTINGS_VARIABLE, EtcdSettings
from elastic_train.slurm import torchrun_variables

if TYPE_CHECKING:
    from torch.distributed import Store

DEFAULT_PORT = 29400
LAST_CALL_SECONDS = 2
"""how long a world below --nnodes' maximum waits for more nodes, where the user does not say"""
NAME_LOOKUP_OPTIONS = "timeout:1 attempts:1"
"""RES_OPTIONS (resolv.conf(5)) of agents and workers: every connection to a TCPStore looks the peer's name up, on the
one thread that serves everybody, and a name server that does not answer must not hold a world up for its usual 5 s"""
FIRST_ANSWER = datetime.timedelta(seconds=3)
"""from the endpoint's store, before a person is told that there is none"""
STRANGER_PATIENCE = datetime.timedelta(seconds=60)
"""for an answer of a store that is busy; what torchrun's own is"""
ENDPOINT_VARIABLE = "ELASTIC_TRAIN_RDZV_ENDPOINT"
MIN_NODES_VARIABLE = "ELASTIC_TRAIN_MIN_NODES"
NODE_VARIABLE = "ELASTIC_TRAIN_NODE"

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
    arguments = agent_arguments(sys.orig_argv)
    if arguments is not None and launches_elastic_train(arguments, os.environ):
        plan = plan_agent(arguments, os.environ)
        os.environ.update(plan.environment)
        if plan.announcement:
            _say(plan.announcement)
        if endpoint := plan.environment.get(ENDPOINT_VARIABLE):
            raw = greet_endpoint(endpoint)
            keep_alive.install()
            if raw is not None:
                reopen_if_abandoned(raw, endpoint, option(arguments, os.environ, "rdzv-id") or "none")
    return refuse_as_backend


def greet_endpoint(endpoint: str) -> Store | None:
    """A client of the store there; None where nobody hosts it yet. Ends this process, an agent that torchrun would end
    with a traceback, where another program has the endpoint's port."""
    from elastic_train.errors import StoreUnreachable
    from elastic_train.store import greet  # torch is loaded by now

    host, port = split_endpoint(endpoint)
    with suppress(StoreUnreachable):
        return greet(host, port, FIRST_ANSWER)
    _say(
        f"what listens at {endpoint} does not answer as a rendezvous store; waiting up to "
        f"{STRANGER_PATIENCE.total_seconds():.0f} s for it"
    )
    with suppress(StoreUnreachable):
        return greet(host, port, STRANGER_PATIENCE)
    _say(
        f"error: what listens at {endpoint} is no rendezvous store: another program has that port; choose another "
        "--rdzv-endpoint"
    )
    os._exit(1)  # a thread that waits for the stranger's answer could abort an ordinary exit


def reopen_if_abandoned(raw: Store, endpoint: str, run_id: str) -> None:
    """An agent that ends closes its rendezvous for all who come later, which only workers who train on mend. Where the
    store outlives the last agent, nothing could ever start there again: it is opened once nobody has given a sign of
    life for as long as torchrun takes for dead. Blocks for that long where it is closed, and else for next to nothing.
    """
    from elastic_train.errors import StoreUnreachable
    from elastic_train.store import TorchStore

    store, key = TorchStore(raw, STRANGER_PATIENCE), agents_key(run_id)
    with suppress(StoreUnreachable, ValueError):  # torchrun itself says what is wrong, and better
        seen, since = store.get(key), time.monotonic()
        if seen is None or not read_agents_state(seen).is_closed:
            return
        _say(f"the job at {endpoint} has ended; starting it again once nobody of it is left (up to 20 s)")
        while time.monotonic() - since < KEEP_ALIVE_SECONDS:
            time.sleep(0.5)
            found = store.get(key)
            if found is None or not read_agents_state(found).is_closed:
                return
            if found != seen:
                seen, since = found, time.monotonic()
        store.swap(key, seen, reopened(seen))


def _say(message: str) -> None:
    print(f"elastic_train: {message}", file=sys.stderr, flush=True)


def refuse_as_backend(_parameters: Any) -> Any:
    raise RuntimeError("elastic_train is no rendezvous backend; use --rdzv-backend=c10d or etcd3")


def etcd3_backend() -> Any:
    """Entry point `etcd3` of `torchrun.handlers`: what makes the handler of `--rdzv-backend=etcd3`."""

    def create(parameters: Any) -> Any:
        from elastic_train.rendezvous import create_handler  # heavy, and only for those who asked for it

        return create_handler(parameters)

    return create


@dataclass(frozen=True)
class AgentPlan:
    """What to set in an agent's environment, and what to tell the person in front of it."""

    environment: dict[str, str]
    announcement: str | None


def plan_agent(arguments: Sequence[str], environ: Mapping[str, str]) -> AgentPlan:
    """Decide from an agent's command line and environment; what the user set wins."""
    environment = {}
    if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in environ:
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if "RES_OPTIONS" not in environ:
        environment["RES_OPTIONS"] = NAME_LOOKUP_OPTIONS
    backend = option(arguments, environ, "rdzv-backend") or "static"
    standalone = "standalone" in read_command(arguments).options or environ.get("PET_STANDALONE", "0") == "1"
    if backend != "c10d" or standalone:
        return AgentPlan(environment, None)
    endpoint = normalize_endpoint(option(arguments, environ, "rdzv-endpoint") or "")
    environment[ENDPOINT_VARIABLE] = endpoint
    min_nodes, max_nodes = parse_nnodes(option(arguments, environ, "nnodes") or "1:1")
    environment[MIN_NODES_VARIABLE] = str(min_nodes)
    if max_nodes == 1:
        return AgentPlan(environment, None)
    if min_nodes == max_nodes:
        return AgentPlan(
            environment,
            f"waiting at {endpoint} for exactly {max_nodes} nodes, as --nnodes {max_nodes} asks; "
            f"a lost node will then pause training, --nnodes 1:{max_nodes} lets it go on",
        )
    conf = option(arguments, environ, "rdzv-conf") or ""
    if conf:
        given = re.search(r"last_call_timeout=(\d+)", conf)
        seconds = int(given.group(1)) if given else 30
    else:
        seconds = LAST_CALL_SECONDS
        environment["PET_RDZV_CONF"] = f"last_call_timeout={seconds}"
    hint = "" if seconds <= 10 else " (--rdzv-conf last_call_timeout=2 shortens this)"
    return AgentPlan(
        environment,
        f"meeting at {endpoint}, {min_nodes} to {max_nodes} nodes; training starts {seconds} s after "
        f"{'the first node has' if min_nodes == 1 else f'{min_nodes} nodes have'} come, at once with {max_nodes}{hint}",
    )


def agent_arguments(command: Sequence[str]) -> list[str] | None:
    """The arguments of torchrun in a process's full command line; None if it is no torchrun process."""
    for position, word in enumerate(command[:6]):
        if Path(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch"):
            return list(command[position + 1 :])
    return None


def launches_elastic_train(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the program that torchrun is told to start is ours.

    It is when it is the module `elastic_train` or one below it, a Python file or module whose own source imports it, or
    when ELASTIC_TRAIN=1 is set.
    """
    if environ.get("ELASTIC_TRAIN") == "1":
        return True
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
    endpoint: str | None = None
    """HOST:PORT of the c10d rendezvous; None where there is none"""
    master: tuple[str, int] | None = None
    """MASTER_ADDR and MASTER_PORT, the meeting point where there is no c10d endpoint"""
    is_agent_store: bool = False
    """whether an agent serves the store at `master`; else rank 0 has to"""
    etcd: EtcdSettings | None = None
    """the cluster where workers of all nodes meet; rank, world_size and num_nodes are then those of this node alone"""
    node_id: str = ""
    """what the workers of this node have in common and no other node has; set with `etcd`"""

    @staticmethod
    def from_environment(environ: Mapping[str, str], store_endpoint: str | None) -> Launch:
        """Read torchrun's variables, or those of srun. Without them (no RANK): a world of one."""
        agent_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in environ else None  # not srun, nor another launcher
        environ = {**environ, **torchrun_variables(environ)}
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return Launch()
        endpoint = normalize_endpoint(store_endpoint) if store_endpoint else environ.get(ENDPOINT_VARIABLE)
        etcd = environ.get(SETTINGS_VARIABLE)
        if endpoint is None and etcd is None and agent_pid is not None:
            endpoint = endpoint_of_agent(agent_pid, environ)
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
            min_nodes=int(environ.get(MIN_NODES_VARIABLE, "1")),
            endpoint=endpoint,
            master=(environ.get("MASTER_ADDR", "localhost"), int(environ.get("MASTER_PORT", "0"))),
            is_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            etcd=EtcdSettings.from_json(etcd) if etcd and endpoint is None else None,
            node_id=environ.get(NODE_VARIABLE, ""),
        )


def endpoint_of_agent(agent_pid: int, environ: Mapping[str, str]) -> str | None:
    """The c10d endpoint by the agent's command line: for packages on a path, where no hook is installed."""
    arguments = arguments_of_agent(agent_pid)
    return plan_agent(arguments, environ).environment.get(ENDPOINT_VARIABLE) if arguments else None


def max_nodes_of(launch: Launch, environ: Mapping[str, str]) -> int:
    """How many nodes the job may have: by --nnodes, without torchrun those that there are."""
    if launch.etcd is not None:
        return launch.etcd.max_nodes
    if launch.agent_pid is None:
        return launch.num_nodes
    return parse_nnodes(option(arguments_of_agent(launch.agent_pid) or [], environ, "nnodes") or "1:1")[1]


def arguments_of_agent(agent_pid: int) -> list[str] | None:
    try:
        command = Path(f"/proc/{agent_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return agent_arguments(command)


def torchrun_round(encoded: str, launch: Launch) -> int | None:
    """The rendezvous round that started this worker; None while the agents' state is of another round.

    `encoded` is the value of `agents_key`. The state is this worker's only if it is complete and knows our agent under
    our node rank: else a next round is already forming, and this worker is about to be ended by its agent.
    """
    state = read_agents_state(encoded)
    if state.is_complete and launch.node_rank in state.ranks_by_pid.get(launch.agent_pid or -1, set()):
        return state.round
    return None
