"""A real browser for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def opened() -> Iterator[Any]:
    """Skips the test where there is none. While it is open, no other test can start an event loop."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def visit(browser: Any, page: Path, width: int = 1200, **settings: Any) -> tuple[Any, list[str]]:
    """The page opened without network, and what it complains about."""
    context = browser.new_context(viewport={"width": width, "height": 844}, offline=True, **settings)
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda request: complaints.append(request.url))
    tab.on("request", lambda request: complaints.append(request.url) if page.name not in request.url else None)
    tab.goto(page.as_uri())
    return tab, complaints
