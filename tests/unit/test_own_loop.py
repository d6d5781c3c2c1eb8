"""What a loop of one's own is refused for, in one line, before any world or in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_train.elastic.session import Training, scalar_of
from elastic_train.errors import UsageError


@pytest.mark.parametrize("given", ["0.3", b"0.3", None, [1.0], torch.ones(3)])
def test_what_is_no_scalar(given: Any) -> None:
    with pytest.raises(UsageError, match=r"commit\(\) was given .*: give the mean loss, a scalar"):
        scalar_of(given, "commit()", "the mean loss")


@pytest.mark.parametrize("given", [0.5, 1, torch.tensor(0.5), torch.ones(1), torch.ones(2).numpy()[0]])
def test_what_is_a_scalar(given: Any) -> None:
    assert scalar_of(given, "commit()", "the mean loss") == float(given)


def test_what_is_kept_is_a_number() -> None:
    evaluations = SimpleNamespace(keep=lambda _world, _metric: None)
    training: Any = SimpleNamespace(
        _steps=SimpleNamespace(require_none=lambda _what: None), _evaluations=evaluations, world=None
    )
    with pytest.raises(UsageError, match=r"keep\(\) was given None: give how good the model is, a scalar"):
        Training.keep(training, None)  # type: ignore[arg-type]
