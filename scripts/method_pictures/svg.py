"""Small SVG pictures: a few shapes, written out as text. Colours are mid-tones, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess_lab.methods import METHODS
from gradguess_lab.tables.figure import INK, Style, style_of

Point = tuple[float, float]
BRIGHTNESS = 0.21  # luminance with the same contrast, about 4, to white and to the dark pages of the site
FONT = "font-family='system-ui,DejaVu Sans,sans-serif' font-size='14'"


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def middle(style: Style) -> str:
    """The colour between the light and the dark page's that is closest to `BRIGHTNESS`."""
    light, dark = ([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (style.light, style.dark))
    ways = [
        "#" + "".join(f"{round(a + (b - a) * step / 50):02x}" for a, b in zip(light, dark, strict=True))
        for step in range(51)
    ]
    return min(ways, key=lambda colour: abs(luminance(colour) - BRIGHTNESS))


def colour_of(method: str) -> str:
    assert method in METHODS, method
    return middle(style_of(method))


GREY = middle(INK)


def n(value: float) -> str:
    """A number with one digit after the point, and no digit that says nothing."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


class Picture:
    """Shapes in the order in which they are drawn."""

    def __init__(self, width: float, height: float, title: str, top: float = 0) -> None:
        self.size, self.top, self.title, self.parts = (width, height), top, title, list[str]()

    def add(self, part: str) -> None:
        self.parts.append(part)

    def text(
        self, at: Point, words: str, colour: str = GREY, anchor: str = "start", size: int = 14, bold: bool = False
    ) -> None:
        extra = (f" text-anchor='{anchor}'" if anchor != "start" else "") + (
            f" font-size='{size}'" if size != 14 else ""
        )
        extra += " font-weight='600'" if bold else ""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.add(f"<text x='{n(at[0])}' y='{n(at[1])}' fill='{colour}'{extra}>{words}</text>")

    def line(
        self, points: Sequence[Point], colour: str = GREY, width: float = 1.5, dash: str = "", opacity: float = 1.0
    ) -> None:
        d = "M" + "L".join(f"{n(x)} {n(y)}" for x, y in points)
        self.path(d, colour, width, dash, opacity)

    def path(
        self, d: str, colour: str = GREY, width: float = 1.5, dash: str = "", opacity: float = 1.0, fill: str = "none"
    ) -> None:
        extra = (f" stroke-dasharray='{dash}'" if dash else "") + (f" opacity='{opacity}'" if opacity < 1 else "")
        self.add(f"<path d='{d}' fill='{fill}' stroke='{colour}' stroke-width='{width}'{extra}/>")

    def arrow(
        self, points: Sequence[Point], colour: str = GREY, width: float = 1.5, dash: str = "", bend: float = 0
    ) -> None:
        """A line with a head at its end. With `bend` it is an arc from the first point to the second."""
        (x0, y0), (x1, y1) = points[-2], points[-1]
        if bend:
            mx, my = (x0 + x1) / 2, (y0 + y1) / 2 + bend
            d, (x0, y0) = f"M{n(x0)} {n(y0)}Q{n(mx)} {n(my)} {n(x1)} {n(y1)}", (mx, my)
        else:
            d = "M" + "L".join(f"{n(x)} {n(y)}" for x, y in points)
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        ux, uy, size = (x1 - x0) / length, (y1 - y0) / length, 3.5 + 1.8 * width
        self.path(d, colour, width, dash)
        left, right = (
            (x1 - size * ux - side * size * 0.5 * uy, y1 - size * uy + side * size * 0.5 * ux) for side in (1, -1)
        )
        corners = "L".join(f"{n(x)} {n(y)}" for x, y in ((x1 + ux, y1 + uy), left, right))
        self.add(f"<path d='M{corners}z' fill='{colour}'/>")

    def box(self, at: Point, size: Point, colour: str = GREY, fill: float = 0.0, dash: str = "", width=1.5) -> None:
        extra = f" stroke-dasharray='{dash}'" if dash else ""
        inside = f"fill='{colour}' fill-opacity='{fill}'" if fill else "fill='none'"
        self.add(
            f"<rect x='{n(at[0])}' y='{n(at[1])}' width='{n(size[0])}' height='{n(size[1])}' rx='4' {inside} "
            f"stroke='{colour}' stroke-width='{width}'{extra}/>"
        )

    def dots(self, points: Sequence[Point], colour: str, size: float = 5, opacity: float = 0.6) -> None:
        """Many equal dots as one path: lines of no length with round ends."""
        d = "".join(f"M{n(x)} {n(y)}h0" for x, y in points)
        self.add(
            f"<path d='{d}' stroke='{colour}' stroke-width='{n(size)}' stroke-linecap='round' opacity='{opacity}'/>"
        )

    def svg(self) -> str:
        width, height = self.size
        seen = f"0 {n(self.top)} {n(width)} {n(height)}"
        head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='{seen}' {FONT} role='img'>"
        return "\n".join([head, f"<title>{self.title}</title>", *self.parts, "</svg>\n"])
