"""Waiting for a collective or a message ends when the group is broken off, though gloo's own wait does not."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from elastic_train.errors import FormationFailed
from elastic_train.training import collectives
from elastic_train.training.collectives import (
    broken_off_by,
    exchange,
    gather_json,
    numbers,
    reduced,
    require_sound,
    wait,
)
from elastic_train.training.group_sockets import KEEP_SECONDS, GroupSockets

MEMBER = """
import json, os, signal, sys, threading, time
import torch
import torch._dynamo  # as process_group() does: it takes its time
import torch.distributed as dist
from types import SimpleNamespace
from elastic_train.training import collectives, group_sockets
from elastic_train.training.group_sockets import GroupSockets
from elastic_train.elastic.process_group import is_communication_error, process_group

rank, port, kind, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
store.set(f"here/{rank}", "yes")
store.get(f"here/{1 - rank}")  # a group has a second to form
sockets = GroupSockets()
world = SimpleNamespace(rank=rank, world_size=2, members=[SimpleNamespace(store=None)])
tensor = torch.zeros(16 * 2**20)  # more than the kernels hold: a part of it stays in gloo's queue


def receive_and_freeze():
    # gloo sends only what the other has asked for.
    work = dist.irecv(tensor, 0) if kind == "exchange" else dist.broadcast(tensor, 0, async_op=True)
    time.sleep(1.0)
    store.set("asked", "yes")
    os.kill(os.getpid(), signal.SIGSTOP)
    return work


def send():
    if kind == "broadcast":
        collectives.broadcast(tensor, 0)
    elif kind == "exchange":
        collectives.exchange([(tensor, 1)], [])
    else:
        works = [dist.broadcast(tensor, 0, async_op=True) for _ in range(2)]
        futures = [collectives.reduced(work, tensor) for work in works]
        futures[0].wait()


try:
    with process_group(world, lambda: dist.PrefixStore("group", store), "gloo", sockets):
        if rank == 1:
            work = receive_and_freeze()
        store.get("asked")
        time.sleep(1.0)
        threading.Timer(0.2, sockets.shut).start()
        started = time.monotonic()
        send()
except Exception as error:
    assert is_communication_error(error), error
    text = str(error)
    seconds = time.monotonic() - started
sockets.release()  # as the next group does
world = SimpleNamespace(rank=0, world_size=1, members=[SimpleNamespace(store=None)])
with process_group(world, dist.HashStore, "gloo", sockets):
    collectives.barrier()
    one = torch.ones(1)
    collectives.reduced(dist.all_reduce(one, async_op=True), one).wait()
sockets.release()  # as a membership does in the end: gloo's threads let go of tensors, which aborts at Python's end

print(json.dumps({"text": text, "seconds": seconds}))
assert group_sockets._left_behind, "no thread was left behind"
exec(end)
"""
ENDS = {"pass": 0, "sys.exit(3)": 3, "raise ValueError('of the script')": 1}


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("broadcast", "pass"),
        pytest.param("exchange", "sys.exit(3)", marks=pytest.mark.slow),
        pytest.param("reduced", "raise ValueError('of the script')", marks=pytest.mark.slow),
    ],
)
def test_a_send_that_gloo_never_ends_is_left_behind(kind: str, end: str) -> None:
    """Fails loudly where gloo ends it by then: collectives.py may be without need. The script ends as it would."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(server.port), kind, end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(2)
    ]
    try:
        out, error = members[0].communicate(timeout=100)  # it does not wait for the thread that hangs
    finally:
        for member in members:
            member.send_signal(signal.SIGKILL)
        for member in members:
            member.communicate()
    assert members[0].returncode == ENDS[end], error
    told = json.loads(out)
    assert "broken off, and Gloo does not end" in told["text"]
    assert told["seconds"] > KEEP_SECONDS


class Work:
    """One that is done after some looks at it."""

    def __init__(self, looks: int, error: RuntimeError | None = None) -> None:
        self.looks, self.error = looks, error

    def is_completed(self) -> bool:
        return self.looks <= 0

    def wait(self, limit: timedelta | None = None) -> None:
        self.looks -= 1
        if limit is not None and self.looks >= 0:
            raise RuntimeError("Operation timed out!")  # it may be done in this very moment
        assert self.looks < 0 or limit is not None, "no wait without an end"
        if self.error is not None:
            raise self.error


SENT = torch.zeros(1)


class Group(GroupSockets):
    def __init__(self) -> None:
        super().__init__()
        self.patience = 10
        self.is_waiting = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.is_waiting = True
        yield
        self.is_waiting = False

    def require_hope(self) -> None:
        self.patience -= 1
        if self.patience < 0:
            raise FormationFailed("broken off")


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_slow_collective_is_waited_for(looks: int) -> None:
    with broken_off_by(Group()):
        wait(Work(looks), SENT)


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_the_error_of_a_collective_is_its_own(looks: int) -> None:
    with broken_off_by(Group()), pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait(Work(looks, RuntimeError("Connection closed by peer")), SENT)


def test_who_has_no_hope_left_does_not_wait() -> None:
    work: Any = Work(1000)
    with broken_off_by(Group()), pytest.raises(FormationFailed, match="broken off"):
        wait(work, SENT)


@pytest.mark.parametrize("work", [Work(0, RuntimeError("gloo/pair.cc: Connection closed")), Work(1000)])
@pytest.mark.parametrize("is_bucket", [False, True])
def test_a_failure_that_was_caught_is_known_until_the_group_is_over(work: Any, is_bucket: bool) -> None:
    """A loop may catch all errors, to leave a bad batch out."""
    work = copy.copy(work)
    with broken_off_by(Group()):
        require_sound()
        with pytest.raises(RuntimeError if work.error or is_bucket else FormationFailed) as caught:
            reduced(work, SENT).wait() if is_bucket else wait(work, SENT)
        with pytest.raises(FormationFailed) as known:
            require_sound()
        assert str(known.value) in str(caught.value)
    require_sound()
    with broken_off_by(Group()):
        require_sound()


def test_a_failed_message_that_was_caught_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    message = SimpleNamespace(wait=lambda _limit: raise_lost())
    monkeypatch.setattr(dist, "P2POp", lambda _kind, tensor, _peer: SimpleNamespace(tensor=tensor))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _operations: [message])

    def raise_lost() -> None:
        raise RuntimeError("gloo/pair.cc: Connection closed")

    with broken_off_by(Group()):
        with pytest.raises(RuntimeError, match="Connection closed"):
            exchange([(SENT, 1)], [])
        with pytest.raises(FormationFailed, match="Connection closed"):
            require_sound()


def test_nccl_waits_without_a_limit_and_the_cpu_beside_it_with_one() -> None:
    """A limit would have NCCL block the processor; gloo, which carries the CPU's tensors, has no abort."""
    limits: list[timedelta | None] = []
    work: Any = SimpleNamespace(wait=lambda limit=None: limits.append(limit))
    group = Group()
    group.has_nccl = True
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    with broken_off_by(group):
        wait(work, SENT)
        wait(work, on_gpu)
    assert limits == [timedelta(seconds=0.25), None]


def test_a_batch_of_messages_on_nccl_is_begun_on_a_thread_that_ends_with_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By fakes. NCCL and torch keep a batch that has failed half way, for each thread, and go on with it later."""
    threads: list[threading.Thread] = []
    streams: list[Any] = []
    tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))

    def begin(operations: list[Any]) -> list[Any]:
        threads.append(threading.current_thread())
        if len(threads) == 4:
            raise RuntimeError("NCCL communicator was aborted on rank 1")
        return []

    monkeypatch.setattr(dist, "P2POp", lambda *arguments: SimpleNamespace(tensor=arguments[1]))
    monkeypatch.setattr(dist, "batch_isend_irecv", begin)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "set_device", streams.append)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.append(stream.device))
    for _ in range(2):
        group = Group()
        group.has_nccl = True
        with broken_off_by(group):
            exchange([(tensor, 1)], [])
            with nullcontext() if len(threads) < 2 else pytest.raises(RuntimeError, match="aborted"):
                exchange([(tensor, 1)], [(tensor, 1)])
        threads[-1].join(10)
    assert threads[0] is threads[1] is not threading.current_thread()
    assert threads[2] is not threads[0]
    assert not threads[0].is_alive()
    assert streams == [tensor.device] * 8


def test_whoever_reads_what_was_reduced_lets_an_abort_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fakes. In pinned memory: a copy to other memory would keep CUDA from a thread that saves the last commit."""
    seen: list[Any] = []
    group = Group()
    host = SimpleNamespace(copy_=lambda _source, non_blocking: seen.append(non_blocking), tolist=lambda: [1.0])
    event = SimpleNamespace(synchronize=lambda: seen.append(group.is_waiting))
    monkeypatch.setattr(
        torch, "empty", lambda _shape, dtype, pin_memory, device: seen.append((pin_memory, device)) or host
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(record_event=lambda: event))
    tensor: Any = SimpleNamespace(is_cuda=True, shape=(1,), dtype=torch.float32, device="cuda:0", detach=lambda: None)
    with broken_off_by(group):
        assert numbers(tensor) == [1.0]
        assert numbers(SENT) == [0.0]
    assert (seen, group.is_waiting) == ([(True, "cpu"), True, True], False)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (502, 1, 502), (503, 1, 20), (5000, 1, 600)])
def test_what_all_tell_comes_whole_and_in_one_message_where_it_is_short(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """502 letters with their quotation marks and the size before them fill a first message."""
    told = ["x" * size for size in sizes]
    given: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(len(told))}
    all_gave = threading.Barrier(len(told), timeout=60)

    def all_gather(mine: torch.Tensor) -> list[list[int]]:
        given[rank_of[threading.get_ident()]].append(mine)
        all_gave.wait()
        found = [messages[-1] for messages in given.values()]
        assert len({len(one) for one in found}) == 1, "gloo wants as many of each"
        all_gave.wait()
        return [one.tolist() for one in found]

    rank_of: dict[int, int] = {}
    found: dict[int, list[Any]] = {}

    def gather(rank: int) -> None:
        rank_of[threading.get_ident()] = rank
        found[rank] = gather_json(told[rank])

    monkeypatch.setattr(collectives, "all_gather", all_gather)
    threads = [threading.Thread(target=gather, args=(rank,)) for rank in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(given, told)
    assert {len(messages) for messages in given.values()} == {1 if max(sizes) <= 502 else 2}
