"""On other systems than Linux: one clear line, and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elastic_train
from elastic_train import __main__
from elastic_train.errors import UnsupportedSystem


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows"), ("freebsd15", "freebsd15")])
def test_a_worker_says_what_it_needs(
    platform: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "argv", ["elastic_train"])
    assert __main__.main() == 1
    out = capsys.readouterr().err
    assert out.count("\n") == 1
    assert f"training needs Linux, and this is {name}" in out


def test_a_script_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_fcntl(name: str) -> None:
        raise ModuleNotFoundError("No module named 'fcntl'", name="fcntl")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(elastic_train, "import_module", without_fcntl)
    with pytest.raises(UnsupportedSystem, match="Windows"):
        _ = elastic_train.run


def test_a_command_that_needs_more_than_windows_has() -> None:
    program = (
        "import sys; sys.modules['fcntl'] = None; from elastic_train.cli import main; sys.exit(main(['audit', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr == "elastic-train: error: this command needs Linux or macOS: use WSL2\n"
