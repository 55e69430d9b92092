"""From rows to a recommendation. The order of the rows is the order of preference."""

from __future__ import annotations

from collections.abc import Sequence

from gradguess.advise.advice import Row
from gradguess.advise.candidates import BACKPROP, CHECKPOINTED

EXACT = (BACKPROP, CHECKPOINTED)
SAME = 1 - 1e-5  # a cosine above it: the gradient itself, up to rounding
FAINT = 0.1  # a cosine below it: training from scratch takes many times as many steps


def recommend(rows: Sequence[Row], memory_mb: float | None = None) -> tuple[Row | None, str]:
    """The first row that works and fits into `memory_mb`, and why. What was not measured does not fit."""
    working = [row for row in rows if row.works]
    if not working:
        return None, "Nothing works here; the table says why."
    fitting = [
        row for row in working if memory_mb is None or (row.memory_mb is not None and row.memory_mb <= memory_mb)
    ]
    if not fitting:
        return None, _nothing_fits(working, memory_mb)
    chosen = fitting[0]
    local = next((row for row in fitting if row.method not in EXACT and not _is_backpropagation(row)), None)
    why = _why_exact(chosen, rows) if chosen.method in EXACT else _why_local(chosen, rows)
    return chosen, why if chosen.method not in EXACT else f"{why} {_bought(local)}"


def _is_backpropagation(row: Row) -> bool:
    """Is its gradient the true one? A chained form with few sites is backpropagation by another name."""
    return row.cosine is not None and row.lowest_cosine is not None and min(row.cosine, row.lowest_cosine) > SAME


def _why_exact(chosen: Row, rows: Sequence[Row]) -> str:
    if chosen.method == BACKPROP:
        return "Use plain backpropagation if accuracy is what you want: its gradient is exact."
    return f"Use backpropagation with checkpoints{_price(chosen)}: its gradient is exact, and {_passed(chosen, rows)}."


def _why_local(chosen: Row, rows: Sequence[Row]) -> str:
    why = (
        f"Use {chosen.method}{_price(chosen)}, since {_passed(chosen, rows)}. Its gradient is an "
        f"approximation{_near(chosen)}: compare its accuracy with that of backpropagation on a smaller model or batch."
    )
    if chosen.cosine is None or chosen.cosine >= FAINT:
        return why
    return f"{why} So faint a signal suits fine-tuning; from scratch a smaller batch with a better method is faster."


def _bought(local: Row | None) -> str:
    """What the best method without a global backward pass gives instead."""
    if local is None:
        return "Nothing else that was measured and fits does without a backward pass through the whole network."
    return (
        f"{local.method}{_price(local)} buys something else: no signal passes backwards through the whole network. Its "
        f"gradient is an approximation{_near(local)}."
    )


def _passed(chosen: Row, rows: Sequence[Row]) -> str:
    """Why the exact rows above the chosen one are out."""
    above = [row for row in rows if row.method in EXACT and row is not chosen]
    return " and ".join(
        f"{row.method.lower()} needs {_mb(row.memory_mb)}"
        if row.works and row.memory_mb is not None
        else f"{row.method.lower()} {'has an unknown peak of memory' if row.works else 'does not work here'}"
        for row in above
    )


def _price(row: Row) -> str:
    """Time and memory, in brackets."""
    told = [] if row.time is None else [f"{row.time:.2f} × the time"]
    told += [] if row.memory is None else [f"{row.memory:.2f} × the memory"]
    return f" ({' and '.join(told)} of backpropagation)" if told else ""


def _near(row: Row) -> str:
    """How good the gradient is, in brackets."""
    if row.cosine is None or row.lowest_cosine is None:
        return ""
    return f" (cosine {row.cosine:.2f}, {row.lowest_cosine:.2f} at the lowest site)"


def _nothing_fits(working: Sequence[Row], memory_mb: float | None) -> str:
    known = [row for row in working if row.memory_mb is not None]
    if not known:
        return "Memory is not counted on this device, so nobody knows what fits."
    least = min(known, key=lambda row: row.memory_mb or 0.0)
    return (
        f"Nothing that was measured fits into {_mb(memory_mb)}; {least.method} needs least, {_mb(least.memory_mb)}. "
        "Take a smaller batch (or chunk= of gg.ForwardGradient), more pieces, or memory='replay'."
    )


def _mb(value: float | None) -> str:
    assert value is not None
    return f"{value:.4g} MB" if value < 1000 else f"{value:.0f} MB"
