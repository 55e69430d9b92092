"""The documentation site, without building it: `make docs` builds it. Its packages need not be installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC = ("gradguess", "gradguess.guesses", "gradguess.online", "gradguess.baselines")
OURS = {"gradguess.online.later.Later"}  # classes that users get and do not make
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "scripts" / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


hooks, check = script("hooks"), script("check")


# --- the hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("guesses.md", "../CONTRIBUTING.md#style", "contributing.md#style"),
        ("streams.md", "../examples/online_agent.py", "examples/online_agent.md"),
        ("api/guesses.md", "../../CONTRIBUTING.md", "../contributing.md"),
        ("contributing.md", "docs/glossary.md", "glossary.md"),
        ("changelog.md", "CONTRIBUTING.md", "contributing.md"),
        ("index.md", "../LICENSE", "files/LICENSE"),
        ("guesses.md", "sites.md#branches", "sites.md#branches"),
        ("guesses.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("guesses.md", "no-such.md", "no-such.md"),  # MkDocs reports it
    ],
)
def test_links_hold_inside_the_site(page: str, link: str, expected: str):
    assert hooks.relinked(page, f"see [this]({link}).") == f"see [this]({expected})."


# --- the check of what was built -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="b.html#not">', "no such anchor"),
        ('<a href="c.html">', "no such file"),
        ('<a href="#not">', "no such anchor"),
        ('<img src="c.png">', "no such file"),
        ('<a href="https://example.org">', None),
        ('<script src="https://example.org/a.js"></script>', "loads https"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads //"),
        ('<link rel="canonical" href="https://example.org">', None),
    ],
)
def test_what_is_wrong_with_a_site_is_found(body: str, fault: str | None, tmp_path: Path, capsys: Any):
    (tmp_path / "index.html").write_text(body, encoding="utf-8")
    (tmp_path / "b.html").write_text('<h2 id="there">', encoding="utf-8")
    assert check.main(tmp_path) == (0 if fault is None else 1)
    said = capsys.readouterr().out
    assert (fault or "2 pages") in said


# --- the reference -------------------------------------------------------------------------------------------


def public_names() -> dict[str, Any]:
    """Where each public name is defined, without the modules among them."""
    found = [getattr(module, name) for module in map(importlib.import_module, PUBLIC) for name in module.__all__]
    return {f"{one.__module__}.{one.__name__}": one for one in found if not inspect.ismodule(one)}


def test_the_reference_has_every_public_name():
    listed = set(re.findall(r"^::: ([\w.]+)$", REFERENCE, flags=re.MULTILINE))
    assert public_names().keys() - listed == set()
    assert [path for path in sorted(listed) if importlib.util.find_spec(path.rpartition(".")[0]) is None] == []


@pytest.mark.parametrize("path", [path for path in public_names() if path not in OURS])
def test_every_argument_is_explained(path: str):
    one = public_names()[path]
    if inspect.isclass(one) and issubclass(one, Exception):
        return
    text = inspect.getdoc(one) or ""
    names = [name for name in inspect.signature(one).parameters if name not in ("args", "kwargs")]
    assert [name for name in names if not re.search(rf"^ +{name}: \S", text, flags=re.MULTILINE)] == []
