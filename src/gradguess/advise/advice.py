"""The advice: numbers for each method, as objects, as JSON and as a table, and a recommendation."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradguess.advise.candidates import BACKPROP, CHECKPOINTED
from gradguess.diagnose.report import aligned, shown

COLUMNS = {
    "time": "time / backprop",
    "over_checkpoints": "/ checkpoints",
    "memory": "memory / backprop",
    "cosine": "cosine",
    "lowest_cosine": "lowest",
}


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
        lines = [["method", *COLUMNS.values()]]
        for row in self.rows:
            cells = [shown(getattr(row, name), ".2f") for name in COLUMNS] if row.problem is None else [row.problem]
            lines.append([row.method, *cells])
        return aligned(lines)

    def __str__(self) -> str:
        return "\n\n".join([self.table(), textwrap.fill(self.recommendation, 120), self.code]).rstrip()


def recommend(rows: Sequence[Row], memory_mb: float | None = None) -> tuple[Row | None, str]:
    """The first row that works and fits into `memory_mb`, and why. What was not measured does not fit."""
    working = [row for row in rows if row.works]
    sizes = {row.method: row.memory_mb for row in working if row.memory_mb is not None}
    fits = [row for row in working if memory_mb is None or sizes.get(row.method, math.inf) <= memory_mb]
    if fits:
        chosen, limit = fits[0], "" if memory_mb is None else f" in {memory_mb:g} MB"
        why = f"Use {chosen.method}, the first method that works here{limit}"
        if chosen.method in (BACKPROP, CHECKPOINTED):
            return chosen, f"{why}: its gradient is exact."
        near = "" if chosen.cosine is None else f" (cosine {chosen.cosine:.2f})"
        check = "compare its accuracy with that of backpropagation on a smaller model or batch."
        return chosen, f"{why}. Its gradient is an approximation{near}: {check}"
    if not working:
        return None, "Nothing works here; the table says why."
    if not sizes:
        return None, "Memory is not counted on this device, so nobody knows what fits."
    least = min(sizes, key=sizes.__getitem__)
    return None, (
        f"Nothing that was measured fits into {memory_mb:g} MB; {least} needs least, {sizes[least]:.4g} MB. Take a "
        "smaller batch (or chunk= of gg.ForwardGradient), more pieces, or memory='replay'."
    )
