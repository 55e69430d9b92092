"""The advice: numbers for each method, as objects, as JSON and as a table, and a recommendation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLUMNS = ("time", "over_checkpoints", "memory", "cosine", "lowest_cosine")
TITLES = ("method", "works?", "time / backprop", "/ checkpoints", "memory / backprop", "cosine", "lowest")
WIDTH = 120


@dataclass(frozen=True)
class Row:
    """One method on this model and this machine. What could not be measured is None.

    Attributes:
        method: its name.
        code: the line of code to use.
        problem: why it does not work here; None where it works.
        time: of a step, over that of `loss.backward()`; what a search takes is spread over the steps between two.
        over_checkpoints: the same over backpropagation with checkpoints.
        memory: the peak of a step, over that of `loss.backward()`.
        memory_mb: the peak itself: all that a step allocates, gradients included, and what the method keeps from step
            to step. Weights, the batch and an optimiser's state are not counted.
        cosine: between the gradient of one step and the true one, over all parameters.
        lowest_cosine: the same over the parameters of the lowest site.
    """

    method: str
    code: str
    problem: str | None = None
    time: float | None = None
    over_checkpoints: float | None = None
    memory: float | None = None
    memory_mb: float | None = None
    cosine: float | None = None
    lowest_cosine: float | None = None

    @property
    def works(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Advice:
    """What `gg.advise` found. Printed, it is a table and the recommendation.

    Attributes:
        rows: one for each method, in the order in which they are recommended.
        method: the name of the recommended method; None where nothing works or fits.
        recommendation: one or two sentences.
        code: the line of code to use; empty where nothing is recommended. A `forward` is made once, and called with
            `loss = forward(loss_fn, inputs, targets)` where `loss.backward()` stood.
        seconds: how long the measurement took.
    """

    rows: tuple[Row, ...]
    method: str | None
    recommendation: str
    code: str
    seconds: float

    def __getitem__(self, method: str) -> Row:
        return {row.method: row for row in self.rows}[method]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and None alone, for JSON."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def table(self) -> str:
        """The rows as plain text. A method that does not work has its reason in place of numbers."""
        shown = [[row.method, "yes", *(_shown(getattr(row, name)) for name in COLUMNS)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(TITLES, *shown, strict=True)]
        lines = [_aligned(TITLES, widths)]
        for row, cells in zip(self.rows, shown, strict=True):
            if row.works:
                lines.append(_aligned(cells, widths))
            else:
                lines.append(f"{row.method.ljust(widths[0])}  {row.problem}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n\n".join([self.table(), textwrap.fill(self.recommendation, WIDTH), self.code]).rstrip()


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    return "  ".join([*texts, *(cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True))])


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
