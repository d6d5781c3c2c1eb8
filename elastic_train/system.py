"""Functions of the operating system that training needs, and that differ between systems."""

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
"""The variable in which an agent passes its `name_of_process` to its workers."""
LOCAL_FLOCK = frozenset({"localflock", "localflocks", "nolock", "local_lock=all", "local_lock=flock"})
"""Mount options of Lustre, of OCFS2 and GFS2, and of NFS."""
MALLOC_LIMITS = {-3: 32 * 2**20, -1: 64 * 2**20}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h, in bytes: the maximum that glibc itself may adjust them to."""


def require_linux(what: str) -> None:
    """Require Linux, as several workers do: /proc, /dev/shm, and a signal at the parent's death.

    Raises:
        UnsupportedSystem: this is another system, on which `what` does not work.
    """
    if sys.platform != "linux":
        name = {"darwin": "macOS"}.get(sys.platform, sys.platform)
        raise UnsupportedSystem(f"{what} needs Linux, and this is {name}: {INSTEAD}")


def require_system_for_training(environ: Mapping[str, str]) -> None:
    """Require Linux, or macOS for a world of one, which needs files, flock and a process group without a connection.

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
    """The number of processors that this process may use; on macOS, which sets no limit, all."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo, by name; empty if there is no such file."""
    try:
        first = cpuinfo.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    return dict(re.findall(r"^(\S[^\t:]*?)\s*:\s*(.*?)\s*$", first, flags=re.MULTILINE))


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Let glibc keep up to 64 MiB of freed memory, and take blocks of up to 32 MiB from it, unless `environ` configures
    malloc. Return whether that succeeded.

    glibc adjusts itself to this once a block of 32 MiB was freed (mallopt(3), M_MMAP_THRESHOLD). Before, a step on the
    CPU may return its activations to the kernel and get them back page by page, for a tenth of its time. That depends
    on which blocks happen to be above them in memory.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl's, and macOS's
        return False
    return all(mallopt(option, limit) == 1 for option, limit in MALLOC_LIMITS.items())


def close_in_forked_children(port: int, server: object) -> None:
    """Make children of `fork`, such as DataLoader processes, close their copies of the sockets with this local port.
    Only while `server` exists, because another socket may get its port later."""
    alive = weakref.ref(server)
    os.register_at_fork(after_in_child=lambda: close_sockets_at(port) if alive() is not None else None)


def try_flock(fd: int, operation: int, timeout: timedelta = timedelta(0)) -> bool:
    """Try to lock an open file, shared or exclusive, within `timeout`; return whether it succeeded. The kernel drops
    the lock when the process ends in any way. Raises OSError if the file system has no flock."""
    import fcntl  # missing on Windows, where this module must still report what to do instead

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
    """The pid of this host that holds the exclusive flock of a file; None if none is visible (proc(5), locks)."""
    inode = str(os.fstat(fd).st_ino)
    with suppress(OSError), open("/proc/locks", encoding="ascii") as lines:
        for line in lines:
            match line.split():
                case [_, "FLOCK", _, "WRITE", pid, file, *_] if file.rpartition(":")[2] == inode:
                    return int(pid)
    return None


def local_flock(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The mount option (proc(5), mountinfo) that limits an flock below an absolute path to this host, although other
    hosts may see the file; None if there is none, or it is not visible."""
    deepest, found = 0, None
    with suppress(OSError, ValueError):
        for line in mountinfo.read_text(errors="surrogateescape").splitlines():
            mount, _, system = line.partition(" - ")
            point, options = mount.split()[4:6]
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
            depth = len(Path(point).parts)
            if path.is_relative_to(point) and depth >= deepest:  # of several mounts at one place the last is on top
                local = LOCAL_FLOCK.intersection(re.split("[ ,]", f"{options},{system}"))
                deepest, found = depth, min(local, default=None)
    return found


def process_stat(pid: int) -> tuple[str | None, str]:
    """State letter and start time of a process. (None, "") if there is none. ("?", "") if that is not visible: without
    /proc, or if it hides processes of other users (hidepid of proc(5))."""
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
    """Whether this machine has a process with this pid, of any user; also a zombie."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def name_of_process(pid: int) -> str:
    """A name by which `has_ended` recognises a process of this machine, even if a later process gets its pid."""
    return f"{pid} {process_stat(pid)[1]} {pid_namespace()}"


def has_ended(name: str) -> bool:
    """Whether a process, by its `name_of_process`, has ended; False if that is not visible, as inside a container."""
    pid, started, namespace = [*name.split(), "", "", ""][:3]
    if not (pid.isdecimal() and namespace and namespace == pid_namespace()):
        return False
    state, started_here = process_stat(int(pid))
    return state in (None, "Z", "X") or (state != "?" and started_here != started)


def pid_namespace() -> str:
    """The pid namespace that this process sees; "" without /proc, or if /proc is that of another namespace."""
    try:
        return os.readlink("/proc/self/ns/pid") if os.readlink("/proc/self") == str(os.getpid()) else ""
    except OSError:
        return ""


def give_up_gone_terminals() -> None:
    """Redirect stdout and stderr to /dev/null if they are a closed terminal. Otherwise each write of the user's code
    would fail. Its output is lost from then on, as our own lines are (errors.write_line)."""
    import termios

    for fd in (1, 2):
        try:
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # else a pipe, a file, or a closed descriptor
                with suppress(OSError), open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), fd)


def call_in_children(method: Callable[[], None]) -> None:
    """Make forked children call a bound method, as long as its object exists."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        if (method := found()) is not None:
            method()

    os.register_at_fork(after_in_child=call)


def open_sockets() -> dict[int, str]:
    """The sockets of this process: descriptor -> `socket:[inode]`. Empty on macOS, where a world of one needs none."""
    found: dict[int, str] = {}
    if sys.platform != "linux":
        return found
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (name := name_of_socket(int(entry))) is not None:
                found[int(entry)] = name
    return found


def opened_since(before: Mapping[int, str], now: Mapping[int, str]) -> dict[int, str]:
    """The sockets in the later of two results of `open_sockets` that are new; a descriptor may have been reused."""
    return {fd: name for fd, name in now.items() if before.get(fd) != name}


def name_of_socket(fd: int) -> str | None:
    """The socket's name, as in its link in /proc, which takes four times as long to read. Raises: OSError."""
    status = os.fstat(fd)
    return f"socket:[{status.st_ino}]" if stat.S_ISSOCK(status.st_mode) else None


def copy_of_socket(fd: int, name: str) -> socket.socket:
    """Duplicate one of `open_sockets`; the caller closes it. Raises: OSError: the descriptor was reused for another
    file. The copy is closed then, because it would keep that file's flock."""
    copy = os.dup(fd)
    try:
        if name_of_socket(copy) != name:  # of the copy, which no other thread closes
            raise OSError(errno.EBADF, f"descriptor {fd} is not {name} any more")
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def close_sockets_at(port: int) -> None:
    """Close this process's copies of the sockets with this local port."""
    for fd, name in open_sockets().items():
        with suppress(OSError), copy_of_socket(fd, name) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                os.close(fd)


def answer_of(call: Callable[[], Answer], name: str) -> Future[Answer]:
    """Run `call` on a daemon thread of this name, and return its future. A thread that hangs can be abandoned."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # raised by Future.result
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def starts(thread: threading.Thread) -> bool:
    """Start a thread. Returns False where none is left below the limit of processes of the host or the container."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def twice(read: Callable[[], Answer], failure: type[Exception]) -> Answer:
    """Read, and a second time if that raises `failure`: a file server may fail for a moment."""
    with suppress(failure):  # it is gone when the second read begins: its frames hold what was read
        return read()
    return read()


def through_suspends() -> float:
    """A monotonic clock that goes on while the machine is suspended, because other machines may train meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()
