"""What torchrun's command line means, what the hook makes of it in the agent, and what workers read of their start."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as torch_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api as torch_launcher

from elastic_train import wording
from elastic_train.elastic.connect import local_address
from elastic_train.errors import FormationFailed, UsageError
from elastic_train.protocol import addresses
from elastic_train.protocol.addresses import normalize_endpoint, parse_endpoints, split_endpoint
from elastic_train.protocol.names import look_up
from elastic_train.rendezvous import command_line, etcd_handler, hook, launch
from elastic_train.rendezvous.command_line import (
    agent_above,
    agent_arguments,
    asks_for_c10d,
    has_free_port,
    launches_elastic_train,
    option,
    parse_nnodes,
    read_command,
)
from elastic_train.rendezvous.etcd_settings import SETTINGS_VARIABLE, EtcdSettings
from elastic_train.rendezvous.handler import (
    MASTER_ADDR,
    MASTER_PORT,
    WorkersHandler,
    announcement,
    create_c10d_handler,
    create_handler,
    keys_without_meaning,
    read_c10d_settings,
)
from elastic_train.rendezvous.launch import (
    ADDRESS_VARIABLE,
    C10D_VARIABLE,
    MARKERS,
    NODE_VARIABLE,
    C10dSettings,
    Launch,
    alone_warning,
    max_nodes_of,
)
from elastic_train.system import AGENT_VARIABLE
from elastic_train.world import World, from_json, to_json
from tests.unit.test_world import member

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
def _clean_environ() -> Iterator[None]:
    """Restored by hand: handlers set variables, which monkeypatch does not see."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("PET_", "TORCHELASTIC_", "ELASTIC_TRAIN")) or name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


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

    assert asks_for_c10d(arguments, environ) == (theirs.rdzv_backend == "c10d" and not theirs.standalone)
    assert parse_nnodes(theirs.nnodes) == torch_run.parse_min_max_nnodes(theirs.nnodes)


def test_the_lists_of_options_are_torchruns() -> None:
    parser = torch_run.get_args_parser()
    flagged = [action for action in parser._actions if action.option_strings]
    longest = {max(action.option_strings, key=len): action for action in flagged}
    names = {long.removeprefix("--").replace("_", "-"): action for long, action in longest.items()}
    switches = {name for name, action in names.items() if action.nargs == 0}
    # newer torch may have more of them, older ones fewer
    assert set(wording.TORCHRUN_SWITCHES) >= switches
    assert set(wording.TORCHRUN_OPTIONS) >= names.keys() - switches
    shorts = {s: name for name, action in names.items() for s in action.option_strings if not s.startswith("--")}
    assert shorts == command_line.SHORT_OPTIONS


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
    ours.write_text("import torch\nif 1:\n    from elastic_train.training.tasks import Task\n")
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("localhost:29400",)),
        ("h1", ("h1:29400",)),
        ("h1:1,h2, h3:3 ", ("h1:1", "h2:29400", "h3:3")),
        ("[::1]:5,::", None),
        ("h1,h2:0", None),
        ("h1:65536", None),
        ("h1:port", None),
        ("h1,h2,h1:29400", ("h1:29400", "h2:29400")),
        ("localhost,h2", None),
        ("h1,127.0.0.1:29401", None),
        ("h1,[::1]", None),
        (":29400,h2", None),
        ("localhost,127.0.0.1:29401,[::1]", ("localhost:29400", "127.0.0.1:29401", "[::1]:29400")),
    ],
)
def test_lists_of_endpoints(text: str, expected: tuple[str, ...] | None) -> None:
    if expected is not None:
        assert parse_endpoints(text, "--rdzv-endpoint") == expected
        return
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint"):
        parse_endpoints(text, "--rdzv-endpoint")


@pytest.mark.parametrize(
    ("endpoint", "expected"), [("localhost:0", True), ("h:0 ", True), ("h:10", False), ("", False), ("a:0,b:0", False)]
)
def test_what_nobody_else_can_find(endpoint: str, expected: bool) -> None:
    assert has_free_port(endpoint) == expected


# --- what an agent reads of its options -------------------------------------------------------------------------------


def read(conf: Mapping[str, object], endpoint: str = "h:1") -> C10dSettings:
    return read_c10d_settings(endpoint, conf, min_nodes=1, max_nodes=4)


def test_settings_without_conf_are_ours() -> None:
    assert read({"timeout": 900}, "h1,h2:2") == C10dSettings(("h1:29400", "h2:2"), 1, 4, 2.0, None, 600.0)


def test_conf_keys_that_have_a_meaning() -> None:
    conf = {"last_call_timeout": "0.5", "join_timeout": "30", "is_host": "False", "store_type": "TCP"}
    assert read(conf) == C10dSettings(("h:1",), 1, 4, 0.5, False, 30.0)
    assert read({"is_host": "1"}).is_host is True
    assert keys_without_meaning(conf) == []


def test_conf_keys_that_have_none_are_named_where_a_person_gave_them() -> None:
    conf = {"timeout": 900, "read_timeout": "60", "heartbeat_timeout": "5", "join_timeout": "30", "timout": "3"}
    assert keys_without_meaning(conf) == ["read_timeout", "heartbeat_timeout", "timout"]
    assert keys_without_meaning({"timeout": "900"}) == ["timeout"]


@pytest.mark.parametrize(
    "conf",
    [
        {"store_type": "file"},
        {"is_host": "maybe"},
        {"last_call_timeout": "soon"},
        {"last_call_timeout": "0"},
        {"join_timeout": "-1"},
        {"join_timeout": "inf"},
        {"join_timeout": "nan"},
    ],
    ids=str,
)
def test_conf_values_that_cannot_be_served(conf: dict[str, object]) -> None:
    ((key, value),) = conf.items()
    with pytest.raises(UsageError, match=f"^{key}={value} in --rdzv-conf: "):
        read(conf)


def test_the_announcement() -> None:
    assert announcement("at h:1", C10dSettings(("h:1",), 1, 1, 2.0)) is None
    elastic = announcement("at h:1,i:2", C10dSettings(("h:1",), 1, 4, 2.0))
    assert elastic == (
        "meeting at h:1,i:2, 1 to 4 nodes; training starts 2 s after the first node has come, at once with 4; nodes "
        "that come later are admitted between two steps"
    )
    assert "0.5 s after 2 nodes have come" in str(announcement("at h:1", C10dSettings(("h:1",), 2, 4, 0.5)))
    exact = str(announcement("at h:1", C10dSettings(("h:1",), 4, 4, 2.0)))
    assert exact.startswith("waiting at h:1 for exactly 4 nodes")
    assert "--nnodes 1:4" in exact


# --- the handler ------------------------------------------------------------------------------------------------------


def parameters(backend: str = "c10d", endpoint: str = "h:1", max_nodes: int = 4, **conf: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "job", 1, max_nodes, **conf)


def test_a_rendezvous_of_ones_own_node(capsys: pytest.CaptureFixture[str]) -> None:
    handler = create_c10d_handler(parameters(timeout=900))
    assert handler.get_backend() == "c10d"
    assert handler.get_run_id() == "job"
    assert not handler.use_agent_store
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, MASTER_ADDR)
    assert MASTER_ADDR.endswith(".invalid"), "it must resolve nowhere (RFC 2606)"
    assert handler.num_nodes_waiting() == 0
    handler.set_closed()
    assert not handler.is_closed()
    assert handler.shutdown()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_creator_sets_the_markers_and_a_restart_is_a_new_node() -> None:
    handler = create_c10d_handler(parameters())
    assert from_json(C10dSettings, os.environ[C10D_VARIABLE]) == C10dSettings(("h:1",), 1, 4, 2.0)
    seen = [os.environ[NODE_VARIABLE]]
    handler.next_rendezvous()
    assert os.environ[NODE_VARIABLE] == seen[0]
    for _ in range(2):
        handler.next_rendezvous()
        seen.append(os.environ[NODE_VARIABLE])
    create_c10d_handler(parameters())
    seen.append(os.environ[NODE_VARIABLE])
    assert len(set(seen)) == 4
    assert all(len(node) == 12 for node in seen)


def test_etcd3_gets_the_same_handler(capsys: pytest.CaptureFixture[str]) -> None:
    handler = create_handler(parameters("etcd3", "e:2379", membership="workers"))
    assert isinstance(handler, WorkersHandler)
    assert handler.get_backend() == "etcd3"
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == MASTER_ADDR
    assert from_json(EtcdSettings, os.environ[SETTINGS_VARIABLE]).endpoints == ("e:2379",)
    assert C10D_VARIABLE not in os.environ
    assert "meeting in etcd at e:2379, 1 to 4 nodes" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["grace", "lease", "join_timeout", "read_timeout"])
@pytest.mark.parametrize("value", ["abc", "0", "nan"])
def test_agents_that_wait_for_no_time_are_told_in_a_line(
    key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is asked of etcd."""
    with pytest.raises(SystemExit) as ended:
        create_handler(parameters("etcd3", "127.0.0.1:1", membership="agents", **{key: value}))
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"elastic_train: error: {key}={value} in --rdzv-conf: give a number of seconds above 0\n"
    )


@pytest.mark.parametrize("backend", ["c10d", "etcd3"])
@pytest.mark.parametrize("given", ["127.0.0.2", "localhost"])
def test_an_address_that_is_given_is_the_nodes(backend: str, given: str) -> None:
    of = {"endpoint": "h:1", "local_addr": given, "max_nodes": 1}
    if backend == "c10d":
        create_c10d_handler(parameters(**of))
    else:
        create_handler(parameters("etcd3", membership="workers", **of))
    started = Launch.from_environment(
        OF_WORKERS | {name: os.environ[name] for name in MARKERS if name in os.environ}, None
    )
    assert local_address(started, pytest.fail) == ("127.0.0.1" if given == "localhost" else given)


@pytest.mark.parametrize(("given", "found"), [("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("me", None)])
def test_an_agent_that_serves_a_store_is_told_where_a_name_of_its_own_leads(
    given: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would listen at 127.0.1.1 where the own name leads there, as Debian's does, and the others find nobody."""
    told: list[str | None] = []
    monkeypatch.setattr(etcd_handler, "AgentsHandler", lambda given, *_, **__: told.append(given.local_addr))
    monkeypatch.setattr(addresses, "look_up", lambda host: ["127.0.1.1"] if host == "me" else look_up(host))
    create_handler(parameters("etcd3", membership="agents", local_addr=given))
    assert told == [found]


@pytest.mark.parametrize("membership", ["workers", "agents"])
def test_an_address_of_another_machine_is_told(membership: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked of etcd."""
    with pytest.raises(SystemExit) as ended:
        create_handler(parameters("etcd3", endpoint="127.0.0.1:1", membership=membership, local_addr="192.0.2.1"))
    assert ended.value.code == 2
    assert ADDRESS_VARIABLE not in os.environ
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic_train: error: --local-addr=192.0.2.1: no network interface of this machine has it")


@pytest.mark.parametrize(
    ("left_as", "handled"),
    [(signal.SIG_IGN, "SIGTERM,SIGINT,SIGQUIT"), (signal.SIG_DFL, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")],
)
def test_torch_handles_no_hangup_that_nohup_ignores(
    left_as: signal.Handlers, handled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hook.SIGNALS_VARIABLE, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    registry = SimpleNamespace(get_rendezvous_handler=None)
    hook.answer_c10d(registry)
    before = signal.signal(signal.SIGHUP, left_as)
    try:
        registry.get_rendezvous_handler(parameters())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert os.environ[hook.SIGNALS_VARIABLE] == handled


def test_what_is_told_is_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    create_c10d_handler(parameters(max_nodes=1))
    assert capsys.readouterr().err == ""
    create_c10d_handler(parameters(max_nodes=1, timeout="3", close_timeout="4"))
    assert capsys.readouterr().err == (
        "elastic_train: timeout, close_timeout in --rdzv-conf have no meaning here: agents do not wait for each other\n"
    )
    with pytest.raises(SystemExit) as ended:
        create_c10d_handler(parameters(store_type="file"))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic_train: error: store_type=file in --rdzv-conf: ")


def test_the_hook_leaves_everything_else_to_torch() -> None:
    asked = []
    registry = SimpleNamespace(get_rendezvous_handler=asked.append)
    hook.answer_c10d(registry)
    os.environ.update(dict.fromkeys(MARKERS, "of a job around this one"))
    others = [parameters(endpoint="localhost:0", max_nodes=1), parameters("static"), parameters("etcd3")]
    for other in others:
        registry.get_rendezvous_handler(other)
    assert asked == others
    assert not os.environ.keys() & set(MARKERS)
    with pytest.raises(SystemExit):  # else it waits for a second one, which cannot find it
        registry.get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 2, 4))
    assert isinstance(registry.get_rendezvous_handler(parameters()), WorkersHandler)
    assert isinstance(registry.get_rendezvous_handler(parameters(max_nodes=1)), WorkersHandler)
    assert asked == others


def test_an_agent_may_run_on_another_thread_than_the_main_one() -> None:
    """As torch allows, with a warning: a launcher of one's own, with ELASTIC_TRAIN=1."""
    registry = SimpleNamespace(get_rendezvous_handler=lambda given: given)
    hook.answer_c10d(registry)
    with ThreadPoolExecutor(1) as pool:
        asked = parameters("etcd3")
        assert pool.submit(registry.get_rendezvous_handler, asked).result(60) is asked


@pytest.mark.parametrize("backend", ["etcd", "consul"])
def test_a_backend_that_torch_does_not_have_is_one_line(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    registry = SimpleNamespace(get_rendezvous_handler=torch_registry.get_rendezvous_handler)
    hook.answer_c10d(registry)
    with pytest.raises(SystemExit) as ended:
        registry.get_rendezvous_handler(parameters(backend))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastic_train: error: --rdzv-backend={backend}: give c10d or etcd3; torch says: ")


@pytest.mark.parametrize(("max_nodes", "lines"), [(4, 1), (1, 0)])
def test_torchruns_default_is_told_to_wait_for_all(
    max_nodes: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = SimpleNamespace(get_rendezvous_handler=lambda _parameters: None)
    hook.answer_c10d(registry)
    registry.get_rendezvous_handler(parameters("static", max_nodes=max_nodes))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert all("add --rdzv-backend=c10d" in line for line in told)


# --- the hook in torch's launcher -------------------------------------------------------------------------------------


def test_torchs_launcher_asks_where_the_hook_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails with a new torch, look in torch/distributed/launcher/api.py for where it takes its handler from."""
    assert torch_launcher.rdzv_registry is torch_registry  # type: ignore[attr-defined]

    class Asked(Exception):
        pass

    def get_rendezvous_handler(params: RendezvousParameters) -> None:
        raise Asked(params.backend, params.endpoint, params.min_nodes, params.max_nodes)

    monkeypatch.setattr(torch_registry, "get_rendezvous_handler", get_rendezvous_handler)
    config = torch_launcher.LaunchConfig(1, 4, 1, rdzv_backend="c10d", rdzv_endpoint="h1,h2:2", run_id="job")
    with pytest.raises(Asked) as asked:
        torch_launcher.launch_agent(config, "true", [])
    assert asked.value.args == ("c10d", "h1,h2:2", 1, 4)


SHOW_ENVIRONMENT = """\
import json, os
print(json.dumps(dict(os.environ, PARENT=str(os.getppid()))))
"""
CALLER = "from torch.distributed import run; run.run(run.parse_args({!r}))"


def start(arguments: str, program: str, directory: Path, *, is_called: bool = False, **environ: str) -> Any:
    """The environment of the one worker that torchrun starts, and what the agent wrote on stderr."""
    script = directory / "program.py"
    script.write_text(f"if False:\n    import {program}\n" + SHOW_ENVIRONMENT)
    words = [*shlex.split(arguments), str(script)]
    torchrun_words = ["-c", CALLER.format(words)] if is_called else ["-m", "torch.distributed.run", *words]
    done = subprocess.run(
        [sys.executable, *torchrun_words], env={**os.environ, **environ}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ("--rdzv-backend=c10d --rdzv-endpoint=h1,h2:2 --nnodes 2:4", {}),
        ("--nn 2:4", {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h1,h2:2"}),
    ],
    ids=["in full", "abbreviated and by PET_ variables"],
)
def test_our_program_gets_our_handler(arguments: str, environ: dict[str, str], tmp_path: Path) -> None:
    found, said = start(arguments, "elastic_train", tmp_path, **environ, **{AGENT_VARIABLE: "1 1 of-a-job-around"})
    assert found[AGENT_VARIABLE].split()[0] == found["PARENT"]
    assert from_json(C10dSettings, found[C10D_VARIABLE]) == C10dSettings(("h1:29400", "h2:2"), 2, 4, 2.0)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == (MASTER_ADDR, MASTER_PORT)
    assert found["RES_OPTIONS"] == launch.NAME_LOOKUP_OPTIONS
    assert (found["WORLD_SIZE"], found["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "False")
    assert said.count("elastic_train: meeting at h1:29400,h2:2, 2 to 4 nodes; ") == 1


def test_a_process_group_of_the_scripts_own_fails_at_once_and_says_why(tmp_path: Path) -> None:
    """torch would look for a name that resolves nowhere until its own timeout, half an hour."""
    script = tmp_path / "program.py"
    script.write_text("import elastic_train, torch.distributed\ntorch.distributed.init_process_group('gloo')\n")
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=h1", "--nnodes", "1:2", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert re.search(rf"^(\[rank0\]: )?ValueError: .*{re.escape(MASTER_PORT)}", done.stderr, re.MULTILINE), done.stderr


def test_our_program_gets_our_handler_from_another_launcher(tmp_path: Path) -> None:
    arguments = "--rdzv-backend=c10d --rdzv-endpoint=h1 --nnodes 2:4"
    found, _ = start(arguments, "elastic_train", tmp_path, is_called=True, ELASTIC_TRAIN="1")
    assert from_json(C10dSettings, found[C10D_VARIABLE]).endpoints == ("h1:29400",)


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes 1", "somebody"),
        ("--standalone", "elastic_train"),
    ],
)
def test_all_others_get_torchs_own(arguments: str, program: str, tmp_path: Path) -> None:
    found, said = start(arguments, program, tmp_path)
    assert not found.keys() & set(MARKERS)
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert "RES_OPTIONS" in found or program == "somebody"
    assert "elastic_train" not in said


# --- what a worker reads of its start ---------------------------------------------------------------------------------


def test_launch_without_torchrun_is_a_world_of_one() -> None:
    assert Launch.from_environment({}, None) == Launch()


ENVIRON = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "5",
    "MASTER_ADDR": "m", "MASTER_PORT": "77", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OF_ONE_NODE = ENVIRON | {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
OF_WORKERS = OF_ONE_NODE | {"MASTER_ADDR": MASTER_ADDR, "MASTER_PORT": MASTER_PORT}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of this process's agent; empty, it is no torchrun process."""
    words: list[str] = []
    monkeypatch.setattr(launch, "agent_above", lambda pid: (pid, words) if words else None)
    return words


OF_WRAPPED = """
import os, sys
from elastic_train.rendezvous.command_line import agent_above
from elastic_train.rendezvous.launch import Launch
agent_pid = Launch.from_environment({**os.environ, **ENVIRON}, None).agent_pid
print(agent_above(os.getppid())[1], agent_pid == int(os.environ["AGENT"]), agent_pid == os.getppid(), flush=True)
"""


@pytest.mark.parametrize(
    ("wrapper", "is_parent"), [('"$@"; exit $?', False), ('(exec "$@"); exit $?', False), ('exec "$@"', True)]
)
def test_the_agent_of_a_worker_that_a_wrapper_has_started(wrapper: str, is_parent: bool, tmp_path: Path) -> None:
    """`torchrun --no-python wrapper.sh`, where the wrapper does not exec: the worker's parent is a shell."""
    torchrun, script, worker = (tmp_path / name for name in ("torchrun", "wrapper.sh", "worker.py"))
    torchrun.write_text(
        "import os, subprocess, sys\n"
        "subprocess.run(['bash', *sys.argv[-3:]], env={**os.environ, 'AGENT': str(os.getpid())}, check=True)\n"
    )
    script.write_text(wrapper + "\n")
    worker.write_text(f"ENVIRON = {OF_ONE_NODE}\n{OF_WRAPPED}")
    words = ["--rdzv-backend=c10d", "--nnodes=1:4", "--no-python", str(script), sys.executable, str(worker)]
    told = subprocess.run([sys.executable, torchrun, *words], capture_output=True, text=True, timeout=60, check=True)
    found = [*words, ""]  # what stands after the last NUL of /proc/PID/cmdline
    assert told.stdout == f"{found} True {is_parent}\n", "workers of one agent are of one node"


def test_a_process_that_no_agent_has_started() -> None:
    assert agent_above(os.getpid()) is None
    assert agent_above(2**22 + 1) is None, "there is none"


@pytest.mark.usefixtures("agent")
def test_launch_in_a_fixed_world() -> None:
    assert Launch.from_environment(ENVIRON, None) == Launch(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        num_nodes=2,
        run_id="job",
        restart_count=5,
        agent_pid=os.getppid(),
        master=("m", 77),
        is_agent_store=True,
    )


@pytest.mark.parametrize("command", ["--standalone", "--rdzv-backend=c10d --standalone", "--nnodes 2 --master-addr m"])
def test_worlds_that_are_fixed(command: str, agent: list[str]) -> None:
    agent += shlex.split(command)
    for store_endpoint in (None, "h:1"):
        launch = Launch.from_environment(ENVIRON, store_endpoint)
        assert (launch.c10d, launch.etcd, launch.node_id) == (None, None, "")


def test_a_node_that_nobody_can_join_says_so(agent: list[str]) -> None:
    """torchrun's own c10d took it for another's program, say a wrapper of ours."""
    agent += shlex.split("--rdzv-backend=c10d --rdzv-endpoint h:1 --nnodes 1:4 wrapper.sh")
    warning = alone_warning(Launch.from_environment(OF_ONE_NODE, None), OF_ONE_NODE)
    assert warning is not None
    assert "no other can join it" in warning
    assert "set ELASTIC_TRAIN=1" in warning
    hooked = OF_WORKERS | {C10D_VARIABLE: to_json(C10dSettings(("h:1",), 1, 4, 0.5))}
    assert alone_warning(Launch.from_environment(hooked, None), hooked) is None
    agent[:] = shlex.split("--rdzv-backend=c10d --rdzv-endpoint h:1 --nnodes 1 wrapper.sh")
    assert alone_warning(Launch.from_environment(OF_ONE_NODE, None), OF_ONE_NODE) is None
    for flags in ("--rdzv-endpoint=h:0 --nnodes 1", "--rdzv-endpoint=localhost:0 --standalone --nnodes 1:4"):
        agent[:] = shlex.split(f"--rdzv-backend=c10d {flags} -m elastic_train")
        assert alone_warning(Launch.from_environment(OF_ONE_NODE, None), OF_ONE_NODE) is None
    agent[:] = ["--standalone", "wrapper.sh"]
    assert alone_warning(Launch.from_environment(OF_ONE_NODE, None), OF_ONE_NODE) is None


def test_a_node_at_a_port_that_nobody_else_knows_says_so(agent: list[str]) -> None:
    agent += shlex.split("--rdzv-backend=c10d --rdzv-endpoint=h:0 --nnodes 1:4 -m elastic_train")
    assert alone_warning(Launch.from_environment(OF_ONE_NODE, None), OF_ONE_NODE) == (
        "this node trains alone: no other can find --rdzv-endpoint=h:0, whose port is any free one; give all nodes the "
        "same port, such as h:29400"
    )


@pytest.mark.parametrize(
    ("command", "environ", "seconds"),
    [
        ("", {}, None),
        ("--shutdown-timeout 10", {}, 10.0),
        ("--shutdown_timeout=10", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}, 10.0),
        ("", {"PET_SHUTDOWN_TIMEOUT": "10", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}, 10.0),
        ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}, 20.0),
    ],
)
def test_how_soon_an_agent_kills(command: str, environ: dict[str, str], seconds: float, agent: list[str]) -> None:
    agent += [*shlex.split(command), "-m", "elastic_train"]
    assert Launch.from_environment(OF_ONE_NODE | environ, None).shutdown_seconds == seconds


def test_launch_under_c10d() -> None:
    settings = C10dSettings(("h:1",), 2, 4, 0.5, True, 7.0)
    environ = OF_WORKERS | {C10D_VARIABLE: to_json(settings), NODE_VARIABLE: "abc"}
    launch = Launch.from_environment(environ, None)
    assert (launch.c10d, launch.etcd, launch.node_id, launch.min_nodes) == (settings, None, "abc", 2)
    assert max_nodes_of(launch, environ) == 4
    elsewhere = Launch.from_environment(environ, "[2001:db8::2]:5,i").c10d
    assert elsewhere == C10dSettings(("[2001:db8::2]:5", "i:29400"), 2, 4, 0.5, True, 7.0)
    with pytest.raises(UsageError, match=r"^--store-endpoint: 'h:x' is not HOST:PORT"):
        Launch.from_environment(environ, "h:x")


def test_launch_under_etcd3() -> None:
    settings = EtcdSettings(("e:2379",), min_nodes=2, max_nodes=4)
    environ = OF_WORKERS | {SETTINGS_VARIABLE: to_json(settings), NODE_VARIABLE: "abc"}
    launch = Launch.from_environment(environ, None)
    assert (launch.c10d, launch.etcd, launch.node_id, launch.min_nodes) == (None, settings, "abc", 2)
    assert max_nodes_of(launch, environ) == 4


C10D_OF_ONE, ETCD_OF_ONE = to_json(C10dSettings(("h:1",), 1, 4, 0.5)), to_json(EtcdSettings(("e:2379",)))


@pytest.mark.parametrize("settings", [{C10D_VARIABLE: C10D_OF_ONE}, {SETTINGS_VARIABLE: ETCD_OF_ONE}])
def test_workers_that_are_all_told_to_be_the_first_of_their_node_are_told_apart(settings: dict[str, str]) -> None:
    """torchrun --virtual-local-rank: LOCAL_RANK is 0 for each, and has to be, as each sees one GPU."""
    launches = [
        Launch.from_environment(OF_WORKERS | settings | {"RANK": rank, "LOCAL_RANK": "0"}, None) for rank in ("0", "1")
    ]
    assert [launch.local_rank for launch in launches] == [0, 1]
    members = tuple(member(0, 0, local_rank=launch.local_rank) for launch in launches)
    assert "LOCAL_RANK" not in launches[1].variables_in(World(1, 7, members))


def test_what_srun_says_of_a_place_on_its_node_is_told_as_torchruns_variable() -> None:
    step = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
    launch = Launch.from_environment(step, None)
    members = tuple(member(0, 0, local_rank=local_rank) for local_rank in (0, 1))
    assert launch.variables_in(World(1, 7, members))["LOCAL_RANK"] == "1"


def test_a_world_in_torchruns_variables() -> None:
    """Three nodes of two workers each, ranks as they came; the last node stands by."""
    nodes = (0, 1, 1, 0, 2, 2)
    members = tuple(member(node, 0, local_rank=nodes[:rank].count(node)) for rank, node in enumerate(nodes))
    environ = OF_WORKERS | {C10D_VARIABLE: to_json(C10dSettings(("h:1",), 2, 4, 0.5))}
    launch = Launch.from_environment(environ, None)
    found = [launch.variables_in(World(rank, 7, members, max_world_size=4)) for rank in range(6)]
    of_node = {"LOCAL_WORLD_SIZE": "2"}  # LOCAL_RANK stays as the agent has set it
    assert found[2] == of_node | {
        "RANK": "2", "WORLD_SIZE": "4", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "4", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }  # fmt: skip
    assert [variables["RANK"] for variables in found] == list("012345")
    assert [variables["GROUP_RANK"] for variables in found] == list("011022")
    assert {variables["GROUP_WORLD_SIZE"] for variables in found} == {"2"}


def test_where_no_launcher_said_a_rank_none_is_said() -> None:
    """A second run in the same process, or one that it starts, would take it for a launcher's."""
    assert Launch().variables_in(World(0, 0, (member(0, 0),))) == {}


def test_several_nodes_without_the_plug_in_are_refused(agent: list[str]) -> None:
    agent += ["--rdzv-backend=c10d", "--nnodes=1:4", "-m", "elastic_train"]
    for store_endpoint in (None, "h:1"):
        with pytest.raises(
            FormationFailed, match=r"torchrun plug-in of elastic_train is missing \(pip install"
        ) as found:
            Launch.from_environment(ENVIRON, store_endpoint)
        assert found.value.exit_code == 1
        assert len(str(found.value).splitlines()) == 1


def test_what_is_told_without_the_plug_in_is_told_behind_a_wrapper_too(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rdzv-backend=c10d", "--nnodes=1:4", "--no-python", "wrapper.sh"]
    monkeypatch.setattr(launch, "agent_above", lambda _pid: (4711, words))
    with pytest.raises(FormationFailed, match=r"set ELASTIC_TRAIN=1"):
        Launch.from_environment(ENVIRON, None)
    found = Launch.from_environment(OF_ONE_NODE, None)
    assert (found.c10d, found.agent_pid) == (None, 4711)
    assert "set ELASTIC_TRAIN=1" in str(alone_warning(found, OF_ONE_NODE))
    assert Launch.from_environment(OF_ONE_NODE, "h:1").c10d == C10dSettings(("h:1",), 1, 4, 2.0)


def test_one_node_without_the_plug_in_finds_others_by_a_flag(agent: list[str]) -> None:
    agent += ["--rdzv-backend=c10d", "--nnodes=2:4", "-m", "elastic_train"]
    launch = Launch.from_environment(OF_ONE_NODE, "h:1")
    assert launch.c10d == C10dSettings(("h:1",), 2, 4, 2.0)
    assert launch.min_nodes == 2
    other = Launch.from_environment(OF_ONE_NODE | {"RANK": "0", "LOCAL_RANK": "0"}, "h:1")
    assert launch.node_id == other.node_id != ""
    restarted = Launch.from_environment(OF_ONE_NODE | {"TORCHELASTIC_RESTART_COUNT": "6"}, "h:1")
    assert restarted.node_id != launch.node_id
