"""Loads a state that was received or read, or reports in one line why it does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_train.errors import SnapshotError, first_line
from elastic_train.storage.state_bytes import once, rebuilt
from elastic_train.training.kept import ExtraNotLoaded
from elastic_train.training.optimizers import rate_of
from elastic_train.training.state import TrainState
from elastic_train.training.state_hash import is_as_given
from elastic_train.wording import count

SHOWN_NAMES = 3


def load(state: TrainState, loaded: Mapping[str, Any], source: str, *, is_peers: bool = False) -> None:
    """Do as `TrainState.load_state_dict`, with tensors on the CPU. Errors name the state by `source`.

    Extras may keep the tensors that they get. A tensor goes to the device of the extra's own tensor in that place, and
    stays on the CPU where there is none.

    Raises:
        SnapshotError: the state is of another model or optimizer; or any other reason why it cannot be loaded.
    """
    device = next((parameter.device for parameter in state.model.parameters()), torch.device("cpu"))

    try:
        extras = loaded.get("extras", {})
        own = {name: state.kept.updates.state_of(state.extras[name]) for name in extras.keys() & state.extras.keys()}
        places = {id(tensor): mine.device for tensor, mine in pairs(extras, own)}
        extras = rebuilt(extras, once(lambda tensor: tensor.to(places.get(id(tensor), tensor.device))), "extras")
        # The model copies its tensors, and the optimizer moves those that belong to a parameter.
        groups = rebuilt(loaded["optimizer"]["param_groups"], once(lambda tensor: tensor.to(device)), "param_groups")
        optimizer = {**loaded["optimizer"], "param_groups": groups}
        given = {**loaded, "extras": extras, "optimizer": optimizer}
        state.load_state_dict(given, is_peers=is_peers)
        # All ranks load a snapshot alike, so only a peer's state is compared.
        state.kept.updates.is_as_sent = not is_peers or is_as_given(state, given)
    except ExtraNotLoaded as error:
        raise SnapshotError(
            f"{source} cannot be taken over: {error}; correct its load_state_dict(), or leave it out of extras: then a "
            "warning follows"
        ) from error
    except Exception as error:  # of user code too: a rank that reads a snapshot for others must report its failure
        if isinstance(error, torch.OutOfMemoryError) or not isinstance(
            error, KeyError | TypeError | ValueError | RuntimeError
        ):
            raise SnapshotError(
                f"{source} cannot be taken over: {type(error).__name__}: {first_line(error)}"
            ) from error
        what = difference(state.model.state_dict(), loaded["model"]) or " ".join(str(error).split())
        raise SnapshotError(
            f"{source} does not fit this model and its optimizer: {what}; go on with those that it was made with, or "
            "give --fresh to begin anew"
        ) from error


def pairs(theirs: Any, ours: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tensors that have the same place in two states."""
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        yield theirs, ours
    elif isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in theirs.keys() & ours.keys():
            yield from pairs(theirs[key], ours[key])
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
        for their, our in zip(theirs, ours, strict=False):
            yield from pairs(their, our)


def all_rates(state: TrainState) -> list[float | None]:
    """Return `state.learning_rates`, and those of the optimizers among the extras."""
    others = state.kept.updates.optimizers[1:]
    return state.learning_rates + [rate_of(group) for one in others for group in one.param_groups]


def peak_rates(state: TrainState) -> list[float | None]:
    """Return the optimizers' learning rates by group, before a scheduler of torch's or ours has changed them."""
    all_groups = [group for one in state.kept.updates.optimizers for group in one.param_groups]
    groups = zip(all_groups, all_rates(state), strict=True)
    return [rate if (first := group.get("initial_lr")) is None else float(first) for group, rate in groups]


def other_rates(started: Sequence[float | None], used: Sequence[float | None]) -> str | None:
    """Return a line where a start has other learning rates than the run that it continues; else None."""
    if list(started) == list(used):
        return None
    return f"the run's learning rate {shown(used)} is used, not this start's {shown(started)}"


def shown(rates: Iterable[float | None]) -> str:
    """Return `0.1, 0.01`."""
    return ", ".join("none" if rate is None else f"{rate:g}" for rate in rates)


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return how two models' state dicts differ, in one line with some names; "" where their shapes are equal."""

    def some(names: Collection[str]) -> str:
        return ", ".join(sorted(names)[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")

    shapes = {
        name: (tuple(theirs[name].shape), tuple(ours[name].shape))
        for name in ours.keys() & theirs.keys()
        if isinstance(ours[name], torch.Tensor) and isinstance(theirs[name], torch.Tensor)
    }
    changed = {f"{name} {old} instead of {new}" for name, (old, new) in shapes.items() if old != new}
    missing, unexpected = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    parts = [
        f"it lacks {count(len(missing), 'tensor')} ({some(missing)})" if missing else "",
        f"it has {count(len(unexpected), 'tensor')} too many ({some(unexpected)})" if unexpected else "",
        f"{count(len(changed), 'tensor')} of another shape ({some(changed)})" if changed else "",
    ]
    return "; ".join(filter(None, parts))
