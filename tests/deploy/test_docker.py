"""The image and the Compose file of deploy/docker: checked, and run as far as that is possible without an engine."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_train.tools.drills.etcd_cluster import find_program
from elastic_train.tools.drills.network import Network
from tests.audits import audit
from tests.deploy.tools import DEPLOY, program, programs_folder
from tests.integration.cluster import Cluster, Node, events, last_step, result, wait_for_step, wait_until

DOCKER = DEPLOY / "docker"


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return found


def instruction(name: str) -> list[str]:
    """The last instruction of that name in the Dockerfile, in its JSON form."""
    found: list[str] = json.loads(re.findall(rf"^{name} (\[.*\])$", (DOCKER / "Dockerfile").read_text(), re.M)[-1])
    return found


def test_the_dockerfile_is_clean() -> None:
    command = [program("hadolint"), "--failure-threshold", "style", str(DOCKER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_a_stop_leaves_torchrun_its_30_s() -> None:
    """docker stop kills after 10 s by default, before a late stop saves."""
    assert compose()["x-trainer"]["stop_grace_period"] == "60s"
    commands = re.findall(r"docker run --.*", (DOCKER / "README.md").read_text())
    assert len(commands) == 2
    assert all("--stop-timeout 60 " in command for command in commands)


def test_what_the_image_copies_is_there() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert "USER 1000:1000" in text
    kept = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    sources = [word for line in re.findall(r"^COPY ([^-].*)$", text, re.M) for word in line.split()[:-1]]
    assert sorted(sources) == sorted(kept)
    for source in sources:
        assert (DEPLOY.parent / source).exists()
    links = [path for path in (DEPLOY.parent / "elastic_train").rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        assert link.exists()
        target = link.resolve().relative_to(DEPLOY.parent)
        assert any(target.is_relative_to(source) for source in sources), f"{link} leads out of what is copied"


def test_the_image_has_what_flags_of_a_run_ask_for() -> None:
    """--metrics-port, --snapshot-dir with a URL, and files of safetensors."""
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'pip install "/source\[([\w,]+)\]"', (DOCKER / "Dockerfile").read_text())
    assert set(extras.split(",")) == set(project["optional-dependencies"]) - {"bench", "test"}


def test_the_compose_file_is_valid() -> None:
    command = [program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(DOCKER / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_services_fit_together() -> None:
    services = compose()["services"]
    trainers = {name for name in services if name.startswith("trainer-")}
    members = set(services) - trainers
    assert (len(trainers), len(members)) == (4, 3)
    assert compose()["networks"]["training"] == {"internal": True}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        assert "ports" not in service, "nothing is open to others"
        if name in trainers:
            assert set(service["depends_on"]) == members
            endpoints = re.findall(r"([\w-]+):2379", " ".join(service["command"]))
            assert set(endpoints) == members
            assert service["read_only"] is True
        else:
            assert f"--name={name}" in service["command"]
            own = [word for word in service["command"] if "advertise" in word]
            assert all(f"//{name}:" in word for word in own)
            assert "healthcheck" in service


def test_a_trainer_checks_its_node_first(tmp_path: Path) -> None:
    """With stubs of the two programs: both are told the same, and what would break the job does not start it."""
    for name in ("elastic-train", "torchrun"):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/sh\necho {name} "$@"\nexit $CODE\n')
        stub.chmod(0o755)
    trainer = compose()["services"]["trainer-1"]
    command = [word.replace("$$", "$") for word in trainer["command"]]

    def start(code: int) -> list[list[str]]:
        env = {**trainer["environment"], "CODE": str(code), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    (check,) = start(1)
    assert check[:2] == ["elastic-train", "check"]
    check, torchrun = start(0)
    assert torchrun[0] == "torchrun"
    assert [word for word in check if "--rdzv" in word] == [word for word in torchrun if "--rdzv" in word] != []
    assert check[check.index("--") + 1 :] == torchrun[torchrun.index("elastic_train") + 1 :] != []


# --- run --------------------------------------------------------------------------------------------------------------


class Services:
    """The services of the Compose file, each on a network namespace in place of its container."""

    def __init__(self, path: Path, cluster: Cluster, network: Network) -> None:
        self.path = path
        self._cluster, self._network = cluster, network
        self._services = compose()["services"]
        self._names = sorted(self._services)
        self._programs = programs_folder(path)
        for name in ("etcd", "etcdctl"):
            (self._programs / name).symlink_to(find_program(name))
        (path / "runs").mkdir()

    def start(self, name: str, flags: str = "") -> Node:
        service = self._services[name]
        # Compose writes $$ for $; mounts and the end of the run are this test's.
        folders = {"$$": "$", "/runs/": f"{self.path}/runs/", "/tmp/etcd": f"{self.path}/{name}"}
        words = [self._replaced(word, folders) for word in service["command"]]
        env = {**service.get("environment", {}), "PATH": f"{self._programs}:{os.environ['PATH']}"}
        if flags:
            env["FLAGS"] = flags
        return self._cluster.launch([*self._network.node_prefix(self._names.index(name)), *words], env)

    def is_healthy(self, name: str) -> bool:
        prefix = self._network.node_prefix(self._names.index(name))
        test = self._services[name]["healthcheck"]["test"][1:]
        env = {**os.environ, "PATH": f"{self._programs}:{os.environ['PATH']}", "ETCDCTL_API": "3"}
        return subprocess.run([*prefix, *test], env=env, capture_output=True, timeout=60, check=False).returncode == 0

    @staticmethod
    def _replaced(word: str, pairs: dict[str, str]) -> str:
        for theirs, ours in pairs.items():
            word = word.replace(theirs, ours)
        return word


@pytest.fixture
def services(tmp_path: Path, cluster: Cluster) -> Iterator[Services]:
    missing = Network.why_not()
    if missing is not None:
        pytest.skip(f"no network namespaces: {missing}")
    names = sorted(compose()["services"])
    network = Network(len(names), aliases=names)
    try:
        yield Services(tmp_path, cluster, network)
    finally:
        cluster.end()
        network.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demonstration(services: Services, cluster: Cluster) -> None:
    """`docker compose kill trainer-2`, then `start`: with three of the four trainers, for two processors' sake."""
    members = [services.start(f"etcd-{number}") for number in (1, 2, 3)]
    wait_until(lambda: all(services.is_healthy(f"etcd-{number}") for number in (1, 2, 3)), "health of etcd", 300)
    flags = "--epochs 100000 --max-steps 3000 --no-progress --ledger --eval-every 100000"
    first, second, third = (services.start(f"trainer-{number}", flags) for number in (1, 2, 3))
    run_dir = services.path / "runs" / "demo"
    wait_until(lambda: size_of(run_dir) == 3, "world of three", 600)
    wait_for_step(run_dir, last_step(run_dir) + 20, 300)
    second.kill()
    wait_until(lambda: size_of(run_dir) == 2, "world of two", 300)
    again = services.start("trainer-2", flags)
    wait_until(lambda: size_of(run_dir) == 3, "world of three again", 600)
    members[0].kill()
    cluster.finish([first, third, again], timeout=600)
    assert result(run_dir)["step"] == 3000
    found = audit(run_dir)
    assert found.passed, "\n".join(found.reasons)
    assert all("PASS" in node.text().splitlines() for node in (first, second, third, again)), "each node's check"


def size_of(run_dir: Path) -> int:
    """Workers of the newest world; 0 before the first."""
    newest = max(events(run_dir, "world"), key=lambda event: event["generation"], default={"world_size": 0})
    return int(newest["world_size"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_entry_point_in_a_container(tmp_path: Path) -> None:
    """The host's root file system stands in for the image, read-only; user and limits are those of the files."""
    missing = [name for name in ("podman", "runc", "dumb-init") if shutil.which(name, path=search_path()) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no {', '.join(missing) or 'root'} here")
    runs, programs = tmp_path / "runs", programs_folder(tmp_path)
    runs.mkdir()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    entry = [*instruction("ENTRYPOINT"), *instruction("CMD"), "--max-steps", "10", "--no-progress"]
    done = subprocess.run(
        ["podman", "run", "--rm", "--runtime", "runc", "--ulimit", f"nofile=1024:{hard}", "--ulimit", "nproc=1024:1024",
         "--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--shm-size", "1g",
         "--env", f"PATH={programs}:{search_path()}", "--env", "HOME=/tmp", "--env", "OMP_NUM_THREADS=1",
         "-v", f"{runs}:/runs", "--rootfs", "/:O", *entry],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert result(runs / "default")["step"] == 10


def search_path() -> str:
    import sysconfig

    return f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
