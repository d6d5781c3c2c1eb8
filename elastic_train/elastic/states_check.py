"""Checks that all ranks of a world hold the same weights and optimizer state, when it begins and while it trains; and,
while it trains, the same extras (schedulers, a GradScaler, ...)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_train.elastic.membership import Membership
from elastic_train.elastic.worker import Worker
from elastic_train.elastic.world_end import WorldEnd
from elastic_train.errors import FormationFailed, StatesDiffer
from elastic_train.protocol.heartbeat import FIRST_SECONDS
from elastic_train.rules import Activity
from elastic_train.runlog.event_types import StatesDiffered
from elastic_train.training.collectives import gather_json
from elastic_train.training.state_hash import StateComparison, plain_hashes
from elastic_train.world import World


class StateChecks:
    """Compares this worker's state with the others', in all its worlds."""

    def __init__(self, worker: Worker, membership: Membership) -> None:
        self._worker, self._membership = worker, membership
        self._is_able = True
        """whether this worker's state can be compared with the others'"""
        self._warned_in: World | None = None
        """the world in which a difference was reported, though it has begun with equal states"""
        self._extras_warned_in: World | None = None
        """the same for extras"""

    def comparison(self, world: World, voters: Sequence[int]) -> StateComparison | None:
        """Return a comparison of the ranks' states; None in a world of one. `voters` as StateComparison's."""
        if world.world_size == 1:
            return None
        worker = self._worker
        is_ordered = worker.config.reduction == "ordered"  # else BatchNorm's statistics are each rank's own
        return StateComparison(worker.state, worker.device, voters, with_buffers=is_ordered, is_able=self._is_able)

    def finish(self, comparison: StateComparison) -> None:
        """Wait for this rank's hash, then for the others'. Raises: as `StateComparison.compare`; FormationFailed."""
        worker, watcher = self._worker, self._membership.watcher
        watcher.do(Activity.FORM, FIRST_SECONDS)  # a large state takes long
        comparison.finish_hash(self._membership.sockets.require_unbroken)
        watcher.do(Activity.REDUCE)
        comparison.compare()
        optimizer = type(worker.state.optimizer).__name__
        if comparison.why_not is not None:
            worker.reporter.warn(
                f"states are not compared: {optimizer} or the model cannot be hashed: {comparison.why_not}"
            )
            self._is_able = False
        if comparison.is_lost_in_loading:  # on every rank alike
            self._is_able = False
            if not worker.state.kept.updates.is_as_sent:
                worker.reporter.warn(
                    f"the states of this job are not compared any more: {optimizer} changes its state when it is "
                    "loaded, so each step of this worker differs from the others' by rounding; correct its "
                    "load_state_dict()"
                )

    def check(self, world: World, end: WorldEnd) -> None:
        """Compare after a commit; every rank calls this after the same one. Blocks until all have.

        A difference here was made by the trained code, which would make it again from any state. So it is only
        reported, and training goes on: weights once in a world and at the end, extras once in a world. A peer that is
        lost meanwhile is noted in `end`.
        """
        comparison = self.comparison(world, range(world.world_size))
        if comparison is None or end.lost is not None:
            return
        if self._worker.device.type == "cuda":  # the optimizer may have stepped on a stream of the user's own
            torch.cuda.synchronize(self._worker.device)
        try:
            self._check_extras(world)
            comparison.begin()
            self.finish(comparison)
        except StatesDiffer as differ:
            # Machines of two kinds drift apart by rounding, and a newcomer may have the state of either.
            is_new = self._warned_in is not world or self._worker.state.is_finished
            if is_new and comparison.num_kinds == 1:
                self._warned_in = world
                self._warn(differ, world)
        except (RuntimeError, FormationFailed) as error:
            end.note_lost(error)
        self._membership.watcher.do(Activity.COMPUTE)

    def _check_extras(self, world: World) -> None:
        extras = self._worker.state.extras
        if not extras or self._extras_warned_in is world:  # on every rank alike
            return
        mine = {name: value for name, value in plain_hashes(self._worker.state).items() if name in extras}
        self._membership.watcher.do(Activity.REDUCE)
        others = gather_json(mine)
        names = [name for name in sorted(mine) if any(other.get(name) != mine[name] for other in others)]
        if not names:
            return
        self._extras_warned_in = world
        if world.rank == 0:
            self._worker.reporter.warn(
                f"extras differ between the ranks: {', '.join(names)}. Snapshots hold those of rank 0; when that is "
                "lost, another rank's count: have every rank do the same with them"
            )

    def _warn(self, differ: StatesDiffer, world: World) -> None:
        state = self._worker.state
        then = "training is over" if state.is_finished else "training goes on"
        if world.rank > 0:
            if world.rank in differ.wrong:  # its own user should know
                self._worker.reporter.log(own_line(differ, state.step, f"{then}, and what is saved is rank 0's"))
            return
        reporter, wrong = self._worker.reporter, [world.members[rank].name for rank in differ.wrong]
        reporter.events.write(StatesDiffered(wrong=wrong, has_majority=differ.has_majority, is_mended=False))
        which = f"{', '.join(wrong)} hold others than most" if differ.has_majority else "there is no majority"
        reporter.warn(
            f"the weights or optimizer states of {world.world_size} workers are not equal after step {state.step}, and "
            f"{which}: {then}, and what is saved is rank 0's; the next world "
            "will go by the majority, or by the newest snapshot. The code that is trained must do the same on every "
            "rank: one pass through training.parallel(), one backward() and one optimizer.step() for each batch, and "
            "schedulers among the extras"
        )


def own_line(differ: StatesDiffer, step: int, then: str) -> str:
    """Return the line for the terminal of a worker whose state differs from the majority's."""
    than = "most" if differ.has_majority else "others"
    return f"this worker has not the weights or optimizer state that {than} have after step {step}: {then}"
