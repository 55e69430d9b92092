"""A figure as plain data, and drawn by matplotlib: PNG and SVG files, and SVG that takes its colours from the page."""

from __future__ import annotations

import hashlib
import io
import re
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradguess_lab.files import write_atomic
from gradguess_lab.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Style:
    """A colour for light and one for dark pages, which stay apart under colour-vision deficiencies, and a marker."""

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


@dataclass(frozen=True)
class Curve:
    """One line of a figure; `style` names its colour and marker.

    `kind`: a "line" with a band; markers with "bars"; the "paper"'s dashed and hollow, without a name; "points" alone.
    """

    label: str
    style: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    kind: Literal["line", "bars", "paper", "points"] = "line"
    hollow: bool = False


def means(label: str, style: str, values: Mapping[Any, Sequence[float]]) -> Curve:
    """A line through the means of the values at each x, with the range of the values."""
    low, high = ([pick(found) for found in values.values()] for pick in (min, max))
    return Curve(label, style, list(values), [statistics.fmean(found) for found in values.values()], low, high)


def with_bars(label: str, style: str, points: Mapping[Any, Any], **more: Any) -> Curve:
    """Markers at the means with bars of one standard deviation; `points` are summaries by their x."""
    spread = [one.sd or 0.0 for one in points.values()]
    y = [one.mean for one in points.values()]
    low, high = ([value + sign * sd for value, sd in zip(y, spread, strict=True)] for sign in (-1, 1))
    return Curve(label, style, [float(x) for x in points], y, low, high, "bars", **more)


@dataclass(frozen=True)
class Figure:
    """Curves over a pair of axes."""

    slug: str
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    caption: str = ""
    x_ticks: Sequence[float] = ()
    y_range: tuple[float, float] | None = None
    mark: tuple[float, str] | None = None  # a dotted vertical line, and what it says
    x_scale: str = "linear"
    y_scale: str = "linear"

    @property
    def fingerprint(self) -> str:
        """What the figure shows, in short: drawings change with the version of matplotlib, this does not."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK.light,
    "axes.labelcolor": INK.light,
    "axes.titlesize": 10,
    "axes.titlecolor": INK.light,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID.light,
    "grid.linewidth": 0.6,
    "xtick.color": INK.light,
    "ytick.color": INK.light,
    "text.color": INK.light,
    "text.parse_math": False,  # a name with a dollar sign is a name
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Drawing:
    png: bytes
    svg: bytes  # letters as outlines: it looks the same everywhere
    inline: str  # for the page: letters as text, colours as the page's variables, ids of its own


def save_figures(figures: Iterable[Figure], directory: Path) -> list[Path]:
    """One PNG for each figure."""
    paths = []
    for figure in figures:
        paths.append(directory / f"{figure.slug}.png")
        write_atomic(paths[-1], draw(figure).png)
    return paths


def draw(figure: Figure) -> Drawing:
    """Draw on a white ground, without touching the global state of pyplot. The same results give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Page

    def saved(kind: str, ground: str, letters: str = "path", **metadata: None) -> bytes:
        out = io.BytesIO()
        with rc_context({"svg.fonttype": letters}):
            page.savefig(out, format=kind, dpi=200, facecolor=ground, metadata=metadata)
        return out.getvalue()

    rows = sum(bool(curve.label) for curve in figure.curves) / 2
    size = (4.5, 3.5 + 0.16 * max(0.0, rows - 5))  # inches; small, so that it is legible on a phone; a legend has room
    with warnings.catch_warnings(), rc_context({**_SETTINGS, "svg.hashsalt": figure.slug}):
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        page = Page(figsize=size, layout="constrained", facecolor="none")
        FigureCanvasAgg(page)
        axes = page.add_subplot(facecolor="none")
        for curve in figure.curves:
            _draw_curve(axes, curve)
        _dress(axes, figure)
        page.draw_without_rendering()  # places everything once, for all files
        page.set_layout_engine("none")
        outlines = saved("svg", "white", Date=None, Creator=None)
        text = saved("svg", "none", "none", Date=None, Creator=None).decode()
        return Drawing(saved("png", "white", Software=None), outlines, _themed(text))


def _draw_curve(axes: Axes, curve: Curve) -> None:
    style, paper = style_of(curve.style), curve.kind == "paper"
    marked = curve.kind != "line" or len(curve.x) == 1  # a line of one point is not seen
    axes.plot(
        curve.x,
        curve.y,
        color=style.light,
        linestyle="" if curve.kind == "points" else (0, (3, 2)) if paper or curve.hollow else "-",
        linewidth=1.0 if paper else 1.6,
        marker=style.marker if marked else "",
        markersize=5.5,
        markerfacecolor="none" if paper or curve.hollow else style.light,
        label=curve.label or "_paper",  # a leading underscore keeps it out of the legend
        zorder=3 if curve.kind == "points" else 2,
    )
    if curve.low is None or curve.high is None:
        return
    if curve.kind == "bars":
        axes.vlines(curve.x, curve.low, curve.high, color=style.light, linewidth=1.4)
    else:
        axes.fill_between(curve.x, curve.low, curve.high, color=style.light, alpha=0.18, linewidth=0)


def _dress(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_title(figure.title, loc="left")
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label, xscale=figure.x_scale, yscale=figure.y_scale)
    for axis, scale in ((axes.xaxis, figure.x_scale), (axes.yaxis, figure.y_scale)):
        if scale == "log":
            axis.set_major_formatter(LogFormatter())  # its own formulas are not set
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    if figure.x_ticks:
        axes.set_xticks(figure.x_ticks, [f"{tick:g}" for tick in figure.x_ticks])
        axes.minorticks_off()
    if figure.y_range:
        axes.set_ylim(*figure.y_range)
    if figure.mark:
        x, words = figure.mark
        axes.axvline(x, color=INK.light, linestyle=":", linewidth=1.3)
        axes.annotate(words, (x, 0.03), (4, 0), ("data", "axes fraction"), textcoords="offset points", fontsize=8)
    if any(curve.label for curve in figure.curves):
        axes.figure.legend(loc="outside lower center", ncols=2)


def _themed(svg: str) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r' id="[a-zA-Z]\w*_\d+"', "", body)  # ids that nothing refers to
    body = re.sub(r'(<svg [^>]*?) width="[^"]*" height="[^"]*"|font-family: [^;"]*;? ?', r"\1", body)
    body = re.sub(r"(\.\d\d)\d+|\s*\n\s*", lambda match: match[1] or " ", body)
    for light in colours():
        body = body.replace(light, f"var(--c{light[1:]})")
    return body
