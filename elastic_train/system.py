"""The operating system: what training needs of it, and how it is done where systems differ."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from elastic_train.errors import UnsupportedSystem

Answer = TypeVar("Answer")
INSTEAD = "use a container (deploy/docker)"
AGENT_VARIABLE = "ELASTIC_TRAIN_AGENT"
"""in which an agent gives its workers its `name_of_process`"""
LOCAL_FLOCK = frozenset({"localflock", "localflocks", "nolock", "local_lock=all", "local_lock=flock"})
"""mount options of Lustre, of OCFS2 and GFS2, and of NFS"""
MALLOC_LIMITS = {-3: 32 * 2**20, -1: 64 * 2**20}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h -> bytes, the most that glibc's own adjustment comes to"""


def require_linux(what: str) -> None:
    """Several workers stand on Linux: /proc, /dev/shm, and signals that follow a parent's death.

    Raises:
        UnsupportedSystem: this is another system, where `what` does not work.
    """
    if sys.platform != "linux":
        name = {"darwin": "macOS"}.get(sys.platform, sys.platform)
        raise UnsupportedSystem(f"{what} needs Linux, and this is {name}: {INSTEAD}")


def require_system_for_training(environ: Mapping[str, str]) -> None:
    """Linux; or macOS for a world of one, which takes files, flock and a process group without a connection.

    Raises:
        UnsupportedSystem: this is another system, or macOS with a launcher's variables in `environ`.
    """
    if sys.platform != "darwin":
        require_linux("training")
    elif "RANK" in environ:
        raise UnsupportedSystem(
            "several workers need Linux, and this is macOS: without torchrun (python -m elastic_train) a world of one "
            f"trains here, else {INSTEAD}"
        )


def num_cores() -> int:
    """Processors that this process may use; on macOS, which does not limit them, all."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What Linux tells of the first processor, by name; empty where there is no such file."""
    try:
        first = cpuinfo.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    return dict(re.findall(r"^(\S[^\t:]*?)\s*:\s*(.*?)\s*$", first, flags=re.MULTILINE))


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Have glibc keep up to 64 MiB of freed memory, and take blocks of up to 32 MiB from it, where `environ` does not
    set that: whether it does.

    It would get there by itself once a block of 32 MiB was freed (mallopt(3), M_MMAP_THRESHOLD). Until then a step on
    the CPU, which frees its activations, may give them back to the kernel and get them anew, page by page, for a tenth
    of its time; whether it does depends on what happens to lie above them.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl's, and macOS's
        return False
    return all(mallopt(option, limit) == 1 for option, limit in MALLOC_LIMITS.items())


def close_in_forked_children(port: int, server: object) -> None:
    """Have children of `fork`, such as DataLoader processes, close their copies of the sockets that have this port
    here. Only as long as `server` is there: others may get its port."""
    alive = weakref.ref(server)
    os.register_at_fork(after_in_child=lambda: close_sockets_at(port) if alive() is not None else None)


def try_flock(fd: int, operation: int, timeout: timedelta = timedelta(0)) -> bool:
    """Whether this open file got the lock, shared or exclusive, within `timeout`. The kernel drops it with the process,
    however that ends. Raises OSError where the file system has no flock."""
    import fcntl  # not on Windows, where this module says what to do instead

    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        else:
            return True


def flock_holder(fd: int) -> int | None:
    """The process of this host that took the exclusive flock of a file; None where none is seen (proc(5), locks)."""
    inode = str(os.fstat(fd).st_ino)
    with suppress(OSError), open("/proc/locks", encoding="ascii") as lines:
        for line in lines:
            match line.split():
                case [_, "FLOCK", _, "WRITE", pid, file, *_] if file.rpartition(":")[2] == inode:
                    return int(pid)
    return None


def local_flock(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The mount option (proc(5), mountinfo) by which an flock below an absolute path holds for this host alone, though
    other hosts may see the file; None where there is none, or it cannot be seen."""
    deepest, found = 0, None
    with suppress(OSError, ValueError):
        for line in mountinfo.read_text(errors="surrogateescape").splitlines():
            mount, _, system = line.partition(" - ")
            point, options = mount.split()[4:6]
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
            depth = len(Path(point).parts)
            if path.is_relative_to(point) and depth >= deepest:  # of several at one place the last is on top
                local = LOCAL_FLOCK.intersection(re.split("[ ,]", f"{options},{system}"))
                deepest, found = depth, min(local, default=None)
    return found


def process_stat(pid: int) -> tuple[str | None, str]:
    """State letter and start time of a process; (None, "") where there is none, ("?", "") where that cannot be seen:
    without a /proc, or where it hides the processes of others (hidepid of proc(5))."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name in parentheses may itself hold parentheses and spaces
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return (None if os.path.isdir("/proc/self") and not is_there(pid) else "?"), ""
    except (OSError, IndexError):
        return "?", ""


def is_there(pid: int) -> bool:
    """Whether this machine has such a process, of whatever user; one that has ended, and is not waited for, too."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def name_of_process(pid: int) -> str:
    """Of this machine; by it `has_ended` knows the process again, also where a later one has its pid."""
    return f"{pid} {process_stat(pid)[1]} {pid_namespace()}"


def has_ended(name: str) -> bool:
    """Whether a process, by its `name_of_process`, has ended; False where that cannot be seen from here, as from
    within a container."""
    pid, started, namespace = [*name.split(), "", "", ""][:3]
    if not (pid.isdecimal() and namespace and namespace == pid_namespace()):
        return False
    state, started_here = process_stat(int(pid))
    return state in (None, "Z", "X") or (state != "?" and started_here != started)


def pid_namespace() -> str:
    """That whose pids this process sees; "" where there is no /proc, or one that counts processes otherwise."""
    try:
        return os.readlink("/proc/self/ns/pid") if os.readlink("/proc/self") == str(os.getpid()) else ""
    except OSError:
        return ""


def give_up_gone_terminals() -> None:
    """Let stdout and stderr go to /dev/null where they are a terminal that has gone: each write to it fails, and with
    it the code that is trained. What it prints is lost from then on, as our own lines are (errors.write_line)."""
    import termios

    for fd in (1, 2):
        try:
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # else a pipe or a file, or it is closed
                with suppress(OSError), open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), fd)


def call_in_children(method: Callable[[], None]) -> None:
    """Have processes that are forked from this one call a bound method, as long as its object is there."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        if (method := found()) is not None:
            method()

    os.register_at_fork(after_in_child=call)


def open_sockets() -> dict[int, str]:
    """The sockets of this process: number -> `socket:[inode]`; none on macOS, where a world of one has none to shut."""
    found: dict[int, str] = {}
    if sys.platform != "linux":
        return found
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (name := name_of_socket(int(entry))) is not None:
                found[int(entry)] = name
    return found


def opened_since(before: Mapping[int, str], now: Mapping[int, str]) -> dict[int, str]:
    """Of two answers of `open_sockets` what the later one has more; a number may name another socket by then."""
    return {fd: name for fd, name in now.items() if before.get(fd) != name}


def name_of_socket(fd: int) -> str | None:
    """As the link in /proc says it, which takes four times as long to read. Raises: OSError."""
    status = os.fstat(fd)
    return f"socket:[{status.st_ino}]" if stat.S_ISSOCK(status.st_mode) else None


def copy_of_socket(fd: int, name: str) -> socket.socket:
    """A copy of one of `open_sockets`, for the caller to close. Raises: OSError: its number is another file's by now:
    where that file has an flock, a copy that nobody closes keeps it."""
    copy = os.dup(fd)
    try:
        if name_of_socket(copy) != name:  # of the copy: nobody else closes it
            raise OSError(errno.EBADF, f"descriptor {fd} is not {name} any more")
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def close_sockets_at(port: int) -> None:
    """This process's copies of the sockets that have this port here."""
    for fd, name in open_sockets().items():
        with suppress(OSError), copy_of_socket(fd, name) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                os.close(fd)


def answer_of(call: Callable[[], Answer], name: str) -> Future[Answer]:
    """What comes of `call` on a daemon thread of that name, which can be left behind where it hangs."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # who asks for the result raises it
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def through_suspends() -> float:
    """A monotonic clock that goes on while the machine is suspended, and others may train."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()
