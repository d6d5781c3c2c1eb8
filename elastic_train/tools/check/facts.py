"""The facts that a check gathers: plain values that JSON can carry from one worker to another."""

from __future__ import annotations

from dataclasses import dataclass

ALL_REDUCE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Gpu:
    """The GPU that a worker uses."""

    uuid: str
    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the rendezvous, and what to do about it."""

    what: str
    do: str


@dataclass(frozen=True)
class RendezvousFacts:
    """What a node finds at the rendezvous of a job."""

    problems: tuple[Problem, ...] = ()
    """of the endpoints, or of members of etcd"""
    is_usable: bool = True
    """whether the rendezvous works in spite of the problems"""
    notes: tuple[str, ...] = ()
    is_running: bool = False
    """whether the job has begun: it answers at an endpoint"""


@dataclass(frozen=True)
class Measured:
    """A snapshot of the model that the flags choose, which the first worker of a node writes."""

    bytes: int
    seconds: float
    """time until it is durable"""
    last_step: int
    """the step with which training ends"""
    moments_error: str | None
    """why the optimizer's moments are missing in it; None if they are not"""


@dataclass(frozen=True)
class WorkerFacts:
    """The facts that one worker finds alone."""

    host: str
    machine: str
    """equal for all processes of one kernel, whatever the host names of their containers"""
    pid: int
    agent_pid: int
    """pid of the node's torchrun; 0 without one"""
    local_rank: int
    local_world_size: int
    address: str
    """IP address at which other workers are to reach it"""
    versions: dict[str, str]
    """of python, torch, torchvision, elastic_train; cuda if torch has it, nccl if it is used"""
    has_hook: bool
    """whether torchrun loads elastic_train's entry point on this node"""
    backend: str
    interface: str | None
    """network interface of `address`, which gloo will use"""
    interfaces: tuple[str, ...]
    """all of this node, as NAME=ADDRESS with the first address if they have one"""
    wanted_interfaces: dict[str, str]
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if they are set"""
    host_addresses: tuple[str, ...]
    """the addresses of this node's own name; empty if it does not resolve"""
    num_gpus: int
    """seen by torch"""
    num_gpu_devices: int
    """shown by the driver in /dev"""
    gpu: Gpu | None
    device_error: str | None
    snapshot_dir: str
    snapshot_dir_error: str | None
    """why the directory is not writable"""
    snapshot_dir_free: int
    shm_free: int
    """free bytes in /dev/shm"""
    state_error: str | None
    """why a worker would not start: its flags, its run directory, or the model or data that it builds"""
    trained: str
    """the flags that choose the model and the data, to which `measured` belongs"""
    measured: Measured | None
    num_loaders: int
    """DataLoader processes, --num-workers"""
    keep_snapshots: int
    """the most snapshots that stay when training ends"""
    rendezvous: RendezvousFacts = RendezvousFacts()
    notices_of: str = ""
    """the source that --notices asks, or `off`"""
    notice_seconds: float | None = None
    """seconds that a notice of this source leaves, if known in advance"""
    wanted_device: str = "auto"
    """value of --device"""


@dataclass(frozen=True)
class SharedFacts:
    """What one worker found about the other workers."""

    unreachable: tuple[int, ...] = ()
    """ranks whose listener this worker cannot reach"""
    sees_directory_of: tuple[int, ...] = ()
    """ranks whose file this worker sees in its snapshot directory"""
    clock: float | None = None
    """Unix seconds of a moment that is the same for all, up to milliseconds"""
    all_reduce_seconds: float | None = None
    """time of an all-reduce of ALL_REDUCE_BYTES over all workers, on their devices"""
    group_error: str | None = None
    """why the process group was not formed, or why it broke"""


@dataclass(frozen=True)
class Wanted:
    """What the user asked for, as far as it is known."""

    nodes: int | None = None
    """--nodes, or the number that the scheduler has given"""
    nodes_by: str = "--nodes"
    """the source of that number"""
    max_nodes: int = 1
    """maximum of torchrun's --nnodes"""
    workers: int | None = None
    """of this node, if the check is a single process"""
    grace_seconds: float = 30.0
    """time between the signal to stop and the kill"""
    wants_shared_directory: bool = True
    is_c10d: bool = False
    """whether the rendezvous is c10d"""


@dataclass(frozen=True)
class Gathered:
    """All facts, by rank; `shared` is empty if no world was formed."""

    wanted: Wanted
    workers: tuple[WorkerFacts, ...]
    shared: tuple[SharedFacts, ...] = ()
    world_error: str | None = None
    """why no world formed; then `workers` has only one"""

    @property
    def measured(self) -> dict[int, Measured]:
        """The snapshots that were measured, by rank."""
        return {rank: worker.measured for rank, worker in enumerate(self.workers) if worker.measured is not None}

    @property
    def nodes(self) -> dict[str, list[int]]:
        """Ranks by the name of their node: its host, with the rank of its first worker if two nodes share the host."""
        nodes: dict[tuple[str, str, int], list[int]] = {}
        for rank, worker in enumerate(self.workers):
            nodes.setdefault((worker.host, worker.machine, worker.agent_pid), []).append(rank)
        hosts = [host for host, _, _ in nodes]
        return {
            host if hosts.count(host) == 1 else f"{host} (rank {ranks[0]})": ranks
            for (host, _, _), ranks in nodes.items()
        }

    def name(self, rank: int) -> str:
        """The name of a rank's node for people."""
        return next(name for name, ranks in self.nodes.items() if rank in ranks)
