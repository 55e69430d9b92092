"""The order of the packages: each imports those above it, and devices, private names and the user's model stay put."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import gradguess

ROOT = Path(gradguess.__file__).parent
ORDER = (
    "errors; backends; linalg noise; layers; model; jacobian; guesses; passes; step; methods; baselines; compile; "
    "estimate; captured_step; diagnose; online; advise; front; gradguess; integrations; __main__"
)
RANK = {name: rank for rank, names in enumerate(ORDER.split("; ")) for name in names.split()}
CORE = {name for name, rank in RANK.items() if rank < RANK["gradguess"]}

LINES = 350  # in a file of the core
RUNS = 4  # places that run the user's model
DEVICE = re.compile(r"""\bis_cuda\b|\.type\s*[=!]=\s*["']cuda["']|["']cuda["']|\bcuda\.is_|\busable\(""")
RUN = re.compile(r"\.outputs\(|functional_call\(")


def part_of(path: Path) -> str:
    """The package or module at the top level to which a file belongs; "gradguess" for what stands above them."""
    first = path.relative_to(ROOT).parts[0]
    return "gradguess" if first == "__init__.py" else first.removesuffix(".py")


FILES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
CORE_FILES = {path: source for path, source in FILES.items() if part_of(path) in CORE}


def module_of(path: Path) -> str:
    return ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import from gradguess, those for type checking too; name is "" for a whole module."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(FILES[path])):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            whole = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            found += [(name, "") if name in MODULES else (str(node.module), alias) for name, alias in whole]
    return [(module, name) for module, name in found if module.split(".")[0] == ROOT.name]


def allowed(part: str, module: str) -> bool:
    other = [*module.split("."), "gradguess"][1]
    return other == part or (other in RANK and RANK[other] < RANK[part])


def lines_with(pattern: re.Pattern[str], path: Path) -> list[str]:
    """Places in the code without docstrings and comments: prose may name a device."""
    lines = FILES[path].splitlines()
    for node in ast.walk(ast.parse(FILES[path])):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * ((text.end_lineno or 0) - text.lineno + 1)
    found = [number for number, line in enumerate(lines, 1) if pattern.search(line.partition("  #")[0])]
    return [f"{path.relative_to(ROOT)}:{number}" for number in found]


def test_every_part_has_its_place():
    assert {part_of(path) for path in FILES} == RANK.keys()


def test_imports_follow_the_order():
    assert [(str(p), m) for p in FILES for m, _ in imports(p) if not allowed(part_of(p), m)] == []


def test_the_library_does_without_the_lab():
    using = {path.name for path, source in FILES.items() if re.search(r"(import|from) gradguess_lab", source)}
    assert using == {"__main__.py"}  # the command


def test_no_private_name_crosses_modules():
    crossing = [
        (str(path), other, name)
        for path in CORE_FILES
        for other, name in imports(path)
        if other != module_of(path) and re.search(r"(^|\.)_(?!_version__$)", f"{other}.{name}")
    ]
    assert crossing == []


def test_files_are_short():
    assert [str(path) for path, source in CORE_FILES.items() if len(source.splitlines()) > LINES] == []


def test_devices_are_named_in_one_package():
    assert [place for path in CORE_FILES if part_of(path) != "backends" for place in lines_with(DEVICE, path)] == []


def test_few_places_run_the_users_model():
    places = [place for path in CORE_FILES if path != ROOT / "model" / "task.py" for place in lines_with(RUN, path)]
    assert 0 < len(places) <= RUNS, places
