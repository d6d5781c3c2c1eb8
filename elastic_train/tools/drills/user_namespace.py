"""Root of a user namespace: what an ordinary user needs for network namespaces, where the machine allows that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HIDDEN = ("/run", "/dev/shm")
# Not seen in there: the machine's network, which nothing made there may be connected to; what it has in /run, where
# `ip netns` writes; and its shared memory, where the folder of our root may be that of the machine's.
_ENTER = [
    "unshare", "--user", "--map-root-user", "--mount", "--net",
    "sh", "-c",
    "mount -t tmpfs -o mode=755 tmpfs /run && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
    ' && ip link set lo up && exec "$@"',
    "enter",
]  # fmt: skip
_PROBE = "import sys; from elastic_train.tools.drills.network import Network; sys.exit(Network.why_not())"


def become_root(needed: Sequence[Path]) -> None:
    """An ordinary user's program starts again as the root of a user namespace, with the same pid, where that is allowed
    and serves for network namespaces: this does not return then. For root it does nothing, nor where one of the
    `needed` paths could not be seen in there."""
    if os.geteuid() == 0 or shutil.which(_ENTER[0]) is None:
        return
    if any(path.resolve().is_relative_to(hidden) for path in needed for hidden in HIDDEN):
        return
    python = [*_ENTER, sys.executable]
    if subprocess.run([*python, "-c", _PROBE], capture_output=True, check=False).returncode == 0:
        os.execvp(python[0], [*python, *sys.orig_argv[1:]])
