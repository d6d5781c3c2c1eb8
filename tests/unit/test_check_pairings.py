"""Who measures with whom: every node once in a round, and no pair twice."""

from __future__ import annotations

import pytest

from elastic_train.tools.check.together import MOST_PAIRINGS, pairings, probed_by


@pytest.mark.parametrize("size", range(1, 20))
def test_pairings(size: int) -> None:
    nodes = [10 * number for number in range(size)]
    rounds = list(pairings(nodes))
    assert len(rounds) <= MOST_PAIRINGS
    met = [frozenset(couple) for couples in rounds for couple in couples]
    assert len(set(met)) == len(met)
    assert all(len(couple) == 2 for couple in met)
    for couples in rounds:
        present = [node for couple in couples for node in couple]
        assert len(set(present)) == len(present) >= size - 1 - (size == 1)
    if size - 1 <= MOST_PAIRINGS and size % 2 == 0:
        assert len(met) == size * (size - 1) // 2  # everybody with everybody


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 66, 200])
def test_everybody_is_probed_by_as_many(size: int) -> None:
    counts = [0] * size
    for rank in range(size):
        probed = probed_by(rank, size)
        assert rank not in probed
        for other in probed:
            counts[other] += 1
    assert set(counts) == {min(size - 1, 64)}
