"""Write the tables of the README and of the docs, and the overview figure, from results/paper and results/bench.

Run after new results: `python scripts/make_tables.py`. Text between `<!-- NAME -->` and `<!-- end -->` is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradguess.experiments.config import TrainConfig
from gradguess.experiments.methods import method_label, settings_of
from gradguess.experiments.paper_numbers import SCALING, WIDTHS
from gradguess.experiments.tables.averages import curve_of_means
from gradguess.experiments.tables.feedback import feedback_tables
from gradguess.experiments.tables.feedback_results import results_of
from gradguess.experiments.tables.paper import (
    bias_variance_table,
    choice_of_k_table,
    newton_schulz_table,
    preconditioning_table,
    scaling_matrix,
)
from gradguess.experiments.tables.real import real_table
from gradguess.experiments.tables.runs import Run
from gradguess.experiments.tables.table import Curve, Figure, Table
from gradguess.report.plot import draw
from gradguess.report.results import load_runs

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/reproduce.md",
    "docs/feedback.md",
    "docs/speed.md",
    "docs/scale.md",
    "docs/real.md",
    "docs/gpu.md",
)
OVERVIEW = ("backprop", "feedback-chained", "feedback-direct-rare", "wperp", "wt", "activation", "weight")


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown(table: Table) -> str:
    """The columns that are shown; a cell's note follows it in brackets."""
    head = [table.columns[i] for i in table.shown]
    body = [[row[i].text + (f" ({row[i].note})" if row[i].note else "") for i in table.shown] for row in table.rows]
    return "\n".join([line(head), line(["---"] * len(head)), *(line(cells) for cells in body)])


def overview_table(runs: Sequence[Run]) -> str:
    """Training accuracy by width: ours, and the paper's in brackets."""
    published = {(entry.method, entry.width): entry.value for entry in SCALING}
    lines = ["| | " + " | ".join(f"width {width}" for width in WIDTHS) + " |", "|---" * (1 + len(WIDTHS)) + "|"]
    for method in OVERVIEW:
        cells = [method_label(method)]
        for result in results_of([TrainConfig(width=width, **settings_of(method)) for width in WIDTHS], runs):
            ours = result.ours("train_accuracy")
            paper = published.get((method, result.config.width))
            shown = "–" if ours is None else f"{ours.mean:.3f} ± {ours.sd or 0:.3f}"
            cells.append(shown + ("" if paper is None else f" ({paper:.3f})"))
        lines.append(line(cells))
    return "\n".join(lines)


def overview_figure(runs: Sequence[Run]) -> Figure:
    """Training accuracy over the width: ours filled, the paper's hollow."""
    curves = []
    for method in OVERVIEW:
        if method in ("weight", "feedback-direct-rare"):
            continue
        entries = [entry for entry in SCALING if entry.method == method]
        if entries:
            x, y = [float(e.width) for e in entries], [e.value for e in entries]
            curves.append(Curve("", x, y, method, dashed=True, markers=True))
        results = results_of([TrainConfig(method=method, width=width) for width in WIDTHS], runs)
        points = [(r.config.width, summary) for r in results if (summary := r.ours("train_accuracy"))]
        label = "Learned feedback, chained" if method == "feedback-chained" else method_label(method)
        if curve := curve_of_means(label, points, method):
            curves.append(curve)
    return Figure(
        "overview",
        "Training accuracy after 300 epochs",
        "Layer width",
        "Train accuracy",
        tuple(curves),
        x_ticks=tuple(float(width) for width in WIDTHS),
        y_range=(0.0, 1.05),
        log_x=True,
    )


def bench_record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / "results" / "bench" / name).read_text(encoding="utf-8"))
    return record


def ratio_text(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"


def times_table(device: str) -> str:
    """Ratio of a step to backpropagation's, by method and width."""
    rows = bench_record(f"time-{device}.json")["rows"]
    widths = sorted({row["width"] for row in rows})
    found = {(row["method"], row["width"]): row for row in rows}
    lines = [line(["", *(f"width {width}" for width in widths)]), "|---" * (1 + len(widths)) + "|"]
    base = [f"{found['backprop', width]['step_ms']:.3g} ms" for width in widths]
    lines.append(line(["Backpropagation", *base]))
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "backprop"):
        cells = [ratio_text(row["ratio"]) if (row := found.get((method, width))) else "–" for width in widths]
        lines.append(line([method_label(method), *cells]))
    return "\n".join(lines)


def tasks_table() -> str:
    """Ratio of a step to backpropagation's, by real network and variant."""
    rows = bench_record("tasks-cpu.json")["rows"]
    methods = [method for method in dict.fromkeys(row["method"] for row in rows) if method != "backprop"]
    found = {(row["method"], row["task"]): row for row in rows}
    lines = [line(["", "Backpropagation", *map(method_label, methods)]), "|---" * (2 + len(methods)) + "|"]
    for task in dict.fromkeys(row["task"] for row in rows):
        ratios = [f"{found[method, task]['ratio']:.2f}" for method in methods]
        lines.append(line([task, f"{found['backprop', task]['step_ms']:.3g} ms", *ratios]))
    return "\n".join(lines)


def memory_table() -> str:
    """Peak memory without the parameters' gradients, and time over backpropagation's, by method and depth."""
    rows = bench_record("memory-cpu.json")["rows"]
    depths = sorted({row["depth"] for row in rows})
    found = {(row["method"], row["depth"]): row for row in rows}
    lines = [
        line(["", *(f"depth {depth}" for depth in depths), *("time" for _ in depths)]),
        "|---" * (1 + 2 * len(depths)) + "|",
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [found[method, depth] for depth in depths]
        memory = [f"{row['peak_mb'] - row['gradients_mb']:.0f} MB" for row in mine]
        times = [f"{row['step_ms'] / found['backprop', row['depth']]['step_ms']:.2f}" for row in mine]
        lines.append(line([method_label(method), *memory, *times]))
    return "\n".join(lines)


def tables(runs: Sequence[Run]) -> dict[str, str]:
    real = real_table(runs)
    found = {
        "bench-times": times_table("cpu"),
        "bench-times-gpu": times_table("cuda"),
        "bench-memory": memory_table(),
        "bench-tasks": tasks_table(),
        "real": markdown(real) if real else "",
        "overview": overview_table(runs),
        "scaling": markdown(scaling_matrix(runs)),
        "choice-of-k": markdown(choice_of_k_table(runs)),
        "bias-variance": markdown(bias_variance_table(runs)),
        "newton-schulz": markdown(newton_schulz_table(runs)),
        "preconditioning": markdown(preconditioning_table(runs)),
    }
    return found | {table.slug: markdown(table) for table in feedback_tables(runs)}


def filled(page: str, made: dict[str, str]) -> str:
    """The page with every marked table replaced."""

    def put(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- ([a-z-]+) -->\n.*?<!-- end -->", put, page, flags=re.DOTALL)


def main() -> None:
    runs = load_runs(ROOT / "results" / "paper")
    made = tables(runs)
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    drawing = draw(overview_figure(runs))
    folder = ROOT / "docs" / "figures"
    (folder / "overview.png").write_bytes(drawing.png)
    (folder / "overview.svg").write_text(drawing.svg, encoding="utf-8")


if __name__ == "__main__":
    main()
