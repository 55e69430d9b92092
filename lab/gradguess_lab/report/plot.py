"""A `Figure` drawn by matplotlib: as PNG and SVG files, and as SVG for the page, which gives it colours and type."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradguess.extras import require
from gradguess_lab.files import write_atomic
from gradguess_lab.report.palette import GRID, INK, colours, style_of
from gradguess_lab.tables.table import Curve, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SIZE = (4.5, 3.5)  # inches; small, so that the type stays legible on a phone
LEGEND = 5  # rows for which there is room in a legend
_SETTINGS: dict[str, Any] = {
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
    matplotlib = require("matplotlib", "gradguess-lab", "the report")
    backend = require("matplotlib.backends.backend_agg", "gradguess-lab", "the report")
    canvas_figure = require("matplotlib.figure", "gradguess-lab", "the report")
    with warnings.catch_warnings(), matplotlib.rc_context(_SETTINGS):
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        page = canvas_figure.Figure(figsize=_size(figure), layout="constrained", facecolor="none")
        backend.FigureCanvasAgg(page)
        axes = page.add_subplot(facecolor="none")
        for curve in figure.curves:
            _draw_curve(axes, curve)
        _dress(axes, figure)
        page.draw_without_rendering()  # places everything once, for both files
        page.set_layout_engine("none")
        return Drawing(_png(page), _svg(page, "path"), _svg(page, "none"))


def _size(figure: Figure) -> tuple[float, float]:
    """Wider and taller where the lines have names, taller where the legend is long."""
    width, height = _SIZE
    rows = sum(bool(curve.label) for curve in figure.curves) / figure.legend_columns
    height += 0.16 * max(0.0, rows - LEGEND)
    return (width * 1.7, max(height, 1.2 + 0.19 * len(figure.y_names))) if figure.y_names else (width, height)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    style = style_of(curve.style)
    if curve.dots:
        _draw_dots(axes, curve)
        return
    axes.plot(
        curve.x,
        curve.y,
        color=style.light,
        linestyle=(0, (3, 2)) if curve.dashed else "-",
        linewidth=1.0 if curve.dashed and curve.markers else 1.6,
        marker=style.marker if curve.markers or len(curve.x) == 1 else "",  # a line of one point is not seen
        markersize=5.5,
        markerfacecolor="none" if curve.dashed else style.light,
        label=curve.label or "_paper",  # a leading underscore keeps it out of the legend
    )
    if curve.low is None or curve.high is None:
        return
    if curve.error_bars:
        axes.vlines(curve.x, curve.low, curve.high, color=style.light, linewidth=1.4)
    else:
        axes.fill_between(curve.x, curve.low, curve.high, color=style.light, alpha=0.18, linewidth=0)


def _draw_dots(axes: Axes, curve: Curve) -> None:
    style = style_of(curve.style)
    if curve.low is not None and curve.high is not None:
        axes.hlines(curve.y, curve.low, curve.high, color=style.light, linewidth=1.4)
    face = "white" if curve.dashed else style.light
    axes.plot(curve.x, curve.y, style.marker, color=style.light, markerfacecolor=face, label=curve.label)


def _dress(axes: Axes, figure: Figure) -> None:
    axes.set_title(figure.title, loc="left")
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    if figure.log_x:
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
    if figure.log_y:
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis)
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


def _plain_numbers(axis: Any) -> None:
    """A logarithmic axis writes its numbers as formulas, and those are not set."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _png(page: Any) -> bytes:
    out = io.BytesIO()
    page.savefig(out, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def _svg(page: Any, letters: str) -> str:
    out = io.StringIO()
    matplotlib = require("matplotlib", "gradguess-lab", "the report")
    with matplotlib.rc_context({"svg.fonttype": letters}):
        page.savefig(out, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return out.getvalue()


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
