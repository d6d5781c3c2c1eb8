"""The Python files that a program of the user's is made of, found without running it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""folders of packages that have versions"""


def digests(code: Sequence[str], cwd: Path) -> dict[str, str]:
    """Path -> SHA-256 of a script, or of `-m` and a module, and of all that it imports, early or late, from its folder
    (a module's: `cwd`), from PYTHONPATH, and from where the module lies. Without elastic_train, and without what is
    installed; empty for no code."""
    if not code:
        return {}
    *is_module, name = code
    first = cwd if is_module else (cwd / name).parent
    given = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = [first, *given, *(_folders_of(name) if is_module else ())]
    path = [str(folder) for folder in folders if INSTALLED.isdisjoint(folder.parts)]
    finder = ModuleFinder(path=path, excludes=["elastic_train"])
    with suppress(ImportError, SyntaxError):  # the program itself says that
        if is_module:
            finder.import_hook(name)
        else:
            finder.run_script(str(cwd / name))
    modules: dict[str, Any] = finder.modules
    files = {Path(module.__file__) for module in modules.values() if module.__file__}
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def _folders_of(module: str) -> Iterator[Path]:
    """Where its top package is found: one that is installed to be edited lies elsewhere than here."""
    spec = find_spec(module.partition(".")[0])
    for folder in (spec.submodule_search_locations or []) if spec is not None else ():
        yield Path(folder).parent
    if spec is not None and spec.origin is not None and not spec.submodule_search_locations:
        yield Path(spec.origin).parent
