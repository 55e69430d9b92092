"""Sentences of the README and of the docs that have numbers in them, made from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import method_label
from gradguess_lab.paper_numbers import DISTINCT, SCALING
from gradguess_lab.tables.compare import DIFFERS, HOLDS, LEVEL, Summary, kind_of
from gradguess_lab.tables.costs import place_of
from gradguess_lab.tables.feedback_results import results_of
from gradguess_lab.tables.lines import compare, quantity_cell
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Table, mean_text
from gradguess_lab.tables.tally import holding_when_lower, verdicts
from gradguess_lab.tables.variants import explanations

Record = Mapping[str, Any]


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


def seeds_sentence(runs: Sequence[Run]) -> str:
    """How many seeds stand behind the main lines."""
    counts = Counter(line.ours.n for line in compare(DISTINCT, runs) if line.main and line.ours)
    parts = [
        f"{seeds} {'seed' if seeds == 1 else 'seeds'} for {count}" for seeds, count in sorted(counts.items())[::-1]
    ]
    return f"Behind the {sum(counts.values())} numbers stand " + ", ".join(parts) + "."


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


def best_guess_sentence(runs: Sequence[Run]) -> str:
    """How far the best of the paper's guesses is from backpropagation at the largest width."""
    width = max(entry.width for entry in SCALING)
    found = {line.entry.method: line.ours for line in compare(SCALING, runs) if line.main and line.entry.width == width}
    known = {method: ours for method, ours in found.items() if ours}
    guesses = {method: ours for method, ours in known.items() if method != "backprop"}
    if not guesses or "backprop" not in known:
        return ""
    best = max(guesses, key=lambda method: guesses[method].mean)
    return (
        f"- The paper's guesses stay far below backpropagation: at width {width} the best of them, "
        f"{method_label(best)}, reaches {_percent(guesses[best])} % training accuracy, and backpropagation "
        f"{_percent(known['backprop'])} % ({guesses[best].n} seeds)."
    )


def _percent(ours: Summary) -> str:
    return f"{100 * ours.mean:.1f}" + ("" if ours.sd is None else f" ± {100 * ours.sd:.1f}")


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


def speed_bullet(time: Record, cpu: Record, cuda: Record) -> str:
    """Time of a step over that of backpropagation, for W⊥ and for learned feedback with rare tangents.

    Args:
        time: uncompiled, on the paper's network.
        cpu, cuda: compiled, on real networks.
    """
    perp, rare = (
        [_range(_compiled(cpu, name, "compiled")), _range(_compiled(cuda, name, "compiled-captured"))]
        for name in ("wperp", "feedback-chained-rare")
    )
    plain = _range([row["ratio"] for row in time["rows"] if row["method"] == "wperp"])
    where, networks = _threads(cpu), len({row["task"] for record in (cpu, cuda) for row in _real(record)})
    return (
        f"- Speed: compiled, on {networks} real networks, a step of W⊥ with the shared basis takes {perp[0]} steps of "
        f"compiled backpropagation on {where} and {perp[1]} on one {place_of(cuda)}, where both are CUDA graphs; one "
        f"of learned feedback with rare tangents {rare[0]} and {rare[1]}. Uncompiled, W⊥ takes {plain} on the paper's "
        f"MLP on {_threads(time)}, most on narrow layers ([on a CPU](docs/speed.md), [on a GPU](docs/gpu.md))."
    )


def _threads(record: Record) -> str:
    return f"{record['environment']['threads']} threads of a {place_of(record)}"


def _real(record: Record) -> list[Record]:
    """The rows of networks other than the paper's."""
    return [row for row in record["rows"] if not row["task"].startswith("paper")]


def _compiled(record: Record, method: str, mode: str) -> list[float]:
    """Ratios to backpropagation in the same mode on the real networks."""
    return [row["ratios"][mode] for row in _real(record) if (row["method"], row["mode"]) == (method, mode)]


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


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
