"""The drawings inside the page: smaller than matplotlib's, and the same picture."""

from __future__ import annotations

from xml.etree import ElementTree

from gradguess_lab.report.plot import draw, themed
from gradguess_lab.tables.table import Curve, Figure


def test_themed_keeps_every_element_but_bare_groups() -> None:
    drawing = draw(Figure("f", "F", "x", "y", (Curve("a", [0, 1, 2], [0, 1, 4], "wt", markers=True),))).inline
    small = ElementTree.fromstring(themed(drawing, "p"))
    whole = ElementTree.fromstring(drawing[drawing.index("<svg") :])

    def tags(root: ElementTree.Element) -> dict[str, int]:
        names = [element.tag.rpartition("}")[2] for element in root.iter()]
        return {name: names.count(name) for name in ("path", "use", "text", "clipPath", "rect")}

    assert tags(small) == tags(whole)
    bare = [element for element in small.iter() if element.tag.endswith("}g") and not element.attrib]
    assert not bare


def test_themed_keeps_groups_that_say_something() -> None:
    svg = '<svg a="b"><g clip-path="url(#c)"> <g> <path d="M 0 0"/> </g> </g></svg>'
    assert themed(svg, "p") == '<svg a="b"><g clip-path="url(#p-c)"><path d="M 0 0"/></g></svg>'


def test_one_point_is_seen() -> None:
    def curve_marks(x: list[float]) -> int:
        axes = draw(Figure("f", "F", "x", "y", (Curve("", x, x, "wt"),), x_ticks=(0.0,), y_range=(0.0, 2.0))).inline
        return axes.count("<use")

    assert curve_marks([1.0]) == curve_marks([0.0, 1.0]) + 1
