"""The undisturbed run of a drill, and when one of an earlier drill will do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.tools.drills.reference import ReferenceFailed, cache_directory, cache_key, undisturbed


def test_only_what_flags_alone_decide_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_directory().mkdir(parents=True)
    flags = ["--no-such-flag"]
    for given in (flags, [*flags, "--init-from=weights.pt"]):
        (cache_directory() / f"{cache_key(given)}.json").write_text(json.dumps({"step": 3}))
    assert undisturbed(flags, is_own_task=False, cwd=tmp_path) == {"step": 3}
    with pytest.raises(ReferenceFailed, match="no-such-flag"):  # so it was run
        undisturbed([*flags, "--init-from=weights.pt"], is_own_task=False, cwd=tmp_path)
