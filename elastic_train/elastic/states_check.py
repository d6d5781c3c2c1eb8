"""Whether the ranks of a world still hold the same weights and optimizer state as training goes on."""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.whole_steps import ComparesStates, WholeSteps, compare
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_end import WorldEnd
from elastic_train.errors import FormationFailed, StatesDiffer
from elastic_train.rules import Activity
from elastic_train.training.state_hash import StateComparison
from elastic_train.world import World


class StatesCheck:
    """Compares hashes after a commit; every rank calls it after the same one. What differs here has been made by the
    code that is trained, which would do it again from any state: so it is told, once in the life of a worker, and
    training goes on."""

    def __init__(
        self, trainer: ComparesStates, worker: Worker, membership: Membership, world: World, whole: WholeSteps
    ) -> None:
        self._trainer, self._worker, self._membership = trainer, worker, membership
        self._world, self._whole = world, whole

    def compare(self, end: WorldEnd, go_on: Callable[[], None]) -> None:
        """Blocks until every rank has, and calls `go_on` then. A peer that is lost meanwhile is noted in `end`."""
        worker, world = self._worker, self._world
        # What a world has begun with is judged by a comparison of its own.
        if world.world_size == 1 or self._whole.is_comparing or end.lost is not None:
            return
        comparison = StateComparison(
            worker.state,
            worker.device,
            range(world.world_size),
            with_buffers=worker.config.reduction == "ordered",
            is_able=self._trainer.compares_states,
        )
        comparison.begin()
        try:
            compare(comparison, self._trainer, worker, self._membership)
        except StatesDiffer as differ:
            if world.rank == 0 and not self._trainer.has_told_of_states:
                self._trainer.has_told_of_states = True
                self._tell(differ)
        except (RuntimeError, FormationFailed) as error:
            end.note_lost(error)
        self._membership.watcher.do(Activity.COMPUTE)
        go_on()

    def _tell(self, differ: StatesDiffer) -> None:
        reporter, members, step = self._worker.reporter, self._world.members, self._worker.state.step
        wrong = [members[rank].name for rank in differ.wrong]
        reporter.events.write("states_differ", wrong=wrong, has_majority=differ.has_majority, is_mended=False)
        which = f"{', '.join(wrong)} hold others than most" if differ.has_majority else "there is no majority"
        reporter.warn(
            f"the weights or optimizer states of {self._world.world_size} workers are not equal after step {step}, and "
            f"{which}: training goes on, and what is saved is rank 0's. The code that is trained must do the same on "
            "every rank: one backward() and one optimizer.step() for each batch, and schedulers among the extras"
        )
