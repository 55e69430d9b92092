"""The explorable page in a real browser, opened from its file and without network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import opened

PAGE = Path(__file__).parents[2] / "docs" / "explore" / "explore.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed after each module."""
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    """The page, for tests that only call its functions."""
    tab = browser.new_page()
    tab.goto(PAGE.as_uri())
    return tab
