"""From rows to a recommendation. The order of the rows is the order of preference."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.advise.advice import Row
from gradguess.advise.candidates import BACKPROP, CHECKPOINTED

EXACT = (BACKPROP, CHECKPOINTED)


def recommend(rows: Sequence[Row], memory_mb: float | None = None) -> tuple[Row | None, str]:
    """The first row that works and fits into `memory_mb`, and why.

    A memory that was not measured is taken to fit where no limit is given, and not to fit where one is.
    """
    working = [row for row in rows if row.works]
    if not working:
        return None, "Nothing works here; the table says why."
    fitting = [row for row in working if memory_mb is None or (row.memory_mb or float("inf")) <= memory_mb]
    if not fitting:
        return None, _nothing_fits(working, memory_mb or 0.0)
    chosen = fitting[0]
    local = next((row for row in fitting if row.method not in EXACT), None)
    return chosen, " ".join([_because(chosen, rows, memory_mb), *_alternative(chosen, local)])


def _because(chosen: Row, rows: Sequence[Row], memory_mb: float | None) -> str:
    if chosen.method == BACKPROP:
        fits = "" if memory_mb is None else f", and its {chosen.memory_mb:.3g} MB fit into {memory_mb:.3g} MB"
        return f"Use backpropagation if accuracy is all you want: its gradient is exact{fits}."
    reasons = [_ruled_out(row) for row in rows[: rows.index(chosen)]]
    without = f" ({'; '.join(reasons)})" if reasons else ""
    if chosen.method == CHECKPOINTED:
        return f"Use backpropagation with checkpoints: its gradient is exact{_figures(chosen)}{without}."
    return f"Use {chosen.method}{_figures(chosen)}: it comes first of what works and fits{without}."


def _ruled_out(row: Row) -> str:
    if not row.works:
        return f"{row.method} does not work here"
    needs = "an unknown amount of memory" if row.memory_mb is None else f"{row.memory_mb:.3g} MB"
    return f"{row.method} needs {needs}"


def _alternative(chosen: Row, local: Row | None) -> list[str]:
    """What the best method without a global backward pass would buy."""
    if chosen.method not in EXACT:
        return ["Its gradient is an approximation: compare the accuracy with backpropagation on a small run."]
    if local is None:
        return ["Nothing without a backward pass through the whole network works here."]
    return [
        f"{local.method}{_figures(local)} needs no backward pass through the whole network, so that a step holds one "
        "piece or layer at a time and no signal passes between them; its gradient is an approximation."
        if local.method == "Students"
        else f"{local.method}{_figures(local)} needs no backward pass through the whole network; its gradient is an "
        "approximation."
    ]


def _figures(row: Row) -> str:
    """The price of a method, in brackets."""
    told = [f"{row.time:.2f} of its time" if row.time is not None else ""]
    told.append(f"{row.memory:.2f} of its memory" if row.memory is not None else "")
    told = [words for words in told if words]
    return f" ({', '.join(told)})" if told else ""


def _nothing_fits(working: Sequence[Row], memory_mb: float) -> str:
    known = [row for row in working if row.memory_mb is not None]
    if not known:
        return "Memory is not counted on this device, so it is not known what fits."
    least = min(known, key=lambda row: row.memory_mb or 0.0)
    return (
        f"Nothing fits into {memory_mb:.3g} MB. {least.method} needs least, {least.memory_mb:.3g} MB. Take a smaller "
        "batch, more pieces (pieces=), or gg.ForwardGradient(..., memory='replay') or chunk=."
    )
