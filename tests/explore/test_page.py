"""The explorable page as people meet it: it opens, its controls work, and its race runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from explore.controls import cells, choose, losses, wait_for_steps

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def test_the_page_is_made_of_its_parts_and_stands_alone():
    page = (ROOT / "docs" / "explore" / "explore.html").read_text(encoding="utf-8")
    assert page == runpy.run_path(str(ROOT / "scripts" / "build_explore.py"))["built"]()
    assert "http:" not in page
    assert "https:" not in page
    assert "src=" not in page
    assert len(page) < 80_000


@pytest.mark.parametrize("width", [1200, 380])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_complaint_and_without_network(visit, width, scheme):
    tab, complaints = visit(width, color_scheme=scheme)
    for name in ("cloud", "space", "plane", "curves"):
        box = tab.locator(f"#{name} svg").bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100
    tab.click("#step")
    assert complaints == []


# --- what the sliders do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "wanted"),
    [
        ("method", "activation"), ("layer", 1), ("k", 5), ("width", 32), ("tangents", 2), ("sample", 7),
        ("trained", 0), ("others", False),
    ],
)  # fmt: skip
def test_every_control_changes_the_numbers_and_the_cloud(visit, control, wanted):
    tab, complaints = visit()
    before = [cells(tab, "noise"), tab.locator("#cloud").inner_html()]
    choose(tab, **{control: wanted})
    after = [cells(tab, "noise"), tab.locator("#cloud").inner_html()]
    assert all(a != b for a, b in zip(after, before, strict=True))
    if control in ("k", "width", "tangents", "sample", "trained"):
        assert tab.inner_text(f"#{control}-value") == str(wanted)
    assert complaints == []


def test_draw_again_changes_what_is_measured_and_not_what_is_exact(visit):
    tab, _ = visit()
    before = cells(tab, "variance")
    tab.click("#again")
    after = cells(tab, "variance")
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_k_is_no_larger_than_there_are_directions(visit):
    tab, _ = visit()
    choose(tab, k=16, layer=1)
    assert tab.get_attribute("#k", "max") == "3"
    assert tab.inner_text("#k-value") == "3"
    assert tab.is_enabled("#k")
    choose(tab, method="wt")
    assert tab.is_disabled("#k")


def test_measured_numbers_are_near_the_exact_ones(visit):
    tab, _ = visit()
    for method in ("weight", "activation", "wt", "wperp", "wp"):
        choose(tab, method=method)
        exact, measured = (float(cell) for cell in cells(tab, "noise over signal"))
        assert measured == pytest.approx(exact, rel=0.25)


@pytest.mark.parametrize("method", ["weight", "wt", "wperp"])
def test_distances_from_the_tip_of_the_arrow_are_true(visit, method):
    tab, _ = visit()
    choose(tab, layer=1, k=2, method=method)
    view = tab.evaluate("(({ cloud, exact, measured }) => ({ cloud, exact, measured }))(window.gradguess.guess.view)")
    far = [(x - 1) ** 2 + y**2 for x, y in view["cloud"]["points"]]
    squared_bias = (view["exact"]["bias"] / view["exact"]["length"]) ** 2
    x, y = view["cloud"]["exact"]
    assert (x - 1) ** 2 + y**2 == pytest.approx(squared_bias, abs=1e-12)
    x, y = view["cloud"]["mean"]
    scatter = view["measured"]["noise"] ** 2 * (len(far) - 1) / len(far)
    assert sum(far) / len(far) == pytest.approx(scatter + (x - 1) ** 2 + y**2, rel=1e-9)  # bias² + variance


# --- the race ------------------------------------------------------------------------------------------


def test_the_race_starts_pauses_steps_and_resets(visit):
    tab, complaints = visit()
    first = losses(tab)
    assert len({tuple(values) for values in first.values()}) == 1  # the same start for all
    tab.click("#step")
    assert tab.inner_text("#race-steps") == "1"
    assert len({values[1] for values in losses(tab).values()}) == len(first)
    tab.click("#start")
    assert tab.inner_text("#start") == "Pause"
    wait_for_steps(tab, 150)
    tab.click("#start")
    assert tab.inner_text("#start") == "Start"
    seen, steps = losses(tab), int(tab.inner_text("#race-steps"))
    tab.wait_for_timeout(100)
    assert int(tab.inner_text("#race-steps")) == steps
    last = {name: values[-1] for name, values in seen.items()}
    assert last["backprop"] < min(last["wperp"], last["wt"]) < last["activation"] < last["weight"]
    tab.click("#reset")
    assert losses(tab) == first
    tab.click("#step")
    assert {name: values[:2] for name, values in seen.items()} == losses(tab)  # the same seed, the same race
    assert complaints == []


@pytest.mark.parametrize("control", ["race_k", "race_width", "race_tangents", "race_seed"])
def test_a_slider_starts_the_race_anew(visit, control):
    tab, _ = visit()
    tab.click("#step")
    before = losses(tab)
    choose(tab, **{control: 8})
    assert tab.inner_text("#race-steps") == "0"
    tab.click("#step")
    assert losses(tab) != before
