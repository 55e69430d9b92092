"""Colours and markers of the figures: one pair of colours, for light and for dark pages, per kind of curve.

The hues stay apart under the common colour-vision deficiencies; markers and dashes tell curves apart as well.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GRID", "INK", "PALETTE", "Style", "colours", "style_of"]


@dataclass(frozen=True)
class Style:
    light: str
    dark: str
    marker: str = "o"


INK = Style("#1b1f24", "#e6e8eb")
GRID = Style("#d9dce1", "#3a4049")

PALETTE = {
    "backprop": Style("#1b1f24", "#e6e8eb", "D"),
    "weight": Style("#228833", "#5ccb78", "*"),
    "activation": Style("#4477aa", "#7fb2e5", "s"),
    "wt": Style("#aa3377", "#e58bc0", "o"),
    "wperp": Style("#e07b00", "#ffa94d", "^"),
    "wperp-bottom": Style("#00897b", "#45d0be", "v"),
    "wperp-ns": Style("#cc3311", "#ff7f66", "P"),
    "wp": Style("#7a6a53", "#c9b79a", "X"),
    "feedback-direct": Style("#2b93bd", "#6fd0f2", "<"),
    "feedback-chained": Style("#6a3fb5", "#b79cf5", ">"),
    "feedback-corrected": Style("#7d8000", "#c9cc4a", "h"),
    "wperp-rank": Style("#8c510a", "#c98f4e"),
    "wperp-25": Style("#b8860b", "#e0c25a"),
    "wperp-1": Style("#d9a066", "#8f6b45"),
    "layer-1": Style("#4477aa", "#7fb2e5", "o"),
    "layer-2": Style("#cc3311", "#ff7f66", "s"),
    "layer-3": Style("#00897b", "#45d0be", "^"),
}
_OTHER = Style("#6b7280", "#9aa3af", "o")


def style_of(name: str) -> Style:
    return PALETTE.get(name, _OTHER)


def colours() -> dict[str, str]:
    """Every light colour with the dark one that takes its place."""
    return {style.light: style.dark for style in (*PALETTE.values(), _OTHER, INK, GRID)}
