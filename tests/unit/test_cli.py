"""The console script: its parser, its one-line errors, its snapshot commands, and the table of benchmarks."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors

from elastic_train import cli
from elastic_train.errors import SnapshotError
from elastic_train.storage.dcp import write_dcp
from elastic_train.storage.signature import read_key
from elastic_train.storage.snapshot import SnapshotInfo, verify
from elastic_train.storage.snapshot_writer import SnapshotWriter
from elastic_train.storage.weights import export_weights, initialise
from elastic_train.tools import bench
from elastic_train.tools.bench import table
from elastic_train.tools.bench.table import BenchRow
from elastic_train.training.state import state_sha256
from tests.processes import cpu_seconds, cpu_seconds_of_torch, flip_a_bit

NO_VALUE = "has no value: is a variable not set? Leave the flag out for the default"
MODEL = {"w": torch.arange(6.0), "n": torch.tensor(3)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """With snapshots of steps 10, 20 and 30, of which only the model's tensor differs."""
    path = tmp_path / "run"
    writer = SnapshotWriter(path / "snapshots", keep=9, host="node", run_uid="u", task={"train_length": 100})
    for step in (10, 20, 30):
        model = MODEL | {"n": torch.tensor(step)}
        metric = {10: 0.75, 20: 0.5, 30: None}[step]
        position = {"step": step, "epoch": 0, "samples_done": step, "generation": 0, "world_size": 2}
        writer.save({"model": model}, **position, metric=metric)
    return path


def snapshot(run_dir: Path, step: int) -> Path:
    return run_dir / "snapshots" / f"step-{step:012d}-gen-0000-node"


def sha256(step: int) -> str:
    return state_sha256(MODEL | {"n": torch.tensor(step)})


class TestSnapshotHash:
    @pytest.mark.parametrize("below", ["", "snapshots"])
    def test_of_the_newest_in_a_directory(self, run_dir: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["snapshot", "hash", str(run_dir / below)]) == 0
        assert capsys.readouterr() == (sha256(30) + "\n", "")

    def test_of_the_newest_whole_one(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip_a_bit(snapshot(run_dir, 30) / "state.pt")
        assert cli.main(["snapshot", "hash", str(run_dir)]) == 0
        out, err = capsys.readouterr()
        assert out == sha256(20) + "\n"
        assert len(err.splitlines()) == 1
        assert "step-000000000030" in err

    def test_of_a_damaged_one(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip_a_bit(snapshot(run_dir, 30) / "state.pt")
        assert cli.main(["snapshot", "hash", str(snapshot(run_dir, 30))]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert "is damaged" in err

    @pytest.mark.parametrize("file_format", ["pt", "safetensors", "dcp"])
    def test_of_exported_weights(self, run_dir: Path, file_format: str, capsys: pytest.CaptureFixture[str]) -> None:
        output = run_dir.parent / f"weights.{file_format}"
        assert cli.main(["snapshot", "export", str(run_dir), "--format", file_format, "--output", str(output)]) == 0
        capsys.readouterr()
        assert cli.main(["snapshot", "hash", str(output)]) == 0
        assert capsys.readouterr() == (sha256(30) + "\n", "")

    def test_of_a_file_without_weights(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        torch.save({"epoch": 3}, tmp_path / "other.pt")
        assert cli.main(["snapshot", "hash", str(tmp_path / "other.pt")]) == 1
        assert capsys.readouterr() == ("", f"elastic-train: error: {tmp_path / 'other.pt'} holds no weights\n")

    def test_by_torch_alone_as_the_readme_has_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        weights = {
            "b.weight": torch.randn(3, 4).T,  # not contiguous
            "a": torch.tensor(7),
            "half": torch.randn(5).bfloat16(),
            "empty": torch.empty(0, 2),
            "mask": torch.tensor([True, False]),
            "parameter": torch.nn.Parameter(torch.randn(2)),
        }
        torch.save(weights, tmp_path / "weights.pt")
        monkeypatch.chdir(tmp_path)
        readme = (Path(cli.__file__).parent / "storage" / "README.md").read_text()
        [snippet] = [part.split("```")[0] for part in readme.split("```python\n")[1:]]
        assert "elastic_train" not in snippet
        exec(snippet, {})
        assert capsys.readouterr().out == state_sha256(weights) + "\n"


class TestSnapshotExport:
    """Of a snapshot that holds a model and nothing else, as a `SnapshotStore` of somebody's own may."""

    @pytest.mark.parametrize("file_format", ["pt", "safetensors"])
    def test_the_weights_alone_are_enough(
        self, run_dir: Path, file_format: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = run_dir / "weights"
        assert cli.main(["snapshot", "export", str(run_dir), "--format", file_format, "--output", str(output)]) == 0
        assert capsys.readouterr() == (f"2 tensors of step 30: {output}\n", "")
        loaded = torch.load(output) if file_format == "pt" else load_safetensors(output.read_bytes())
        assert state_sha256(loaded) == sha256(30)

    @pytest.mark.parametrize("file_format", ["pt", "safetensors", "dcp"])
    def test_nothing_is_overwritten_that_was_not_named(
        self, run_dir: Path, file_format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(run_dir)
        name, command = f"weights.{file_format}", ["snapshot", "export", str(run_dir), "--format", file_format]
        assert cli.main([*command, "--best"]) == 0
        capsys.readouterr()
        assert cli.main(command) == 2
        told = f"{name} is there already: say where to by --output, which replaces a file"
        assert capsys.readouterr() == ("", f"elastic-train: error: {told}\n")
        assert cli.main(["snapshot", "hash", name]) == 0
        assert capsys.readouterr().out == sha256(10) + "\n", "as it was"
        is_replaced = file_format != "dcp"  # which is a folder
        assert cli.main([*command, "--output", name]) == (0 if is_replaced else 1)
        capsys.readouterr()
        assert cli.main(["snapshot", "hash", name]) == 0
        assert capsys.readouterr().out == sha256(30 if is_replaced else 10) + "\n"

    @pytest.mark.parametrize("output", [".", "/", ".."])
    @pytest.mark.parametrize("file_format", ["pt", "safetensors", "dcp"])
    def test_an_output_that_names_no_file_is_told(
        self,
        run_dir: Path,
        file_format: str,
        output: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        here = run_dir.parent / "above" / "empty"
        here.mkdir(parents=True)
        monkeypatch.chdir(here)
        command = ["snapshot", "export", str(run_dir), "--format", file_format, "--output", output]
        assert cli.main(command) == 1
        out, err = capsys.readouterr()
        assert out == ""
        shown = re.escape(str(Path(output)))
        assert re.fullmatch(rf"elastic-train: error: {shown} cannot be written: [^\n:]+(; choose .*)?\n", err)
        assert [*here.parent.rglob("*")] == [here]

    def test_no_averaged_weights_no_file(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = run_dir / "weights.pt"
        assert cli.main(["snapshot", "export", str(run_dir), "--averaged", "--output", str(output)]) == 1
        assert capsys.readouterr() == (
            "",
            f"elastic-train: error: {run_dir} holds no averaged weights; --ema-decay keeps them\n",
        )
        assert not output.exists()

    def test_an_extra_that_is_called_so_and_has_other_names_is_none(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        writer = SnapshotWriter(run_dir / "snapshots", keep=9, host="node", run_uid="u", task={})
        state = {"model": MODEL, "extras": {"ema": {"decay": 0.9, "shadow": MODEL}}}
        writer.save(state, step=40, epoch=0, samples_done=40, generation=0, world_size=2)
        output = run_dir / "weights.pt"
        assert cli.main(["snapshot", "export", str(run_dir), "--averaged", "--output", str(output)]) == 1
        assert "holds no averaged weights" in capsys.readouterr().err
        assert cli.main(["snapshot", "export", str(run_dir), "--output", str(output)]) == 0
        assert "--averaged" not in capsys.readouterr().out

    def test_what_the_format_has_no_place_for(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        writer = SnapshotWriter(run_dir / "snapshots", keep=9, host="node", run_uid="u", task={})
        model = MODEL | {"layer._extra_state": {"scale": 2}}
        writer.save({"model": model}, step=40, epoch=0, samples_done=0, generation=0, world_size=1)
        command = ["snapshot", "export", str(run_dir), "--output", str(run_dir / "weights")]
        assert cli.main([*command, "--format", "safetensors"]) == 1
        assert "layer._extra_state is none: take --format pt" in capsys.readouterr().err
        assert not (run_dir / "weights").exists()
        assert cli.main(command) == 0
        assert torch.load(run_dir / "weights")["layer._extra_state"] == {"scale": 2}

    def test_the_best(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command = ["snapshot", "export", str(run_dir), "--output", str(run_dir / "weights"), "--best"]
        assert cli.main(command) == 0
        assert torch.load(run_dir / "weights")["n"] == 10
        flip_a_bit(snapshot(run_dir, 10) / "state.pt")
        assert cli.main(command) == 0
        assert torch.load(run_dir / "weights")["n"] == 20, "the best that is whole"
        assert "2 tensors of step 20, metric 0.5: " in capsys.readouterr().out
        flip_a_bit(snapshot(run_dir, 20) / "state.pt")
        capsys.readouterr()
        assert cli.main(command) == 1
        assert "no whole snapshot in" in (last := capsys.readouterr().err.splitlines()[-1])
        assert last.endswith("has a metric; --keep-best keeps such ones")

    def test_a_best_that_is_not_kept_is_told(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        writer = SnapshotWriter(run_dir / "snapshots", keep=1, host="node", run_uid="u", task={})
        state = {"model": MODEL, "run": {"ratings": {"best": [35, 9.5], "newest": [40, 1.5]}}}
        writer.save(state, step=40, epoch=0, samples_done=0, generation=0, world_size=1, metric=1.5)
        assert cli.main(["snapshot", "export", str(run_dir), "--output", str(run_dir / "weights"), "--best"]) == 0
        told = "the best so far was 9.5, of step 35: no snapshot of it is here (--keep-best)"
        assert capsys.readouterr().out.splitlines()[1:] == [told]


class TestSnapshotVerify:
    def test_all_whole(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["snapshot", "verify", str(run_dir)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"whole: {snapshot(run_dir, step)}" for step in (30, 20, 10)]

    def test_damage_of_each_kind(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip_a_bit(snapshot(run_dir, 30) / "state.pt")
        (snapshot(run_dir, 20) / "manifest.json").write_text("{")
        assert cli.main(["snapshot", "verify", str(run_dir)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"whole: {snapshot(run_dir, 10)}"
        assert sorted(line.split(":")[0] for line in lines[1:]) == ["damaged", "damaged"]
        for step in (30, 20):
            assert cli.main(["snapshot", "verify", str(snapshot(run_dir, step))]) == 1
        assert cli.main(["snapshot", "verify", str(snapshot(run_dir, 10))]) == 0

    def test_what_is_pruned_meanwhile_is_not_damaged(
        self, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def prune_and_verify(info: SnapshotInfo) -> None:
            if info.step == 20:
                shutil.rmtree(snapshot(run_dir, 20))
            verify(info)

        monkeypatch.setattr("elastic_train.storage.snapshot.verify", prune_and_verify)
        assert cli.main(["snapshot", "verify", str(run_dir)]) == 0
        assert capsys.readouterr().out.splitlines() == [f"whole: {snapshot(run_dir, step)}" for step in (30, 10)]


class TestSnapshotKey:
    """Step 30 alone is signed with it; 40 is newer and not."""

    @pytest.fixture
    def key(self, run_dir: Path) -> str:
        path = run_dir / "snapshot.key"
        path.write_text("0123456789abcdef")
        for step, signed in ((30, b"0123456789abcdef"), (40, None)):
            shutil.rmtree(snapshot(run_dir, step), ignore_errors=True)
            writer = SnapshotWriter(run_dir / "snapshots", keep=9, host="node", run_uid="u", task={}, key=signed)
            state = {"model": {"w": torch.ones(step)}}
            writer.save(state, step=step, epoch=0, samples_done=0, generation=0, world_size=1)
        return str(path)

    def test_every_action_asks_for_it(self, run_dir: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
        def out(action: str, *arguments: str) -> str:
            assert cli.main(["snapshot", action, *arguments, "--snapshot-key", key]) == 0
            captured = capsys.readouterr()
            assert "it has no signature" in captured.err
            return captured.out

        assert [row.split()[0] for row in out("list", str(run_dir)).splitlines()[1:]] == ["30"]
        assert cli.main(["snapshot", "hash", str(snapshot(run_dir, 30)), "--snapshot-key", key]) == 0
        assert capsys.readouterr().out == out("hash", str(run_dir))
        assert "of step 30: " in out("export", str(run_dir), "--output", str(run_dir / "weights"))
        assert out("copy", str(run_dir), str(run_dir / "copies")).startswith("step 30: ")
        for action in ("verify", "hash", "export"):
            assert cli.main(["snapshot", action, str(snapshot(run_dir, 40)), "--snapshot-key", key]) == 1

    def test_so_does_init_from(self, run_dir: Path, key: str) -> None:
        model = torch.nn.ParameterDict({"w": torch.zeros(30)})
        initialise(model, run_dir, warn=[].append, key=read_key(Path(key)))
        assert model["w"].sum() == 30
        with pytest.raises(SnapshotError, match="it has no signature"):
            initialise(model, snapshot(run_dir, 40), warn=pytest.fail, key=read_key(Path(key)))

    @pytest.mark.parametrize("below", ["", "snapshots", "snapshots/step-000000000030-gen-0000-node"])
    def test_foreign_weights_beside_signed_ones_are_not_read(
        self, run_dir: Path, key: str, below: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Of who may write there, and has no key: in the format that has no signatures."""
        path, foreign, signed = run_dir / below, run_dir / "foreign", {"w": torch.ones(30)}
        write_dcp({"w": torch.full((30,), 666.0)}, foreign)
        for file in foreign.iterdir():
            file.rename(path / file.name)
        model = torch.nn.ParameterDict({"w": torch.zeros(30)})
        initialise(model, path, warn=[].append, key=read_key(Path(key)))
        assert torch.equal(model["w"], signed["w"])
        assert cli.main(["snapshot", "hash", str(path), "--snapshot-key", key]) == 0
        assert capsys.readouterr().out == f"{state_sha256(signed)}\n"

    def test_weights_that_no_key_can_sign(
        self, run_dir: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A file is what was named, and is told to be unsigned; a folder may be a run in which somebody wrote."""
        model, told = torch.nn.ParameterDict({"w": torch.zeros(30)}), list[str]()
        weights = {"w": torch.full((30,), 2.0)}
        export_weights(weights, tmp_path / "w.pt", "pt")
        initialise(model, tmp_path / "w.pt", warn=told.append, key=read_key(Path(key)))
        assert (float(model["w"].detach().sum()), told) == (60.0, [f"{tmp_path}/w.pt is no snapshot: no key signs it"])
        assert cli.main(["snapshot", "hash", f"{tmp_path}/w.pt", "--snapshot-key", key]) == 0
        out, err = capsys.readouterr()
        assert (out, err) == (f"{state_sha256(weights)}\n", f"elastic-train: warning: {told[0]}\n")

        export_weights(weights, tmp_path / "dcp", "dcp")
        why = "no key signs what torch.distributed.checkpoint wrote there: as a file of torch.save it would be read"
        with pytest.raises(SnapshotError) as raised:
            initialise(model, tmp_path / "dcp", warn=pytest.fail, key=read_key(Path(key)))
        assert str(raised.value) == f"no whole snapshot in {tmp_path}/dcp; {why}"
        assert cli.main(["snapshot", "hash", f"{tmp_path}/dcp", "--snapshot-key", key]) == 1
        assert capsys.readouterr() == ("", f"elastic-train: error: {raised.value}\n")


def test_every_action_takes_a_url(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/bucket"

    def out(action: str, *arguments: str) -> str:
        assert cli.main(["snapshot", action, *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    for step in (10, 30):
        assert out("copy", str(snapshot(run_dir, step)), url).startswith(f"step {step}: ")
    assert [row.split()[0] for row in out("list", url).splitlines()[1:]] == ["30", "10"]
    names = [snapshot(run_dir, step).name for step in (30, 10)]
    assert out("verify", url).splitlines() == [f"whole: {url}/{name}" for name in names]
    assert out("hash", url) == f"{sha256(30)}\n"
    assert out("hash", f"{url}/{names[1]}") == f"{sha256(10)}\n"
    assert "of step 30: " in out("export", url, "--output", str(tmp_path / "weights"))
    assert torch.load(tmp_path / "weights")["n"] == 30
    assert out("copy", url, str(tmp_path / "back")).startswith("step 30: ")
    assert out("hash", str(tmp_path / "back")) == f"{sha256(30)}\n"


class TestSnapshotList:
    def test_newest_first(self, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (snapshot(run_dir, 20) / "state.pt").write_bytes(b"")
        assert cli.main(["snapshot", "list", str(run_dir)]) == 0
        out, err = capsys.readouterr()
        head, *rows = out.splitlines()
        assert head.split() == ["step", "epoch", "samples", "generation", "workers", "metric", "age", "size", "name"]
        assert [row.split()[0] for row in rows] == ["30", "10"]
        assert [row.split()[5] for row in rows] == ["-", "0.75"]
        assert len({row.index("step-") for row in rows} | {head.index("name")}) == 1
        assert "step-000000000020" in err

    @pytest.mark.parametrize("action", ["list", "verify", "hash"])
    def test_nothing_there(self, action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for path in (tmp_path, tmp_path / "none"):
            assert cli.main(["snapshot", action, str(path)]) == 1
            out, err = capsys.readouterr()
            assert out == ""
            assert len(err.splitlines()) == 1
            assert str(path) in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["bogus"], "invalid choice: 'bogus'"),
        (["status"], "required: RUN_DIR"),
        (["snapshot"], "required: ACTION"),
        (["snapshot", "hash"], "required: PATH"),
        (["bench", "bogus"], "invalid choice: 'bogus'"),
        (["bench", "loop", "--quic"], "unrecognized arguments: --quic"),
        (["snapshot", "export", "--best", "run", "out.pt"], "out.pt (to write there: --output out.pt; elastic-train"),
        (["drill", "--fault", "kill"], "did you mean --faults? elastic-train drill --help tells more"),
        (["drill", "--task", "x:Y"], "flags of the worker stand behind --: elastic-train drill -- --task"),
        (["drill", "mine.py", "--rows", "3"], "stand behind --: elastic-train drill -- mine.py --rows"),
        (["bench", "loop", "--json", "/no/such/folder/file"], "there is no folder /no/such/folder"),
        (["check", "--nodes", "0"], "--nodes 0: must be at least 1"),
        (["check", "--workers", "-1"], "--workers -1: must be at least 1"),
        (["check", "--grace", "nan"], "--grace nan: must be at least 0"),
        (["check", "--grace", "inf"], "--grace inf: must be a finite number"),
        (["check", "--wait", "nan"], "--wait nan: must be a positive number"),
        (["check", "--wait", "inf"], "--wait inf: must be a positive number"),
        (["check", "--rdzv-endpoint=localhost:abc"], "--rdzv-endpoint: 'localhost:abc' is not HOST:PORT"),
        (["check", "--rdzv-endpoint=localhost:99999"], "a port is 1 to 65535"),
        (["check", "--", "train.py", "--run-dir", "r"], "error: train.py: the check builds what `-m elastic_train`"),
        (["check", "--", "-m", "my.train", "--rows", "3"], "error: -m my.train: the check builds what"),
        (["check", "--rdzv-backend=etcd3"], "needs --rdzv-endpoint=HOST:PORT"),
        (["status", ""], "error: an argument has no value: is a variable not set?"),
        (["status", "--json", ""], "error: an argument has no value: is a variable not set?"),
        (["snapshot", "copy", "run", ""], "error: an argument has no value: is a variable not set?"),
        (["snapshot", "export", "run", "--output", ""], f"error: --output {NO_VALUE}"),
        (["snapshot", "list", "run", "--snapshot-key="], f"error: --snapshot-key {NO_VALUE}"),
        (["check", "--rdzv-conf", "", "--rdzv-endpoint", ""], f"error: --rdzv-endpoint {NO_VALUE}"),
        (["drill", "--faults", "", "--", "mine.py", "--title", ""], f"error: --faults {NO_VALUE}"),
        (["submit", "slurm", "--etcd", "", "--dry-run"], f"error: --etcd {NO_VALUE}"),
        (["submit", "slurm", "--name=", "--dry-run"], f"error: --name {NO_VALUE}"),
        (["submit", "slurm", "--dry-run", "--", "--task", ""], f"error: --task {NO_VALUE}"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("elastic-train: error: ")
    assert message in err


def test_an_empty_value_where_the_default_is_empty_or_a_script_gets_it() -> None:
    parse = cli.make_parser().parse_args
    assert parse(["check", "--rdzv-conf="]).rdzv_conf == "", "as deploy/slurm/elastic.sbatch gives it"
    assert parse(["check", "--rdzv-conf", "", "--workers", "2"]).workers == 2
    assert parse(["drill", "--", "mine.py", "--title", ""]).flags == ["mine.py", "--title", ""]


def test_status_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == (
        f"elastic-train: error: {tmp_path / 'none'} does not exist; --run-dir of the training says where the run is\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        "status", "status {} other", "audit", "audit other {}", "report", "snapshot list", "snapshot verify",
        "snapshot export", "snapshot hash", "snapshot copy {} other", "drill --duration 1 --run-dir",
        "bench loop --json {}/rows",
    ],
)  # fmt: skip
def test_a_path_that_the_system_refuses_is_one_line(
    run_dir: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does what lies in a folder that one may not enter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other" / "events").mkdir(parents=True)
    name = "x" * 300
    words = [word.replace("{}", name) for word in command.split()]
    assert cli.main(words if "{}" in command else [*words, name]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"elastic-train: error: [^\n]*{name}[^\n]*: File name too long\n", err)
    assert "/elastic-train-audit-" not in err, "a path that the person has named"


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (
            "check",
            "open('/none/labels.csv')",
            "FileNotFoundError: [Errno 2] No such file or directory: '/none/labels.csv'",
        ),
        (
            "drill --duration 1",
            "from urllib.error import HTTPError; from os import environ\n"
            "raise HTTPError(environ['URL'], 403, 'Forbidden', {}, None)",
            "urllib.error.HTTPError: HTTP Error 403: Forbidden",
        ),
    ],
)
def test_what_a_task_cannot_read_is_told_with_its_traceback(
    tmp_path: Path, command: str, code: str, error: str
) -> None:
    """It is no path of the command line, and a presigned URL is a secret."""
    (tmp_path / "mine.py").write_text(code)
    env = os.environ | {"PYTHONPATH": f"{Path(cli.__file__).parents[1]}:{tmp_path}", "URL": "https://s/x?key=SECRET"}
    done = console(*command.split(), "--", "--task", "mine:T", stdout=subprocess.PIPE, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert f'File "{tmp_path}/mine.py", line ' in done.stderr
    assert done.stderr.splitlines()[-1] == error
    assert "SECRET" not in done.stderr


# --- benchmarks -------------------------------------------------------------------------------------------------------


def test_every_benchmark_has_a_run() -> None:
    for place in bench.BENCHMARKS.values():
        assert callable(pkgutil.resolve_name(place))


def test_bench_writes_the_rows_as_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [BenchRow.of_rates("a case", [90.0, 100.0, 130.0], [100.0, 100.0, 100.0], "samples/s")]
    monkeypatch.setattr(bench, "run", lambda name, quick: table.report(f"{name} {quick}", rows))
    assert cli.main(["bench", "loop", "--quick", "--json", str(tmp_path / "rows.json")]) == 0
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found.keys() == {"bench", "machine", "torch", "rows"}
    assert (found["bench"], found["torch"]) == ("loop True", str(torch.__version__))
    (row,) = found["rows"]
    assert row == {
        "case": "a case", "ours": 100.0, "theirs": 100.0, "unit": "samples/s", "ratio": 1.0,
        "spread": pytest.approx(0.2),
    }  # fmt: skip
    title, head, line = capsys.readouterr().out.splitlines()
    assert title.startswith("bench loop True: ")
    assert head.split() == ["case", "ours", "theirs", "unit", "ratio", "spread"]
    assert line.split() == ["a", "case", "100", "100", "samples/s", "1.000", "0.200"]


def test_spread_is_the_interquartile_range() -> None:
    assert table.iqr([1.0]) == 0.0
    assert table.iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0


# --- as a process -----------------------------------------------------------------------------------------------------


def console(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elastic_train.cli", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        **options,
    )


HELPS = [
    [], ["status"], ["snapshot"], ["snapshot", "list"], ["snapshot", "verify"], ["snapshot", "hash"], ["bench"],
]  # fmt: skip


def test_help_answers_at_once() -> None:
    """All of them together, in a quarter of the time that torch takes to be imported."""
    program = (
        "import contextlib, sys\n"
        "from elastic_train import cli\n"
        f"for command in {HELPS}:\n"
        "    print(command, flush=True)\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        cli.main([*command, '--help'])\n"
    )
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for words in HELPS:
        assert f"{words}\nusage: {' '.join(['elastic-train', *words])} " in told
    assert any(cpu_seconds(command) < cpu_seconds_of_torch() / 4 for _ in range(3))


def test_reading_files_needs_no_torch(run_dir: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from elastic_train import cli\n"
        f"assert cli.main(['status', {str(run_dir)!r}]) == 0\n"
        f"assert cli.main(['snapshot', 'list', {str(run_dir)!r}]) == 0\n"
        f"assert cli.main(['snapshot', 'verify', {str(run_dir)!r}]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early_is_no_traceback(run_dir: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as closed_pipe:
        done = console("snapshot", "list", str(run_dir), stdout=closed_pipe)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_on_a_full_disk_is_one_line(run_dir: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = console("snapshot", "list", str(run_dir), stdout=full)
    assert done.returncode == 1
    assert done.stderr == "elastic-train: error: output cannot be written: No space left on device\n"
