"""The order of the packages: each imports those above it, and devices, private names and the user's model stay put."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import gradguess

ROOT = Path(gradguess.__file__).parent
ORDER = [
    {"errors"},
    {"backends"},
    {"linalg", "noise"},
    {"layers"},
    {"model"},
    {"jacobian"},
    {"guesses"},
    {"passes"},
    {"step"},
    {"methods"},
    {"baselines"},
    {"estimate"},
    {"captured_optimiser"},
    {"captured_step"},
    {"diagnose"},
    {"online"},
    {"advise"},
    {"front"},
    {""},  # gradguess itself
    {"integrations"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
CORE = {name for name, rank in RANK.items() if rank < RANK[""]}
OUTSIDE = {"integrations"}  # these alone may use `gradguess.extras`
RANK |= {"__main__": len(ORDER), "extras": RANK["backends"]}

LINES = 300  # in a file of the core
RUNS = 4  # places that run the user's model
DEVICE = re.compile(r"""\bis_cuda\b|\.type\s*[=!]=\s*["']cuda["']|["']cuda["']|\bcuda\.is_|\busable\(""")
RUN = re.compile(r"\.outputs\(|functional_call\(")


def part_of(path: Path) -> str:
    """The package or module at the top level to which a file belongs; "" for gradguess itself."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)
CORE_FILES = [path for path in FILES if part_of(path) in CORE]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def modules() -> frozenset[str]:
    """The dotted names of all modules and packages."""
    return frozenset(".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES) | {
        ".".join((ROOT.name, *path.parent.relative_to(ROOT).parts)) for path in FILES if path.name == "__init__.py"
    }


def imports(source: str) -> list[tuple[str, str]]:
    """(module, name) of every import from gradguess, those for type checking too; name is "" for a whole module."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            whole = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            found += [(name, "") if name in modules() else (str(node.module), alias) for name, alias in whole]
    return [(module, name) for module, name in found if module.split(".")[0] == ROOT.name]


def top(module: str) -> str:
    """'gradguess.step.base' -> 'step'; 'gradguess' -> ''."""
    return [*module.split("."), ""][1]


def out_of_order(part: str, source: str) -> list[str]:
    """What a file of this part must not import."""

    def allowed(other: str) -> bool:
        if other == part:
            return True
        if other == "extras":
            return part in OUTSIDE
        return other in RANK and RANK[other] < RANK[part]

    return [module for module, _ in imports(source) if not allowed(top(module))]


def private(module: str, source: str) -> list[str]:
    """Names with a leading underscore that come from another module."""
    return [
        f"{other}.{name}" if name else other
        for other, name in imports(source)
        if other != module and any(word.startswith("_") and word != "__version__" for word in [*other.split("."), name])
    ]


def code(source: str) -> list[str]:
    """The lines without docstrings and comments: prose may name a device."""
    lines = source.splitlines()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            for i in range(text.lineno - 1, text.end_lineno or text.lineno):
                lines[i] = ""
    return [line.partition("  #")[0] for line in lines]


def naming(pattern: re.Pattern[str], source: str) -> list[int]:
    return [number for number, line in enumerate(code(source), 1) if pattern.search(line)]


# --- the tree ------------------------------------------------------------------------------------------------


def test_every_part_has_its_place():
    assert {part_of(path) for path in FILES} == RANK.keys()


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_imports_follow_the_order(path: Path):
    assert out_of_order(part_of(path), path.read_text(encoding="utf-8")) == []


def test_the_library_does_without_the_lab():
    using = {path.name for path in FILES if re.search(r"(import|from) gradguess_lab", path.read_text(encoding="utf-8"))}
    assert using == {"__main__.py"}  # the command


@pytest.mark.parametrize("path", CORE_FILES, ids=shown)
def test_no_private_name_crosses_modules(path: Path):
    module = ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts))
    assert private(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", CORE_FILES, ids=shown)
def test_files_are_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES


@pytest.mark.parametrize("path", [path for path in CORE_FILES if part_of(path) != "backends"], ids=shown)
def test_devices_are_named_in_one_package(path: Path):
    assert naming(DEVICE, path.read_text(encoding="utf-8")) == []


def test_few_places_run_the_users_model():
    places = [
        f"{shown(path)}:{number}"
        for path in CORE_FILES
        if shown(path) != "model/task.py"
        for number in naming(RUN, path.read_text(encoding="utf-8"))
    ]
    assert 0 < len(places) <= RUNS, places


# --- that these tests see what they are for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "line", "found"),
    [
        ("layers", "from gradguess.model.site import Site", ["gradguess.model.site"]),
        ("step", "if TYPE_CHECKING:\n    from gradguess.methods import Method", ["gradguess.methods"]),
        ("step", "def f():\n    import gradguess.methods.run", ["gradguess.methods.run"]),
        ("step", "from gradguess import estimate", ["gradguess.estimate"]),
        ("step", "import gradguess as gg", ["gradguess"]),
        ("estimate", "from gradguess.captured_step import CapturedStep", ["gradguess.captured_step"]),
        ("experiments", "from gradguess.task import Task", ["gradguess.task"]),  # there is no such module
        ("integrations", "import gradguess as gg", []),
        ("methods", "from gradguess.extras import require", ["gradguess.extras"]),
        ("integrations", "from gradguess.extras import require", []),
        ("step", "from gradguess.step.base import Step\nfrom gradguess.errors import InputError", []),
        ("passes", "from gradguess.jacobian import CutGraph\nimport torch", []),
    ],
)
def test_an_import_that_is_out_of_order_is_seen(part, line, found):
    assert out_of_order(part, line) == found
