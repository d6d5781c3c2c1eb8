"""`torchrun ... -m elastic_train.check [flags] [-- flags of the job]`: the same as `elastic-train check`."""

from __future__ import annotations

import sys

from elastic_train.cli import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
