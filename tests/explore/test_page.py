"""The explorable page is made of its parts, stands alone, and opens."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explore" / "explore.html"


def test_the_page_is_made_of_its_parts_and_stands_alone():
    page = PAGE.read_text(encoding="utf-8")
    assert page == runpy.run_path(str(ROOT / "scripts" / "build_explore.py"))["built"]()
    assert not [words for words in ("http:", "https:", "src=") if words in page]


@pytest.mark.slow
def test_it_opens_without_complaint_and_without_network(browser):
    tab, complaints = browser.new_context(offline=True).new_page(), []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: complaints.append(request.url) if PAGE.name not in request.url else None)
    tab.goto(PAGE.as_uri())
    for name in ("cloud", "space", "plane", "curves"):
        assert tab.locator(f"#{name} svg").bounding_box()["width"] > 200
    tab.click("#step")
    assert tab.inner_text("#race-steps") == "1"
    assert complaints == []
