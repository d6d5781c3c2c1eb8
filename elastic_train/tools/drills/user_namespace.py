"""Root in a user namespace: an ordinary user needs it for network namespaces. The machine may not allow it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HIDDEN = ("/run", "/dev/shm")
# Hidden in there: the machine's network, which namespaces in there cannot connect to; its /run, where `ip netns`
# writes; and its shared memory, where a folder of our root may be that of the machine's root.
_ENTER = [
    "unshare", "--user", "--map-root-user", "--mount", "--net",
    "sh", "-c",
    "mount -t tmpfs -o mode=755 tmpfs /run && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
    ' && ip link set lo up && exec "$@"',
    "enter",
]  # fmt: skip
_PROBE = "import sys; from elastic_train.tools.drills.network import Network; sys.exit(Network.why_not())"


def become_root(needed: Sequence[Path]) -> None:
    """Start an ordinary user's program again, with the same pid, as the root of a user namespace, and do not return. Do
    nothing as root, if one of the `needed` paths is hidden in there, or if network namespaces do not work in there."""
    if os.geteuid() == 0 or shutil.which(_ENTER[0]) is None:
        return
    if any(path.resolve().is_relative_to(hidden) for path in needed for hidden in HIDDEN):
        return
    python = [*_ENTER, sys.executable]
    if subprocess.run([*python, "-c", _PROBE], capture_output=True, check=False).returncode == 0:
        os.execvp(python[0], [*python, *sys.orig_argv[1:]])
