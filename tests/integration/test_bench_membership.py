"""The benchmark of membership runs what it counts: real stores, pings, a death and a join."""

from __future__ import annotations

import pytest

from elastic_train.protocol.liveness import ping_interval
from elastic_train.tools.bench.membership_load import LARGE, measure_all, rows_of

pytestmark = pytest.mark.timeout(180)


def test_few_members() -> None:
    found = measure_all([2, 12], seconds=1.0)
    assert list(found) == [2, 12]
    nominal = 2 * 8 / ping_interval(60.0)
    mean, most = found[12]["messages"]
    assert 0.5 * nominal < mean <= most < 1.5 * nominal, "eight neighbours, a ping and an answer each"
    assert all(one["killed"][0] > 0 and one["joined"][0] > 0 for one in found.values())
    rows = rows_of(found)
    assert rows[-1].case.startswith(f"{LARGE:,} members")
    messages = next(row for row in rows if row.case == "12 members, messages of a member")
    assert messages.theirs == 2 * 11 / ping_interval(60.0)
