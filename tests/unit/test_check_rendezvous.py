"""What a check tells of the endpoint, and of certificates before they expire."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elastic_train.tools.check.endpoint import days_of, expiry_told, look_at_endpoints
from elastic_train.tools.drills.nodes import free_port
from tests.certificates import make_tls


def test_days_of_a_certificate(tmp_path: Path) -> None:
    days = days_of(str(make_tls(tmp_path, days=3).client_cert))
    assert days == pytest.approx(3.0, abs=0.1)
    assert expiry_told("the client certificate", days) == ["the client certificate expires in 3 days"]
    assert days_of(str(tmp_path / "none.pem")) is None


@pytest.mark.parametrize(("days", "told"), [(None, []), (30.0, []), (-1.0, ["it has expired"])])
def test_what_is_told(days: float | None, told: list[str]) -> None:
    assert expiry_told("it", days) == told


def test_of_several_endpoints_one_is_enough() -> None:
    """The others' nodes may be gone, or still to come."""
    away, here = "nowhere.invalid:29400", f"localhost:{free_port()}"
    found = look_at_endpoints([away, here])
    assert found.is_usable
    (problem,), (note,) = found.problems, found.notes
    assert problem.what.startswith(f"{away} does not resolve")
    assert note.startswith(f"{here} ")
    assert not look_at_endpoints([away]).is_usable


def test_a_store_of_another_kind_is_no_endpoint() -> None:
    """Anybody's torchrun, which has the same port by default"""
    timeout = timedelta(seconds=5)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    found = look_at_endpoints([f"127.0.0.1:{store.port}"])
    assert not found.is_usable
    (problem,) = found.problems
    assert "is no rendezvous of elastic_train" in problem.what
