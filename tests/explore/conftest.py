"""The explorable page in a real browser, opened from its file and without network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browser as real

PAGE = Path(__file__).parents[2] / "docs" / "explore" / "explore.html"
Visit = Callable[..., tuple[Any, list[str]]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed after each module."""
    with real.opened() as found:
        yield found


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """Opens the page, and returns the tab and the list of what it complains about."""
    tabs = []

    def open_page(width: int = 1200, **settings: Any) -> tuple[Any, list[str]]:
        tab, complaints = real.visit(browser, PAGE, width, **settings)
        tabs.append(tab)
        return tab, complaints

    yield open_page
    for tab in tabs:
        tab.context.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    """The page, for tests that only call its functions."""
    tab = browser.new_page()
    tab.goto(PAGE.as_uri())
    return tab
