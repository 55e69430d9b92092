"""A `Figure` drawn by matplotlib: as PNG and SVG files, and as SVG for the page, which gives it colours and type."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradguess_lab.files import write_atomic
from gradguess_lab.report.palette import GRID, INK, colours, style_of
from gradguess_lab.tables.table import Curve, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SIZE = (4.5, 3.5)  # inches; small, so that the type stays legible on a phone
LEGEND = 5  # rows for which there is room in a legend
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
    "svg.hashsalt": "gradguess",  # the same results give the same bytes
}


@dataclass(frozen=True)
class Drawing:
    png: bytes
    svg: str  # letters as outlines: it looks the same everywhere
    inline: str  # letters as text, a fifth of the size: for `themed`


def save_figures(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """One PNG for each figure."""
    paths = [directory / f"{figure.slug}.png" for figure in figures]
    for path, figure in zip(paths, figures, strict=True):
        write_atomic(path, draw(figure).png)
    return paths


def draw(figure: Figure) -> Drawing:
    """Draw on a white ground, without touching the global state of pyplot."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Page

    def saved(kind: str, letters: str = "path", **metadata: None) -> bytes:
        out = io.BytesIO()
        with rc_context({"svg.fonttype": letters}):
            page.savefig(out, format=kind, dpi=200, facecolor="white", metadata=metadata)
        return out.getvalue()

    width, height = _SIZE  # wider and taller where the lines have names, taller where the legend is long
    rows = sum(bool(curve.label) for curve in figure.curves) / figure.legend_columns
    height += 0.16 * max(0.0, rows - LEGEND)
    size = (width * 1.7, max(height, 1.2 + 0.19 * len(figure.y_names))) if figure.y_names else (width, height)
    with warnings.catch_warnings(), rc_context(_SETTINGS):
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        page = Page(figsize=size, layout="constrained", facecolor="none")
        FigureCanvasAgg(page)
        axes = page.add_subplot(facecolor="none")
        for curve in figure.curves:
            _draw_curve(axes, curve)
        _dress(axes, figure)
        page.draw_without_rendering()  # places everything once, for both files
        page.set_layout_engine("none")
        svg = [saved("svg", letters, Date=None, Creator=None).decode() for letters in ("path", "none")]
        return Drawing(saved("png", Software=None), *svg)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    style = style_of(curve.style)
    colour, span = style.light, None if curve.low is None or curve.high is None else (curve.low, curve.high)
    if curve.dots:
        if span:
            axes.hlines(curve.y, *span, color=colour, linewidth=1.4)
        face = "white" if curve.dashed else colour
        axes.plot(curve.x, curve.y, style.marker, color=colour, markerfacecolor=face, label=curve.label)
        return
    axes.plot(
        curve.x,
        curve.y,
        color=colour,
        linestyle=(0, (3, 2)) if curve.dashed else "-",
        linewidth=1.0 if curve.dashed and curve.markers else 1.6,
        marker=style.marker if curve.markers or len(curve.x) == 1 else "",  # a line of one point is not seen
        markersize=5.5,
        markerfacecolor="none" if curve.dashed else colour,
        label=curve.label or "_paper",  # a leading underscore keeps it out of the legend
    )
    if span and curve.error_bars:
        axes.vlines(curve.x, *span, color=colour, linewidth=1.4)
    elif span:
        axes.fill_between(curve.x, *span, color=colour, alpha=0.18, linewidth=0)


def _dress(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_title(figure.title, loc="left")
    scales = ["log" if log else "linear" for log in (figure.log_x, figure.log_y)]
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label, xscale=scales[0], yscale=scales[1])
    for axis, log in ((axes.xaxis, figure.log_x), (axes.yaxis, figure.log_y)):
        if log:
            axis.set_major_formatter(LogFormatter())  # its own formulas are not set
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    if figure.x_ticks:
        axes.set_xticks(figure.x_ticks, figure.x_names or [f"{tick:g}" for tick in figure.x_ticks])
        axes.minorticks_off()
    if figure.y_names:
        axes.set_yticks(range(len(figure.y_names)), figure.y_names, fontsize=7)
        axes.set_ylim(len(figure.y_names) - 0.5, -0.5)
    if figure.y_range:
        axes.set_ylim(*figure.y_range)
    if figure.mark:
        x, words = figure.mark
        axes.axvline(x, color=INK.light, linestyle=":", linewidth=1.3)
        axes.annotate(words, (x, 0.03), (4, 0), ("data", "axes fraction"), textcoords="offset points", fontsize=8)
    if any(curve.label for curve in figure.curves):
        axes.figure.legend(loc="outside lower center", ncols=figure.legend_columns)


def themed(svg: str, prefix: str) -> str:
    """The drawing for use inside the page: transparent, in its colours and type, its ids its own, and small."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'(<g id="patch_1">\s*<path [^>]*?)fill: #ffffff', r"\1fill: none", body)
    used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'((?:xlink:)?href="|url\()#', rf"\1#{prefix}-", body)
    body = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", body, count=1)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    body = re.sub(r"<[^>]*>", _short_numbers, _without_bare_groups(body))
    for light in colours():
        body = body.replace(light, f"var(--c{light[1:]})")
    return body


def _without_bare_groups(body: str) -> str:
    """The drawing without groups that say nothing, and without the space between tags."""
    kept, says = [], []
    for part in re.split(r"(<g\b[^>]*>|</g>)", re.sub(r"> <", "><", body)):
        if part.startswith("<g"):
            says.append(part not in ("<g>", "<g/>"))
        bare = part.startswith(("<g", "</g")) and not says[-1]
        if part == "</g>" or (part.endswith("/>") and part.startswith("<g")):
            says.pop()
        kept.append("" if bare else part)
    return "".join(kept)


def _short_numbers(tag: re.Match[str]) -> str:
    """A tenth of a point is enough for a line, a hundredth for all else; what is between tags stays as it is."""
    straight = ' d="' in tag[0] and not re.search(r"\d [CQ] ", tag[0])
    if not straight:
        return re.sub(r"(\.\d\d)\d+", r"\1", tag[0])
    return re.sub(r"(\.\d)\d+", r"\1", tag[0]).replace(" L ", " ")  # points after the first need no letter
