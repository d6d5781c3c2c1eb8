"""The default task of a drill: the bundled digits at a pace that leaves a processor idle.

Real training computes on a GPU while its processors wait. Here every sample costs some milliseconds of sleep. So more
workers are faster, and the imports of a newcomer slow no other worker. The drill sets the pace while the job runs, so
that it neither ends before the last fault nor goes on long after it. Flags make the job busy, as real jobs are. The
weights depend neither on the pace nor on these flags, except --state-mb.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_train.tools.audit.record import PACE_VARIABLE
from elastic_train.training.tasks import ImageClassification


@dataclass(frozen=True)
class BusyFlags:
    first_step_seconds: float = 0.0
    """that the first forward pass of each process takes, as where it compiles"""
    step_seconds: float = 0.0
    """that each forward pass in training takes beside its pace"""
    hiccup_seconds: float = 0.0
    """that the loader keeps a process waiting now and then"""
    hiccup_every: int = 60
    """forward passes from one hiccup to the next; not of all processes at the same time"""
    evaluation_seconds: float = 0.0
    """that a process takes for its part of an evaluation, about"""
    busy_rank: int | None = None
    """only the process that had this rank in its first step is busy; default: all are"""
    state_mb: int = 0
    """megabytes of weights and momentum to train beside the network; no matter for what it learns"""
    frozen_mb: int = 0
    """megabytes of weights beside it that nobody trains, as those that a small adapter is trained for"""


NOT_BUSY = BusyFlags()
HICCUP = "a hiccup of the loader"
"""printed by a worker when a hiccup begins"""


class PacedDigits(ImageClassification):
    """The bundled digits and network; the pace sets the time of a forward pass in training."""

    name = "paced-digits"

    def __init__(self, flags: BusyFlags = NOT_BUSY) -> None:
        super().__init__()
        path = os.environ.get(PACE_VARIABLE)
        self._pace_file = Path(path) if path else None
        self._flags = flags
        self._num_passes = 0
        self._first_rank: int | None = None

    def build_model(self) -> nn.Module:
        network = super().build_model()
        if self._flags.state_mb:
            network = WithBallast(network, self._flags.state_mb)
        if self._flags.frozen_mb:
            frozen = torch.randn(self._flags.frozen_mb * 2**20 // 4)
            network.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
        return network

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        if model.training:
            time.sleep(self._seconds_per_sample() * len(inputs))
            self._be_busy_before_a_pass()
        elif self._is_busy():
            share = len(inputs) / len(self.test_set) * _world_size()  # type: ignore[arg-type]
            time.sleep(self._flags.evaluation_seconds * share)
        return super().forward(model, inputs)

    def _be_busy_before_a_pass(self) -> None:
        flags = self._flags
        if self._first_rank is None:
            self._first_rank = dist.get_rank() if dist.is_initialized() else 0  # kept: ranks change
        self._num_passes += 1
        if not self._is_busy():
            return
        time.sleep(flags.step_seconds)
        if self._num_passes == 1:
            time.sleep(flags.first_step_seconds)
        its_turn = self._num_passes + self._first_rank * flags.hiccup_every // 4
        if flags.hiccup_seconds and its_turn % flags.hiccup_every == 0:
            print(HICCUP, flush=True)
            time.sleep(flags.hiccup_seconds)

    def _is_busy(self) -> bool:
        """Return whether this process is busy; none is once the drill lets its job run free."""
        is_free = self._pace_file is not None and self._seconds_per_sample() == 0.0
        return not is_free and self._flags.busy_rank in (None, self._first_rank)

    def _seconds_per_sample(self) -> float:
        if self._pace_file is None:
            return 0.0
        try:
            return float(self._pace_file.read_text())
        except (OSError, ValueError):  # being replaced
            return 0.0


class WithBallast(nn.Module):
    """A network with extra parameters that make its state large: all are trained, but hardly change."""

    def __init__(self, network: nn.Module, megabytes: int) -> None:
        """`megabytes`: half of them extra parameters, half their momentum, in float32."""
        super().__init__()
        self.network = network
        self.ballast = nn.Parameter(torch.randn(megabytes * 2**20 // 8))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        return outputs * (1.0 + self.ballast.mean())


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
