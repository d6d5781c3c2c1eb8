"""The worker: `torchrun ... -m elastic_train`, or `python -m elastic_train` for a world of one."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_train.config import parse
from elastic_train.errors import ElasticTrainError, report, show_traceback
from elastic_train.stopping import StopSignal, die_with_agent
from elastic_train.system import require_system_for_training
from elastic_train.training.own_flags import own_flags


def main() -> int:
    """Run this worker; returns its exit code. Expected errors are one line on stderr, others a traceback."""
    is_debug = "--debug" in sys.argv
    try:
        require_system_for_training(os.environ)
        if "RANK" in os.environ:
            die_with_agent()  # first of all: a task of one's own may be imported for long
        with quick_imports():
            config = parse(sys.argv[1:], own_flags(sys.argv[1:]))
        if config.spawn is not None:
            from elastic_train.rendezvous.spawn import is_spawner, spawn

            if is_spawner(config.spawn, os.environ):
                return spawn(config.spawn, sys.argv[1:])
        stop = StopSignal()
        stop.install()
        # After the command line, for these imports take seconds and a mistake in a flag should not.
        with quick_imports():
            import torch._dynamo  # noqa: F401  # else the optimizer imports it, outside of this block

            from elastic_train.elastic.run import run
            from elastic_train.rendezvous.launch import Launch

        return run(config, Launch.from_environment(os.environ, config.store_endpoint), stop)
    except ElasticTrainError as error:
        report(error, rank=os.environ.get("RANK", "0"), is_debug=is_debug)
        return error.exit_code
    except Exception as error:  # a bug, ours or that of the user's task
        show_traceback(error, is_debug=is_debug)
        return 1


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import inside the block, without garbage collection: modules are no garbage, and to look for it takes a fifth of
    torch's import. What they hold is not looked through later, either, in the middle of a step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else extension modules take what is left at the end for leaks, and say so
        if was_enabled:
            gc.enable()


if __name__ == "__main__":
    sys.exit(main())
