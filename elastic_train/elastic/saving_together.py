"""The last state of a world whose nodes all end at one step: saved once, by all nodes where that is faster, and by
another node where the first one cannot. And the state of a node that other members wait for: no store holds it up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Timer

from elastic_train.elastic.saving import Saver
from elastic_train.elastic.worker import Worker
from elastic_train.errors import OwnershipLost
from elastic_train.preemption import ample_seconds
from elastic_train.runlog.goodput import Phase
from elastic_train.storage.shares import Fleet, senders
from elastic_train.system import starts
from elastic_train.training.collectives import gather_json
from elastic_train.world import World

LAST_WORDS_SECONDS = 4.0
"""before SIGKILL: a state that is not saved by then is reported, as nobody can do so later"""
SOON_SECONDS = 10.0
"""for which a node that was left out waits for a bucket, before it comes back"""


@contextmanager
def warned_before_kill(worker: Worker, saver: Saver) -> Iterator[None]:
    """Warn if the block still saves the last state shortly before SIGKILL follows the signal, or the node is taken."""
    left, step, newest = worker.stop.seconds_left(), worker.state.step, saver.newest
    if left is None:
        yield
        return
    kept = "none" if newest is None else f"of step {newest.step}"
    told = (
        f"told to stop by {worker.stop.why}, and the state of step {step} is not in {worker.snapshots_dir} yet: if "
        f"SIGKILL comes first, it is lost; the newest snapshot known here: {kept}"
    )
    timer = Timer(max(0.0, left - LAST_WORDS_SECONDS), worker.reporter.warn, [told])
    timer.daemon = True
    starts(timer)
    try:
        yield
    finally:
        timer.cancel()


def begin_to_save(worker: Worker, saver: Saver, world: World) -> str | None:
    """Begin to save the state to a bucket, if no snapshot is in flight, on a node that waits for other members and has
    to answer them: a store that is away is tried for minutes. Call it again and again while this node waits: it begins
    once. Returns a line for the user."""
    state, mine = worker.state, (world.generation, worker.state.step)
    if not world.is_first_of_node or saver.writer().is_busy():
        return None
    try:
        saver.report()
        if saver.begun_in_wait == mine:
            return None
        saver.begun_in_wait = mine
        saver.save(state)
    except OwnershipLost as error:
        return str(error)
    return f"the state of step {state.step} is on its way to {worker.snapshots_dir}, in case that no other is left"


def save_soon(worker: Worker, saver: Saver) -> bool:
    """Save the state of a node that was left out; return whether it is durable. Below a URL it may still be on its way
    after SOON_SECONDS. Raises: OwnershipLost."""
    state = worker.state
    if worker.bucket is None:
        return saver.save_and_wait(state)
    is_of_it = saver.step_on_the_way == state.step and saver.writer().is_busy()
    if not is_of_it and saver.writer().wait(SOON_SECONDS, prunes=False):  # else the one before it, or neither, is saved
        saver.save(state)
    saver.writer().wait(SOON_SECONDS, prunes=False)
    saver.report()
    return saver.newest is not None and saver.newest.step == state.step


def save_together(worker: Worker, saver: Saver, world: World, is_first_lost: Callable[[], bool]) -> None:
    """Save the state of a world whose members all stop at this step, or this node's share of it. Blocks until this
    worker's part is durable, or until rank 0 is lost."""
    state, fleet = worker.state, _fleet_of(worker, world, is_first_lost)
    make_way(worker, saver, 1 if fleet is None else len(fleet.hosts))
    if saver.is_last_writer(world):
        with warned_before_kill(worker, saver):
            saver.save_and_wait(state, fleet)
    elif fleet is not None and world.is_first_of_node:
        _save_share(worker, saver, world, fleet)


def make_way(worker: Worker, saver: Saver, num_nodes: int = 1) -> None:
    """Give up the snapshot in flight to a URL for the last state, which `num_nodes` send, unless it is of that state or
    only it can be complete in the time that is left."""
    left = worker.stop.seconds_left()
    if saver.newest is not None:
        num_nodes = senders(num_nodes, saver.newest.bytes, is_bucket=True)
    is_same = num_nodes == 1 and saver.step_on_the_way == worker.state.step
    if not is_same and (left is None or saver.expected_seconds / num_nodes <= left):
        saver.give_up_in_flight(worker.state)


def save_in_place_of_others(worker: Worker, saver: Saver, world: World) -> None:
    """Save the last state on this node, if the worker that saves for it has failed: its host alone may have lost the
    shared disk, or the network to the bucket. One node after the other tries, as all together might fill the disk that
    has room for one. Every worker calls this after its own save. Blocks until all are saved, or have tried. All that
    share a place tell the same of it. Raises: as `gather_json`."""
    state, workers = worker.state, world.workers
    places = [worker.bucket is not None or member.directory_id for member in workers]
    firsts = {place: rank for rank, place in reversed([*enumerate(places)])}
    mine = places[world.rank]

    def tell(what: bool) -> list[bool]:
        # A late stop may save meanwhile, as the one that saves for all may hang.
        with state.lock.released() if _is_soon_saved(worker, saver) else nullcontext():
            return gather_json(what)

    failed = tell(bool(saver.unsaved(state)))
    unsaved = {place for place, rank in firsts.items() if failed[rank]}
    for node in dict.fromkeys(member.node for member in workers):
        if not unsaved:
            break
        is_asked = mine in unsaved and world.is_first_of_node and workers[firsts[mine]].node != node == world.me.node
        saved = tell(is_asked and saver.save_and_wait(state))
        unsaved -= {place for place, is_saved in zip(places, saved, strict=True) if is_saved}
    saver.failed_step = state.step if mine in unsaved else -1


def _is_soon_saved(worker: Worker, saver: Saver) -> bool:
    """Whether a stop leaves ample time to save before the late stop. What is not saved by then is on a disk or a line
    that hangs, for which no node should wait until it is killed."""
    left, seconds = worker.stop.seconds_left(), saver.save_time.seconds
    return worker.stop.is_settled and left is not None and seconds > 0 and 2 * ample_seconds(seconds) < left


def _fleet_of(worker: Worker, world: World, is_first_lost: Callable[[], bool]) -> Fleet | None:
    """Return the nodes that train, if each can write to the bucket for all; else None."""
    nodes = list(dict.fromkeys(member.node for member in world.workers))
    if worker.bucket is None or len(nodes) < 2:
        return None
    hosts = {member.node: member.host for member in world.workers}
    return Fleet(
        tuple(hosts[node] for node in nodes),
        nodes.index(world.me.node),
        frozenset(name for name, _ in worker.state.model.named_parameters(remove_duplicate=False)),
        worker.stop.seconds_left,
        is_first_lost,
    )


def _save_share(worker: Worker, saver: Saver, world: World, fleet: Fleet) -> None:
    state, generation = worker.state, world.generation
    with state.clock.during(Phase.SNAPSHOT):
        try:
            if saver.writer().save_share(state.state_dict(), fleet, step=state.step, generation=generation):
                saver.seen_whole = (generation, state.step)
        except Exception as error:  # of any kind: only this node's help is lost
            worker.reporter.warn(f"{error}; the other nodes write it")
