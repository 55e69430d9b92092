"""The pages of the methods: every method has one, all have the same sections, and pictures are those of the library."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gradguess as gg
from gradguess_lab.compare.contenders import CONTENDERS
from gradguess_lab.methods import METHODS
from gradguess_lab.streams.config import RULES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures" / "methods"
INDEX = ROOT / "docs" / "methods" / "index.md"
PAGES = sorted(set(INDEX.parent.glob("*.md")) - {INDEX})
SECTIONS = [
    "Definition",
    "Picture of what it guesses",
    "Bias and variance",
    "Cost",
    "When to use it, and when not",
    "API",
    "Reference",
]
LARGEST = 60_000  # bytes of a picture
ROUNDING = 0.11  # of a coordinate: one unit of its last digit
CONTRAST = 2.9  # of every colour, on a light and on a dark page
LIGHT, DARK = "#ffffff", "#1e2129"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """`scripts/make_method_pictures.py` as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import make_method_pictures

        yield make_method_pictures
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    """The lines of the index by the name in the first cell: link, one line, unbiased, sent back, cost."""
    found = re.findall(r"^\| \[`([\w.-]+)`\]\(([\w-]+\.md)\) \| (.*) \|$", read(INDEX), flags=re.MULTILINE)
    return {name: [link, *cells.split(" | ")] for name, link, cells in found}


def same(one: str, other: str) -> bool:
    """The same drawing up to rounding: words agree, and numbers up to one unit of the last digit."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= ROUNDING for a, b in pairs)


def test_the_pictures_are_those_that_the_script_makes(script: ModuleType):
    before = torch.get_rng_state()
    made = script.pictures()
    assert torch.equal(torch.get_rng_state(), before)
    assert {path.stem for path in FOLDER.iterdir()} == set(made)
    stale = [name for name, text in made.items() if not same(read(FOLDER / f"{name}.svg"), text)]
    assert not stale, "run `python scripts/make_method_pictures.py`"


def test_another_drawing_is_seen():
    assert same("<a x='1.5'/>", "<a x='1.6'/>")
    assert not same("<a x='1.5'/>", "<a x='1.7'/>")
    assert not same("<a x='1.5'/>", "<b x='1.5'/>")


def test_clouds_have_the_mean_that_is_drawn(script: ModuleType):
    """Within five standard errors, from the variance that the picture states."""
    from method_pictures import samples

    with torch.random.fork_rng():
        planes = {
            **{guess: samples.guessed(guess) for guess in (gg.WTranspose(), gg.WPerp(1), gg.WPerpNS(1))},
            "weight": samples.perturbed(gg.WeightPerturbation(), 10),
            "mezo": samples.perturbed(gg.baselines.MeZO(), 10),
            "corrected": samples.corrected(3),
            "local": samples.along_a_student(0.35),
        }
    for name, plane in planes.items():
        error = float((plane.cloud.mean(0) - plane.mean).norm())
        assert error < 5 * (plane.variance / samples.DRAWS) ** 0.5, name
        assert abs(float(plane.g.norm()) - 1) < 1e-12


def test_pictures_are_small_and_stand_alone():
    for path in FOLDER.iterdir():
        assert path.stat().st_size < LARGEST, path.name
        assert "href" not in read(path), path.name
        assert "<title>" in read(path), path.name


def test_colours_are_seen_on_light_and_on_dark_pages(script: ModuleType):
    from method_pictures.svg import luminance

    used = {colour for path in FOLDER.iterdir() for colour in re.findall(r"#[0-9a-f]{6}", read(path))}
    assert len(used) > 10
    for colour in used:
        for page in (LIGHT, DARK):
            low, high = sorted((luminance(colour) + 0.05, luminance(page) + 0.05))
            assert high / low >= CONTRAST, (colour, page)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_line_a_page_and_a_picture(name: str):
    page = INDEX.parent / rows()[name][0]
    assert f"](../figures/methods/{name}.svg)" in read(page).replace("\n", " ")
    assert re.search(rf"`(gradguess train --method )?{name}\b", read(page)), f"{page.name} does not name it"


def test_every_page_has_a_line_and_shows_all_pictures():
    assert {cells[0] for cells in rows().values()} == {page.name for page in PAGES}
    shown = {name for page in PAGES for name in re.findall(r"figures/methods/([\w-]+)\.svg", read(page))}
    assert shown == {path.stem for path in FOLDER.iterdir()}


def test_the_index_says_of_what_is_sent_back_what_the_comparison_says():
    said = {name: cells[3] for name, cells in rows().items() if name in CONTENDERS}
    assert said == {name: CONTENDERS[name].sends for name in said}
    assert len(said) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_the_same_sections_and_a_short_example(page: Path):
    assert re.findall(r"^## (.*)$", read(page), flags=re.MULTILINE) == SECTIONS
    (block,) = re.findall(r"^```python\n(.*?)^```", read(page), flags=re.DOTALL | re.MULTILINE)
    assert len(block.splitlines()) <= 10
    assert len(read(page).splitlines()) <= 100


def test_every_online_rule_is_on_its_page():
    text = read(INDEX.parent / "online-rules.md")
    for make in RULES.values():
        rule = make(type("Config", (), {"k": 2, "basis": "lagged", "refresh": 1, "truncation": 2}))
        assert f"`{type(rule).__name__}" in text
