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

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC = ("gradguess", "gradguess.guesses", "gradguess.online", "gradguess.baselines")
OURS = {"gradguess.online.step.Later"}  # classes that users get and do not make
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


class Loader(yaml.SafeLoader):
    """Reads a tag such as `!ENV` as the value behind it."""


Loader.add_multi_constructor("!", lambda loader, tag, node: loader.construct_sequence(node))
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def entries(nav: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in entries(part)]


NAV = entries(CONFIG["nav"])


def strings(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in strings(one)]
    return [value] if isinstance(value, str) else []


# --- the navigation ------------------------------------------------------------------------------------------


def test_entries_of_the_navigation_exist():
    assert [page for page in NAV if not (DOCS / page).is_file() and page not in hooks.MADE] == []
    assert len(set(NAV)) == len(NAV)


def test_every_page_is_in_the_navigation():
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert (pages | set(hooks.MADE)) - set(NAV) == set()


def test_files_of_the_configuration_exist():
    files = [*CONFIG["hooks"], *CONFIG["watch"], *(f"docs/{name}" for name in CONFIG["extra_css"])]
    files += [f"docs/{name}" for name in CONFIG["extra"]["polyfills"]]
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_a_warning_is_an_error():
    (built,) = re.findall(r"mkdocs build (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert "--strict" in built
    assert "quiet" not in built  # MkDocs then counts no warnings
    assert {*CONFIG["validation"]["nav"].values(), *CONFIG["validation"]["links"].values()} == {"warn"}


# --- nothing from elsewhere ----------------------------------------------------------------------------------


def test_the_site_loads_nothing_from_elsewhere():
    assert CONFIG["theme"]["font"] is False
    assert [text for text in strings(CONFIG) if "://" in text] == []
    for path in [*DOCS.rglob("*.md"), *(DOCS / "assets").iterdir()]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"!\[[^]]*\]\(\w+://|src=[\"']?\w*:?//|url\(|@import", text), path


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


def test_files_that_pages_link_to_are_found():
    text = "[a](../LICENSE) [b](sites.md) [c](https://example.org) `[d](../CITATION.cff)`\n```\n[e](../Makefile)\n```\n"
    assert hooks.outside(DOCS / "index.md", text) == {ROOT / "LICENSE"}


def test_markdown_of_github_is_that_of_the_site():
    page = "Say:\n- one\n  more\n- two\n  - inner\n\n<!-- name -->\n| a |\n<!-- end -->\n```\ncode:\n- no list\n```"
    expected = "Say:\n\n- one\n  more\n- two\n    - inner\n\n\n| a |\n\n```\ncode:\n- no list\n```"
    assert hooks.for_python_markdown(page) == expected


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml")
    made = hooks.on_page_content(r'<p><span class="arithmatex">\(a &lt; b\)</span></p>', None, None, None)
    assert re.fullmatch(r"<p><math.*<mi>a</mi>.*(?:&lt;|&#x0003C;).*<mi>b</mi>.*</math></p>", made)
    assert 'display="block"' in hooks.on_page_content(r'<div class="arithmatex">\[a\]</div>', None, None, None)


def test_formulas_are_spaced_as_latex_spaces_them():
    pytest.importorskip("latex2mathml")
    formula = r'<span class="arithmatex">\(z \sim \tilde W^\top \operatorname{Cov}(y) \lVert g \rVert^2\)</span>'
    made = hooks.on_page_content(formula, None, None, None)
    assert all(right in made for right in ("<mo>&#x0223C;</mo>", "<mi>&#x022A4;</mi>", "<mi>Cov</mi>"))
    assert '<mover accent="true"><mi>W</mi>' in made
    assert made.count('<mo stretchy="false">&#x02016;</mo>') == 2


def test_the_page_of_the_command_line_has_every_option():
    pytest.importorskip("typer")
    from gradguess_lab.config import TrainConfig

    page = hooks.commands()
    heads = re.findall(r"^## gradguess (\w+)$", page, flags=re.MULTILINE)
    assert set(heads) >= {"train", "reproduce", "report", "diagnose", "stream", "bench", "compare"}
    train = page.split("## gradguess train")[1].split("\n## ")[0]
    options = {f"`--{name.replace('_', '-')}`" for name in TrainConfig.__dataclass_fields__}
    assert [option for option in sorted(options) if option not in train] == []
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| option")]
    assert [line for line in rows if not re.fullmatch(r"\| `.+` \| [^|]*\| \S.* \|", line)] == []


def test_examples_of_docstrings_become_code():
    pytest.importorskip("griffe")
    made = script("doctests").fenced("Adds.\n\n>>> 1 + 1\n2\n\nNo more.")
    assert made == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nNo more."


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
