"""Bias, variance and gradient norm over training, with the paper's values as lines: when did the paper measure them?"""

from __future__ import annotations

from collections.abc import Sequence

from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import BIAS_VARIANCE
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.runs import Run, Variant, measure, select
from gradguess_lab.tables.table import Curve, Figure, Table, number, slugify, text

METHODS = {"wt": None, "wperp-bottom": 10, "wperp": 10}
QUANTITIES = {"variance": "Variance", "bias": "Bias", "gradient_norm": "Gradient norm"}
WIDTH, LAYER = 128, 1
START = 0.5  # where the first weights stand on a logarithmic axis


def over_training_figures(runs: Sequence[Run]) -> list[Figure]:
    """One figure for each quantity; none from a single epoch."""
    found = {method: _diagnosed(runs, method, k) for method, k in METHODS.items()}
    known = {method: variant for method, variant in found.items() if variant}
    return [figure for quantity in QUANTITIES if (figure := _figure(known, quantity))]


def over_training_table(runs: Sequence[Run]) -> Table | None:
    """The numbers behind the figures; None where nothing was diagnosed."""
    rows = []
    for method, k in METHODS.items():
        if variant := _diagnosed(runs, method, k):
            for epoch in sorted({row["epoch"] for run in variant.runs for row in run.diagnostics}):
                values = (Summary.of(variant.values(name, LAYER, epoch=epoch)) for name in QUANTITIES)
                means = (number(one.mean if one else None, ".2e") for one in values)
                rows.append((text(method_label(method)), number(epoch, "d"), *means, text(variant.label)))
    if not rows:
        return None
    return Table(
        "over-training",
        "Bias, variance and gradient norm over training",
        ("Method", "Epoch", *QUANTITIES.values(), "Computed by"),
        tuple(rows),
        f"Layer {LAYER}, width {WIDTH}, means over the seeds, on the first 512 training samples.",
        folded=True,
    )


def _diagnosed(runs: Sequence[Run], method: str, k: int | None) -> Variant | None:
    """The main way the method was computed, of those that were diagnosed."""
    return next((v for v in select(runs, method, WIDTH, k) if any(run.diagnostics for run in v.runs)), None)


def _figure(found: dict[str, Variant], quantity: str) -> Figure | None:
    curves = [curve for method, variant in found.items() if (curve := _curve(method, variant, quantity))]
    ticks = sorted({x for curve in curves for x in curve.x})
    if len(ticks) < 2:
        return None
    title = QUANTITIES[quantity]
    seeds = min(len(variant.runs) for variant in found.values())
    ways = ", ".join(dict.fromkeys(variant.label for method, variant in found.items() if method != "wt"))
    lines = [line for method in found if (line := _paper(method, quantity, ticks[0], ticks[-1]))]
    said = "Dashed: the paper's values, of which it does not say the epoch. " if lines else "The paper has no numbers. "
    return Figure(
        slugify(f"over training {quantity}"),
        f"{title} of layer 1, width {WIDTH}",
        "Epoch",
        title,
        (*lines, *curves),
        f"{title} over training, mean over the seeds (at least {seeds}) with their range, on the first 512 training "
        f"samples. {said}W⊥ and W⊥-bottom: {ways or 'not run'}.",
        x_ticks=tuple(ticks),
        x_names=tuple("0" if tick == START else _name(tick, ticks) for tick in ticks),
        log_x=True,
        log_y=True,
    )


def _name(tick: float, ticks: Sequence[float]) -> str:
    """The number at a tick, unless the next one stands too close to it."""
    return "" if any(tick < other < 2 * tick for other in ticks) else f"{tick:g}"


def _curve(method: str, variant: Variant, quantity: str) -> Curve | None:
    epochs = sorted({row["epoch"] for run in variant.runs for row in run.diagnostics})
    columns = {epoch: [measure(run, quantity, LAYER, epoch=epoch) for run in variant.runs] for epoch in epochs}
    values = {epoch: [v for v in column if v] for epoch, column in columns.items()}  # zero has no logarithm
    points = {max(epoch, START): seeds for epoch, seeds in values.items() if seeds}
    if not points:
        return None
    return Curve(
        method_label(method),
        list(points),
        [sum(seeds) / len(seeds) for seeds in points.values()],
        method,
        low=[min(seeds) for seeds in points.values()],
        high=[max(seeds) for seeds in points.values()],
        markers=True,
    )


def _paper(method: str, quantity: str, first: float, last: float) -> Curve | None:
    for entry in BIAS_VARIANCE:
        if (entry.method, entry.quantity) == (method, quantity):
            return Curve("", [first, last], [entry.value] * 2, method, dashed=True)
    return None
