"""What a check tells of certificates before they expire."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.certificates import make_certificates
from elastic_train.check.rendezvous import days_of, expiry_told


def test_days_of_a_certificate(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certs", ["localhost"], client="trainer", days=3)
    days = days_of(str(files.certificate("trainer")))
    assert days == pytest.approx(3.0, abs=0.1)
    assert expiry_told("the client certificate", days) == ["the client certificate expires in 3 days"]
    assert days_of(str(tmp_path / "none.pem")) is None


@pytest.mark.parametrize(("days", "told"), [(None, []), (30.0, []), (-1.0, ["it has expired"])])
def test_what_is_told(days: float | None, told: list[str]) -> None:
    assert expiry_told("it", days) == told
