"""How many files of the package a reader walks through from a fault to the next commit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import elastic_train
from tests.simulation.plan import Plan
from tests.simulation.simulator import Simulation

PACKAGE = Path(elastic_train.__file__).parent
DEATH_FILES, JOIN_FILES = 21, 21
"""at most; what is fewer by now is to be written here"""


@contextmanager
def noting_files(found: set[str]) -> Iterator[None]:
    """Every file of the package in which a function is entered inside the block, on any task."""
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            found.add(frame.f_code.co_filename.removeprefix(prefix))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def files_between(simulation: Simulation, until: Callable[[], bool], limit: float) -> set[str]:
    """Of all that happens from now on until a condition holds."""
    found: set[str] = set()
    kernel = simulation.kernel
    with noting_files(found):
        while not until():
            assert kernel.now < limit, f"not within {limit} s: {simulation.describe()}"
            kernel.run(kernel.now + 0.005)
    return found


def test_a_death() -> None:
    simulation = Simulation(Plan(seed=1, hosts=(1, 1, 1)))
    simulation.kernel.run(2.0)
    simulation.end(simulation.workers[1], "killed")
    survivors = [simulation.workers[0], simulation.workers[2]]

    def is_over() -> bool:
        return all(one.world is not None and one.world.world_size == 2 and _has_committed_in(one) for one in survivors)

    found = files_between(simulation, is_over, 6.0)
    simulation.close()
    print(f"death: {len(found)} files: {sorted(found)}")
    assert "elastic/ring.py" in found
    assert len(found) <= DEATH_FILES, sorted(found)


def test_a_join() -> None:
    simulation = Simulation(Plan(seed=1, hosts=(1, 1, 1), founders=2, min_nodes=1))
    kernel = simulation.kernel
    while not simulation.workers[0].membership.job.queue():
        kernel.run(kernel.now + 0.01)
        assert kernel.now < 6.0, simulation.describe()

    def is_over() -> bool:
        return all(
            one.world is not None and one.world.world_size == 3 and _has_committed_in(one) for one in simulation.workers
        )

    found = files_between(simulation, is_over, 12.0)
    assert simulation.num_prepared == 3, "it was admitted in place"
    simulation.close()
    print(f"join: {len(found)} files: {sorted(found)}")
    assert "elastic/ring.py" in found
    assert len(found) <= JOIN_FILES, sorted(found)


def _has_committed_in(worker: Any) -> bool:
    return worker.commit is not None and worker.commit.world == worker.world.uid
