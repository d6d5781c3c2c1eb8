"""The hook in torchrun's agents.

The entry-point group `torchrun.handlers` is loaded by every torchrun process, whatever the rendezvous backend.
`prepare_agent` uses it, only when the launched program is ours, to answer `--rdzv-backend=c10d` with a rendezvous of
its own node (handler.py). The workers of all nodes then find each other by themselves.

The agent hands what it knows to its workers in environment variables; `Launch` reads them there.

This module imports nothing heavy at module level: agents load it before anything else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping
from typing import Any

from elastic_train.rendezvous.command_line import agent_arguments, has_free_port, launches_elastic_train
from elastic_train.rendezvous.launch import MARKERS, NAME_LOOKUP_OPTIONS
from elastic_train.system import AGENT_VARIABLE, name_of_process

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""torch's: those for which its agent ends the workers"""


def prepare_agent() -> Any:
    """Entry point of `torchrun.handlers`: prepares this process if it is an agent that launches our program.

    Returns a creator, as the entry-point contract wants it; its backend name is not for use.
    """
    if launches_elastic_train(agent_arguments(sys.orig_argv), os.environ):
        from torch.distributed.elastic.rendezvous import registry  # loaded by now: its package is what calls this

        os.environ.setdefault("RES_OPTIONS", NAME_LOOKUP_OPTIONS)
        answer_c10d(registry)
    return refuse_as_backend


def answer_c10d(registry: Any) -> None:
    """Answer `--rdzv-backend=c10d` with our handler, for the rest of this process.

    torch's launcher asks this function of this module for its handler. `register` refuses a second creator for c10d;
    rewriting `sys.argv` would miss the PET_ variables and callers of `torch.distributed.run.run(args)`.

    Args:
        registry: the module `torch.distributed.elastic.rendezvous.registry`.
    """
    of_torch = registry.get_rendezvous_handler

    def get_rendezvous_handler(params: Any) -> Any:
        for marker in MARKERS:  # an agent that a worker of another job has started inherits that job's
            os.environ.pop(marker, None)
        os.environ[AGENT_VARIABLE] = name_of_process(os.getpid())
        keep_nohup(os.environ)
        is_of_one = has_free_port(params.endpoint) and params.min_nodes == 1  # else it would wait in vain
        if params.backend == "etcd3" or (params.backend == "c10d" and is_of_one):
            return of_torch(params)
        from elastic_train.rendezvous import handler  # heavy, and only for those who asked for it

        if params.backend == "c10d":
            return handler.create_c10d_handler(params)
        return handler.create_fixed_handler(params, of_torch)

    registry.get_rendezvous_handler = get_rendezvous_handler


def keep_nohup(environ: MutableMapping[str, str]) -> None:
    """Where this process ignores SIGHUP, as nohup leaves it, have torch leave it so: it would handle the signal, and
    end all workers with it. torch has set the variable by now, and reads it when it starts workers."""
    if SIGNALS_VARIABLE in environ and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        names = environ[SIGNALS_VARIABLE].split(",")
        environ[SIGNALS_VARIABLE] = ",".join(name for name in names if name.strip() != "SIGHUP")


def refuse_as_backend(_parameters: Any) -> Any:
    raise RuntimeError("elastic_train is no rendezvous backend; use --rdzv-backend=c10d or etcd3")


def etcd3_backend() -> Any:
    """Entry point `etcd3` of `torchrun.handlers`: what makes the handler of `--rdzv-backend=etcd3`."""

    def create(parameters: Any) -> Any:
        from elastic_train.rendezvous.handler import create_handler  # heavy, and only for those who asked for it

        return create_handler(parameters)

    return create
