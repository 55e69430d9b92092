"""Write the tables, the sentences with numbers and the figures of the README and of the docs, from the results.

Run after new results: `python scripts/make_tables.py`. Text between `<!-- NAME -->` and `<!-- end -->` is replaced.
`docs/figures/fingerprints.json` says what the figures show, so that a test can tell when they are stale.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gradguess_lab.compare.run import read_record
from gradguess_lab.compare.tables import Compared, compared
from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import entry_of, method_label, settings_of
from gradguess_lab.paper_numbers import (
    BIAS_VARIANCE,
    CHOICE_OF_K,
    NEWTON_SCHULZ,
    PRECONDITIONING,
    SCALING,
    WIDTHS,
    Published,
)
from gradguess_lab.report.plot import draw
from gradguess_lab.report.results import load_benchmarks, load_runs
from gradguess_lab.store import files_of, find
from gradguess_lab.streams.page import TITLES
from gradguess_lab.streams.page import table as streams_table
from gradguess_lab.streams.plan import GROUPS
from gradguess_lab.tables import sentences
from gradguess_lab.tables.averages import curve_of_means
from gradguess_lab.tables.claims import claims_table
from gradguess_lab.tables.compare import DIFFERS, HOLDS, NOT_COMPARED
from gradguess_lab.tables.compiled import compiled_matrix
from gradguess_lab.tables.costs import method_cell, ratio_cell, students_table
from gradguess_lab.tables.curves import scaling_figure
from gradguess_lab.tables.deep import deep_tables
from gradguess_lab.tables.exact_top import exact_top_table
from gradguess_lab.tables.feedback import feedback_tables
from gradguess_lab.tables.feedback_results import results_of
from gradguess_lab.tables.lines import compare, comparison_table
from gradguess_lab.tables.paper import scaling_matrix
from gradguess_lab.tables.projector import projector_table
from gradguess_lab.tables.real import real_matrix
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.speed import speed_claims_table
from gradguess_lab.tables.table import Cell, Curve, Figure, Table, mean_text

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))))
# tables that may have no run
OPTIONAL = ("exact-top", "real", "claims-cost")
PROJECTED = ("Guess", "Layer", "First weights", "Trained weights", "Directions")
ACCURACIES = ("Train accuracy", "Test accuracy", "Seeds")
FEEDBACK = {  # the columns that are shown of a table on learned feedback, and the rows: what they say in a column
    "feedback-width": (("Method", "Width", *ACCURACIES), ("Width", "64", "512")),
    "feedback-depth": (("Method", "Depth", "Learning rate", *ACCURACIES), ("Depth", "12")),
    "feedback-residual": (("Method", "Depth", *ACCURACIES), ("Depth", "24")),
    "feedback-quality": (("Method", "Layer 1", "Layer 2", "Layer 3"), ("Epoch", "300")),
    "feedback-ablations": (("Method", *ACCURACIES), ("Width", "256")),
}
DEEP = {  # the tables that are shown on deep networks
    "deep-charformer-shakespeare-12-20",
    "deep-charformer-shakespeare-4-20",
    "deep-mlp-mnist1d-12-300",
    "deep-residual-mnist1d-24-100",
    "deep-resnet18-cifar10-3-50",
    "deep-resnet18-cifar10-3-10",
    "deep-vit-cifar10-8-20",
}
REACHED = ("rule", "error: mean (least to most)", "MB kept")
STREAMS = {  # the columns that are shown of a group of streams
    "recall12": REACHED,
    "recall40": REACHED,
    "copy40": REACHED,
    "tmaze40": REACHED,
    "characters": REACHED,
    "price": ("task", "rule", "ms a step", "MB kept"),
}
GLANCE = ("backprop", "students", "students-chained", "feedback-chained", "wperp-exact", "wperp", "activation")


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown(table: Table, *columns: str) -> str:
    """The columns that are shown, or those of them that are named; a cell's mark and note follow it."""
    shown = [i for i in table.shown if not columns or table.columns[i] in columns]
    head = [table.columns[i] for i in shown]
    body = [[_shown(row[i]) for i in shown] for row in table.rows]
    return "\n".join([line(head), line(["---"] * len(head)), *(line(cells) for cells in body)])


def _shown(cell: Cell) -> str:
    judged = cell.verdict is not None and cell.verdict != cell.text
    mark = {HOLDS: " ✓", DIFFERS: " ✗"}.get(cell.verdict or "", "") if judged else ""
    return cell.text + mark + (f" ({cell.note})" if cell.note else "")


@cache
def deep_networks() -> list[Table]:
    return deep_tables(load_runs(ROOT / "results" / "deep"))


def of_rows(table: Table | None, column: str, *kept: str) -> Table:
    """The table with those rows alone that say one of these in a column."""
    assert table is not None
    place = table.columns.index(column)
    return replace(table, rows=tuple(row for row in table.rows if row[place].text in kept))


def published_table(runs: Sequence[Run], *entries: Published) -> str:
    """Published numbers beside ours by the paper's definition; times are not compared."""
    lines = [one for one in compare(entries, runs) if one.main and one.verdict != NOT_COMPARED]
    table = comparison_table("published", "", lines, "")
    return markdown(table, "Method", "Width", "Quantity", "Paper", "Ours", "± sd", "Verdict")


def glance_table(runs: Sequence[Run]) -> str:
    """Each way to train on a small, a deep and a language network, what it sends back, and how many seeds there are."""
    deep = {table.slug: table for table in deep_networks()}
    width = max(WIDTHS)
    small = {one.entry.method: one.ours for one in compare(SCALING, runs) if one.main and one.entry.width == width}
    for method in ("feedback-chained", "wperp-exact"):
        (result,) = results_of([TrainConfig(width=width, **settings_of(method))], runs)
        small[method] = result.ours("train_accuracy")
    tables = [deep["deep-resnet18-cifar10-3-50"], deep["deep-charformer-shakespeare-4-20"]]
    firsts = [{row[0].text: row for row in reversed(table.rows)} for table in tables]
    titles = [f"MLP of the paper, width {width}, train", "ResNet-18, CIFAR-10, test", "transformer, text, test bits"]
    seeds = [{str(ours.n) for method, ours in small.items() if ours and method in GLANCE}]
    seeds += [{rows[label][7].text for label in map(method_label, GLANCE) if label in rows} for rows in firsts]
    lines = [line(["", *titles, "sent back through the network"]), "|---" * (2 + len(titles)) + "|"]
    for method in GLANCE:
        label, ours = method_label(method), small.get(method)
        found = [rows[label][4].text if label in rows else "–" for rows in firsts]
        trained = mean_text(ours.mean, ours.sd) if ours else "–"
        lines.append(line([label, trained, *found, entry_of(method).sends]))
    counts = ", ".join(" or ".join(sorted(known, key=int)) for known in seeds)
    return "\n".join([*lines, "", f"Mean ± standard deviation over seeds, by column: {counts}."])


def overview_figure(runs: Sequence[Run]) -> Figure:
    """Training accuracy over the width: ours filled, the paper's hollow; W⊥ by its definition."""
    curves = []
    for method in ("backprop", "feedback-chained", "wperp", "wt", "activation"):
        entries = [entry for entry in SCALING if entry.method == method]
        if entries:
            x, y = [float(e.width) for e in entries], [e.value for e in entries]
            curves.append(Curve("", x, y, method, dashed=True, markers=True))
            points = [(one.entry.width, one.ours) for one in compare(entries, runs) if one.main and one.ours]
        else:
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


def figures(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the docs."""
    made = [overview_figure(runs), scaling_figure(runs)]
    return [figure for figure in made if figure is not None] + [one.figures[0] for one in comparison()]


def measured(key: str, study: str = "bench") -> dict[str, Any]:
    found = find(ROOT / "results" / study, key)
    assert found is not None, f"nothing is stored under {key!r} in results/{study}"
    return found


def times_table(device: str) -> str:
    """Ratio of a step to backpropagation's, by method and width."""
    rows = measured(f"time-{device}")["rows"]
    widths = sorted({row["width"] for row in rows})
    found = {(row["method"], row["width"]): row for row in rows}
    lines = [line(["", *(f"width {width}" for width in widths)]), "|---" * (1 + len(widths)) + "|"]
    base = [f"{found['backprop', width]['step_ms']:.3g} ms" for width in widths]
    lines.append(line(["Backpropagation", *base]))
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "backprop"):
        cells = [ratio_cell(row["ratio"]).text if (row := found.get((method, width))) else "–" for width in widths]
        lines.append(line([_shown(method_cell(method, found.get((method, widths[0])))), *cells]))
    return "\n".join(lines)


def attention_table() -> str:
    """Attention with its tangent: time and peak memory of each way."""
    names = {
        "gradguess": "this library",
        "kernel alone": "its kernel alone",
        "blocks": "128 queries at a time",
        "math kernel": "PyTorch's math kernel",
        "jvp_flash_attention": "jvp_flash_attention",
    }
    record = measured("attention-cuda")
    found = {(row["way"], row["dtype"], tuple(row["shape"])): row for row in record["rows"]}
    settings = list(dict.fromkeys((dtype, shape) for _, dtype, shape in found))
    heads = [f"{dtype}, {b} × {h} heads of {size}, {length} positions" for dtype, (b, h, length, size) in settings]
    lines = [line(["", *heads]), "|---" * (1 + len(heads)) + "|"]
    for way, name in names.items():
        mine = [found[way, *setting] for setting in settings]
        lines.append(line([name, *(f"{row['ms']:.2f} ms, {row['peak_mb']:,.0f} MB" for row in mine)]))
    return "\n".join(lines)


def gpt2_table() -> str:
    """A network of GPT-2's shape: each way to train it, of 400 steps that learn and of 60 whose memory is measured."""
    head = ("", "steps", "step", "median", "peak", "loss, first and last")
    lines = [line(head), "|---" * len(head) + "|"]
    for row in measured("gpt2-cuda")["rows"]:
        if row["steps"] in (60, 400):
            times = [f"{row[key]:.1f} ms" for key in ("step_ms", "median_ms")]
            losses = f"{row['losses'][0]:.2f}, {row['losses'][-1]:.2f}"
            peak = "–" if row["peak_mb"] is None else f"{row['peak_mb'] / 1024:.1f} GiB"
            lines.append(line([row["way"], str(row["steps"]), *times, peak, losses]))
    return "\n".join(lines)


def comparison() -> list[Compared]:
    """The tasks that were compared; none before there are results."""
    stored = ROOT / "results" / "compare"
    return compared(read_record(stored)) if files_of(stored)[0].exists() else []


def feedback_blocks(runs: Sequence[Run]) -> dict[str, str]:
    """Of the tables on learned feedback, what `FEEDBACK` names."""
    made = {table.slug: table for table in feedback_tables(runs)}
    return {slug: markdown(of_rows(made[slug], *rows), *columns) for slug, (columns, rows) in FEEDBACK.items()}


def comparison_block() -> str:
    """Every task with its table, its setting and a figure."""
    parts = []
    for one in comparison():
        drawn = f"![{one.figures[0].title}](figures/{one.figures[0].slug}.png)"
        table = markdown(one.table, "Method", "Test", "Time", "Memory", "Sent back")
        parts.append("\n\n".join([f"### {one.title}", one.setting, table, drawn]))
    return "\n\n".join(parts) or "Not run yet: there are no results in `results/compare`."


def deep_block() -> str:
    """Deep networks: the tables of `DEEP` under their titles."""
    columns = ("Method", "Pieces", "Rate", "Test", "Best epoch", "Seeds")
    shown = [table for table in deep_networks() if table.slug in DEEP]
    return "\n\n".join(f"### {table.title}\n\n{markdown(table, *columns)}" for table in shown)


def streams_block() -> str:
    """The tables of the groups of streams that were run."""
    stored = ROOT / "results" / "streams"
    made = {name: streams_table(stored, GROUPS[name], *columns) for name, columns in STREAMS.items()}
    parts = ["\n".join([f"### {TITLES[name]}", "", *lines]) for name, lines in made.items() if lines]
    return "\n\n".join(parts) or "Not run yet: there are no results in `results/streams`."


def memory_table() -> str:
    """Peak memory without the parameters' gradients, and time over backpropagation's, by method and depth."""
    rows = measured("memory-cpu")["rows"]
    depths = sorted({row["depth"] for row in rows})
    found = {(row["method"], row["depth"]): row for row in rows}
    lines = [
        line(["", *(f"depth {depth}" for depth in depths), *(f"time, {depth}" for depth in depths)]),
        "|---" * (1 + 2 * len(depths)) + "|",
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [found[method, depth] for depth in depths]
        memory = [f"{row['peak_mb'] - row['gradients_mb']:.0f} MB" for row in mine]
        times = [f"{row['step_ms'] / found['backprop', row['depth']]['step_ms']:.2f}" for row in mine]
        lines.append(line([method_label(method), *memory, *times]))
    return "\n".join(lines)


def trainer_table() -> str:
    """The loss of Hugging Face's Trainer and of the bridge, early and late in a run."""
    rows = measured("trainer", "bridges")["rows"]
    steps = [1, 50, 100, rows[0]["steps"]]
    head = ["", *(f"step {step}" for step in steps), "mean of the last 20"]
    lines = [line(head), "|---" * len(head) + "|"]
    for row in rows:
        losses = [f"{row['losses'][step - 1]:.3f}" for step in steps]
        lines.append(line([row["way"], *losses, f"{row['last']:.3f}"]))
    gap = next(row["gap"] for row in rows if row["way"] == "backprop")
    return "\n".join([*lines, "", f"Over all steps, `gg.Backprop()` and Trainer differ by at most {gap:.0e}."])


def narrow_and_wide(table: Table | None) -> Table | None:
    """The rows of the smallest and of the largest width."""
    if table is None:
        return None
    ends, column = (min(WIDTHS), max(WIDTHS)), table.columns.index("Width")
    return dataclasses.replace(table, rows=tuple(row for row in table.rows if row[column].value in ends))


def finite_table() -> str:
    """Errors of the derivative along W⊥'s directions on trained networks, finite and dual, by network and dtype."""
    rows = measured("accuracy", "finite")["derivatives"]
    rows = [row for row in rows if row["guess"] == "wperp" and row["epochs"]]
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    found = {(row["network"], row["dtype"]): row for row in rows}
    head = [f"{kind}, {dtype}" for dtype in dtypes for kind in ("finite", "dual")]
    lines = [line(["network", *head]), "|---" * (1 + len(head)) + "|"]
    for network in dict.fromkeys(row["network"] for row in rows):
        records = [found[network, dtype] for dtype in dtypes]
        cells = [" / ".join(f"{v:.0e}" for v in one[kind]) for one in records for kind in ("finite", "dual")]
        lines.append(line([network, *cells]))
    return "\n".join(lines)


def finite_runs_table() -> str:
    """Accuracies after training with finite differences and with dual numbers."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in measured("accuracy", "finite")["runs"]:
        groups.setdefault((row["method"], row["dtype"]), {}).setdefault(row["derivative"], []).append(row)
    lines = [line(["method", "dtype", "derivative", "train", "test"]), "|---" * 5 + "|"]
    for (method, dtype), kinds in groups.items():
        for kind, rows in kinds.items():
            scores = [
                mean_text(statistics.mean(values), statistics.stdev(values))
                for values in ([row[key] for row in rows] for key in ("train_accuracy", "test_accuracy"))
            ]
            lines.append(line([method_label(method), dtype, kind, *scores]))
    return "\n".join(lines)


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """Every table and every sentence with numbers, by the name of its mark."""
    benchmarks = load_benchmarks(ROOT / "results" / "paper")
    made = [
        narrow_and_wide(exact_top_table(runs)),
        real_matrix(runs),
        speed_claims_table(benchmarks),
        students_table(measured("steps", "deep")),
    ]
    found = {
        "bench-times": times_table("cpu"),
        "bench-times-gpu": times_table("cuda"),
        "bench-memory": memory_table(),
        "attention": attention_table(),
        "gpt": gpt2_table(),
        "compare": comparison_block(),
        "deep": deep_block(),
        "streams": streams_block(),
        **{f"bench-compiled-{d}": markdown(compiled_matrix(measured(f"compiled-{d}"))) for d in ("cpu", "cuda")},
        "trainer": trainer_table(),
        "finite": finite_table(),
        "finite-runs": finite_runs_table(),
        "glance": glance_table(runs),
        "students-sentence": sentences.students_sentence(deep_networks()),
        "scaling": markdown(scaling_matrix(runs)),
        "tally-sentence": sentences.tally_sentence(runs),
        "differing": sentences.differing_list(runs),
        "tangents": sentences.tangents_sentence(runs),
        "claims": markdown(claims_table(runs), "The paper says", "Verdict"),
        "choice-of-k": published_table(runs, *CHOICE_OF_K),
        "bias-variance": published_table(runs, *BIAS_VARIANCE),
        "newton-schulz": published_table(runs, *NEWTON_SCHULZ),
        "preconditioning": published_table(runs, *PRECONDITIONING),
        "projector": markdown(of_rows(projector_table(benchmarks), "Width", "512"), *PROJECTED),
        **feedback_blocks(runs),
    }
    absent = dict.fromkeys(OPTIONAL, "Nothing of this table was run.")
    return absent | found | {table.slug: markdown(table) for table in made if table is not None}


def filled(page: str, made: dict[str, str]) -> str:
    """The page with every marked block replaced."""

    def put(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{_wrapped(made[match[1]])}\n<!-- end -->"

    return re.sub(r"<!-- ([a-z-]+) -->\n.*?<!-- end -->", put, page, flags=re.DOTALL)


def _wrapped(block: str) -> str:
    """Prose in lines of the pages' length; tables as they are."""
    kept = (block_line if block_line.startswith("|") else _fill(block_line) for block_line in block.split("\n"))
    return "\n".join(kept)


def _fill(prose: str) -> str:
    indent = "  " if prose.startswith("- ") else ""
    return textwrap.fill(prose, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    runs = load_runs(ROOT / "results" / "paper")
    made = tables(runs)
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    folder, drawn = ROOT / "docs" / "figures", figures(runs)
    for figure in drawn:
        (folder / f"{figure.slug}.png").write_bytes(draw(figure).png)
    prints = {figure.slug: figure.fingerprint for figure in drawn}
    (folder / "fingerprints.json").write_text(json.dumps(prints, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
