"""A curve as lines of text, for a terminal: dots of braille signs, or asterisks where these cannot be written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # bit of each dot of U+2800
_FRAMES = {True: ("┤", "│", "└", "─"), False: ("+", "|", "+", "-")}  # beside a number, beside none, corner, foot
_MARGIN = 12  # columns of the numbers and the frame


def plot(
    points: Sequence[tuple[float, float]], name: str, width: int = 72, height: int = 8, encoding: str = "utf-8"
) -> list[str]:
    """The lines of the curve through `points`, (x, y) with x growing; none if there are fewer than two.

    What is not finite is left out. Where there are more points than columns of dots, a column shows a mean.

    >>> print("\\n".join(plot([(1, 4.0), (2, 2.0), (3, 1.0), (4, 1.0)], "epoch", width=32, height=3)))
             4 ┤⠑⠢⢄⡀
               │   ⠈⠒⠤⣀
             1 ┤       ⠉⠉⠒⠢⠤⢄⣀⣀⣀⣀⣀⣀⣀
               └────────────────────
                1      epoch       4
    """
    found = [(x, y) for x, y in points if math.isfinite(y)]
    columns = width - _MARGIN
    if len(found) < 2 or columns < 10:
        return []
    unicode = _can_write("⣿┤│└─", encoding)
    beside, plain, corner, foot = _FRAMES[unicode]
    levels = _levels(np.array([y for _, y in found]), columns * (2 if unicode else 1))
    signs = _braille(levels, height) if unicode else _asterisks(levels, height)
    numbers = {0: f"{levels.max():.4g}", height - 1: f"{levels.min():.4g}"}
    lines = [
        f"{numbers.get(row, ''):>{_MARGIN - 2}} {beside if row in numbers else plain}{line}".rstrip()
        for row, line in enumerate(signs)
    ]
    first, last = f"{found[0][0]:g}", f"{found[-1][0]:g}"
    middle = name.center(columns - len(first) - len(last))
    return [*lines, " " * (_MARGIN - 1) + corner + foot * columns, " " * _MARGIN + first + middle + last]


def _can_write(signs: str, encoding: str) -> bool:
    try:
        signs.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _levels(values: np.ndarray, columns: int) -> np.ndarray:
    """The height of the curve at each column of dots."""
    if len(values) > columns:
        return np.array([part.mean() for part in np.array_split(values, columns)])
    return np.interp(np.linspace(0, len(values) - 1, columns), np.arange(len(values)), values)


def _dots(levels: np.ndarray, rows: int) -> np.ndarray:
    """A grid of dots, (rows, columns): one in every column, and more where the curve is steep."""
    top, bottom = levels.max(), levels.min()
    places = np.rint((top - levels) / ((top - bottom) or 1.0) * (rows - 1)).astype(int)
    grid = np.zeros((rows, len(levels)), dtype=bool)
    before = places[0]
    for column, row in enumerate(places):
        grid[min(before, row) + 1 : max(before, row), column] = True
        grid[row, column] = True
        before = row
    return grid


def _braille(levels: np.ndarray, height: int) -> list[str]:
    cells = _dots(levels, 4 * height).reshape(height, 4, -1, 2)
    codes = (cells * _BRAILLE[:, None, :]).sum((1, 3))
    return ["".join(chr(0x2800 + code) if code else " " for code in row) for row in codes]


def _asterisks(levels: np.ndarray, height: int) -> list[str]:
    return ["".join("*" if dot else " " for dot in row) for row in _dots(levels, height)]
