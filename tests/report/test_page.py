"""The page and the files beside it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradguess_lab.report.write import write_report
from report.synthetic import diagnosed, paper_records, record, write

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Every tag with its attributes."""
    found: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.append((tag, dict(attrs)))  # type: ignore[method-assign]
    parser.feed(page)
    return found


@pytest.mark.slow
def test_all_files_are_there_and_the_page_needs_no_network(tmp_path: Path):
    page = write_report(write(tmp_path, paper_records()))
    folder = page.parent
    tables = {path.stem for path in (folder / "tables").glob("*.csv")}
    assert {"claims", "choice-of-k", "ranks", "bias-variance", "scaling", "newton-schulz", "preconditioning"} <= tables
    assert tables == {path.stem for path in (folder / "tables").glob("*.tex")}
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert {"scaling", "overlap-128", "overlap-512", "training-mnist1d-mlp-3-128-train-loss"} <= figures
    assert figures == {path.stem for path in (folder / "figures").glob("*.svg")}
    content = page.read_text()
    for tag, attributes in tags(content):
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:")), (tag, target)
    assert not re.search(r"url\((?!#)|@import", content)


def test_names_from_results_are_inert(tmp_path: Path):
    results = [diagnosed(record(key=EVIL)), record("wt", key="b", data=EVIL), record(EVIL, key="c")]
    results = [{**one, "history": []} for one in results]  # drawing takes most of the time
    results[1]["environment"] = {"device": EVIL}
    content = write_report(write(tmp_path, results)).read_text()
    found = tags(content)
    assert [tag for tag, _ in found].count("script") == 1
    assert not [tag for tag, attributes in found if tag == "img" or "onerror" in attributes]
    assert "&lt;script&gt;alert(1)" in content
