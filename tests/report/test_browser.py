"""The page in a real browser: it opens, sorts, fits a phone and has a dark side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import opened, visit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened() as found:
        yield found


def test_it_opens_without_complaint_and_every_figure_is_there(browser: Any, page: Path):
    tab, complaints = visit(browser, page)
    figures = tab.locator("figure").all()
    assert len(figures) == len(list((page.parent / "figures").glob("*.svg")))
    for figure in figures:
        box = figure.locator("svg").bounding_box()
        assert box["width"] > 200
        assert box["height"] > 150
    assert complaints == []


def column(tab: Any, table: str, title: str) -> list[str]:
    titles = tab.locator(f"#table-{table} th").all_inner_texts()
    index = [words.strip() for words in titles].index(title) + 1
    return tab.locator(f"#table-{table} td:nth-child({index})").all_inner_texts()


def test_clicking_a_title_sorts_by_it(browser: Any, page: Path):
    tab, complaints = visit(browser, page)
    heading = tab.locator("#table-scaling th", has_text="Ours")
    heading.locator("button").click()
    up = column(tab, "scaling", "Ours")
    assert up[-1] == "–"  # what was not run stays last
    assert [float(x) for x in up[:-1]] == sorted(float(x) for x in up[:-1])
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").click()
    down = column(tab, "scaling", "Ours")
    assert down == [*reversed(up[:-1]), "–"]
    tab.locator("#table-scaling th", has_text="Method").locator("button").press("Enter")
    names = column(tab, "scaling", "Method")
    assert names[0] == "Activation perturbation"
    assert complaints == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_it_fits_a_narrow_screen(browser: Any, page: Path, width: int):
    tab, _ = visit(browser, page, width)
    for details in tab.locator("details").all():
        details.evaluate("node => node.open = true")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    scrolls = tab.locator("#table-scaling .scroll").evaluate("node => node.scrollWidth > node.clientWidth")
    assert scrolls or width > 500


def luminance(tab: Any, selector: str, name: str) -> float:
    colour = tab.locator(selector).first.evaluate(f"node => getComputedStyle(node).{name}")
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_dark_mode_is_dark_and_figures_follow(browser: Any, page: Path, tmp_path: Path):
    label = "#figure-scaling svg text"
    for scheme, ground_is_light in (("light", True), ("dark", False)):
        tab, _ = visit(browser, page, color_scheme=scheme)
        ground, ink = luminance(tab, "body", "backgroundColor"), luminance(tab, label, "fill")
        assert (ground > 0.9) is ground_is_light
        assert (ink < 0.2) is ground_is_light
        picture = tmp_path / f"{scheme}.png"
        tab.screenshot(path=picture, full_page=True)
        assert picture.stat().st_size > 50_000
