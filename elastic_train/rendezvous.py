"""torchrun's rendezvous handler for `--rdzv-backend=etcd3`, in two modes; `--rdzv-conf membership=...` says which.

- `workers`, the default for programs of this package: membership belongs to the workers (etcd_membership.py). Each
  agent gets a world of its own node, and nothing that happens elsewhere reaches it: a join restarts nobody.
- `agents`, the default for every other program: an ordinary torchrun rendezvous (etcd_rendezvous.py).
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elastic_train.errors import UsageError
from elastic_train.etcd_settings import LAST_CALL_SECONDS, SETTINGS_VARIABLE, EtcdSettings
from elastic_train.torchrun import MIN_NODES_VARIABLE, NODE_VARIABLE, agent_arguments, launches_elastic_train

MODES = ("workers", "agents")
TORCHRUNS_LAST_CALL = 30.0
"""seconds; what users of torchrun's own rendezvous know: in this mode a late node restarts everybody"""


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """What `torchrun --rdzv-backend=etcd3` calls. A mistake in its options ends the process with one line."""
    try:
        mode = choose_mode(parameters.config, agent_arguments(sys.orig_argv), os.environ)
        settings = EtcdSettings.from_torchrun(
            parameters.endpoint,
            parameters.config,
            os.environ,
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            last_call=LAST_CALL_SECONDS if mode == "workers" else TORCHRUNS_LAST_CALL,
        )
    except UsageError as error:
        print(f"elastic_train: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error
    if mode == "agents":
        from elastic_train.etcd_rendezvous import AgentsHandler

        return AgentsHandler(parameters, settings)
    return WorkersHandler(parameters, settings)


def choose_mode(conf: Mapping[str, Any], arguments: list[str] | None, environ: Mapping[str, str]) -> str:
    """`membership` of --rdzv-conf, else by what is launched.

    Raises:
        UsageError: it is neither of the two.
    """
    given = conf.get("membership")
    if given is None:
        is_ours = arguments is not None and launches_elastic_train(arguments, environ)
        return "workers" if is_ours else "agents"
    if given not in MODES:
        raise UsageError(f"membership={given} in --rdzv-conf: give one of {', '.join(MODES)}")
    return str(given)


class WorkersHandler(RendezvousHandler):
    """A rendezvous of one node: it is complete at once, nobody ever joins it, and its end concerns nobody else."""

    def __init__(self, parameters: RendezvousParameters, settings: EtcdSettings) -> None:
        self._parameters = parameters
        os.environ[SETTINGS_VARIABLE] = settings.to_json()
        os.environ[MIN_NODES_VARIABLE] = str(settings.min_nodes)
        os.environ[NODE_VARIABLE] = uuid.uuid4().hex[:12]
        enough = "the first node is" if settings.min_nodes == 1 else f"{settings.min_nodes} nodes are"
        print(
            f"elastic_train: meeting in etcd at {','.join(settings.endpoints)}, {settings.min_nodes} to "
            f"{settings.max_nodes} nodes; training starts {settings.last_call:g} s after {enough} ready, at once with "
            f"{settings.max_nodes}; nodes that come later are taken in between two steps",
            file=sys.stderr,
            flush=True,
        )

    def get_backend(self) -> str:
        return self._parameters.backend

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: others may come and go."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        return True
