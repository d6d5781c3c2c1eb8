"""Every file of deploy/ is of a kind that a test checks, is used, and has links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.tools import DEPLOY

CHECKED_BY = {
    r".*\.ya?ml": "yamllint, and its own schema",
    r"slurm/autoscale\.py": "test_autoscale.py, and a real SLURM",
    r"slurm/\w+\.sbatch": "shellcheck, and a real SLURM",
    r"docker/Dockerfile(\.dockerignore)?": "hadolint",
    r"monitoring/dashboard\.json": "test_monitoring.py",
    r"README\.md": "test_security.py",
    r"[a-z]+/README\.md": "the links, here",
}
FILES = sorted(
    str(path.relative_to(DEPLOY))
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.parent.name != "__pycache__"  # Python's own, of autoscale.py
)


@pytest.mark.parametrize("file", FILES)
def test_it_is_of_a_kind_that_is_checked(file: str) -> None:
    assert any(re.fullmatch(kind, file) for kind in CHECKED_BY)


def used_by(kustomization: Path) -> set[Path]:
    """The files that come together in an overlay."""
    yaml = pytest.importorskip("yaml")
    content: dict[str, Any] = yaml.safe_load(kustomization.read_text())
    found = {kustomization}
    for name in content["resources"]:
        path = (kustomization.parent / name).resolve()
        found |= used_by(path / "kustomization.yaml") if path.is_dir() else {path}
    return found


def test_every_manifest_is_used_by_an_overlay() -> None:
    """And so built and validated."""
    overlays = (DEPLOY / "kubernetes" / "overlays").glob("*/kustomization.yaml")
    used = set().union(*(used_by(path.resolve()) for path in overlays))
    assert used == {path.resolve() for path in (DEPLOY / "kubernetes").rglob("*.yaml")}


@pytest.mark.parametrize("page", sorted(DEPLOY.glob("*/README.md")), ids=lambda page: page.parent.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    root = DEPLOY.parent
    paths = {path for path in re.findall(r"\b(?:deploy|tests|elastic_train)/[\w./-]*\w", text) if "NAME" not in path}
    # The same beginning is also that of keys in etcd.
    missing = {path for path in paths if not (root / path).exists() and not path.startswith("elastic_train/run-")}
    assert not missing
    assert f"deploy/{page.parent.name}/README.md" in (root / "README.md").read_text()


def test_the_five_pages_are_those_of_the_readme() -> None:
    linked = set(re.findall(r"\]\(deploy/(\w+)/README\.md\)", (DEPLOY.parent / "README.md").read_text()))
    assert linked == {path.name for path in DEPLOY.iterdir() if path.is_dir()}
