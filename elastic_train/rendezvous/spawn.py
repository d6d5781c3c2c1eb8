"""Several workers on one machine without torchrun: `python -m elastic_train --spawn 4 ...`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from elastic_train.errors import UsageError
from elastic_train.rendezvous.slurm import torchrun_variables
from elastic_train.stopping import signals_to_handle
from elastic_train.system import AGENT_VARIABLE, name_of_process, require_linux


def is_spawner(num_workers: int, environ: Mapping[str, str]) -> bool:
    """Return whether this process, which has --spawn, must start the workers; if not, it is one of them.

    Raises:
        UsageError: a launcher has started this worker.
    """
    if "RANK" in environ and AGENT_VARIABLE in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return False
    is_terminal = "SLURM_PTY_PORT" in environ  # below `srun --pty bash`, a task that is no worker
    if "RANK" in environ or (torchrun_variables(environ) and not is_terminal):
        seen = "RANK" if "RANK" in environ else "SLURM_PROCID"
        raise UsageError(
            f"--spawn {num_workers}: a launcher has started this worker already, {seen} is set: leave one of the two "
            "out; torchrun's --nproc-per-node says how many workers a node has, or srun's --ntasks-per-node; in a "
            f"shell or notebook that it has started: env -u {seen} python ..."
        )
    return True


def spawn(num_workers: int, arguments: Sequence[str]) -> int:
    """Run workers with these flags, wait for all of them, and return the exit code of the job.

    This process hosts their store, so any worker may die and the rest go on. The code is 0 if a worker reached the end
    of training, else the first code by rank. All workers get the SIGTERM and SIGINT of this process, and unless it
    ignores them its SIGHUP and SIGUSR1, SLURM's notice.
    """
    require_linux("--spawn")
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = os.environ | {
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        AGENT_VARIABLE: name_of_process(os.getpid()),
    }
    environ.pop("TORCHELASTIC_RUN_ID", None)  # of an enclosing torchrun, which these workers would take for theirs
    workers: list[subprocess.Popen[bytes]] = []
    early: list[int] = []
    is_starting = True

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        if is_starting:  # a worker that is just being started is in no list yet
            early.append(signum)
            return
        for worker in workers:
            worker.send_signal(signum)  # no-op for a worker that has ended

    is_ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # as after `trap '' USR1`: workers inherit that
    for signum in signals_to_handle() + ([] if is_ignored else [signal.SIGUSR1]):
        signal.signal(signum, pass_on)
    command = [sys.executable, "-m", "elastic_train", *arguments]
    for rank in range(num_workers):
        # In a session of its own: otherwise a terminal's Ctrl-C would reach a worker twice, which means to end at once.
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        workers.append(subprocess.Popen(command, env=environ | own, start_new_session=True))
    is_starting = False
    for told in early:
        pass_on(told, None)
    codes = [worker.wait() for worker in workers]
    if 0 in codes:
        return 0
    return next(code if code > 0 else 128 - code for code in codes)
