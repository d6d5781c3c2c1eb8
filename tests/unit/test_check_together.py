"""Who tries to reach whom, before there is a process group."""

from __future__ import annotations

import pytest

from elastic_train.tools.check.together import probed_by


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 66, 200])
def test_everybody_is_probed_by_as_many(size: int) -> None:
    counts = [0] * size
    for rank in range(size):
        probed = probed_by(rank, size)
        assert rank not in probed
        for other in probed:
            counts[other] += 1
    assert set(counts) == {min(size - 1, 64)}
