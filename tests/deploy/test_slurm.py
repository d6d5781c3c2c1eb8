"""The batch scripts as `elastic-train submit` fills them in; tests/integration/test_slurm.py runs them."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.cli import main, make_parser
from elastic_train.errors import UsageError
from elastic_train.tools.drills.nodes import wait_until
from elastic_train.tools.submit import SlurmJob, set_option, set_variable, write_script
from tests.deploy.tools import DEPLOY, program


def options(script: str) -> dict[str, str]:
    words = [line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH --")]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def variables(script: str, *names: str) -> list[str]:
    """Their values, as bash understands the part of the script that is to be edited."""
    top = script.partition("# --- nothing to edit below")[0]
    show = "".join(f'printf "%s\\n" "${{{name}[*]}}"\n' for name in names)
    done = subprocess.run(
        ["bash", "-uc", f"SLURM_JOB_ID=7\n{top}\n{show}"], capture_output=True, text=True, check=True, env={}
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("nodes", ["4", "1:4"])
def test_a_filled_script_is_clean(nodes: str) -> None:
    job = SlurmJob(
        nodes=nodes, options={"partition": "gpu"}, run_dir="a b", flags=["--task", "x y:Z"], setup="true",
        is_checked=False,
    )  # fmt: skip
    script = write_script(job)
    done = subprocess.run([program("shellcheck"), "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert variables(script, "RUN_DIR", "FLAGS", "SETUP", "CHECK") == ["a b", "--task x y:Z", "true", ""]


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.sbatch")), ids=lambda path: path.name)
def test_the_scripts_are_clean_as_they_stand(path: Path) -> None:
    done = subprocess.run([program("shellcheck"), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "torchrun " in path.read_text()


def test_a_fixed_allocation() -> None:
    script = write_script(SlurmJob(nodes="4", options={"time": "5:00", "nice": ""}))
    found = options(script)
    assert (found["nodes"], found["time"], found["nice"]) == ("4", "5:00", "")
    assert "requeue" in found
    assert "no-kill" not in found


def test_an_elastic_job_with_a_spare() -> None:
    script = write_script(SlurmJob(nodes="2:4", allocate=5))
    assert options(script)["nodes"] == "5"
    assert "no-kill" in options(script)
    assert variables(script, "NNODES", "JOB", "RUN_DIR", "ETCD") == ["2:4", "7", "runs/slurm-7", ""]


def test_an_array_meets_in_etcd() -> None:
    script = write_script(SlurmJob(nodes="1:4", is_array=True, etcd="a:1,b:2", etcd_conf="ca=x", name="big"))
    assert options(script)["array"] == "0-3"
    assert options(script)["nodes"] == "1"
    assert variables(script, "ETCD", "ETCD_CONF", "JOB", "RUN_DIR") == ["a:1,b:2", "ca=x", "big", "runs/slurm-big"]


def test_an_environment_without_a_script_that_activates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """conda's; and `pip install --user` has the programs in a folder of its own."""
    own, users = tmp_path / "my env" / "bin", tmp_path / "local"
    for path in (own / "python3", own / "torchrun", users / "torchrun", users / "elastic-train"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(own.parent))
    monkeypatch.setattr(sys, "executable", str(own / "python3"))
    monkeypatch.setenv("PATH", f"{users}:{os.environ['PATH']}")
    [setup] = variables(write_script(SlurmJob()), "SETUP")
    seen = subprocess.run(
        ["bash", "-c", f"{setup}; type -P python3 torchrun elastic-train"],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert seen.stdout.splitlines() == [str(own / "python3"), str(own / "torchrun"), str(users / "elastic-train")]


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}


def with_programs(folder: Path, **bodies: str) -> dict[str, str]:
    """The environment of a job of two nodes, in which programs of SLURM do this."""
    for name, body in ({"scontrol": "printf 'n1\\nn2\\n'"} | bodies).items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"} | ALLOCATION


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_steps_have_what_setup_has_brought(nodes: str, tmp_path: Path) -> None:
    """Also where sbatch's --export=NONE, by SBATCH_EXPORT perhaps, would hold for srun: it says so by this variable."""
    setup = f"export PATH={tmp_path}:$PATH"
    script = write_script(SlurmJob(nodes=nodes, setup=setup, run_dir=str(tmp_path / "run")))
    seen = tmp_path / "seen"
    env = with_programs(tmp_path, srun=f'echo "$SLURM_EXPORT_ENV" >> {seen}; exit 1')
    env |= {"PATH": os.environ["PATH"], "SLURM_EXPORT_ENV": "NONE"}
    subprocess.run(["bash"], input=script, text=True, timeout=60, check=False, env=env)
    assert seen.read_text().split() == ["ALL"]


@pytest.mark.parametrize("nodes", ["2", "1:2"])
@pytest.mark.parametrize("is_local", [False, True])
def test_the_check_is_told_of_snapshots_that_each_node_keeps(nodes: str, is_local: bool, tmp_path: Path) -> None:
    """By the script itself, where srun only writes down what it is given, and says that the check has failed."""
    script = write_script(
        SlurmJob(
            nodes=nodes, etcd=None if nodes == "2" else "a:1", setup="true", run_dir=str(tmp_path / "run"),
            has_local_snapshots=is_local, flags=["--snapshot-dir", "/scratch/mine"],
        )
    )  # fmt: skip
    env = with_programs(tmp_path, srun=f'printf "%s\\n" "$@" > {tmp_path}/words; exit 1')
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert "something would break the job" in done.stdout, done.stderr
    words = (tmp_path / "words").read_text().splitlines()
    start = words.index("check" if "check" in words else "elastic_train.check")
    arguments = make_parser().parse_args(["check", *words[start + 1 :]])
    assert arguments.local_snapshots is is_local
    assert arguments.flags[-2:] == ["--snapshot-dir", "/scratch/mine"]


ASKED = """\
case "$1 $2" in
"show hostnames") printf 'n1\\nn2\\n';;
"show job") echo "   PreemptEligibleTime=2026-11-28T20:52:13 PreemptTime=$PREEMPTED";;
requeue*) echo "$2" >> "$REQUEUED";;
esac"""


@pytest.mark.parametrize("nodes", ["2", "1:2"])
@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize(
    ("code", "preempted", "requeued"),
    [(1, "2026-11-28T20:52:48", ["7"]), (1, "None", []), (0, "2026-11-28T20:52:48", [])],
)
def test_a_job_that_has_saved_within_a_grace_time_starts_again(
    nodes: str, is_checked: bool, code: int, preempted: str, requeued: list[str], tmp_path: Path
) -> None:
    """Also one that was still being checked. The batch script gets no signal then: SLURM's answer shows it."""
    job = SlurmJob(nodes=nodes, setup="true", run_dir=str(tmp_path / "run"), is_checked=is_checked)
    seen = tmp_path / "requeued"
    srun = f"touch {tmp_path}/run/slurm/7-n1.log; exit {code}"
    env = with_programs(tmp_path, srun=srun, scontrol=ASKED) | {"PREEMPTED": preempted, "REQUEUED": str(seen)}
    done = subprocess.run(["bash"], input=write_script(job), text=True, timeout=60, check=False, env=env)
    assert done.returncode == code
    assert (seen.read_text().split() if seen.exists() else []) == requeued


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_job_of_which_no_node_could_start_its_task_is_no_success(nodes: str, tmp_path: Path) -> None:
    """srun ends with 0 where no slurmd could open the log. The check's log may be there. A percent sign in the name of
    the folder was such a case: to srun it begins a pattern."""
    job = SlurmJob(nodes=nodes, setup="true", run_dir=str(tmp_path / "50%j"))
    seen = tmp_path / "seen"
    env = with_programs(tmp_path, srun=f'printf "%s\\n" "$@" >> {seen}; touch {tmp_path}/50%j/slurm/7-n1.check.log')
    done = subprocess.run(["bash"], input=write_script(job), capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, "no node has started torchrun" in done.stdout) == (1, True), done.stderr
    assert f"--output={tmp_path}/50%%j/slurm/%j-%N.log" in seen.read_text().splitlines()


@pytest.mark.parametrize("nodes", ["2", "1:2"])
@pytest.mark.parametrize("then", ["mv {} {}.before", "mv {} {}.before; ln -s {}.before {}"])
def test_a_job_whose_logs_were_moved_has_not_failed(nodes: str, then: str, tmp_path: Path) -> None:
    """As by --fresh, which moves all that is in the run directory."""
    logs = f"{tmp_path}/run/slurm"
    job = SlurmJob(nodes=nodes, setup="true", run_dir=str(tmp_path / "run"), is_checked=False)
    srun = f'case "$*" in *torchrun*) touch {logs}/7-n1.log; {then.replace("{}", logs)};; esac'
    env = with_programs(tmp_path, srun=srun)
    done = subprocess.run(["bash"], input=write_script(job), capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_slurm_that_does_not_answer_as_the_time_runs_out_ends_no_job(nodes: str, tmp_path: Path) -> None:
    """SLURM itself ends the steps, at the time limit; then the job starts again."""
    job = SlurmJob(nodes=nodes, setup="true", run_dir=str(tmp_path / "run"), is_checked=False)
    (tmp_path / "script").write_text(write_script(job))
    step = f"touch {tmp_path}/step; for _ in $(seq 600); do [ -e {tmp_path}/told ] && break; sleep 0.1; done; exit 1"
    env = with_programs(tmp_path, srun=step, scancel=f"touch {tmp_path}/told; exit 1", scontrol=ASKED)
    env |= {"PREEMPTED": "None", "REQUEUED": str(tmp_path / "requeued")}
    with subprocess.Popen(["bash", str(tmp_path / "script")], env=env) as script:
        wait_until((tmp_path / "step").exists, "step", 60)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(60) == 1
    assert (tmp_path / "requeued").read_text() == "7\n"


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (SlurmJob(nodes="4:1"), "--nodes 4:1"),
        (SlurmJob(nodes="0"), "--nodes 0"),
        (SlurmJob(nodes="many"), "--nodes many"),
        (SlurmJob(nodes="4", allocate=5), "--allocate"),
        (SlurmJob(nodes="4", etcd="a:1"), "--etcd"),
        (SlurmJob(is_array=True), "--array"),
        (SlurmJob(etcd_conf="ca=x"), "--etcd-conf"),
        (SlurmJob(etcd="a:1", etcd_conf="ca=x,cafile=y"), "--etcd-conf: .*knows no cafile"),
        (SlurmJob(options={"": "x"}), "--sbatch"),
        (SlurmJob(etcd="a:1", etcd_conf="user=x,password=y"), "password_file=PATH"),
        (SlurmJob(etcd="a:b"), "'a:b'"),
        (SlurmJob(nodes="2:4", allocate=1), "--allocate 1: training starts with 2"),
        (SlurmJob(options={"comment": "a\n#SBATCH --uid=0"}), "--comment"),
        (SlurmJob(workers=0), "--workers 0"),
        (SlurmJob(has_local_snapshots=True, is_checked=False), "--local-snapshots"),
        (SlurmJob(options={"nodes": "3"}), "--sbatch nodes"),
        (SlurmJob(flags=["--fresh"]), "begin anew"),
        (SlurmJob(flags=["--spawn", "4"]), "--workers says how many"),
        (SlurmJob(flags=["--run-dir=x"]), "--run-dir"),
        (SlurmJob(flags=["--epochz", "3"]), "--epochz"),
        (SlurmJob(flags=["--task", "a:B", "--model", "cnn"]), "--model goes without --task"),
    ],
)
def test_what_cannot_be(job: SlurmJob, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        write_script(job)


def test_an_option_is_replaced_or_added() -> None:
    script = "#!/bin/bash\n#SBATCH --time=1  # limit\n#SBATCH --time-min=1\n\nA=1  # a\n"
    assert set_option(script, "time", "2").splitlines()[1] == "#SBATCH --time=2"
    assert set_option(script, "time", "2").splitlines()[2] == "#SBATCH --time-min=1"
    assert set_option(script, "qos", "x").splitlines()[3] == "#SBATCH --qos=x"
    assert set_variable(script, "A", r"'\1'").splitlines()[-1] == r"A='\1'"


@pytest.mark.parametrize(
    ("value", "line"),
    [("a b", '"a b"'), ("a#b", '"a#b"'), ('a"b\\c', r'"a\"b\\c"'), ("it's", '"it\'s"'), ("0-3%2", "0-3%2")],
)
def test_what_sbatch_would_not_read_as_one_word_is_quoted(value: str, line: str) -> None:
    assert set_option("#SBATCH --time=1\n", "comment", value).splitlines()[1] == f"#SBATCH --comment={line}"


def test_a_dry_run_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", "--nodes", "2", "--dry-run", "--sbatch", "qos=low", "--", "--epochs", "3"]) == 0
    script = capsys.readouterr().out
    assert (options(script)["nodes"], options(script)["qos"]) == ("2", "low")
    assert "FLAGS=(--epochs 3)" in script


@pytest.mark.parametrize("nodes", ["2", "1:2"])
@pytest.mark.parametrize("words", [["my train.py"], ["-m", "package.train"]], ids=["script", "module"])
def test_a_loop_of_ones_own(words: list[str], nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags are known to the program alone: neither submit nor the check may refuse them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "my train.py", tmp_path / "package" / "train.py"):
        path.write_text("import elastic_train\n")
    script = write_script(SlurmJob(nodes=nodes, flags=[*words, "--depth", "a b"], run_dir="run", setup="true"))
    seen = tmp_path / "seen"
    srun = f'touch run/slurm/7-n1.log; case "$*" in *run*) printf "<%s>" "$@" >> {seen}; echo >> {seen};; esac'
    env = with_programs(tmp_path, srun=srun)
    subprocess.run(["bash"], input=script, text=True, timeout=60, check=True, env=env)
    check, training = seen.read_text().splitlines()
    assert check.endswith("<--><--run-dir><run>")
    assert training.endswith("".join(f"<{word}>" for word in (*words, "--run-dir", "run", "--depth", "a b")))


def test_the_flag_of_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", "--local-snapshots", "--dry-run"]) == 0
    assert "\nCHECK_FLAGS=(--local-snapshots)\n" in capsys.readouterr().out


def rows_of_page() -> list[list[str]]:
    """What the page has one type after `elastic-train submit slurm`, as words."""
    table = (DEPLOY / "slurm" / "README.md").read_text().partition("Before the job")[0]
    return [shlex.split(code) for code in re.findall(r"`(--[^`]+)`", table)]


@pytest.mark.parametrize("words", rows_of_page(), ids=" ".join)
def test_every_row_of_the_page_gives_a_script(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slurm", *words, "--dry-run", "--", "--epochs", "300"]) == 0
    script = capsys.readouterr().out
    given = {name.removeprefix("--"): value for name, value in itertools.pairwise(words)}
    given |= dict([given["sbatch"].split("=")] if "sbatch" in given else [])
    for name in options(script).keys() & given.keys() - {"nodes", "array"}:
        assert options(script)[name] == given[name]
    done = subprocess.run([program("shellcheck"), "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("is_in_job", [True, False])
def test_what_a_job_submits_knows_nothing_of_that_job(
    is_in_job: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch hands its environment on. The script would write to the run of that job's array and stop its task, and
    srun would ask for that job's GPUs and memory: `SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive`."""
    of_user = {"SLURM_CONF": "x", "SLURM_JWT": "y", "SLURM_CLUSTERS": "z"}
    of_job = {
        "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1", "SLURM_MEM_PER_CPU": "100",
        "SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2",
    }  # fmt: skip
    environ = with_programs(tmp_path, sbatch=f"env > {tmp_path}/env") | of_user | of_job
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if not is_in_job:
        monkeypatch.delenv("SLURM_JOB_ID")
    assert main(["submit", "slurm"]) == 0
    handed_on = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    names = {name for name in handed_on if name.startswith("SLURM_")}
    assert names == of_user.keys() if is_in_job else names >= of_user.keys() | of_job.keys()


def test_without_slurm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "slurm", "--nodes", "2"]) == 1
    assert "there is no sbatch here" in capsys.readouterr().err
