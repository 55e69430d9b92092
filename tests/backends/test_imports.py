"""`backends` and `linalg` lie at the bottom: what they may import, and that `linalg` knows no device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gradguess.backends
import gradguess.linalg

ALLOWED = {
    gradguess.backends: ("gradguess.backends", "gradguess.errors"),
    gradguess.linalg: ("gradguess.linalg", "gradguess.backends", "gradguess.errors"),
}
FILES = [(package, path) for package in ALLOWED for path in sorted(Path(package.__file__).parent.glob("*.py"))]


def imported(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import from gradguess in a file."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [(n.module or "", alias.name) for n in tree if isinstance(n, ast.ImportFrom) for alias in n.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "gradguess"]


@pytest.mark.parametrize(("package", "path"), FILES, ids=lambda value: getattr(value, "stem", None))
def test_a_file_imports_only_what_lies_below_it(package, path):
    for module, name in imported(path):
        assert module.startswith(ALLOWED[package]), f"{path.name} imports {module}"
        assert not name.startswith("_"), f"{path.name} imports {name}, which is private"


@pytest.mark.parametrize("path", [path for package, path in FILES if package is gradguess.linalg], ids=lambda p: p.stem)
def test_linalg_knows_no_device(path):
    words = {n.attr for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute)}
    assert not words & {"is_cuda", "cuda", "usable", "is_cpu"}


@pytest.mark.parametrize("path", [path for _, path in FILES], ids=lambda p: p.stem)
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
