"""The worker's command line: every check, `--help`, exit codes, and how fast it answers."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.config import SHARED, Config, as_json, parse, value_of
from elastic_train.errors import UsageError
from elastic_train.wording import nearest_multiples

BAD = [
    ("--epochs 0", "--epochs 0: must be at least 1"),
    ("--max-steps 0", "--max-steps 0: must be at least 1"),
    ("--global-batch-size 0", "--global-batch-size 0: must be at least 1"),
    ("--virtual-ranks 0", "--virtual-ranks 0: must be at least 1"),
    ("--micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
    ("--eval-every 0", "--eval-every 0: must be at least 1"),
    ("--keep-snapshots 0", "--keep-snapshots 0: must be at least 1"),
    ("--num-workers 1 --prefetch-factor 0", "--prefetch-factor 0: must be at least 1"),
    ("--prefetch-factor 4", "--prefetch-factor 4 is for DataLoader processes: give --num-workers, 1 at least"),
    (
        "--multiprocessing-context spawn",
        "--multiprocessing-context spawn is for DataLoader processes: give --num-workers",
    ),
    ("--snapshot-every -1", "--snapshot-every -1: must be at least 0"),
    ("--snapshot-every 5x", "--snapshot-every 5x: must be steps such as 100, a time such as 30s, 5m or 1h, or auto"),
    ("--snapshot-every 0s", "--snapshot-every 0s: must be steps such as 100"),
    ("--num-workers -1", "--num-workers -1: must be at least 0"),
    ("--seed -1", "--seed -1: must be at least 0"),
    ("--metrics-port 0", "--metrics-port 0: must be a port, 1 to 65535"),
    *(
        (
            f"--notices {value}",
            f"--notices {value}: must be off, auto, aws, gcp, azure, kubernetes, slurm, file:PATH or",
        )
        for value in ("on", "file:", "http://", "http://host:99999/", "ftp://host/")
    ),
    ("--metrics-port 65536", "--metrics-port 65536: must be a port, 1 to 65535"),
    (f"--seed {2**63}", "must be below 2**63"),
    ("--momentum -0.1", "--momentum -0.1: must be at least 0"),
    ("--snapshot-dir s3://bucket/run --on-split go-on", "--on-split go-on: both sides of a split would write to one"),
    ("--run-dir gs://bucket", "--run-dir gs:/bucket: no URL works here, only a folder"),
    *(
        (f"{name}=~/mine", f"{name} ~/mine: the shell has left the ~ as it is: write $HOME for it")
        for name in ("--run-dir", "--snapshot-dir", "--data-dir", "--init-from", "--snapshot-key")
    ),
    ("--task=", "--task has no value: is a variable not set?"),
    ("--run-dir=", "--run-dir has no value: is a variable not set?"),
    ("--task", "--task has no value: is a variable not set?"),
    ("--max-steps --ledger", "--max-steps has no value: is a variable not set?"),
    ("--max-steps 5 --max-steps", "--max-steps has no value"),
    ("--momentum nan", "--momentum nan: must be at least 0"),
    ("--momentum inf", "--momentum inf: must be a finite number"),
    ("--weight-decay inf", "--weight-decay inf: must be a finite number"),
    ("--weight-decay -1", "--weight-decay -1.0: must be at least 0"),
    ("--lr 0", "--lr 0.0: must be a positive number"),
    ("--lr nan", "--lr nan: must be a positive number"),
    ("--lr inf", "--lr inf: must be a positive number"),
    ("--on-split stop", "argument --on-split: invalid choice: 'stop' (choose from"),
    ("--formation-timeout 0", "--formation-timeout 0.0: must be a positive number"),
    ("--reduction ordered --global-batch-size 60", "take a batch of 56 or 64"),
    ("--reduction ordered --global-batch-size 3", "take a batch of 8"),
    ("--micro-batch-size 65", "--micro-batch-size 65 is larger than --global-batch-size 64"),
    ("--download", "--download: digits is not downloaded"),
    ("--download --dataset imagefolder", "that is for mnist, fashion-mnist, cifar10"),
    ("--optimizer adamw --momentum 0.9", "adamw has none"),
    ("--task module.Name", "write MODULE:NAME"),
    ("--task module:Name --model=resnet18", "--model goes without --task: module:Name brings its own"),
    ("--dataset digits --task module:Name", "--dataset goes without --task"),
    ("--spawn 0", "--spawn 0: must be at least 1"),
    ("--spawn 2 --parallel dp", "--parallel dp is one process"),
    ("--reduction ordered --parallel dp", "--parallel dp is one process"),
    ("--reduction ordered --find-unused-parameters", "--find-unused-parameters is for DDP"),
    ("--parallel dp --static-graph", "--static-graph is for DDP"),
    ("--clip-grad-norm 0", "--clip-grad-norm 0.0: must be a positive number"),
    ("--ema-decay 1", "--ema-decay 1.0: must be between 0 and 1"),
    ("--bogus", "unrecognized arguments: --bogus"),
    ("stray", "unrecognized arguments: stray"),
    ("--epoch 3", "unrecognized arguments: --epoch 3 (did you mean --epochs? --help"),
    ("--batch-size=3", "did you mean --global-batch-size or --micro-batch-size? --help"),
    ("--nnodes 2", "--nnodes 2 (--nnodes belongs to torchrun and stands before the script, or before -m; --help"),
    ("--rdzv_id=x --nproc-per-node=2", "(--rdzv_id and --nproc-per-node belong to torchrun and stand before"),
    ("--epochs", "--epochs: expected one argument"),
    ("--epochs three", "invalid int value: 'three'"),
    ("--lr fast", "invalid float value: 'fast'"),
    ("--dataset mnist2", "invalid choice: 'mnist2'"),
    ("--fresh=yes", "ignored explicit argument 'yes'"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=[flags for flags, _ in BAD])
def test_a_bad_flag_is_refused_with_one_line(flags: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(flags.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--global-batch-size 60",  # virtual ranks only count in ordered mode
        "--reduction ordered --global-batch-size 56 --micro-batch-size 56",
        "--snapshot-every 0 --num-workers 0 --momentum 0 --weight-decay 0 --seed 0",
        f"--seed {2**63 - 1}",
        "--optimizer sgd --momentum 0.9",
        "--download --dataset mnist",
        "--download --task module:Name",
        "--fresh --ledger --no-progress --debug",
        "--run-dir some/where --snapshot-dir=/else",
        "--max-steps --max-steps 5",  # the last one counts
    ],
)
def test_good_flags(flags: str) -> None:
    parse(flags.split())


def test_values_and_their_types() -> None:
    config = parse(shlex.split("--epochs 3 --lr 1e-2 --run-dir r --ledger --task m:T --max-steps 7 --precision bf16"))
    assert config == Config(
        epochs=3, lr=0.01, run_dir=Path("r"), ledger=True, task="m:T", max_steps=7, precision="bf16"
    )
    assert json.loads(json.dumps(as_json(config))) == as_json(config)
    assert as_json(config)["run_dir"] == "r"


@dataclasses.dataclass
class OwnFlags:
    width: int = 3
    """of the hidden layer"""
    where: Path = Path("here")


def test_a_dataclass_of_the_users_becomes_flags() -> None:
    config = parse(["--width", "5", "--epochs", "2"], OwnFlags)
    assert config.own_flags == OwnFlags(width=5)
    assert as_json(config) == as_json(Config(epochs=2)) | {"width": 5, "where": "here"}
    with pytest.raises(UsageError, match="invalid int value: 'wide'"):
        parse(["--width", "wide"], OwnFlags)
    with pytest.raises(UsageError, match="unrecognized arguments: --width"):
        parse(["--width", "5"])


def test_help_shows_the_users_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], OwnFlags)
    shown = " ".join(capsys.readouterr().out.split())
    assert "--width int of the hidden layer (default: 3)" in shown
    assert " task flags: " in shown
    assert " own flags: " in shown
    assert "['" not in shown


def test_a_wrong_choice_is_answered_by_the_choices() -> None:
    with pytest.raises(UsageError, match=r"--multiprocessing-context: invalid choice: 'thread'.*fork.*spawn"):
        parse(["--multiprocessing-context", "thread"])


def test_a_flag_of_the_users_must_not_have_the_name_of_one_of_ours() -> None:
    @dataclasses.dataclass
    class Clashing:
        seed: int = 1

    with pytest.raises(UsageError, match=r"Clashing\.seed: --seed exists already; rename the field"):
        parse([], Clashing)


@pytest.mark.parametrize(
    ("arguments", "task"),
    [("", None), ("--task a:B --width 3", "a:B"), ("--epochs 3 --task=a:B", "a:B"), ("--task", None)],
)
def test_the_task_is_known_before_its_flags_are(arguments: str, task: str | None) -> None:
    assert value_of(arguments.split(), "--task") == task


def test_no_flags_are_the_defaults() -> None:
    assert parse([]) == Config()


def test_nearest_multiples() -> None:
    assert nearest_multiples(60, 8) == [56, 64]
    assert nearest_multiples(3, 8) == [8]


# --- as a command -----------------------------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "elastic_train", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        cwd=cwd,
    )


@pytest.mark.parametrize(
    "flags", ["--bogus", "--epochs 0", "--epochs three", "--dataset nope", "--reduction ordered --virtual-ranks 7"]
)
def test_exit_code_2_and_one_line(flags: str, tmp_path: Path) -> None:
    done = command(*flags.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("elastic_train: error: ")
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback() -> None:
    done = command("--epochs", "0", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("elastic_train: error: --epochs 0")


def test_another_rank_says_which_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastic_train", "--bogus"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"RANK": "3"},
    )
    assert done.stderr.startswith("elastic_train: error (rank 3): ")


@dataclasses.dataclass
class Rates:
    lr: float = 0.1
    epochs_of_warmup: int = 2


@dataclasses.dataclass
class Finetuning:
    task: str = "mrpc"
    model: str = "bert"


def test_names_of_other_scopes_are_free_for_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--lr exists already"):
        parse(["--lr", "0.5"], Rates)
    config = parse(["--lr", "0.5", "--epochs", "7", "--ledger"], Rates, scopes=SHARED)
    own = parse(["--task", "mrpc", "--model", "bert"], Finetuning, scopes=SHARED)
    assert own.own_flags == Finetuning()
    assert type(config) is Config
    assert (config.lr, config.model, config.epochs, config.ledger) == (None, "cnn", 7, True)
    assert config.own_flags == Rates(lr=0.5)
    assert config == dataclasses.replace(parse(["--epochs", "7", "--ledger"]), own_flags=Rates(lr=0.5))
    with pytest.raises(UsageError, match="--model"):
        parse(["--model", "mlp"], scopes=SHARED)
    with pytest.raises(SystemExit):
        parse(["--help"], scopes=SHARED)
    said = capsys.readouterr().out
    assert "passes over the training set" in said
    assert "--model str" not in said
