"""A run directory of seven steps and two generations, as a trainer leaves it: for audits to find defects in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastic_train.runlog.goodput import bill
from elastic_train.runlog.reader import read_all
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.training.state import state_sha256

LENGTH, BATCH, PER_EPOCH = 10, 4, 3
LAST_STEP = 7
MEMBERS = ("a/0/11", "b/0/12", "c/0/13")
START = 1_700_000_000.0
Line = dict[str, Any]


def write_small_run(run_dir: Path) -> None:
    """Three members; c dies in step 4, a and b go on as generation 1. A step takes 0.1 s, the outage 0.5 s."""
    events: dict[str, list[Line]] = {member: [] for member in MEMBERS}
    ledger: dict[str, list[Line]] = {member: [] for member in MEMBERS}
    config = {"global_batch_size": BATCH, "epochs": 100, "max_steps": LAST_STEP, "peer_timeout": 2.0}
    config |= {"reduction": "ordered", "snapshot_dir": None}

    def write(member: str, event: str, time: float, generation: int | None, step: int, **fields: Any) -> None:
        members = MEMBERS if generation in (None, 0) else MEMBERS[:2]
        host, _, pid = member.split("/")
        line = {"time": START + time, "monotonic": 1000.0 * (1 + MEMBERS.index(member)) + time, "event": event}
        line |= {"rank": members.index(member), "world_size": len(members)}
        line |= {"generation": generation, "step": step, "pid": int(pid), "host": host}
        events[member].append({**line, **fields})

    def train(step: int, generation: int, is_committed: bool = True) -> None:
        members = MEMBERS if generation == 0 else MEMBERS[:2]
        epoch, within = divmod(step - 1, PER_EPOCH)
        indices = list(range(within * BATCH, min(LENGTH, (within + 1) * BATCH)))
        for rank, member in enumerate(members):
            own = indices[rank :: len(members)]
            line = {"epoch": epoch, "step": step, "generation": generation, "rank": rank, "indices": own}
            ledger[member].append(line)
        if is_committed:
            time = 1.0 + 0.1 * step + (0.5 if generation else 0.0)
            samples = min(LENGTH, (within + 1) * BATCH)
            write(MEMBERS[0], "step", time, generation, step, epoch=epoch, loss=1.0 / step, samples_done=samples)

    for member in MEMBERS:
        write(member, "start", 0.9, None, 0, config=config, task={"train_length": LENGTH})
        write(member, "world", 1.0, 0, 0, cause="start", members=MEMBERS, lost_members=[], left_members=[], seconds={})
        write(member, "restore", 1.0, 0, 0, source="scratch", restored_step=0)
    for step in (1, 2, 3):
        train(step, 0)
    train(4, 0, is_committed=False)
    seconds = {"detect": 0.3, "abort": 0.0, "meet": 0.1, "init": 0.05, "sync": 0.05}
    incident = {"cause": "peer_lost", "time": START + 1.8, "generation": 1, "step": 3, "world_size": 2}
    incident |= {"lost_members": [MEMBERS[2]], "left_members": [], "joined_members": [], "committed_steps_lost": 0}
    incident |= {"seconds": seconds}
    for member in MEMBERS[:2]:
        write(member, "peer_lost", 1.75, 0, 3, error="Connection closed by peer", lost_members=[MEMBERS[2]])
        write(
            member, "world", 1.8, 1, 3, cause="peer_lost", members=MEMBERS[:2], lost_members=[MEMBERS[2]],
            left_members=[], seconds=seconds, incidents=[incident],
        )  # fmt: skip
    for step in range(4, LAST_STEP + 1):
        train(step, 1)
    for member in MEMBERS[:2]:
        write(member, "done", 2.4, 1, LAST_STEP, outcome="finished")
    for kind, files in (("events", events), ("ledger", ledger)):
        for member, lines in files.items():
            write_lines(run_dir / kind / f"{member.replace('/', '-')}.jsonl", lines)

    model = {"weight": torch.arange(4.0)}
    writer = SnapshotWriter(run_dir / "snapshots", keep=3, host="a", run_uid="uid", task={})
    for step, generation in ((3, 0), (LAST_STEP, 1)):
        position = {"epoch": (step - 1) // PER_EPOCH, "samples_done": 4, "generation": generation, "world_size": 2}
        writer.save({"model": model}, step=step, **position)
    phases = {"startup": 1.0, "form": 0.5, "train": 1.0, "lost": 0.1, "evaluate": 0.0, "snapshot": 0.0, "down": 0.0}
    wall = sum(phases.values())
    result = {
        "state_sha256": state_sha256(model),
        "step": LAST_STEP,
        "train_loss": 0.5,
        "wall_seconds": wall,
        "generations": 2,
        "goodput": {**phases, "wall": wall, "ratio": phases["train"] / wall},
        "bill": bill(paid=7.5, kept=2.9, samples=LAST_STEP * 4, price=0.24),
        "incidents": [incident],
        "config": config,
    }
    (run_dir / "result.json").write_text(json.dumps(result))


def write_lines(path: Path, lines: list[Line]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_lines(path: Path, edit: Callable[[list[Line]], list[Line]]) -> None:
    write_lines(path, edit(read_all(path)))


def change(path: Path, which: Callable[[Line], bool], **fields: object) -> None:
    """Other values in some lines of a file."""
    edit_lines(path, lambda lines: [{**line, **fields} if which(line) else line for line in lines])


def later(line: Line, seconds: float) -> Line:
    """As it would have been written so much later."""
    return {**line, **{name: line[name] + seconds for name in ("time", "monotonic") if name in line}}


def delay(path: Path, seconds: float, which: Callable[[Line], bool]) -> None:
    """Some lines of a file were written so much later."""
    edit_lines(path, lambda lines: [later(line, seconds) if which(line) else line for line in lines])


def set_clock(path: Path, seconds: float, which: Callable[[Line], bool]) -> None:
    """Some lines were written when somebody had set the clock of the host by so much."""
    edit_lines(
        path, lambda lines: [{**line, "time": line["time"] + seconds} if which(line) else line for line in lines]
    )


def is_of(generation: int) -> Callable[[Line], bool]:
    return lambda line: bool(line["generation"] == generation)


def is_second_world(line: Line) -> bool:
    return (line["event"], line["generation"]) == ("world", 1)


def edit_json(path: Path, edit: Callable[[Line], Line]) -> None:
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def mark_as_drill(run_dir: Path, faults: list[Line] | None = None, **settings: Any) -> None:
    """Give it the folder of a drill, whose nodes are on one machine."""
    folder = run_dir / "drill"
    folder.mkdir()
    for path in (run_dir / "events").iterdir():
        edit_lines(path, lambda lines: [{**line, "monotonic": line["time"] - START} for line in lines])
    injected = {"what": "injected", "number": 0, "name": "kill", "target": "node3", "step": 3, "limit_seconds": 15.0}
    injected |= {"time": START + 1.35, "injected_at": START + 1.35, "evidence": "gone", "may_take": ["node3"]}
    recovered = {"what": "recovered", "number": 0, "time": START + 1.9, "seconds": 0.55}
    write_lines(folder / "faults.jsonl", [injected, recovered] if faults is None else faults)
    nodes: list[Line] = []
    for number, member in enumerate(MEMBERS, start=1):
        nodes.append({"time": START, "what": "started", "node": f"node{number}"})
        nodes.append({"time": START + 1.0, "what": "worker", "node": f"node{number}", "member": member})
        code = -9 if number == len(MEMBERS) else 0
        nodes.append({"time": START + 3, "what": "ended", "node": f"node{number}", "code": code})
    write_lines(folder / "nodes.jsonl", nodes)
    result = json.loads((run_dir / "result.json").read_text())
    early_loss = (1 / 1 + 1 / 2 + 1 / 3 + 1 / 4) / 4
    reference = {name: result[name] for name in ("state_sha256", "step")} | {"early_loss": early_loss}
    (folder / "reference.json").write_text(json.dumps(reference))
    (folder / "leftovers.json").write_text("[]")
    (folder / "drill.json").write_text(json.dumps({"seed": 1, "num_faults": 1, **settings}))
