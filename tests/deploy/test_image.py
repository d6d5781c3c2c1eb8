"""The image of deploy/docker, really built and run, by podman and runc.

It takes 20 GB of disk for as long as it runs, and a network. There need be no registry: Debian's Python stands in for
the python:slim that the Dockerfile begins with. Torch is the one with CUDA, which comes from PyPI.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.tools.drills.etcd_cluster import find_program
from tests.deploy.test_docker import compose
from tests.deploy.tools import DEPLOY
from tests.integration.cluster import newest_snapshot, outcomes, result, wait_for_step

PROGRAMS = ("podman", "runc", "mmdebstrap")
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ROOM = 25 * 2**30


def what_is_missing() -> list[str]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not KEYS.exists():
        missing.append(KEYS.stem)
    if os.geteuid() != 0:
        missing.append("root")
    if shutil.disk_usage(tempfile.gettempdir()).free < ROOM:
        missing.append("room in the temporary directory")
    return missing


MISSING = what_is_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here"),
]

PYTHON = "3.11"
"""Debian 12's"""
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
MIRROR = "http://deb.debian.org/debian"
OF_THIS_MACHINE = ("/etc/ssl/certs", "/etc/pip.conf")
"""whom it trusts, and where its pip looks"""


class Podman:
    """With a storage of its own, of which nothing stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._environ = os.environ | {"TMPDIR": str(path)}
        # Without these it asks for more than a root without CAP_SYS_RESOURCE may have.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._limits = ["--ulimit", f"nofile=1024:{hard}", "--ulimit", "nproc=1024:1024"]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`podman ARGUMENTS` in the root of the repository."""
        return subprocess.run(
            ["podman", "--root", str(self._path / "root"), "--runroot", str(self._path / "runroot"), *arguments],
            capture_output=True, text=True, timeout=3600, cwd=DEPLOY.parent, env=self._environ, check=False,
        )  # fmt: skip

    def ask(self, *arguments: str) -> str:
        """What it prints; AssertionError where it fails."""
        done = self(*arguments)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()

    def build(self) -> None:
        """`docker build -f deploy/docker/Dockerfile -t elastic_train .`"""
        base = self._path / "base.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(base), MIRROR]
        subprocess.run(command, env=self._environ, timeout=1800, check=True)
        self.ask("import", str(base), f"localhost/python:{PYTHON}-slim-bookworm")
        mounts = [f"--volume={path}:{path}:ro" for path in OF_THIS_MACHINE if Path(path).exists()]
        self.ask(
            "build", "--isolation=chroot", "--layers=false", "--network=host", "--pull=never", *self._limits, *mounts,
            "--build-arg", f"PYTHON={PYTHON}", "--build-arg", "VARIANT=cuda",
            "-f", "deploy/docker/Dockerfile", "-t", "elastic_train", ".",
        )  # fmt: skip

    def run(self, *arguments: str, options: tuple[str, ...] = ("--rm",)) -> str:
        """A container of the image with a volume `runs`, locked down as the Compose file has it."""
        return self.ask(
            "run", "--runtime=runc", *self._limits, "--network=none", "--read-only", "--cap-drop=ALL",
            "--security-opt=no-new-privileges", "--shm-size=1g", "--tmpfs=/tmp", "--volume=runs:/runs", *options,
            "elastic_train", *arguments,
        )  # fmt: skip

    def own_command(self) -> list[str]:
        """What a container runs that is given none."""
        found: list[str] = json.loads(self.ask("image", "inspect", "--format={{json .Config.Cmd}}", "elastic_train"))
        return found

    def runs(self) -> Path:
        """/runs, as this machine sees it."""
        return Path(self.ask("volume", "inspect", "--format={{.Mountpoint}}", "runs"))

    def end(self) -> None:
        self("rm", "--all", "--force", "--time=0")
        self("volume", "rm", "--all", "--force")
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            folder = line.split()[1]
            if Path(folder).is_relative_to(self._path):  # of a build that did not come to its end
                subprocess.run(["umount", "--lazy", folder], check=False)
        shutil.rmtree(self._path)


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """With the image in it."""
    podman = Podman(Path(tempfile.mkdtemp(prefix="podman-")))  # a short path, for sockets lie in it
    try:
        podman.build()
        yield podman
    finally:
        podman.end()


def test_it_trains_by_itself(podman: Podman) -> None:
    """`docker run --rm --stop-timeout 60 -v runs:/runs elastic_train`, but for the end."""
    podman.run(*podman.own_command(), "--max-steps", "10", "--no-progress")
    assert result(podman.runs() / "default")["step"] == 10
    assert {path.stat().st_uid for path in (podman.runs(), *podman.runs().rglob("*"))} == {1000}


def test_it_saves_when_it_is_stopped(podman: Podman) -> None:
    """`docker stop`: the init tells torchrun, which tells its workers."""
    command = podman.own_command()
    container = podman.run(*command[:-1], "/runs/stopped", "--epochs", "100000", options=("--detach",))
    run_dir = podman.runs() / "stopped"
    try:
        wait_for_step(run_dir, 10, 600)
        podman.ask("stop", "--time=60", container)
    except BaseException:
        print(podman("logs", container).stderr)
        raise
    assert outcomes(run_dir) == ["stopped"]
    step = newest_snapshot(run_dir)[0].step
    assert step >= 10
    assert f"step: {step} of " in podman.run("elastic-train", "status", "/runs/stopped")


def test_its_user_can_write_nowhere_else(podman: Podman) -> None:
    assert podman.run("id", "-u") == "1000"
    places = ["/", "/home/trainer", "/opt/elastic_train", "/runs", "/tmp"]
    tries = 'for place in "$@"; do touch "$place/file" 2>/dev/null && echo "$place"; done; true'
    assert podman.run("sh", "-c", tries, "sh", *places).split() == ["/runs", "/tmp"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["elastic-train", "--help"], "usage: elastic-train"),
        (["elastic-train", "check", "--", "--run-dir", "/runs/checked"], "PASS"),
        (["elastic-train", "submit", "slurm", "--dry-run"], "#SBATCH"),
        (["python", "-m", "elastic_train", "--help"], "--run-dir"),
        (["python", "-m", "pip", "check"], "No broken requirements found"),
    ],
)
def test_its_commands(podman: Podman, command: list[str], said: str) -> None:
    assert said in podman.run(*command)


def test_a_trainer_of_the_demonstration(podman: Podman) -> None:
    """The Compose file's, with one member of etcd for all three, and with --metrics-port: the image has it all."""
    trainer = compose()["services"]["trainer-1"]
    command = [word.replace("$$", "$") for word in trainer["command"]]
    environment = trainer["environment"] | {"FLAGS": "--max-steps 10 --no-progress --metrics-port 9100"}
    options = [f"--env={name}={value}" for name, value in environment.items()]
    options += [f"--add-host={member}:127.0.0.1" for member in trainer["depends_on"]]
    options += [f"--volume={find_program(name)}:/{name}:ro" for name in ("etcd", "etcdctl")]
    first = "/etcd --data-dir=/tmp/etcd 2>/tmp/log & until /etcdctl endpoint health; do sleep 1; done"
    text = podman.run("sh", "-c", f'{first}; exec "$@"', "sh", *command, options=("--rm", *options))
    assert "PASS" in text.splitlines()
    assert result(podman.runs() / "demo")["step"] == 10
