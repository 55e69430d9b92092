"""The pages of the methods: every method has one, and pictures are those of the library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gradguess_lab.methods import METHODS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures" / "methods"
INDEX = ROOT / "docs" / "methods" / "index.md"
ROUNDING = 0.11  # of a coordinate: one unit of its last digit
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def same(one: str, other: str) -> bool:
    """The same drawing up to rounding: words agree, and numbers up to one unit of the last digit."""
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=False)
    return NUMBER.sub("#", one) == NUMBER.sub("#", other) and all(
        abs(float(a) - float(b)) <= ROUNDING for a, b in pairs
    )


def test_the_pictures_are_those_that_the_script_makes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import make_method_pictures

    before = torch.get_rng_state()
    made = make_method_pictures.pictures()
    assert torch.equal(torch.get_rng_state(), before)
    stored = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert stored.keys() == made.keys()
    stale = [name for name, text in made.items() if not same(stored[name], text)]
    assert not stale, "run `python scripts/make_method_pictures.py`"


def test_every_method_has_a_line_a_page_and_a_picture():
    rows = dict(re.findall(r"(?m)^\| \[`([\w.-]+)`\]\(([\w-]+\.md)\) \|", INDEX.read_text(encoding="utf-8")))
    for name in METHODS:
        page = (INDEX.parent / rows[name]).read_text(encoding="utf-8")
        assert f"](../figures/methods/{name}.svg)" in page.replace("\n", " ")
        assert re.search(rf"`(gradguess train --method )?{name}\b", page), f"{rows[name]} does not name it"
