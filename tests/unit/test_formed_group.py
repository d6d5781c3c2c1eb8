"""A process group that is formed beside another one, by real processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from elastic_train.elastic.formed_group import can_form


def test_this_torch_lets_a_group_be_formed_ahead() -> None:
    """Fails with the torch that does not any more: joins would silently take the plain way, for which all stop."""
    assert can_form()


@pytest.mark.parametrize("variable", ["TORCH_GLOO_LAZY_INIT"])
def test_not_where_connections_come_later(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert not can_form()


SCRIPT = """
import json, sys, threading
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from elastic_train.elastic.formed_group import form
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.elastic.process_group import process_group
from elastic_train.system import open_sockets
from elastic_train.world import Member, World

rank, port = map(int, sys.argv[1:])
raw = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=30))
members = tuple(Member("host", 0, one, 0, ("127.0.0.1", 1), "", "gloo", None, uid=str(one)) for one in range(3))
old, new = World(rank, 1, members[:2]), World(rank, 2, members)
sockets = GroupSockets()
formed = []


def form_ahead():
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    formed.append(form(PrefixStore("ahead", store), rank, 3, "127.0.0.1"))


def total(count):
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


steps = 0
if rank < 2:  # trains while the group is formed
    raw.set(f"here/{rank}", "1")  # imports take longer than a group may
    raw.get("here/0"), raw.get("here/1")
    with process_group(old, lambda: PrefixStore("old", raw.clone()), "gloo", sockets):
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
    raw.get("newcomer comes")
    form_ahead()
others = open_sockets()
mine = dict(formed[0].sockets)
with process_group(new, lambda: None, "gloo", sockets, formed=formed.pop()):
    reduced = total(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)
    model(torch.ones(2, 4)).sum().backward()
    del model
    failed = ""
    dist.barrier()
    if rank == 1:  # the others wait for it, until a thread of theirs breaks that off
        raw.set("waits", "1")
        raw.get("broken/0"), raw.get("broken/2")
    else:
        raw.get("waits")
        breaker = threading.Timer(0.2, sockets.shut)
        breaker.start()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            failed = str(error)
        raw.set(f"broken/{rank}", "1")
sockets.release()  # a group that outlives the interpreter may ask for its lock, which aborts the process
print(json.dumps(dict(rank=rank, steps=steps, reduced=reduced, sockets=len(mine), failed=bool(failed))), flush=True)
raw.set(f"end/{rank}", "1")
for other in range(3 if rank == 0 else 0):
    raw.get(f"end/{other}")
"""


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "GLOO"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(3)
    ]  # fmt: skip
    found = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=90)
            assert process.returncode == 0, error
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def test_those_who_train_go_on_meanwhile(told: list[dict[str, Any]]) -> None:
    assert told[0]["steps"] == told[1]["steps"] > 20


def test_it_takes_the_place_of_the_default_group(told: list[dict[str, Any]]) -> None:
    assert [one["reduced"] for one in told] == [3.0, 3.0, 3.0]


def test_its_connections_and_no_others_are_known(told: list[dict[str, Any]]) -> None:
    assert [one["sockets"] for one in told] == [2, 2, 2], "one to each of the two others"


def test_a_collective_that_waits_for_a_lost_peer_is_broken_off(told: list[dict[str, Any]]) -> None:
    assert [one["failed"] for one in told] == [True, False, True]


def test_torch_knows_no_group_of_ours_here() -> None:
    assert not dist.is_initialized()
