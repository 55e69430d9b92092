"""The page and the files beside it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradguess_lab.report import sections, write_report
from report.synthetic import diagnosed, record
from report.synthetic import write as write_results

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the training figures: drawing takes most of the time."""
    kept = tuple(entry for entry in sections.SECTIONS if entry.slug != "training")
    assert len(kept) == len(sections.SECTIONS) - 1
    monkeypatch.setattr(sections, "SECTIONS", kept)


@pytest.mark.slow
def test_all_files_are_there(page: Path):
    folder = page.parent
    tables = {path.stem for path in (folder / "tables").glob("*.csv")}
    assert {"claims", "choice-of-k", "ranks", "bias-variance", "scaling", "newton-schulz", "preconditioning"} <= tables
    assert tables == {path.stem for path in (folder / "tables").glob("*.tex")}
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert {"scaling", "overlap-128", "overlap-512", "training-mnist1d-mlp-3-128-train-loss"} <= figures
    assert figures == {path.stem for path in (folder / "figures").glob("*.svg")}
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.slow
def test_the_page_needs_no_network(page: Path):
    content = page.read_text()
    for tag, attributes in Tags(content).found:
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:")), (tag, target)
    assert not re.search(r"url\((?!#)|@import", content)


@pytest.mark.usefixtures("plain")
def test_names_from_results_are_inert(tmp_path: Path):
    results = [diagnosed(record(key=EVIL)), record("wt", key="b", data=EVIL), record(EVIL, key="c")]
    results[1]["environment"] = {"device": EVIL}
    page = write_report(write_results(tmp_path, results))
    content = page.read_text()
    tags = Tags(content).found
    assert [tag for tag, _ in tags].count("script") == 1
    assert not [tag for tag, attributes in tags if tag == "img" or "onerror" in attributes]
    assert "&lt;script&gt;alert(1)" in content
