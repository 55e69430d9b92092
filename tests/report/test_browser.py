"""The page opens in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import opened, visit


@pytest.mark.slow
def test_it_opens_without_complaint_and_every_figure_is_there(page: Path):
    with opened() as browser:
        tab, complaints = visit(browser, page)
        figures = [figure.locator("svg").bounding_box() for figure in tab.locator("figure").all()]
        assert len(figures) == len(list((page.parent / "figures").glob("*.svg")))
        assert all(box["width"] > 200 and box["height"] > 150 for box in figures)
        assert complaints == []
