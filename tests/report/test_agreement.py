"""README, docs, report and results agree: what is made from results is made again here, and compared."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from gradguess_lab.compare.run import read_record
from gradguess_lab.paper_numbers import ENTRIES
from gradguess_lab.store import find

ROOT = Path(__file__).parents[2]
AGAIN = "run `python scripts/make_tables.py`"
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "scripts" / "make_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_results():
    made = script().blocks()
    for name in script().PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert script().filled(text, made) == text, f"{name} is stale: {AGAIN}"


def test_the_figures_of_the_docs_are_those_of_the_results():
    stored = json.loads((ROOT / "docs" / "figures" / "fingerprints.json").read_text(encoding="utf-8"))
    assert stored == {figure.slug: figure.fingerprint for figure in script().figures()}, AGAIN
    for slug in stored:
        assert (ROOT / "docs" / "figures" / f"{slug}.png").exists()


def test_a_task_is_compared_on_one_grid_with_as_many_seeds_in_one_process():
    folder = ROOT / "results" / "compare"
    for task in read_record(folder)["tasks"]:
        assert {len(row["test"]) for row in task["rows"]} == {len(task["rows"][0]["test"])}, task["name"]
        for row in task["rows"]:
            assert [rate for rate, _ in row["scores"]] == task["grid"], (task["name"], row["method"])
        timed = find(folder, f"bench/{task['name']}")["rows"]
        assert not [row["method"] for row in timed if "commit" in row], task["name"]  # of another run


def prose(name: str) -> str:
    """A page without what is made from the results, and without code."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"<!-- ([a-z-]+) -->\n.*?<!-- end -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", PAGES)
def test_no_accuracy_is_typed_by_hand(name: str):
    """A number with three decimals, or with a spread, stands in a block that is made, or the page's own code checks it
    by `near`; the paper's may be quoted."""
    lines = re.findall(r"^ *near\(.*", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    checked = {number for line in lines for number in re.findall(r"\d\.\d{3}\b", line)}
    typed = set(re.findall(r"(?<![\w.,])\d\.\d{3}\b", prose(name))) - {entry.printed for entry in ENTRIES} - {"0.000"}
    assert not typed - checked
    assert not re.findall(r"\d ± \d", prose(name))
