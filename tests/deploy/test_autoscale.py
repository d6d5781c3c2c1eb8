"""What deploy/slurm/autoscale.py submits and cancels; tests/integration/test_slurm.py runs it on a real SLURM."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.observe.metrics import Metrics
from elastic_train.observe.status import RunState
from tests.deploy.tools import DEPLOY

SPEC = importlib.util.spec_from_file_location("autoscale", DEPLOY / "slurm" / "autoscale.py")
assert SPEC is not None
assert SPEC.loader is not None
AUTOSCALE: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(AUTOSCALE)


def status(wanted: int, most: int | None = 4, state: str = "running") -> dict[str, Any]:
    return {"state": state, "capacity": {"wanted": wanted, "max_nodes": most}}


RUNS, WAITS = "RUNNING", "PENDING"


@pytest.mark.parametrize(
    ("told", "states", "submits", "cancels"),
    [
        (None, [], 1, 0),
        (None, [WAITS], 0, 0),
        (status(3), [RUNS], 3, 0),
        (status(3), [RUNS, RUNS, WAITS, WAITS], 0, 0),  # two import torch still
        (status(1), [RUNS] * 3, 1, 0),
        (status(0), [RUNS] * 4, 0, 0),
        (status(0), [RUNS, RUNS, RUNS, WAITS], 0, 1),  # somebody has joined by hand
        (status(0, state="finished"), [RUNS, WAITS, WAITS], 0, 2),
        (status(0, state="finished"), [], 0, 0),
        (status(4, state="stopped"), [], 4, 0),
        (status(0), [], 0, 0),  # others have started it, and it is full
        (status(1), [], 1, 0),
        (status(1, state="silent"), [], 4, 0),  # all were taken away
        (status(0, state="silent"), [WAITS] * 4, 0, 0),
        (status(0, state="silent"), [RUNS, WAITS, WAITS, WAITS], 0, 0),
        (status(0, state="silent"), [RUNS] * 4, 0, 0),  # in a long step
        (status(0, state="starting"), [RUNS, WAITS, WAITS, WAITS], 0, 0),  # those before count until a world stands
        (status(0, most=None), [RUNS], 0, 0),
        (status(0, most=None, state="starting"), [], 1, 0),  # a folder, of a check that was killed
    ],
)
def test_decisions(told: dict[str, Any] | None, states: list[str], submits: int, cancels: int) -> None:
    jobs = [(str(number), state) for number, state in enumerate(states)]
    new, surplus = AUTOSCALE.decide(told, jobs)
    assert (new, len(surplus)) == (submits, cancels)
    assert set(surplus) <= {job for job, state in jobs if state == WAITS}


@pytest.mark.parametrize(
    ("told", "in_all"), [(status(0), 0), (status(2), 2), (status(0, state="silent"), 4), (status(4, state="dead"), 4)]
)
def test_looks_in_turn_settle(told: dict[str, Any], in_all: int) -> None:
    """Of a run whose nodes are none of its own jobs, or were; where what it submits waits in the queue."""
    jobs: list[tuple[str, str]] = []
    for _ in range(10):
        new, surplus = AUTOSCALE.decide(told, jobs)
        assert not surplus
        jobs += [(str(len(jobs) + number), WAITS) for number in range(new)]
    assert len(jobs) == in_all


@given(
    st.integers(1, 9),
    st.integers(0, 9),
    st.lists(st.sampled_from([RUNS, WAITS]), max_size=12),
    st.sampled_from(RunState),
)
def test_there_are_never_more_jobs_than_nodes_may_be(
    most: int, present: int, states: list[str], state: RunState
) -> None:
    jobs = [(str(number), state) for number, state in enumerate(states)]
    new, surplus = AUTOSCALE.decide(status(max(0, most - present), most, state), jobs)
    assert not new or len(jobs) + new <= most
    assert not (new and surplus), "what is submitted is not cancelled at once"


def test_a_script_that_fails_at_once_is_submitted_ever_more_rarely() -> None:
    assert [AUTOSCALE.pause(15.0, number) for number in (0, 1, 3, 4, 5, 50)] == [15, 15, 15, 30, 60, 900]


def test_runs_in_folders_of_one_name_have_jobs_of_their_own(tmp_path: Path) -> None:
    assert AUTOSCALE.job_name(tmp_path / "a" / "x") != AUTOSCALE.job_name(tmp_path / "b" / "x")
    assert AUTOSCALE.job_name(tmp_path / "a" / "x") == AUTOSCALE.job_name(tmp_path / "b" / ".." / "a" / "x")


def test_a_job_is_found_by_its_name_whatever_the_folder_is_called(tmp_path: Path) -> None:
    """squeue takes a list of names, with commas between them."""
    assert "," not in AUTOSCALE.job_name(tmp_path / "lr=0.1,bs=64")


def test_a_hiccup_of_slurm_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks again each time; the test ends it after three."""
    asked, squeue = tmp_path / "asked", tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho >> {asked}\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("sys.argv", ["autoscale.py", str(tmp_path / "run"), "node.sbatch", "--every", "0"])
    monkeypatch.setattr(AUTOSCALE, "read_status", lambda _run_dir: None if num_asked() < 3 else {}["enough"])

    def num_asked() -> int:
        return len(asked.read_text()) if asked.exists() else 0

    with pytest.raises(KeyError, match="enough"):
        AUTOSCALE.main()
    assert capsys.readouterr().err.count("warning: squeue ended with 1") == 3


def test_the_manifest_of_keda_is_yaml_and_asks_for_a_metric_that_there_is() -> None:
    """No more is checked: its schema is not there, as the page says."""
    yaml = pytest.importorskip("yaml")
    page = (DEPLOY / "kubernetes" / "README.md").read_text()
    assert "None of this has been run" in page
    manifest = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert manifest["kind"] == "ScaledJob"
    (trigger,) = manifest["spec"]["triggers"]
    (name,) = re.findall(r"elastic_train_(\w+)", trigger["metadata"]["query"])
    assert f'"{name}"' in inspect.getsource(Metrics)
