"""Keeps the ledger's law where a run continues from a snapshot that a later generation had not seen."""

from __future__ import annotations

from elastic_train.elastic.worker import Worker
from elastic_train.runlog.event_types import LedgerRepaired
from elastic_train.runlog.ledger_ends import newest_steps, unfinished
from elastic_train.training.batches import RunSampler
from elastic_train.training.collectives import gather_json
from elastic_train.world import World


def write_lines_again(worker: Worker, world: World) -> None:
    """Write again the ledger lines that an earlier generation left incomplete. Every rank calls this right after a
    snapshot is restored, before any worker counts as having its state.

    The law counts the lines of a step's largest generation. An earlier generation may have trained on from before this
    snapshot (it could not see it, or none of its members had the step), and have been killed when only some of its
    ranks had written their lines. So this world writes such lines itself: a step has the same samples in every world.
    """
    reporter, state = worker.reporter, worker.state
    trained_in = state.last_commits[-1]["generation"] if state.last_commits else None  # None: by a TrainState alone
    after = -1 if trained_in is None else int(trained_in)
    mine = newest_steps(worker.directory.ledger_dir, after) if world.is_directory_leader else {}
    found = [dict(steps) for steps in gather_json(list(mine.items()))]
    steps = unfinished(found, state.step)
    if not steps or reporter.ledger is None:
        return
    reporter.events.enter(world)  # no later start may take this generation for a new one
    reporter.events.step = state.step
    reporter.events.write(LedgerRepaired(steps=steps))
    sampler = RunSampler(state, world, worker.config)
    for step in steps:
        micro_batches = sampler.of_step(step)
        reporter.ledger.write(
            epoch=micro_batches[0].epoch,
            step=step,
            world=world,
            indices=[micro_batch.indices for micro_batch in micro_batches],
        )
