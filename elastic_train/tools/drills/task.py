"""What a drill trains unless it is told otherwise: the bundled digits at a pace that leaves a processor idle.

Real training computes on a GPU while its processors wait. Here every sample costs some milliseconds of sleep, so that
more workers are faster, the imports of a newcomer disturb nobody, and the drill sets the pace while it runs: its run
neither ends before the last fault nor goes on long after it. The weights do not depend on the pace.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from elastic_train.tools.audit.record import PACE_VARIABLE
from elastic_train.training.tasks import ImageClassification


class PacedDigits(ImageClassification):
    """The bundled digits and network; a forward pass in training takes as long as the pace says."""

    name = "paced-digits"

    def __init__(self) -> None:
        super().__init__()
        path = os.environ.get(PACE_VARIABLE)
        self._pace_file = Path(path) if path else None

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        if model.training:
            time.sleep(self._seconds_per_sample() * len(inputs))
        return super().forward(model, inputs)

    def _seconds_per_sample(self) -> float:
        if self._pace_file is None:
            return 0.0
        try:
            return float(self._pace_file.read_text())
        except (OSError, ValueError):  # being replaced
            return 0.0
