"""Sentences of the README and of the docs that have numbers in them, made from the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import method_label
from gradguess_lab.tables.compare import DIFFERS, HOLDS, LEVEL, kind_of
from gradguess_lab.tables.feedback_results import results_of
from gradguess_lab.tables.lines import quantity_cell
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Table, mean_text
from gradguess_lab.tables.tally import holding_when_lower, verdicts
from gradguess_lab.tables.variants import explanations


def tally_sentence(runs: Sequence[Run]) -> str:
    """How many of the paper's numbers hold."""
    found = verdicts(runs)
    judged, closing = found[HOLDS] + found[DIFFERS], [one for one in explanations(runs) if one.closing]
    seeds = sorted({one.ways[way].n for one in closing for way in one.closing})
    made = f" ({' or '.join(map(str, seeds))} seeds)" if seeds else ""
    return (
        f"Of {judged} published numbers that can be judged, {found[HOLDS]} hold and {found[DIFFERS]} differ; "
        f"{LEVEL * judged:.0f} would differ by chance alone. The paper has one run a number, so that a wide interval "
        f"passes easily: with our means 5 % lower, {holding_when_lower(runs)} of the {found[HOLDS]} would hold as "
        f"well. Of those that differ, {len(closing)} are met when we do as the authors' scripts do and the paper does "
        f"not say{made}; {found[DIFFERS] - len(closing)} remain unexplained."
    )


def differing_list(runs: Sequence[Run]) -> str:
    """A point for every published number whose main line differs."""
    points = []
    for one in explanations(runs):
        line, kind = one.line, kind_of(one.line.entry.quantity)
        if line.ours is None:
            continue
        ours = f"{quantity_cell(line.ours.mean, kind).text} ± {quantity_cell(line.ours.sd, kind).text}"
        paper = quantity_cell(line.entry.value, kind).text
        by = f" ({line.computed_by})" if line.computed_by else ""
        closed = f"closed by: {', '.join(one.closing).lower()}" if one.closing else "unexplained" if one.ways else ""
        said = f"{line.method}, width {line.entry.width}, {line.quantity.lower()}: {ours}{by}, the paper has {paper}"
        points.append(f"- {said}" + (f"; {closed}." if closed else "."))
    return "\n".join(points) or "Nothing differs."


def tangents_sentence(runs: Sequence[Run]) -> str:
    """What more tangents bring W⊥ with the shared basis at width 256."""
    ways: dict[str, dict[str, Any]] = {
        "with one tangent": {},
        "balanced": {"balance": True},
        "with one tangent per site": {"isolate": True},
        "with ten tangents": {"tangents": 10},
    }
    configs = [TrainConfig(method="wperp", width=256, **options) for options in ways.values()]
    found = zip(ways, results_of(configs, runs), strict=True)
    parts = [
        f"{mean_text(s.mean, s.sd)} {way} ({s.n} seed{'s' * (s.n > 1)})"
        for way, r in found
        if (s := r.ours("train_accuracy"))
    ]
    return "On the training data W⊥ with the shared basis at width 256 reaches " + ", ".join(parts) + "."


def students_sentence(deep: Sequence[Table]) -> str:
    """Where students end on ResNet-18 after 50 epochs, of the rows with several seeds; `deep` are `deep_tables`."""
    (table,) = [table for table in deep if table.slug == "deep-resnet18-cifar10-3-50"]
    rows = [row for row in table.rows if row[7].text != "1"]
    mine = [row for row in rows if row[0].text == method_label("students")]
    counts = " or ".join(sorted({row[7].text for row in rows}))
    parts = " and ".join(f"{row[4].text} in {row[1].text} pieces" for row in mine)
    return (
        f"- ResNet-18 on CIFAR-10, 50 epochs, {counts} seeds: students end at {parts}, backpropagation at "
        f"{rows[0][4].text}."
    )
