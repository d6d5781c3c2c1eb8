"""The entry point of a worker: `torchrun ... -m elastic_train`, or `python -m elastic_train` for a world of one."""

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
    """Run this worker and return its exit code. Prints one line to stderr for expected errors, else a traceback."""
    is_debug = "--debug" in sys.argv
    try:
        require_system_for_training(os.environ)
        if "RANK" in os.environ:
            die_with_agent()  # first, because the import of a user's task may take long
        with quick_imports():
            config = parse(sys.argv[1:], own_flags(sys.argv[1:]))
        if config.spawn is not None:
            from elastic_train.rendezvous.spawn import is_spawner, spawn

            if is_spawner(config.spawn, os.environ):
                return spawn(config.spawn, sys.argv[1:])
        stop = StopSignal()
        stop.install()
        # After the command line: these imports take seconds, and a mistake in a flag should show at once.
        with quick_imports():
            import torch._dynamo  # noqa: F401  # else the optimizer imports it outside of this block

            from elastic_train.elastic.run import run
            from elastic_train.rendezvous.launch import Launch

        return run(config, Launch.from_environment(os.environ, config.store_endpoint), stop)
    except ElasticTrainError as error:
        report(error, rank=os.environ.get("RANK", "0"), is_debug=is_debug)
        return error.exit_code
    except Exception as error:  # a bug, ours or in the user's task
        show_traceback(error, is_debug=is_debug)
        return 1


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection for imports inside the block: it takes a fifth of torch's import, and finds nothing.
    The imported objects are frozen, so that no later collection scans them in the middle of a step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else extension modules report the frozen objects as leaks at exit
        if was_enabled:
            gc.enable()


if __name__ == "__main__":
    sys.exit(main())
