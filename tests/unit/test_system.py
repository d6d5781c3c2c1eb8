"""Calls of the operating system; and on systems other than Linux what trains, and one clear line for the rest."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_train import __main__, system
from elastic_train.protocol import store
from elastic_train.protocol.store import limit_socket_waits
from elastic_train.stopping import die_with_agent
from elastic_train.system import (
    AGENT_VARIABLE,
    close_sockets_at,
    copy_of_socket,
    has_ended,
    keep_freed_memory,
    local_flock,
    name_of_process,
    num_cores,
    open_sockets,
    process_stat,
)


@pytest.mark.parametrize(("flags", "launcher"), [([], {"RANK": "0"}), (["--spawn", "2"], {})])
def test_macos_has_no_world_of_several(
    flags: list[str], launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["elastic_train", *flags])
    monkeypatch.setattr(os, "environ", {**os.environ, **launcher})
    monkeypatch.delattr(__main__, "die_with_agent")
    assert __main__.main() == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Linux, and this is macOS" in said
    assert "--spawn" in said or "python -m elastic_train" in said


def test_cores_are_counted_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_cores() >= 1


BESIDE_ROOT = """
import os, subprocess, sys
from elastic_train.system import process_stat
with subprocess.Popen(["sleep", "60"]) as others:
    ended = subprocess.Popen(["true"])
    ended.wait()
    if os.fork() == 0:
        os.setgroups([]), os.setgid(65534), os.setuid(65534)  # of group 0 nothing is hidden
        print(os.path.exists(f"/proc/{others.pid}"), *map(process_stat, (others.pid, ended.pid)), flush=True)
        os._exit(0)
    os.wait()
    others.kill()
"""
HIDDEN_PROC = 'mount -t proc -o hidepid=2 proc /proc || exit 77; "$@"'


def test_a_process_that_proc_hides_is_not_taken_for_one_that_has_ended() -> None:
    """As on the machines of many clusters, for the processes of other users."""
    hidden = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", HIDDEN_PROC, "sh"]
    command = [*hidden, sys.executable, "-c", BESIDE_ROOT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if os.geteuid() != 0 or ended.returncode == 77:
        pytest.skip(f"/proc cannot be mounted: {ended.stderr}")
    assert (ended.stdout, ended.stderr) == ("False ('?', '') (None, '')\n", "")


def test_a_process_that_may_not_be_signalled_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert [process_stat(pid) for pid in (0, ended.pid, 2**40)] == [(None, "")] * 3
    monkeypatch.setattr(os, "kill", refuse)
    assert process_stat(ended.pid) == ("?", "")


def test_a_number_that_another_file_has_by_now_is_no_socket(tmp_path: Path) -> None:
    """And the copy by which that was found is closed: it would keep a lock of that file for as long as it is open."""
    with socket.socket() as one:
        number, name = one.fileno(), open_sockets()[one.fileno()]
        with copy_of_socket(number, name) as copy:
            assert open_sockets()[copy.fileno()] == name
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        before = os.listdir("/proc/self/fd")
        for claimed in (name, os.readlink(f"/proc/self/fd/{fd}")):
            with pytest.raises(OSError, match=r"not .* any more|non-socket"):
                copy_of_socket(fd, claimed)
        assert os.listdir("/proc/self/fd") == before
    finally:
        os.close(fd)


@pytest.mark.parametrize("look", [lambda: limit_socket_waits(1, timedelta(1)), lambda: close_sockets_at(1)])
def test_a_look_at_all_sockets_keeps_no_file_open(
    look: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "file", "w") as file:
        monkeypatch.setattr(system, "open_sockets", lambda: {file.fileno(): "socket:[1]"})
        monkeypatch.setattr(store, "open_sockets", lambda: {file.fileno(): "socket:[1]"})
        before = os.listdir("/proc/self/fd")
        look()
        assert os.listdir("/proc/self/fd") == before


AS_MACOS = """
import os, runpy, sys
import torch, torchvision  # their builds for macOS are others
import elastic_train.system
sys.platform = "darwin"
del os.sched_getaffinity, os.sched_setaffinity
runpy.run_module("elastic_train", run_name="__main__")
"""
WITHOUT_PROC = 'mount -t tmpfs none /proc && mount -t tmpfs -o ro none /dev/shm && exec "$@"'


def can_hide_proc() -> bool:
    command = ["unshare", "--mount", "sh", "-c", WITHOUT_PROC, "sh", "test", "!", "-e", "/proc/self"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_hide_proc(), reason="/proc cannot be hidden: that takes root")
def test_macos_trains_a_world_of_one(tmp_path: Path) -> None:
    """With neither /proc nor a /dev/shm that can be written, and saved, and resumed."""
    for steps in (10, 20):
        flags = ["--run-dir", str(tmp_path / "run"), "--max-steps", str(steps), "--no-progress", "--eval-every", "1"]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", WITHOUT_PROC, "sh", sys.executable, "-c", AS_MACOS, *flags],
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "1 worker on 1 node (cpu, gloo)" in done.stderr
        assert "Error" not in done.stderr.replace("Error in cpuinfo", ""), "which is torch's own, for want of /proc"
        assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == steps


PAGE_FAULTS = """
import os, resource, sys
import numpy as np
from elastic_train.system import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory({})
for _ in range(3):  # glibc's own limits rise with what is freed
    blocks = [np.ones(2**19) for _ in range(8)]
    del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    blocks = [np.ones(2**19) for _ in range(8)]
    del blocks
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is another library's")
def test_memory_that_is_freed_is_not_given_back_in_every_step() -> None:
    """8 blocks of 4 MiB are 8,192 pages."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    faults = {
        how: int(
            subprocess.run([sys.executable, "-c", PAGE_FAULTS, how], env=env, check=True, capture_output=True).stdout
        )
        for how in ("kept", "given back")
    }
    assert faults["kept"] < 100
    assert faults["given back"] > 1000


@pytest.mark.parametrize(
    "variables", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}]
)
def test_what_the_user_has_set_for_malloc_stays(variables: dict[str, str]) -> None:
    assert not keep_freed_memory(variables)


AGENT = """
import os, subprocess, sys, time
from elastic_train.system import AGENT_VARIABLE, name_of_process
os.environ[AGENT_VARIABLE] = name_of_process(os.getpid())
subprocess.Popen(sys.argv[1:], start_new_session=True)
time.sleep(600)
"""
WORKER = """
import os, sys
print(os.getpid(), flush=True)
sys.stdin.readline()  # an import that takes long
from elastic_train.stopping import die_with_agent
die_with_agent()
print("trains", flush=True)
"""


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; :', "sh"]], ids=["none", "one that does not exec"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_worker_whose_agent_died_while_it_imported_does_not_train(wrapper: list[str], is_killed: bool) -> None:
    """The agent is a zombie then: this test, its parent, has not waited for it."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *wrapper, sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdout.readline()
    if is_killed:
        os.kill(agent.pid, signal.SIGKILL)
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
    agent.stdin.write("go on\n")
    agent.stdin.flush()
    said = agent.stdout.readline()
    agent.kill()
    out, err = agent.communicate(timeout=60)
    if is_killed:
        assert said + out == ""
        assert err == f"elastic_train: error: the agent, pid {agent.pid}, has ended: this worker ends too\n"
    else:
        assert said == "trains\n"
        assert err == ""


def test_a_proc_of_another_pid_namespace_proves_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `unshare --pid` without --mount-proc: our pids are other processes' there, or do not exist."""
    name = name_of_process(os.getpid())
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    assert not has_ended(name_of_process(os.getpid()))
    assert not has_ended(name.replace(name.split()[0], str(2**22 + 1), 1))


def test_whether_a_process_has_ended_is_told_by_more_than_its_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        name = name_of_process(process.pid)
        assert not has_ended(name)
    assert has_ended(name)
    pid, _, namespace = name_of_process(os.getpid()).split()
    assert has_ended(f"{pid} 1 {namespace}"), "another process had this pid"
    assert not has_ended(name.replace(namespace, "pid:[1]")), "pids of another namespace say nothing here"
    assert not has_ended("?")
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    monkeypatch.setattr("elastic_train.stopping.die_with_parent", lambda: None)
    die_with_agent()


@pytest.mark.parametrize(
    ("path", "option"),
    [
        ("/run", None),
        ("/nfs3/run", "local_lock=all"),
        ("/nfs3/deep/run", None),
        ("/nfs30/run", None),
        ("/nfs4", None),
        ("/a lustre/run", "localflock"),
        ("/a lustre/hidden/run", None),
    ],
)
def test_a_mount_whose_locks_other_hosts_do_not_see(tmp_path: Path, path: str, option: str | None) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 252:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"
        "40 22 0:40 / /nfs3 rw shared:2 master:1 - nfs host:/a rw,vers=3,local_lock=all,addr=1.2.3.4\n"
        "41 40 0:41 / /nfs3/deep rw - nfs host:/b rw,vers=3,local_lock=none\n"
        "42 22 0:42 / /nfs4 rw - nfs4 host:/a rw,vers=4.2,local_lock=none,addr=1.2.3.4\n"
        "43 22 0:43 / /a\\040lustre rw - lustre mgs@tcp:/scratch rw,localflock,lazystatfs\n"
        "44 43 0:44 / /a\\040lustre/hidden rw - lustre mgs@tcp:/scratch rw,localflock\n"
        "45 44 0:45 / /a\\040lustre/hidden rw - tmpfs tmpfs rw\n"
    )
    assert local_flock(Path(path), table) == option
    assert local_flock(Path(path), tmp_path / "none") is None
