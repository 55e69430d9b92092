"""The explorable page as people meet it: mouse, keyboard, screen reader, phone, dark, calm."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONTROLS = 17  # radio groups count once
pytestmark = pytest.mark.slow


def cells(tab: Any, row: str, table: str = "#numbers") -> list[str]:
    return tab.locator(f"{table} tr", has=tab.locator("th", has_text=row)).first.locator("td").all_inner_texts()


def value(tab: Any, row: str) -> float:
    """The exact number of a row."""
    return float(cells(tab, row)[0].split()[0])


def choose(tab: Any, **settings: Any) -> None:
    """Set controls as a user would see them set."""
    for name, wanted in settings.items():
        if name in ("method", "layer"):
            tab.check(f"input[name={name}][value='{wanted}']")
        elif name == "others":
            tab.set_checked("#others", wanted)
        else:
            tab.fill(f"#{name.replace('_', '-')}", str(wanted))


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
    choose(tab, method=method, layer=1, k=2)
    view = tab.evaluate("(({ cloud, exact, measured }) => ({ cloud, exact, measured }))(window.gradguess.guess.view)")
    far = [(x - 1) ** 2 + y**2 for x, y in view["cloud"]["points"]]
    squared_bias = (view["exact"]["bias"] / view["exact"]["length"]) ** 2
    x, y = view["cloud"]["exact"]
    assert (x - 1) ** 2 + y**2 == pytest.approx(squared_bias, abs=1e-12)
    x, y = view["cloud"]["mean"]
    scatter = view["measured"]["noise"] ** 2 * (len(far) - 1) / len(far)
    assert sum(far) / len(far) == pytest.approx(scatter + (x - 1) ** 2 + y**2, rel=1e-9)  # bias² + variance


# --- what the page says under "Things to try" ------------------------------------------------------------------


def test_activation_perturbation_has_no_bias_and_noise_that_grows_with_the_width(visit):
    tab, _ = visit()
    choose(tab, method="activation", width=8)
    narrow = value(tab, "noise over signal")
    choose(tab, width=48)
    assert value(tab, "bias") == 0
    assert value(tab, "noise over signal") > 1.5 * narrow


def test_k_trades_bias_for_variance(visit):
    tab, _ = visit()
    seen = []
    for k in (1, 3, 6, 10):
        choose(tab, k=k)
        seen.append((value(tab, "bias"), value(tab, "variance")))
    assert [bias for bias, _ in seen] == sorted((bias for bias, _ in seen), reverse=True)
    assert [variance for _, variance in seen] == sorted(variance for _, variance in seen)


def test_the_noise_of_w_perp_hardly_depends_on_the_width(visit):
    tab, _ = visit()
    noise = []
    for width in (16, 24, 32, 40, 48):
        choose(tab, width=width)
        noise.append(value(tab, "noise over signal"))
    assert max(noise) < 1.6 * min(noise)


def test_training_draws_the_gradient_into_few_directions(visit):
    tab, _ = visit()
    choose(tab, width=48)
    late = value(tab, "bias") / value(tab, "true gradient")
    choose(tab, trained=0)
    assert value(tab, "bias") / value(tab, "true gradient") > 1.5 * late


def test_as_many_tangents_as_k_measure_the_whole_guessing_space(visit):
    tab, _ = visit()
    choose(tab, k=3, tangents=3, others=False)
    assert value(tab, "variance") == 0
    assert value(tab, "bias") > 0


def test_w_p_is_activation_perturbation_below_and_w_perp_above(visit):
    tab, _ = visit()
    rows = ("bias", "variance", "cosine of the mean")
    choose(tab, method="activation")
    below = [cells(tab, row)[0] for row in rows]
    choose(tab, method="wp")
    assert [cells(tab, row)[0] for row in rows] == below
    choose(tab, layer=1, others=False)
    above = [cells(tab, row)[0] for row in rows]
    choose(tab, method="wperp", k=3)
    assert [cells(tab, row)[0] for row in rows] == above


# --- the race ---------------------------------------------------------------------------------------------------


def losses(tab: Any) -> dict[str, list[float]]:
    return tab.evaluate("window.gradguess.race.histories")


def wait_for_steps(tab: Any, steps: int) -> None:
    tab.wait_for_function(f"window.gradguess.race.steps > {steps}", timeout=60_000)


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


# --- keyboard, screen reader, screens -----------------------------------------------------------------------------


def focused(tab: Any) -> str:
    return tab.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.className")


def test_every_control_is_reached_by_keyboard_and_shows_it(visit):
    tab, _ = visit()
    tab.check("input[name=method][value=wperp]")  # k is enabled
    tab.evaluate("document.activeElement.blur()")
    stops = []
    for _ in range(CONTROLS + 3):
        tab.keyboard.press("Tab")
        stop = focused(tab)
        if not stop or stop in stops:
            break
        stops.append(stop)
        outline = tab.evaluate(
            "(({ outlineStyle: s, outlineWidth: w }) => s + w)(getComputedStyle(document.activeElement))"
        )
        assert outline == "solid3px", stop
    wanted = tab.evaluate(
        "[...new Set([...document.querySelectorAll('a, button, input')].map((e) => e.id || e.name || e.className))]"
    )
    assert sorted(stops) == sorted(wanted)
    assert len(stops) == CONTROLS


def test_every_control_is_worked_by_keyboard(visit):
    tab, complaints = visit()
    tab.focus("input[name=method]:checked")
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate("window.gradguess.guess.view.options.method") == "wt"
    tab.keyboard.press("ArrowDown")
    for name in ("k", "width", "tangents", "sample", "trained", "race-k", "race-width", "race-tangents", "race-seed"):
        before = tab.inner_text(f"#{name}-value")
        tab.focus(f"#{name}")
        tab.keyboard.press("ArrowRight")
        assert float(tab.inner_text(f"#{name}-value")) > float(before), name
    tab.focus("#others")
    tab.keyboard.press("Space")
    assert tab.evaluate("window.gradguess.guess.view.options.isolate")
    before = cells(tab, "variance")[1]
    tab.focus("#again")
    tab.keyboard.press("Enter")
    assert cells(tab, "variance")[1] != before
    tab.focus("#step")
    tab.keyboard.press("Space")
    assert tab.inner_text("#race-steps") == "1"
    tab.focus("#start")
    tab.keyboard.press("Enter")
    wait_for_steps(tab, 5)
    tab.keyboard.press("Enter")
    assert tab.inner_text("#start") == "Start"
    assert complaints == []


def test_a_screen_reader_finds_names_roles_and_pictures_in_words(visit):
    tab, _ = visit()
    tree = tab.locator("body").aria_snapshot()
    for line in (
        'radio "W⊥" [checked]',
        'slider "k, directions that W⊥ keeps"',
        'slider "Width of the hidden layers"',
        'slider "Tangents, averaged per estimate"',
        'checkbox "The other layers guess at the same time" [checked]',
        'button "Draw again"',
        'img "The cloud of estimates."',
        'img "The guessing space."',
        'img "Loss over steps."',
        'table "Bias, variance and cosine"',
        'heading "A race" [level=2]',
    ):
        assert line in tree
    unnamed = "[...document.querySelectorAll('input')].filter((e) => !e.labels.length).length"
    assert tab.evaluate(unnamed) == 0
    assert tab.evaluate("[...document.querySelectorAll('svg')].every((e) => e.getAttribute('aria-hidden') === 'true')")
    for words, begins in (("#cloud-words", "300 estimates by W⊥."), ("#space-words", "The Jacobian has rank ")):
        assert tab.text_content(words).startswith(begins)


def test_new_numbers_are_told_politely_once_they_rest(visit):
    tab, _ = visit()
    for region in ("#told", "#race-told"):
        assert tab.get_attribute(region, "role") == "status"
        assert tab.get_attribute(region, "aria-live") == "polite"
    choose(tab, method="activation")
    tab.wait_for_function("document.getElementById('told').textContent.startsWith('Activation')")
    assert "bias 0, 0 % of the gradient's length" in tab.inner_text("#told")
    tab.click("#step")
    tab.wait_for_function("document.getElementById('race-told').textContent.startsWith('After 1 steps')")


@pytest.mark.parametrize("width", [320, 380, 768, 1000])
def test_it_fits_a_narrow_screen(visit, width):
    tab, _ = visit(width)
    for method in ("weight", "wperp"):
        choose(tab, method=method, width=48)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def contrast(tab: Any, selector: str, name: str = "color") -> float:
    """Of a colour with the page's ground, by the rule of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    ink = tab.locator(selector).first.evaluate(f"node => getComputedStyle(node).{name}")
    ground = tab.locator("body").evaluate("node => getComputedStyle(node).backgroundColor")
    light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_legible(visit, scheme):
    tab, _ = visit(color_scheme=scheme)
    ground = tab.locator("body").evaluate("node => getComputedStyle(node).backgroundColor")
    assert (int(ground.removeprefix("rgb(").split(",")[0]) > 128) is (scheme == "light")
    for selector in ("p", ".note", "figcaption", "table td", "button"):
        assert contrast(tab, selector) >= 4.5, selector
    assert contrast(tab, "#cloud text", "fill") >= 4.5
    for swatch in range(5):
        assert contrast(tab, f"#methods label:nth-of-type({swatch + 1}) line", "stroke") >= 3


def test_reduced_motion_draws_rarely(visit):
    """The numbers of the table change every 50 steps alone."""
    seen = {}
    for motion in ("no-preference", "reduce"):
        tab, _ = visit(reduced_motion=motion)
        tab.evaluate("""() => {
          window.shown = new Set();
          new MutationObserver(() => window.shown.add(Number(document.getElementById("race-steps").textContent)))
            .observe(document.getElementById("race-numbers"), { childList: true });
        }""")
        tab.click("#start")
        wait_for_steps(tab, 110)
        seen[motion] = tab.evaluate("[...window.shown]")
        assert tab.evaluate("document.getAnimations().length") == 0
    assert len(seen["no-preference"]) > 5
    assert len(seen["reduce"]) <= 3
