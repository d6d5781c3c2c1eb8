"""The hook in torchrun's agents.

Every torchrun process loads the entry-point group `torchrun.handlers`, with any rendezvous backend. If the launched
program is ours, `prepare_agent` uses this to answer `--rdzv-backend=c10d` with a rendezvous of this node alone
(handler.py). The workers of all nodes then find each other by themselves.

The agent passes its settings to its workers in environment variables; `Launch` reads them there.

This module imports nothing heavy at module level: agents load it before anything else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from typing import Any

from elastic_train.rendezvous.command_line import agent_arguments, has_free_port, launches_elastic_train
from elastic_train.rendezvous.launch import MARKERS, NAME_LOOKUP_OPTIONS
from elastic_train.system import AGENT_VARIABLE, name_of_process

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""torch's variable: the signals on which its agent ends the workers"""


def prepare_agent() -> Any:
    """Prepare this process if it is an agent that launches our program. Entry point of `torchrun.handlers`.

    Returns a creator, as the entry-point contract demands, but of no usable backend.
    """
    if launches_elastic_train(agent_arguments(sys.orig_argv), os.environ):
        from torch.distributed.elastic.rendezvous import registry  # already loaded: its package calls this function

        os.environ.setdefault("RES_OPTIONS", NAME_LOOKUP_OPTIONS)
        answer_c10d(registry)
    return refuse_as_backend


def answer_c10d(registry: Any) -> None:
    """Answer `--rdzv-backend=c10d` with our handler, for the rest of this process.

    torch's launcher gets its handler from `registry.get_rendezvous_handler`, which this replaces. `register` refuses a
    second creator for c10d. Rewriting `sys.argv` would miss PET_ variables and callers of `torch.distributed.run.run`.

    Args:
        registry: the module `torch.distributed.elastic.rendezvous.registry`.
    """
    of_torch = registry.get_rendezvous_handler

    def get_rendezvous_handler(params: Any) -> Any:
        for marker in MARKERS:  # an agent started by a worker of another job inherits that job's markers
            os.environ.pop(marker, None)
        os.environ[AGENT_VARIABLE] = name_of_process(os.getpid())
        keep_nohup(os.environ)
        outlive_notice()
        is_of_one = has_free_port(params.endpoint) and params.min_nodes == 1  # with more nodes torch would wait in vain
        if params.backend == "etcd3" or (params.backend == "c10d" and is_of_one):
            return of_torch(params)
        from elastic_train.rendezvous import handler  # heavy: imported only where it is needed

        if params.backend == "c10d":
            return handler.create_c10d_handler(params)
        return handler.create_fixed_handler(params, of_torch)

    registry.get_rendezvous_handler = get_rendezvous_handler


def keep_nohup(environ: MutableMapping[str, str]) -> None:
    """Keep SIGHUP ignored where this process ignores it, as under nohup; torch would handle it, and end all workers.
    torch has set the variable by now, and reads it when it starts workers."""
    if SIGNALS_VARIABLE in environ and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        names = environ[SIGNALS_VARIABLE].split(",")
        environ[SIGNALS_VARIABLE] = ",".join(name for name in names if name.strip() != "SIGHUP")


def outlive_notice() -> None:
    """Ignore SIGUSR1 in this process, but not in its workers, which get it too: by `srun --signal=USR1` SLURM announces
    the end of the time to all processes (--notices slurm), and it would end an agent at once."""
    is_main = threading.current_thread() is threading.main_thread()  # on another one torch handles no signals either
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda _signum, _frame: None)  # not SIG_IGN, which the workers would inherit


def refuse_as_backend(_parameters: Any) -> Any:
    raise RuntimeError("elastic_train is no rendezvous backend; use --rdzv-backend=c10d or etcd3")


def etcd3_backend() -> Any:
    """Return the creator of handlers for `--rdzv-backend=etcd3`. Entry point `etcd3` of `torchrun.handlers`."""

    def create(parameters: Any) -> Any:
        from elastic_train.rendezvous.handler import create_handler  # heavy: imported only where it is needed

        return create_handler(parameters)

    return create
