"""Colours and markers of the figures: a pair of colours, for light and for dark pages, for every kind of curve.

Those of the methods stand in the registry of methods. The hues stay apart under the common colour-vision deficiencies;
markers and dashes tell curves apart as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradguess_lab.methods import METHODS


@dataclass(frozen=True)
class Style:
    light: str
    dark: str
    marker: str = "o"


INK = Style("#1b1f24", "#e6e8eb")
GRID = Style("#d9dce1", "#3a4049")
_OTHER = Style("#6b7280", "#9aa3af", "o")

STYLES = {name: Style(entry.light, entry.dark, entry.marker) for name, entry in METHODS.items()} | {
    "wperp-shared": Style("#b3720e", "#f2c27a", "<"),  # W⊥ with one basis for the batch
    "wperp-rank": Style("#8c510a", "#c98f4e"),  # W⊥ with another k than 10
    "wperp-25": Style("#b8860b", "#e0c25a"),
    "wperp-1": Style("#d9a066", "#8f6b45"),
    "this-run": Style(INK.light, INK.dark, "x"),
    "layer-1": Style("#4477aa", "#7fb2e5", "o"),
    "layer-2": Style("#cc3311", "#ff7f66", "s"),
    "layer-3": Style("#00897b", "#45d0be", "^"),
}


def style_of(name: str) -> Style:
    """The style of this name; grey for a name that is not known."""
    return STYLES.get(name, _OTHER)


def colours() -> dict[str, str]:
    """Every light colour with the dark one that takes its place."""
    return {style.light: style.dark for style in (*STYLES.values(), _OTHER, INK, GRID)}
