"""Whether the ranks of a world still hold the same weights and optimizer state as training goes on."""

from __future__ import annotations

from typing import Protocol

import torch

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.whole_steps import ComparesStates, WholeSteps, compare, comparison_of
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_end import WorldEnd
from elastic_train.errors import FormationFailed, StatesDiffer
from elastic_train.rules import Activity
from elastic_train.world import World


class TellsOfStates(ComparesStates, Protocol):
    """Who remembers over the worlds what was told."""

    has_told_of_states: bool


def check_states(
    trainer: TellsOfStates, worker: Worker, membership: Membership, world: World, whole: WholeSteps, end: WorldEnd
) -> None:
    """Compare hashes after a commit; every rank calls it after the same one. Blocks until all have.

    What differs here has been made by the code that is trained, which would do it again from any state: so it is told,
    once in the life of a worker, and training goes on. A peer that is lost meanwhile is noted in `end`.
    """
    comparison = comparison_of(worker, trainer, world, range(world.world_size))
    # What a world has begun with is judged by a comparison of its own.
    if comparison is None or whole.is_comparing or end.lost is not None:
        return
    if worker.device.type == "cuda":  # the optimizer may have stepped on a stream of the user's
        torch.cuda.synchronize(worker.device)
    comparison.begin()
    try:
        compare(comparison, trainer, worker, membership)
    except StatesDiffer as differ:
        # Machines of two kinds drift apart by rounding, and who has joined may have the state of either.
        if world.rank == 0 and not trainer.has_told_of_states and comparison.num_kinds == 1:
            trainer.has_told_of_states = True
            _tell(differ, worker, world)
    except (RuntimeError, FormationFailed) as error:
        end.note_lost(error)
    membership.watcher.do(Activity.COMPUTE)


def _tell(differ: StatesDiffer, worker: Worker, world: World) -> None:
    wrong = [world.members[rank].name for rank in differ.wrong]
    worker.reporter.events.write("states_differ", wrong=wrong, has_majority=differ.has_majority, is_mended=False)
    which = f"{', '.join(wrong)} hold others than most" if differ.has_majority else "there is no majority"
    worker.reporter.warn(
        f"the weights or optimizer states of {world.world_size} workers are not equal after step {worker.state.step}, "
        f"and {which}: training goes on, and what is saved is rank 0's; the next world will go by the majority, or by "
        "the newest snapshot. The code that is trained must do the same on every rank: one backward() and one "
        "optimizer.step() for each batch, and schedulers among the extras"
    )
