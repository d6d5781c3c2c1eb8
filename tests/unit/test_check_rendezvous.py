"""The report of a check about the endpoint."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from elastic_train.protocol.signposts import HOLDER, reach_sign
from elastic_train.protocol.store import TorchStore
from elastic_train.tools.check import endpoint
from elastic_train.tools.check.endpoint import look_at_endpoints
from elastic_train.tools.drills.nodes import free_port
from elastic_train.world import Address


def test_of_several_endpoints_one_is_enough() -> None:
    """The others' nodes may be gone, or still to come."""
    away, here = "nowhere.invalid:29400", f"localhost:{free_port()}"
    found = look_at_endpoints([away, here], "run")
    assert found.is_usable
    (problem,), (note,) = found.problems, found.notes
    assert problem.what.startswith(f"{away} does not resolve")
    assert note.startswith(f"{here} ")
    assert not look_at_endpoints([away], "run").is_usable


def served_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_a_store_of_another_kind_is_no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody's torchrun, which has the same port by default."""
    monkeypatch.setattr(endpoint, "STRANGER_SECONDS", 0.0)
    store = served_store()
    found = look_at_endpoints([f"127.0.0.1:{store.port}"], "run")
    assert not found.is_usable
    (problem,) = found.problems
    assert "is no rendezvous of elastic_train" in problem.what


def test_a_node_that_names_its_run_a_moment_after_it_listens_is_no_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the first node begins to serve while another one's looks."""
    store = served_store()

    def reach_and_name(address: Address) -> TorchStore:
        try:
            return reach_sign(address)
        finally:
            store.set(HOLDER, "run")

    monkeypatch.setattr(endpoint, "reach_sign", reach_and_name)
    found = look_at_endpoints([f"127.0.0.1:{store.port}"], "run")
    assert (found.is_usable, found.problems) == (True, ())


@pytest.mark.parametrize(("holder", "is_running"), [("run", True), ("run/check", False), ("another", False)])
def test_whether_the_job_itself_is_there_is_seen(holder: str, is_running: bool) -> None:
    store = served_store()
    store.set(HOLDER, holder)
    found = look_at_endpoints([f"127.0.0.1:{store.port}"], "run")
    assert (found.is_usable, found.is_running) == (True, is_running)
