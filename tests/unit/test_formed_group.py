"""A process group that is formed beside another one, by real processes over gloo."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from elastic_train.elastic.formed_group import FormedGroup, can_form, form
from elastic_train.elastic.process_group import process_group
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.world import World
from tests.ranks import beside_a_store
from tests.unit.test_liveness import make_member


def test_this_torch_lets_a_group_be_formed_ahead() -> None:
    """Fails with the torch that does not any more: joins would silently take the plain way, for which all stop."""
    assert can_form()


@pytest.mark.parametrize("variable", ["TORCH_GLOO_LAZY_INIT"])
def test_not_where_connections_come_later(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert not can_form()


def meet(rank: int, port: int, out: Path) -> None:
    """Ranks 0 and 1 train while they form a group with rank 2; in that one the others wait for rank 1."""

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))

    raw, sockets, steps = connect(), GroupSockets(), 0
    members = tuple(make_member(number) for number in range(3))
    formed: list[FormedGroup] = []

    def form_ahead() -> None:
        formed.append(form(PrefixStore("ahead", connect()), rank, 3, "127.0.0.1"))

    if rank < 2:
        raw.set(f"here/{rank}", "1")  # a start may take longer than a group may
        raw.wait(["here/0", "here/1"])
        with process_group(World(rank, 1, members[:2]), lambda: PrefixStore("old", raw.clone()), "gloo", sockets):
            side = threading.Thread(target=form_ahead)
            side.start()
            while True:
                done = torch.tensor([float(not side.is_alive())])
                dist.all_reduce(done)
                steps += 1
                if steps == 20:
                    raw.set("newcomer comes", "1")
                if done.item() == 2.0:
                    break
            side.join()
    else:
        raw.wait(["newcomer comes"])
        form_ahead()
    num_sockets = len(formed[0].sockets)
    with process_group(World(rank, 2, members), lambda: None, "gloo", sockets, formed=formed.pop()):
        reduced = torch.ones(1)
        dist.all_reduce(reduced)
        model = DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)
        model(torch.ones(2, 4)).sum().backward()
        del model
        failed = ""
        dist.barrier()
        if rank == 1:  # the others wait for it, until a thread of theirs breaks that off
            raw.set("waits", "1")
            raw.wait(["broken/0", "broken/2"])
        else:
            raw.wait(["waits"])
            threading.Timer(0.2, sockets.shut).start()
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                failed = str(error)
            raw.set(f"broken/{rank}", "1")
    sockets.release()
    (out / str(rank)).write_text(json.dumps([steps, reduced.item(), num_sockets, bool(failed)]))


def test_a_group_forms_beside_another_and_takes_its_place(tmp_path: Path) -> None:
    beside_a_store(meet, tmp_path, size=3)
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    steps, reduced, num_sockets, failed = zip(*told, strict=True)
    assert steps[0] == steps[1] > 20, "those who train go on meanwhile"
    assert reduced == (3.0, 3.0, 3.0)
    assert num_sockets == (2, 2, 2), "one to each of the two others, and no others are known"
    assert failed == (True, False, True), "a collective that waits for a lost peer is broken off"


def test_torch_knows_no_group_of_ours_here() -> None:
    assert not dist.is_initialized()
