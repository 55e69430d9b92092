"""The explorable page in a real browser, opened from its file and without network."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "explore" / "explore.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
Visit = Callable[..., tuple[Any, list[str]]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed after each module: while it is open, no other test can start an event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """Opens the page, and returns the tab and the list of what it complains about."""
    contexts = []

    def open_page(width: int = 1200, **settings: Any) -> tuple[Any, list[str]]:
        context = browser.new_context(viewport={"width": width, "height": 844}, offline=True, **settings)
        contexts.append(context)
        tab = context.new_page()
        complaints: list[str] = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: complaints.append(request.url) if "explore.html" not in request.url else None)
        tab.goto(PAGE.as_uri())
        return tab, complaints

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    """The page, for tests that only call its functions."""
    tab = browser.new_page()
    tab.goto(PAGE.as_uri())
    return tab
