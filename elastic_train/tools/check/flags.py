"""The flags of `elastic-train check`; apart from it, for every `elastic-train --help` reads them."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, metavar="N", help="how many nodes the job is to have; fewer is a failure")
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS",
        help="between the signal to stop and the kill: terminationGracePeriodSeconds, KillWait (default: 30)",
    )  # fmt: skip
    parser.add_argument("--local-snapshots", action="store_true", help="each node keeps its own snapshots, on purpose")
    parser.add_argument("--wait", type=float, default=120.0, metavar="SECONDS", help="for the others (default: 120)")
    alone = parser.add_argument_group("for one node alone, without torchrun", "what torchrun will be given")
    alone.add_argument("--workers", type=int, metavar="N", help="of this node, as torchrun's --nproc-per-node")
    alone.add_argument("--rdzv-backend", choices=("c10d", "etcd3"), default="c10d", help="default: c10d")
    alone.add_argument("--rdzv-endpoint", metavar="HOST:PORT,...", help="as torchrun will be given it")
    alone.add_argument("--rdzv-id", default="none", metavar="NAME", help="run id of the job (default: none)")
    alone.add_argument(
        "--rdzv-conf", default="", metavar="KEY=VALUE,...", help="ca, cert, key, user, password_file, prefix"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of the job: its model, data and directories")
