"""The worker: `torchrun ... -m elastic_train`, or `python -m elastic_train` for a world of one."""

from __future__ import annotations

import os
import sys

from elastic_train.config import parse
from elastic_train.errors import ElasticTrainError, tell
from elastic_train.stopping import StopSignal, die_with_parent


def main() -> int:
    """Run this worker; returns its exit code. Expected errors are one line on stderr, others a traceback."""
    is_debug = "--debug" in sys.argv
    try:
        config = parse(sys.argv[1:])
        stop = StopSignal()
        stop.install()
        if "RANK" in os.environ:
            die_with_parent()
        # After the command line, for these imports take seconds and a mistake in a flag should not.
        from elastic_train.recovery import run
        from elastic_train.torchrun import Launch

        return run(config, Launch.from_environment(os.environ, config.store_endpoint), stop)
    except ElasticTrainError as error:
        tell(error, rank=os.environ.get("RANK", "0"), is_debug=is_debug)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
