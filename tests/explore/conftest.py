"""The explorable page in a real browser, opened from its file and without network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "explore" / "explore.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed after each module: while it is open, no other test can start an event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=[*flags, "--disable-component-update"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    """The page, for tests that only call its functions."""
    tab = browser.new_page()
    tab.goto(PAGE.as_uri())
    return tab
