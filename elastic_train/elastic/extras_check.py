"""Whether the extras of an own loop (schedulers, a GradScaler, ...) are equal on all ranks, and a warning if not."""

from __future__ import annotations

from elastic_train.elastic.worker import Worker
from elastic_train.training.collectives import gather_json
from elastic_train.training.state_hash import hash_of_plain

MAX_HASH = 2**20
"""of the extras: the sum of the squares of thousands is exact in float64"""


class ExtrasCheck:
    """Compares a small hash of the extras' plain values, now and then; warns once in each world.

    The hash and its square are summed over the ranks along with the loss of a step; only where the sums tell of a
    difference are there messages that say in which extra it is.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._has_warned = False

    def enter(self) -> None:
        """A world begins, perhaps with others in it."""
        self._has_warned = False

    def hashes(self) -> tuple[int, int]:
        """This rank's hash and its square, to be summed; zeros where there is nothing to compare, or more to say."""
        if not self._worker.state.extras or self._has_warned:
            return 0, 0
        value = hash_of_plain(self._hash_by_extra()) % MAX_HASH
        return value, value * value

    def warn(self, rank: int) -> None:
        """Name the extras that differ. Every rank calls it; a lost peer shows as in any collective."""
        self._has_warned = True
        mine = self._hash_by_extra()
        found = gather_json(mine)
        names = [name for name in sorted(mine) if any(other.get(name) != mine[name] for other in found)]
        if rank == 0 and names:
            self._worker.reporter.warn(
                f"extras differ between the ranks: {', '.join(names)}. Snapshots hold those of rank 0; when that is "
                "lost, another rank's count: have every rank do the same with them"
            )

    def _hash_by_extra(self) -> dict[str, int]:
        extras = self._worker.state.extras
        return {name: hash_of_plain(extra.state_dict()) % MAX_HASH for name, extra in extras.items()}


def do_hashes_differ(sum_of_hashes: float, sum_of_squares: float, world_size: int) -> bool:
    """Whether not all ranks had the same hash."""
    return world_size * int(sum_of_squares) != int(sum_of_hashes) ** 2  # equal ones alone make it so
