"""Rules about the workers of a world, and how they reach each other."""

from __future__ import annotations

import ipaddress
import re

from elastic_train.tools.check.advice import (
    Finding,
    breaks,
    by_value,
    errors,
    fine,
    listing,
    matters,
    nodes_of,
    skipped,
)
from elastic_train.tools.check.facts import ALL_REDUCE_BYTES, Gathered, Problem, WorkerFacts
from elastic_train.wording import count, human_bytes

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
WHY_EQUAL = {
    "python": (matters, "what random numbers and floating point give may differ"),
    "torch": (breaks, "members with other versions are refused, or cannot talk to each other (torch 1.7 and 1.8 "
              "could not)"),
    "elastic_train": (breaks, "members with other versions are refused"),
    "elastic_train's protocol": (breaks, "members of other builds are refused"),
    "torchvision": (breaks, "no worker is refused, and models, images and their augmentation may differ"),
    "cuda": (matters, "kernels and what they round may differ"),
    "nccl": (breaks, "members with other versions cannot talk to each other"),
}  # fmt: skip
"""the harm if two members have different versions"""
NOTABLE_SKEW_SECONDS = 1.0


def world_is_the_one_asked_for(gathered: Gathered) -> list[Finding]:
    if gathered.world_error is not None and any(worker.rendezvous.is_running for worker in gathered.workers):
        return skipped("the world: the job has begun at its endpoint, and this node was looked at alone")
    if gathered.world_error is not None:
        has_store = all(worker.rendezvous.is_usable for worker in gathered.workers)
        return breaks(
            f"no world was formed: {gathered.world_error}",
            "what is below is of this worker alone",
            "see that all nodes are started, with one endpoint, one run id and one --nnodes"
            if has_store
            else "correct the rendezvous first, see below",
        )
    wanted, num_nodes, num_workers = gathered.wanted, len(gathered.nodes), len(gathered.workers)
    here = f"{count(num_workers, 'worker')} on {count(num_nodes, 'node')}"
    if wanted.nodes is not None and num_nodes != wanted.nodes:
        alone = num_nodes == 1 and wanted.nodes > 1
        return breaks(
            f"the world is {here}, and {wanted.nodes} nodes were asked for ({wanted.nodes_by})",
            f"perhaps there are {wanted.nodes} worlds of one: each would train by itself and write the same run"
            if alone
            else "the nodes that are missing will not train, or are training somewhere else",
            "give every node the same --rdzv-backend, --rdzv-id and --rdzv-endpoint=HOST:PORT (not localhost, "
            "torchrun's default) and let --nnodes allow that many; see that the missing nodes have started",
        )
    if num_nodes < wanted.max_nodes and wanted.nodes is None:
        return matters(
            f"the world is {here}; --nnodes allows {wanted.max_nodes} nodes",
            "workers that are not here are not checked",
            "if all were to be here, say so with --nodes, and look at the endpoint and the run id of those missing",
        )
    told = "as asked" if wanted.nodes is not None else "--nodes N has this compared with what you meant"
    return fine(f"world: {here}, {told}")


def versions_are_equal(gathered: Gathered) -> list[Finding]:
    findings = []
    for name in dict.fromkeys(name for worker in gathered.workers for name in worker.versions):
        here = by_value(worker.versions.get(name, "none") for worker in gathered.workers)
        if name == "nccl":
            here.pop("none", None)  # of workers that do not use it
        if len(here) > 1:
            judge, why = WHY_EQUAL[name]
            findings += judge(
                f"{name} is not the same everywhere: {listing(here)}",
                why,
                "install one set of versions on all nodes, best as one image",
            )
    mine = ", ".join(f"{name} {version}" for name, version in gathered.workers[0].versions.items())
    return findings or fine(f"versions: {mine}")


def torch_is_known(gathered: Gathered) -> list[Finding]:
    text = gathered.workers[0].versions["torch"]
    found = re.match(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST_TORCH:
        return breaks(
            f"torch {text} is older than {'.'.join(map(str, OLDEST_TORCH))}",
            "it was never tried with it",
            "install a newer torch on all nodes",
        )
    findings = []
    if version > NEWEST_TORCH:
        findings += matters(
            f"torch {text} is newer than {'.'.join(map(str, NEWEST_TORCH))}, the newest that was tried",
            "names of torch's own that a re-form needs may have changed",
            "try a join before you rely on it: elastic-train drill --faults join",
        )
    bare = [rank for rank, worker in enumerate(gathered.workers) if not worker.has_hook]
    if bare and gathered.wanted.is_c10d:
        findings += matters(
            f"torchrun does not load elastic_train's entry point on {nodes_of(gathered, bare)}",
            "one node trains there alone, no other can join it, and several nodes end at once",
            "pip install elastic_train there, in place of a folder on PYTHONPATH",
        )
    return findings or fine(f"torch {text}: tried")


# --- how they reach each other ----------------------------------------------------------------------------------------


def store_is_usable(gathered: Gathered) -> list[Finding]:
    met: dict[Problem, list[int]] = {}
    for rank, worker in enumerate(gathered.workers):
        for problem in worker.rendezvous.problems:
            met.setdefault(problem, []).append(rank)
    findings = []
    for problem, ranks in met.items():
        what = f"rendezvous, from {nodes_of(gathered, ranks)}: {problem.what}"
        if all(gathered.workers[rank].rendezvous.is_usable for rank in ranks):
            why = "nodes meet while enough of the others answer: any one under c10d, a majority of etcd"
            findings += matters(what, why, problem.do)
        else:
            findings += breaks(what, "without it no node can start or join", problem.do)
    for note in dict.fromkeys(note for worker in gathered.workers for note in worker.rendezvous.notes):
        findings += fine(f"rendezvous: {note}")
    return findings


def names_resolve(gathered: Gathered) -> list[Finding]:
    findings = []
    by_host: dict[str, set[str]] = {}
    for worker in gathered.workers:
        by_host.setdefault(worker.host, set()).add(worker.machine)
    for host, machines in by_host.items():
        if len(machines) > 1:
            findings += breaks(
                f"{len(machines)} machines call themselves {host}",
                "event files, snapshots and members are told apart by host name",
                "give each its own: hostnamectl hostname NAME",
            )
    lost = [rank for rank, worker in enumerate(gathered.workers) if not worker.host_addresses]
    if lost:
        findings += matters(
            f"the name of {nodes_of(gathered, lost)} does not resolve there",
            "a rendezvous in which a name serves as address (torchrun's MASTER_ADDR) waits for the name server",
            "add it to /etc/hosts or the name server, or give torchrun --local-addr=IP",
        )
    return findings or fine(f"names: {', '.join(sorted(by_host))}")


def addresses_are_usable(gathered: Gathered) -> list[Finding]:
    findings = []
    addresses = [ipaddress.ip_address(worker.address.split("%")[0]) for worker in gathered.workers]
    loopback = [rank for rank, address in enumerate(addresses) if address.is_loopback]
    if loopback and len({worker.machine for worker in gathered.workers}) > 1:
        findings += breaks(
            f"{nodes_of(gathered, loopback)} can be reached at {addresses[loopback[0]]} only, from itself",
            "members on other machines cannot connect to it",
            "name the endpoint by an address that is not loopback, or see to a default route there",
        )
    if len({address.version for address in addresses}) > 1:
        v6 = [rank for rank, address in enumerate(addresses) if address.version == 6]
        findings += breaks(
            f"{nodes_of(gathered, v6)} has an IPv6 address, the others IPv4",
            "gloo takes one kind; a pair with different kinds cannot connect",
            "name the endpoint by an IPv4 address on every node, or by an IPv6 address on every node",
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        bad = {}
        for rank, worker in enumerate(gathered.workers):
            wanted = worker.wanted_interfaces.get(variable)
            names = {interface.partition("=")[0] for interface in worker.interfaces}
            if wanted is not None and not any(matches(wanted, name, variable) for name in names):
                bad[rank] = wanted
        if bad:
            rank, wanted = next(iter(bad.items()))
            findings += breaks(
                f"{variable}={wanted} names no interface of {nodes_of(gathered, bad)}",
                "the process group cannot be formed",
                f"unset it, or take one of {', '.join(gathered.workers[rank].interfaces)}",
            )
    if findings:
        return findings
    findings = fine(f"interface that gloo takes: {listing(by_value(map(gloo_takes, gathered.workers)))}")
    if any("nccl" in worker.backend for worker in gathered.workers):
        taken = by_value(map(nccl_takes, gathered.workers))
        findings += fine(f"interface that NCCL takes, where it has no InfiniBand: {listing(taken)}")
    return findings


def gloo_takes(worker: WorkerFacts) -> str:
    return worker.wanted_interfaces.get("GLOO_SOCKET_IFNAME") or worker.interface or f"the one with {worker.address}"


def nccl_takes(worker: WorkerFacts) -> str:
    """NCCL's interface by its documentation: that of NCCL_SOCKET_IFNAME, else any, loopback and docker bridges last."""
    if "NCCL_SOCKET_IFNAME" in worker.wanted_interfaces:
        return worker.wanted_interfaces["NCCL_SOCKET_IFNAME"]
    names = [interface.partition("=")[0] for interface in worker.interfaces]
    usual = [name for name in names if not name.startswith(("lo", "docker"))]
    return " or ".join(usual or names)


def matches(wanted: str, name: str, variable: str) -> bool:
    """Return whether the variable selects an interface: gloo takes a name, NCCL prefixes, =NAME and ^NOT."""
    parts = wanted.lstrip("^=").split(",")
    if variable == "GLOO_SOCKET_IFNAME":
        return name in parts
    if wanted.startswith("^"):
        return not any(name.startswith(part) for part in parts)
    return name in parts if wanted.startswith("=") else any(name.startswith(part.split(":")[0]) for part in parts)


def everybody_reaches_everybody(gathered: Gathered) -> list[Finding]:
    pairs = [(rank, other) for rank, shared in enumerate(gathered.shared) for other in shared.unreachable]
    findings = []
    if pairs:
        some = ", ".join(f"{gathered.name(a)} to {gathered.name(b)}" for a, b in pairs[:5])
        more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        findings += breaks(
            f"no TCP connection from {some}{more}",
            "every worker connects to every other one, in both directions, at ports that the system chooses",
            "let the nodes of the job reach each other at all ports (firewall, security group, NetworkPolicy)",
        )
    broken = errors(shared.group_error for shared in gathered.shared)
    if broken and not pairs:
        seen = "; ".join(f"{nodes_of(gathered, ranks)}: {text}" for text, ranks in broken[:3])
        findings += breaks(
            f"no process group that works; {seen}",
            "nothing can be trained together",
            "look at interfaces and versions above; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose an interface",
        )
    if findings or not gathered.shared:
        return findings
    if len(gathered.workers) == 1:
        return fine(f"{gathered.workers[0].backend} works; one worker alone: no connection to others was tried")
    seconds = max(shared.all_reduce_seconds or 0.0 for shared in gathered.shared)
    return fine(
        f"connections: every worker reaches every other one, and {gathered.workers[0].backend} works: "
        f"an all-reduce of {human_bytes(ALL_REDUCE_BYTES)} takes {1e3 * seconds:.1f} ms"
    )


def clocks_agree(gathered: Gathered) -> list[Finding]:
    known = {rank: shared.clock for rank, shared in enumerate(gathered.shared) if shared.clock is not None}
    if len(known) < 2:
        return []
    last, first = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    skew = known[last] - known[first]
    if skew >= NOTABLE_SKEW_SECONDS:
        return matters(
            f"the clock of {gathered.name(last)} is {skew:.1f} s ahead of that of {gathered.name(first)}",
            "training does not mind, but logs of different nodes cannot be put in order, and certificates may look "
            "expired, or not yet valid",
            "run chrony or systemd-timesyncd on every node",
        )
    return fine(f"clocks: within {skew:.3f} s")
