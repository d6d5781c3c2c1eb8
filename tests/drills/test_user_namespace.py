"""Drills of ordinary users: root of a user namespace makes network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.nodes import clean_environment
from elastic_train.tools.drills.user_namespace import become_root
from tests.drills.test_drill import drill_command, scenario

# Who is root already becomes somebody else first, with the rights to the same files.
AS_ANYBODY = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []

_PROGRAM = """
import os, sys
from elastic_train.tools.drills.network import Network
from elastic_train.tools.drills.user_namespace import become_root
if os.geteuid() != 0:
    print(os.getpid(), Network.why_not(), flush=True)
become_root([])
network = Network(2)
network.drop_outgoing(0)
print(os.getpid(), sys.argv[1:], network.can_reach(0), network.can_reach(1), flush=True)
network.close()
"""


def _needs_user_namespaces() -> None:
    command = [*AS_ANYBODY, "unshare", "--user", "--map-root-user", "--mount", "--net", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no user namespaces: {done.stderr.strip()}")


def test_an_ordinary_user_has_nodes_that_can_lose_their_network(tmp_path: Path) -> None:
    _needs_user_namespaces()
    missing = Network.why_not()
    if missing is not None and missing.startswith("no "):  # a program; an ordinary user is told of something else
        pytest.skip(missing)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    command = [*AS_ANYBODY, sys.executable, str(program), "a b", "--c"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    pid, _, why_not = before.partition(" ")
    assert "neither root" in why_not
    assert after == f"{pid} ['a b', '--c'] False True"


def test_root_stays_who_he_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("started again"))
    become_root([])


def test_where_it_is_not_allowed_he_stays_who_he_is_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("started again"))
    become_root([])


@pytest.mark.parametrize("path", ["/dev/shm/run", "/run/../dev/shm/x/run", "/run/user/1000/run"])
def test_nor_where_his_files_could_not_be_seen_in_there(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("started again"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    become_root([Path("/home/me"), Path(path)])
    with pytest.raises(pytest.fail.Exception, match="started again"):
        become_root([Path("/home/me"), Path("/running")])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drill_of_an_ordinary_user(tmp_path: Path) -> None:
    _needs_user_namespaces()
    plan = scenario(tmp_path, "partition", "power-loss", "join", "disk-full", every=4.0)
    command = [*AS_ANYBODY, *drill_command("--seed", "5", "--nodes", "3", "--scenario", plan)]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 nodes as network namespaces" in done.stdout
