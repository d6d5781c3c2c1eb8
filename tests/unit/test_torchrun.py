"""What the hook makes of an agent's command line, and what workers read of the agents' state."""

from __future__ import annotations

import base64
import os
import pickle
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from elastic_train import torchrun
from elastic_train.agents_state import AgentsState
from elastic_train.torchrun import (
    ENDPOINT_VARIABLE,
    MIN_NODES_VARIABLE,
    Launch,
    agent_arguments,
    launches_elastic_train,
    normalize_endpoint,
    option,
    parse_nnodes,
    plan_agent,
    read_agents_state,
    read_command,
    split_endpoint,
    torchrun_round,
)

COMMANDS = [
    "-m elastic_train",
    "--rdzv-backend=c10d --nnodes 1:4 -m elastic_train",
    "--rdzv-backend c10d --rdzv-endpoint=host:29500 --nnodes=2:8 --nproc-per-node 2 -m elastic_train --epochs 3",
    "--rdzv_backend c10d --rdzv_endpoint host --nnodes 4 -m elastic_train --nnodes 9",
    "--rdzv-id elastic_train --rdzv-backend=c10d --nnodes=1:2 -m elastic_train",
    "--role elastic_train --log-dir out.py --nnodes=1:2 --rdzv-backend=c10d train.py --rdzv-backend=etcd",
    "--nnodes 1:2 --nnodes 1:3 --rdzv-backend=static --rdzv-backend=c10d -m elastic_train",
    "--nn 1:4 --rdzv-b c10d --rdzv-e=host:1 -m elastic_train",
    "--rdzv-backend=c10d --rdzv-endpoint=[::1]:29400 --nnodes=1:4 --module elastic_train",
    "--standalone --nproc-per-node=2 -m elastic_train",
    "-t3 -r 1:3 --rdzv-backend=c10d --no-python -- prog --nnodes 3",
    "-r=3 --tee=3 --run-path --rdzv-backend=c10d --rdzv-conf last_call_timeout=5,timeout=9 train.py",
    "--nnodes=1:4 --rdzv-backend=etcd3 --rdzv-endpoint=h1:2379,h2:2379 -m elastic_train",
    "--master-addr h --master-port 1234 --node-rank 1 --nnodes 2 train.py -m elastic_train",
]
ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"PET_NNODES": "2:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "from-env:7"},
    {"PET_STANDALONE": "1"},
    {"PET_STANDALONE": "0", "PET_RDZV_BACKEND": "c10d"},
]


@pytest.fixture(autouse=True)
def _clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("PET_", "TORCHELASTIC_", "ELASTIC_TRAIN")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("environ", ENVIRONMENTS, ids=lambda environ: ",".join(environ) or "no environment")
@pytest.mark.parametrize("command", COMMANDS)
def test_an_agents_command_line_means_what_torchrun_takes_it_for(
    command: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = shlex.split(command)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    theirs = torch_run.get_args_parser().parse_args(arguments)
    for name in ("rdzv-backend", "rdzv-endpoint", "nnodes", "rdzv-conf", "rdzv-id", "role"):
        default = {"rdzv-backend": "static", "nnodes": "1:1", "rdzv-id": "none", "role": "default"}.get(name, "")
        assert (option(arguments, environ, name) or default) == getattr(theirs, name.replace("-", "_")), name
    ours = read_command(arguments)
    assert ours.program == theirs.training_script
    assert ("module" in ours.options) == theirs.module
    assert launches_elastic_train(arguments, environ) == (theirs.module and theirs.training_script == "elastic_train")

    plan = plan_agent(arguments, environ)
    assert plan.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    is_c10d = theirs.rdzv_backend == "c10d" and not theirs.standalone
    assert (MIN_NODES_VARIABLE in plan.environment) == is_c10d
    if is_c10d:
        endpoint = parse_rendezvous_endpoint(theirs.rdzv_endpoint, 29400)
        assert split_endpoint(plan.environment[ENDPOINT_VARIABLE]) == endpoint
    assert parse_nnodes(theirs.nnodes) == torch_run.parse_min_max_nnodes(theirs.nnodes)


def test_the_lists_of_options_are_torchruns() -> None:
    parser = torch_run.get_args_parser()
    flagged = [action for action in parser._actions if action.option_strings]
    longest = {max(action.option_strings, key=len): action for action in flagged}
    names = {long.removeprefix("--").replace("_", "-"): action for long, action in longest.items()}
    switches = {name for name, action in names.items() if action.nargs == 0}
    # newer torch may have more of them, older ones fewer
    assert set(torchrun.SWITCHES) >= switches
    assert set(torchrun.OPTIONS) >= names.keys() - switches
    shorts = {s: name for name, action in names.items() for s in action.option_strings if not s.startswith("--")}
    assert shorts == torchrun.SHORT_OPTIONS


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["/usr/bin/python3", "/venv/bin/torchrun", "-m", "x"], ["-m", "x"]),
        (["python", "-m", "torch.distributed.run", "--nnodes=2"], ["--nnodes=2"]),
        (["python", "-X", "dev", "-m", "torch.distributed.launch"], []),
        (["torchrun"], []),
        (["python", "train.py", "--a", "--b", "--c", "--d", "torchrun"], None),
        (["python", "-m", "elastic_train"], None),
        ([], None),
    ],
)
def test_agent_arguments(command: list[str], arguments: list[str] | None) -> None:
    assert agent_arguments(command) == arguments


def test_a_module_or_script_of_the_users_launches_us_where_it_imports_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "train.py").write_text("import os, elastic_train\n")
    (tmp_path / "mine" / "deep" / "__main__.py").write_text("from elastic_train import run\n")
    (tmp_path / "mine" / "plain.py").write_text("import torch, elastic_trainer\n")
    for command in ("-m mine.train", "mine/train.py", "-m mine.deep"):
        assert launches_elastic_train(shlex.split(command), {}), command
    for command in ("-m mine.plain", "-m mine.absent", "mine/plain.py", "-m mine"):
        assert not launches_elastic_train(shlex.split(command), {}), command
    monkeypatch.chdir("/")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launches_elastic_train(["-m", "mine.train"], {})


def test_what_launches_our_program(tmp_path: Path) -> None:
    def launches(command: str, **environ: str) -> bool:
        return launches_elastic_train(shlex.split(command), environ)

    ours, other = tmp_path / "ours.py", tmp_path / "other.py"
    ours.write_text("import torch\nif 1:\n    from elastic_train.tasks import Task\n")
    other.write_text("import elastic_trainer  # import elastic_train\nprint('import elastic_train')\n")
    assert launches("-m elastic_train")
    assert launches("-m elastic_train.check --nodes 2")
    assert launches("--no-python --nnodes 1:2 .venv/bin/elastic-train check")
    assert launches("--nnodes=1:2 --module elastic_train.__main__ --epochs 2")
    assert launches("elastic_train", PET_MODULE="1")
    assert launches(f"--nnodes 2 {ours} -m something")
    assert launches("train.py", ELASTIC_TRAIN="1")
    assert not launches("-m elastic_trainer")
    assert not launches("-m other elastic_train")
    assert not launches("--rdzv-id elastic_train -m other")
    assert not launches(f"{other}")
    assert not launches(f"{other} {ours}")
    assert not launches(f"{tmp_path}/missing.py")
    assert not launches("")


def test_the_silent_last_call_is_shortened_and_announced() -> None:
    plan = plan_agent(shlex.split("--rdzv-backend=c10d --nnodes 1:4 -m elastic_train"), {})
    assert plan.environment["PET_RDZV_CONF"] == "last_call_timeout=2"
    assert plan.announcement is not None
    assert "localhost:29400" in plan.announcement
    assert "2 s after the first node" in plan.announcement


def test_what_the_user_set_wins() -> None:
    arguments = shlex.split("--rdzv-backend=c10d --nnodes 2:4 --rdzv-conf=last_call_timeout=60 -m elastic_train")
    plan = plan_agent(arguments, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "RES_OPTIONS": "timeout:3"})
    assert plan.environment.keys() == {ENDPOINT_VARIABLE, MIN_NODES_VARIABLE}
    assert plan.announcement is not None
    assert "60 s after 2 nodes" in plan.announcement
    assert "shortens this" in plan.announcement


def test_an_exact_number_of_nodes_is_pointed_out() -> None:
    plan = plan_agent(shlex.split("--rdzv-backend=c10d --nnodes 4 -m elastic_train"), {})
    assert plan.announcement is not None
    assert "exactly 4 nodes" in plan.announcement
    assert "--nnodes 1:4" in plan.announcement
    assert "PET_RDZV_CONF" not in plan.environment


@pytest.mark.parametrize(
    "text",
    ["", "  ", "host", "host:1", " host:29400 ", "127.0.0.1:2", "[::1]:29400", "[fe80::1]", "my-host.example:65535"],
)
def test_endpoints_are_read_as_torch_does(text: str) -> None:
    assert split_endpoint(text) == parse_rendezvous_endpoint(text, 29400)
    assert split_endpoint(normalize_endpoint(text)) == split_endpoint(text)


@pytest.mark.parametrize("text", ["host:port", "host:1:2", "[::1]:x", "[::1"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match="not HOST:PORT"):
        split_endpoint(text)


def test_launch_without_torchrun_is_a_world_of_one() -> None:
    assert Launch.from_environment({}, None) == Launch()


def test_launch_from_torchruns_environment() -> None:
    environ = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "5",
        "MASTER_ADDR": "m", "MASTER_PORT": "77", "TORCHELASTIC_USE_AGENT_STORE": "True", ENDPOINT_VARIABLE: "h:29400",
    }  # fmt: skip
    assert Launch.from_environment(environ, None) == Launch(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        run_id="job",
        restart_count=5,
        agent_pid=os.getppid(),
        endpoint="h:29400",
        master=("m", 77),
        is_agent_store=True,
    )
    assert Launch.from_environment(environ, "[::1]:5").endpoint == "[::1]:5"


# --- the agents' state ------------------------------------------------------------------------------------------------


def encoded(state: Any) -> bytes:
    """As DynamicRendezvousHandler hands it to the store."""
    return base64.b64encode(pickle.dumps(state))


def torch_state(pids: dict[int, list[int]], round: int = 7, complete: bool = True) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete = round, complete
    number = 0
    for pid, ranks in pids.items():
        for rank in ranks:
            node = _NodeDesc(f"host-{rank}", pid, number)
            number += 1
            state.participants[node] = rank
            state.last_heartbeats[node] = datetime.now(UTC)
    state.wait_list.add(_NodeDesc("waiting", 9, 99))
    state.redundancy_list.add(_NodeDesc("redundant", 10, 99))
    state.deadline = datetime.now(UTC)
    return state


@pytest.mark.parametrize("pids", [{100: [0]}, {100: [0], 200: [1, 2], 300: [3]}, {}])
def test_the_agents_state_is_read(pids: dict[int, list[int]]) -> None:
    found = read_agents_state(encoded(torch_state(pids)))
    ranks_by_pid = {pid: set(ranks) for pid, ranks in pids.items()}
    assert found == AgentsState(7, True, is_closed=False, num_waiting=1, ranks_by_pid=ranks_by_pid)


def test_the_round_is_ours_only_if_it_is_complete_and_knows_our_agent() -> None:
    launch = Launch(node_rank=1, agent_pid=200)
    pids = {100: [0], 200: [1]}
    assert torchrun_round(encoded(torch_state(pids)), launch) == 7
    assert torchrun_round(encoded(torch_state(pids, complete=False)), launch) is None
    assert torchrun_round(encoded(torch_state(pids)), Launch(node_rank=0, agent_pid=200)) is None
    assert torchrun_round(encoded(torch_state(pids)), Launch(node_rank=1, agent_pid=300)) is None


class Crafted:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_a_crafted_state_runs_no_code(tmp_path: Path) -> None:
    state = torch_state({100: [0]})
    state.closed = Crafted(tmp_path / "ran")  # type: ignore[assignment]
    for data in (encoded(state), encoded(Crafted(tmp_path / "ran"))):
        with pytest.raises(ValueError, match="does not belong into a rendezvous state"):
            read_agents_state(data)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"!", base64.b64encode(b"torn"), encoded({}), encoded(7), encoded(set())])
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_agents_state(data)
