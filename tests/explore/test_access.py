"""The explorable page for everybody: keyboard, screen reader, phone, light and dark, calm."""

from __future__ import annotations

from typing import Any

import pytest

from explore.controls import cells, choose, wait_for_steps

CONTROLS = 17  # radio groups count once
pytestmark = pytest.mark.slow


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
    assert len(seen["reduce"]) <= max(seen["reduce"]) / 50 + 1  # the race goes on until it is looked at
