"""The documentation: its code runs, and its links lead somewhere. `report/test_agreement.py` checks its numbers."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXTRAS = ("accelerate", "lightning", "peft", "transformers")  # a block that needs one of them may be left out
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore::Warning:lightning.*")  # what Lightning says of itself
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_every_block_of_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__docs__"}
    missing, left_out = [package for package in EXTRAS if find_spec(package) is None], []
    with torch.random.fork_rng():
        for number, block in enumerate(blocks(page)):
            try:
                exec(compile(block, f"{name(page)}, block {number}", "exec", dont_inherit=True), scope)
            except ImportError:
                if not missing:
                    raise
                left_out.append(number)
    if left_out:
        pytest.skip(f"blocks {left_out} were left out, for want of {missing}; the others ran")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name(page)} links to {path}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{name(page)} links to #{anchor} of {name(found)}"


def test_the_architecture_names_every_module_and_nothing_else():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:gradguess/)?(\w+\.py)`", text))
    there = {path.name for path in (ROOT / "src" / "gradguess").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert named == there


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_is_named_exists(page: Path):
    """A path in backticks with a slash is a file or a folder of the package, or of the repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"`([\w.]+(?:/[\w.]+)*/(?:\w+\.(?:py|json|md))?)`", text):
        places = [ROOT / path, ROOT / "src" / "gradguess" / path, ROOT / "src" / "gradguess" / "experiments" / path]
        made = path.startswith("build/")  # by a command
        assert made or any(place.exists() for place in places), f"{name(page)} names {path}"


def test_the_architecture_names_every_package():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "gradguess").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^\| `(\w+)/`", text, flags=re.MULTILINE))
