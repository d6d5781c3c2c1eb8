"""The parameters, parts and schedulers of optimizers."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic_train.errors import UsageError
from elastic_train.wording import count, named

OBJECTS_LOOKED_AT = 100_000
"""limit of a search; it takes some 50 ms"""


def build_optimizer(
    parameter_groups: list[dict[str, Any]], *, name: str, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Build `sgd` or `adamw`. Values in a group take precedence."""
    if name == "adamw":
        return torch.optim.AdamW(parameter_groups, lr=lr, weight_decay=weight_decay)
    return torch.optim.SGD(parameter_groups, lr=lr, momentum=momentum, weight_decay=weight_decay)


def require_values(module: nn.Module, what: str = "the model") -> None:
    """Raises: UsageError: a parameter or buffer of `module` has a shape but no values. `what` names the module."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{name} of {what} is on the meta device, where it has no values: build the module outside of "
                'torch.device("meta"), or call its to_empty(device="cpu") and load or initialise its weights, before '
                "its optimizer is made"
            )


def require_in_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises: UsageError: the optimizer trains parameters outside the model. Their gradients would not be summed, and
    they would be neither saved nor handed over."""
    shapes = [str(tuple(one.shape)) for one in parameters_beside([model], [optimizer])]
    if shapes:
        raise UsageError(
            f"the optimizer trains {named(shapes)} that the model does not have: put them into the module "
            "that build_model returns, or other workers and snapshots do not get them"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def groups_instead(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the optimizer's own groups, to load a state by them instead of those in which it was `saved`.

    Raises: ValueError: they have not as many parameters. torch, which goes by their numbers, would not notice.
    """
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    now, before = (sum(len(group["params"]) for group in some) for some in (groups, saved))
    if now != before:
        raise ValueError(f"the optimizer trains {count(now, 'parameter')}, and trained {before}")
    return groups


def sizes_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the number of parameters of each group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def scalers_in(parts: Iterable[Any]) -> list[torch.amp.GradScaler]:
    """Return the enabled GradScalers among parts of a state, or held by a part, as by timm's NativeScaler."""
    held = (one for part in parts for one in (part, *getattr(part, "__dict__", {}).values()))
    found = (one for one in held if isinstance(one, torch.amp.GradScaler) and one.is_enabled())
    return list({id(one): one for one in found}.values())


def call_before_steps(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> RemovableHandle:
    """Do as `optimizer.register_step_pre_hook`, also for one whose constructor has not called torch's, such as a widely
    copied Lookahead."""
    try:
        return optimizer.register_step_pre_hook(hook)
    except AttributeError:
        _add_hooks(optimizer)
        return optimizer.register_step_pre_hook(hook)


def _add_hooks(optimizer: torch.optim.Optimizer) -> None:
    # As torch's constructor, but for this object alone: torch's changes the step of the whole class, and that would
    # fail in others that lack these lists. A scheduler may have put a function in place of the step.
    step: Any = optimizer.step
    torchs = torch.optim.SGD([torch.zeros(1, device="cpu")])
    vars(optimizer).update({name: lists for name, lists in vars(torchs).items() if name.endswith("_hooks")})
    if not getattr(step, "hooked", False):
        given = getattr(step, "__func__", None) or functools.wraps(step)(lambda _self, *args, **kw: step(*args, **kw))
        vars(optimizer)["step"] = types.MethodType(torch.optim.Optimizer.profile_hook_step(given), optimizer)


def rate_of(group: Mapping[str, Any]) -> float | None:
    """Return a parameter group's learning rate; None if its optimizer finds the rate itself (Adafactor)."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def parameters_beside(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Return the parameters that the optimizers train and no module has; each once."""
    own = {id(one) for module in modules for one in module.parameters()}
    trained = {id(one): one for optimizer in optimizers for one in parameters_of(optimizer)}
    return [one for key, one in trained.items() if key not in own]


def parts_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that this one is made of, by attribute: SAM's `base_optimizer`, of the same parameters."""
    owned = {id(one) for one in parameters_of(optimizer)}
    found: dict[str, torch.optim.Optimizer] = {}
    waiting = {"": optimizer}
    while waiting:
        place, whole = waiting.popitem()
        for name, value in vars(whole).items():
            for number, one in enumerate(value if isinstance(value, list | tuple) else (value,)):
                is_known = one is optimizer or any(one is other for other in found.values())
                if (
                    isinstance(one, torch.optim.Optimizer)
                    and not is_known
                    and owned.issuperset(map(id, parameters_of(one)))
                ):
                    found[f"{place}{name}.{number}"] = waiting[f"{place}{name}.{number}."] = one
    return found


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler of torch sets the rates. Takes some 50 ms if no group shows it."""
    if any("initial_lr" in group for group in optimizer.param_groups):  # a documented key, which schedulers set
        return True
    holders = gc.get_referrers(optimizer)  # ReduceLROnPlateau sets no `initial_lr`
    holders += gc.get_referrers(*(one for one in holders if type(one) is dict))  # perhaps an object's __dict__
    return any(issubclass(type(one), torch.optim.lr_scheduler.LRScheduler) for one in holders)


def stepping_scaler() -> torch.amp.GradScaler | None:
    """Return the enabled GradScaler whose `step` is on this thread's stack, or None."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    scaler = None if frame is None else frame.f_locals["self"]
    return scaler if scaler is not None and scaler.is_enabled() else None


def may_schedule(one: object, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `one` refers to the optimizer or a group of it, as every scheduler of its rates does."""
    return may_hold(one, (optimizer, *optimizer.param_groups))


def may_hold(one: object, objects: Iterable[object]) -> bool:
    """Return whether `one` is one of the objects or refers to one, through any wrappers. True if the search is cut
    off at OBJECTS_LOOKED_AT."""
    wanted = {*map(id, objects)}
    # Not searched: every object refers to types and modules, and nn.Modules and tensors hold no schedulers.
    passed_by = type | types.ModuleType | nn.Module | torch.Tensor
    seen: set[int] = set()
    waiting = [one]
    while waiting:
        here = waiting.pop()
        if id(here) in wanted:
            return True
        if id(here) in seen or isinstance(here, passed_by):
            continue
        if len(seen) == OBJECTS_LOOKED_AT:
            return True
        seen.add(id(here))
        if isinstance(here, torch.optim.Optimizer):  # our hooks lead to the whole state
            waiting += [value for name, value in vars(here).items() if not name.endswith("_hooks")]
        else:
            waiting += here.__closure__ or () if isinstance(here, types.FunctionType) else gc.get_referents(here)
    return False
