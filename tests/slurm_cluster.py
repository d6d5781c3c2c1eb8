"""A real SLURM for tests: munge, slurmctld and a slurmd for each node, the nodes being network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_train.tools.drills.network import HUB_ADDRESS, Network
from elastic_train.tools.drills.nodes import clean_environment, dying_with_parent, wait_until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel", "squeue")
CONTROLLER = "ctl"
NODE_TIMEOUT = 10
"""seconds after which slurmctld looks whether a silent node is down; it takes about twice as long to say so"""
KILL_WAIT = 20
"""seconds between scancel's signal and its kill"""

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={path}/munge/socket
CredType=cred/munge
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool/%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdPidFile={path}/slurmd-%n.pid
SlurmdLogFile={path}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout={timeout}
KillWait={kill_wait}
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
CGROUP_CONF = "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n"
GRES_CONF = "Name=gpu File=/dev/tty[1-2]\n"
"""two files that stand for GPUs: SLURM only counts them and names their indices"""


def why_not() -> str | None:
    """Why no SLURM can be started here; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: slurmctld, slurmd, slurm-client, munge)"
    return Network.why_not()


class SlurmCluster:
    """Nodes node1, node2, ... of two processors and two pretended GPUs each; every process is ended by its pid."""

    def __init__(self, path: Path, num_nodes: int) -> None:
        self.path = path
        self.network = Network(num_nodes)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = clean_environment() | {"SLURM_CONF": str(path / "slurm.conf")}

    def start(self) -> None:
        """Blocks until every node is idle."""
        self._write_settings()
        path = self.path
        munge = [
            "munged", "--foreground", "--force", f"--key-file={path}/munge.key", f"--socket={path}/munge/socket",
            f"--pid-file={path}/munged.pid", f"--log-file={path}/munged.log", f"--seed-file={path}/munge.seed",
        ]  # fmt: skip
        self._daemons.append(self._spawn(munge, "munged"))
        wait_until((path / "munge" / "socket").exists, "munged", 30)
        controller = ["unshare", "--uts", "sh", "-c", f"hostname {CONTROLLER} && exec slurmctld -D"]
        self._daemons.append(self._spawn([*self.network.hub_prefix(), *controller], "slurmctld"))
        for index in range(self.network.num_nodes):
            self.switch_on(index)
        self.wait_for_idle(range(self.network.num_nodes))

    def _write_settings(self) -> None:
        path, network = self.path, self.network
        for folder in ("munge", "state", *(f"spool/{network.host_name(i)}" for i in range(network.num_nodes))):
            (path / folder).mkdir(parents=True)
        (path / "munge.key").write_bytes(os.urandom(128))
        (path / "munge.key").chmod(0o400)
        (path / "munge").chmod(0o755)
        nodes = [
            f"NodeName={network.host_name(i)} NodeAddr={network.address(i)} CPUs=2 RealMemory=4000 Gres=gpu:2"
            for i in range(network.num_nodes)
        ]
        text = SLURM_CONF.format(
            controller=CONTROLLER, address=HUB_ADDRESS, path=path, timeout=NODE_TIMEOUT, kill_wait=KILL_WAIT,
            nodes="\n".join(nodes),
        )  # fmt: skip
        (path / "slurm.conf").write_text(text)
        (path / "cgroup.conf").write_text(CGROUP_CONF)
        (path / "gres.conf").write_text(GRES_CONF)

    def _spawn(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        with (self.path / f"{name}.out").open("ab") as out:
            return subprocess.Popen(
                [*dying_with_parent(), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment,
                start_new_session=True,
            )

    # --- nodes --------------------------------------------------------------------------------------------------------

    def switch_on(self, index: int) -> None:
        self.network.heal(index)
        # A shell of its own as the first process: it reaps, and the node ends when it is killed.
        command = [*self.network.node_prefix(index), "sh", "-c", f"slurmd -D -N {self.network.host_name(index)}; exit"]
        self._nodes[index] = self._spawn(command, f"slurmd-{index}")

    def lose_power(self, index: int) -> None:
        """Silence at once, without a farewell on any connection."""
        self.network.pull_cable(index)
        node = self._nodes.pop(index)
        node.kill()
        node.wait(10)

    def wait_for_idle(self, indices: Sequence[int], timeout: float = 60.0) -> None:
        names = {self.network.host_name(index) for index in indices}
        wait_until(lambda: names <= self.nodes_in("idle"), f"idle {', '.join(sorted(names))}", timeout)

    def nodes_in(self, state: str) -> set[str]:
        """By sinfo's word for a state; slurmctld may not answer yet."""
        done = self._run(["sinfo", "-h", "-N", "-t", state, "-o", "%N"])
        return set(done.stdout.split())

    # --- commands -----------------------------------------------------------------------------------------------------

    def run(self, command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """A command on the controller's network, as a person at the login node; its output. Fails where it fails."""
        done = self._run(command, cwd, env)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def _run(
        self, command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.network.hub_prefix(), *command],
            cwd=cwd,
            env=self._environment | (env or {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @contextlib.contextmanager
    def running(
        self, command: Sequence[str], cwd: Path, log: Path, env: dict[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A program on the controller's network; it is killed at the end, where it still runs."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*dying_with_parent(), *self.network.hub_prefix(), *command],
                cwd=cwd, env=self._environment | env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)

    def submit(self, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
        """`elastic-train submit slurm ARGUMENTS`; the job's id."""
        said = self.run([sys.executable, "-m", "elastic_train.cli", "submit", "slurm", *arguments], cwd, env)
        return said.split()[-1]

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows of it."""
        words = self.run(["scontrol", "-o", "show", "job", job]).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait_for_state(self, job: str, state: str, timeout: float) -> None:
        """Raises TooSlow."""
        wait_until(lambda: self.job(job)["JobState"] == state, f"{state} of job {job}", timeout)

    def end_in_minutes(self, job: str, minutes: int) -> None:
        """Lower its limit so that its time is over in that many minutes, up to one less."""
        hours, passed, _ = re.fullmatch(r"(\d+):(\d+):(\d+)", self.job(job)["RunTime"]).groups()  # type: ignore[union-attr]
        self.run(["scontrol", "update", f"jobid={job}", f"TimeLimit={60 * int(hours) + int(passed) + minutes}"])

    def start_again_soon(self, job: str) -> None:
        """SLURM holds a requeued job back for two minutes, whatever is set.

        Not all of it is idle time: the batch script's end may be reported some seconds later, and would be taken for
        that of the new one.
        """
        self.run(["scontrol", "update", f"jobid={job}", "StartTime=now+15"])

    def logs(self) -> str:
        """What the daemons have said last."""
        paths = [*self.path.glob("*.out"), *self.path.glob("*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(paths))

    def end(self) -> None:
        for process in [*self._nodes.values(), *self._daemons]:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(10)
        self.network.close()


@contextlib.contextmanager
def slurm_running(num_nodes: int) -> Iterator[SlurmCluster]:
    """With a folder of its own, whose name is short: sockets lie there, and their paths have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = SlurmCluster(Path(folder), num_nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()
            print(cluster.logs())  # pytest shows it where the test failed
