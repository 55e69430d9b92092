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
from gradguess_lab.methods import METHODS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures" / "methods"
INDEX = ROOT / "docs" / "methods" / "index.md"
ROUNDING = 0.11  # of a coordinate: one unit of its last digit
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


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_line_a_page_and_a_picture(name: str):
    page = INDEX.parent / rows()[name][0]
    assert f"](../figures/methods/{name}.svg)" in read(page).replace("\n", " ")
    assert re.search(rf"`(gradguess train --method )?{name}\b", read(page)), f"{page.name} does not name it"
