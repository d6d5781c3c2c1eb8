"""The benchmark of the loop really runs both loops."""

from __future__ import annotations

import pytest

from elastic_train.bench.loop import Case, Effort, measure
from elastic_train.errors import ElasticTrainError

pytestmark = pytest.mark.timeout(180)


def test_a_small_measurement() -> None:
    cases = [Case("mlp", 64, 2, snapshot_every=5), Case("cnn", 512, 2)]
    rows = measure(cases, Effort(block_seconds=0.02, case_seconds=0.1, min_pairs=2, launches=2))
    assert [row.case for row in rows] == [str(case) for case in cases]
    assert all(row.ours > 0 and row.theirs > 0 and row.ratio > 0 for row in rows)


def test_a_worker_that_fails_ends_it() -> None:
    with pytest.raises(ElasticTrainError, match="rank 0 of OurLoop ended with code 1"):
        measure([Case("no-such-model", 64, 1)], Effort(block_seconds=0.02, case_seconds=0.1, min_pairs=2, launches=1))
