"""Errors before training end in one line with the remedy: no traceback, exit code 1 or 2."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_train.config import Config, as_json, flag
from elastic_train.rendezvous.launch import C10D_VARIABLE, C10dSettings
from elastic_train.world import to_json
from tests.integration.cluster import (
    PYTHON,
    Cluster,
    Node,
    clean_environment,
    error_line,
    error_lines,
    free_port,
    is_listening,
    result,
    running,
    wait_until,
)

LISTED_TASK = """
import os
import torch
from torch.utils.data import Dataset
from elastic_train.training.tasks import Task

class Folder(Dataset):
    def __init__(self):
        kinds = os.environ["KINDS"].split()  # as a file system may list them
        self.files = [f"{kind}/{number}.png" for kind in kinds for number in range(40)]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        kind, number = self.files[index].split("/")
        return torch.full((3,), float(number[:-4])), int(kind == "dog")

class Listed(Task):
    def build_model(self):
        return torch.nn.Linear(3, 2)

    def train_dataset(self):
        return Folder()
"""
BROKEN_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic_train.training.tasks import Task

class Broken(Task):
    def build_model(self):
        return nn.Linear(8, 2)

    def train_dataset(self):
        raise RuntimeError("my own mistake")

class Summed(Task):
    def build_model(self):
        return nn.Linear(8, 2)

    def train_dataset(self):
        return TensorDataset(torch.zeros(64, 8), torch.zeros(64, dtype=torch.long))

    test_dataset = train_dataset

    def summarize(self, means):
        return {"r2": "high"}
"""


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server of another program; its port."""
    connections = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                answer(connection)

    with socket.create_server(("localhost", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    for connection in connections:
        connection.close()


def greet_and_close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(b"220 mail.example.org ESMTP\r\n")
        connection.close()


def say_nothing(_connection: socket.socket) -> None:
    pass


STRANGER = ("what listens at localhost:", "another program has that port; choose another --rdzv-endpoint")
Cases = dict[str, tuple[tuple[str, ...], dict[str, str]]]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Node]]:
    """All of them side by side: most of a start is imports."""
    with running(tmp_path_factory.mktemp("failures")) as cluster, server(greet_and_close) as rude:
        path = cluster.path
        (path / "file").touch()
        (path / "broken.py").write_text(BROKEN_TASK)

        def as_worker(port: int) -> dict[str, str]:
            settings = C10dSettings((f"localhost:{port}",), 1, 4, last_call=2.0, join_timeout=3.0)
            return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", C10D_VARIABLE: to_json(settings)}

        def in_a_fixed_world(port: int) -> dict[str, str]:
            return {
                "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)
            }  # fmt: skip

        cases: Cases = {
            "mnist": (("--dataset", "mnist", "--data-dir", "nowhere"), {}),
            "run-dir": (("--run-dir", "file/run"), {}),
            "no-class": (("--task", "broken:Brokn"), {}),
            "broken-task": (("--task", "broken:Broken"), {}),
            "wrong-summary": (("--task", "broken:Summed", "--epochs", "1"), {}),
            "debug": (("--run-dir", "file/run", "--debug"), {}),
            "nothing-listens": (("--formation-timeout", "3"), in_a_fixed_world(free_port())),
            "rude-server": ((), as_worker(rude)),
        }
        started = {}
        for name, (flags, env) in cases.items():
            run_dir = () if "--run-dir" in flags else ("--run-dir", name)
            started[name] = cluster.launch([PYTHON, "-m", "elastic_train", *run_dir, *flags], env)
        yield started


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("mnist", 1, ("nowhere", "--download", "--data-dir")),
        ("run-dir", 1, ("file/run", "Not a directory", "--run-dir")),
        ("no-class", 2, ("--task broken:Brokn", "did you mean Broken?")),
        ("wrong-summary", 2, ("Summed.summarize gave 'r2' as a str: it must be a number", "of step 1 is saved")),
        ("nothing-listens", 1, ("localhost:", "MASTER_ADDR")),
        ("rude-server", 1, STRANGER),
    ],
)
def test_one_line_says_what_to_do(failures: dict[str, Node], case: str, code: int, words: tuple[str, ...]) -> None:
    node = failures[case]
    assert node.wait(100) == code, node.text()
    line = error_line(node)
    for word in words:
        assert word in line
    assert node.text().rstrip().splitlines()[-1] == line, "it is the last line"


@pytest.mark.slow
@pytest.mark.parametrize("answer", [greet_and_close, say_nothing])
def test_an_endpoint_whose_port_another_program_has(tmp_path: Path, answer: Callable[[socket.socket], None]) -> None:
    with server(answer) as port:
        ended = subprocess.run(
            [PYTHON, "-m", "torch.distributed.run", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
             "--nnodes=1:4", "-m", "elastic_train"],
            capture_output=True, text=True, timeout=100, cwd=tmp_path, env=clean_environment(),
        )  # fmt: skip
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr.partition("elastic_train: error: ")[0]
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("elastic_train: error: ")]
    told = f"what listens at localhost:{port} is no rendezvous of elastic_train: another program has that port"
    assert line == f"elastic_train: error: {told}; choose another --rdzv-endpoint"


def test_traceback_with_debug(failures: dict[str, Node]) -> None:
    node = failures["debug"]
    assert node.wait() == 1
    assert "Traceback (most recent call last)" in node.text()
    assert node.text().rstrip().splitlines()[-1].startswith("elastic_train: error: run directory")


def test_mistake_in_the_users_task_shows_where_it_is(failures: dict[str, Node]) -> None:
    node = failures["broken-task"]
    assert node.wait() == 1
    assert "Traceback (most recent call last)" in node.text()
    assert "broken.py" in node.text()
    assert node.text().rstrip().splitlines()[-1] == "RuntimeError: my own mistake"


def test_help_is_whole_and_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['elastic_train', '--help']\n"
        "from elastic_train.__main__ import main\n"
        "try:\n    main()\n"
        "finally:\n    print('heavy:', sorted({'torch', 'numpy', 'rich', 'PIL'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [PYTHON, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=clean_environment()
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--no-fresh" not in ended.stdout
    assert "--own-flags" not in ended.stdout
    assert ended.stdout.splitlines()[-1] == "heavy: []"
    for name, default in as_json(Config()).items():
        found = re.search(rf"^\s+{flag(name)}\b.*?(?=^ {{2}}--|\Z)", ended.stdout, re.MULTILINE | re.DOTALL)
        assert found, f"{flag(name)} is not in the help"
        if default not in (None, False):
            assert str(default) in found[0], f"{flag(name)} does not show its default {default}"


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "values"), [("--seed", ("3", "4")), ("--lr", ("0.3", "0.4"))])
def test_members_that_do_not_agree(cluster: Cluster, flag: str, values: tuple[str, str]) -> None:
    """The one that differs is refused, with both values; the other goes on to the end."""
    flags, options = ("--max-steps", "10"), {"nnodes": "1:2", "conf": cluster.last_call(30)}
    first = cluster.start(flag, values[0], *flags, **options)
    wait_until(lambda: is_listening(cluster.port), "the first node")
    nodes = [*first, *cluster.start(flag, values[1], *flags, **options)]
    codes = [node.wait(150) for node in nodes]
    assert sorted(codes) == [0, 1], [node.text()[-2000:] for node in nodes]
    refused, trained = nodes[codes.index(1)], nodes[codes.index(0)]
    [line] = error_lines(refused)
    assert any(re.search(rf"{flag}\b.*\b{one}\b.*\b{other}\b", line) for one, other in (values, values[::-1])), line
    assert not any("train with the settings of the run" in node.text() for node in nodes), "it does not train"
    assert "Traceback" not in refused.text().split("elastic_train: error")[0]
    assert "elastic_train: error" not in trained.text()
    assert result(cluster.run_dir)["step"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("loaders", ["0", "1"])
def test_a_folder_that_a_node_lists_in_another_order(cluster: Cluster, loaders: str) -> None:
    """Of equal length: without a word each sample would be trained twice or never."""
    (cluster.path / "listed.py").write_text(LISTED_TASK)
    flags = ("--task", "listed:Listed", "--num-workers", loaders, "--max-steps", "10")
    options = {"nnodes": "1:2", "conf": cluster.last_call(30)}
    first = cluster.start(*flags, **options, env={"KINDS": "cat dog"})
    wait_until(lambda: is_listening(cluster.port), "the first node")
    [second] = cluster.start(*flags, **options, env={"KINDS": "dog cat"})
    codes = [node.wait(150) for node in (*first, second)]
    assert sorted(codes) == [0, 1]
    [line] = error_lines([*first, second][codes.index(1)])
    assert "training set by its " in line
    assert "this worker is refused" in line
    if loaders == "1":  # nothing but the names may be read
        assert "'cat/0.png' is the first" in line
        assert "'dog/0.png' is the first" in line
