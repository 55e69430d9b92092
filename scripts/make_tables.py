"""Write the tables, the sentences with numbers and the figures of the README and of the docs, from the results.

Run after new results: `python scripts/make_tables.py`. Text between `<!-- NAME -->` and `<!-- end -->` is replaced.
`docs/figures/fingerprints.json` says what the figures show, so that a test can tell when they are stale.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from gradguess_lab.compare.run import read_record
from gradguess_lab.compare.tables import compared
from gradguess_lab.methods import entry_of, method_label, settings_of
from gradguess_lab.paper_numbers import SCALING, WIDTHS
from gradguess_lab.report.sections import Section
from gradguess_lab.store import find
from gradguess_lab.streams import page as stream_tables
from gradguess_lab.streams.plan import GROUPS
from gradguess_lab.tables import bench, beyond, common
from gradguess_lab.tables.claims import claims_table
from gradguess_lab.tables.feedback import feedback_tables
from gradguess_lab.tables.figure import Figure, draw, with_bars
from gradguess_lab.tables.paper import PUBLISHED, compare, over_width, papers_curve, scaling_figure, scaling_matrix
from gradguess_lab.tables.runs import DEFAULTS, EXPERIMENT, Run, groups, load_benchmarks, load_runs
from gradguess_lab.tables.table import Table, cell, matrix
from gradguess_lab.tables.tally import explanations, tally_sentence
from gradguess_lab.tables.verdicts import NOT_COMPARED, Summary

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))))
ACCURACIES = ("Train accuracy", "Test accuracy", "Seeds")
FEEDBACK = {  # the columns that are shown of a table on learned feedback, and the rows: what they say in a column
    "feedback-width": (("Method", "Width", *ACCURACIES), ("Width", "64", "512")),
    "feedback-depth": (("Method", "Depth", "Learning rate", *ACCURACIES), ("Depth", "12")),
    "feedback-residual": (("Method", "Depth", *ACCURACIES), ("Depth", "24")),
    "feedback-quality": (("Method", "Layer 1", "Layer 2", "Layer 3"), ("Epoch", "300")),
    "feedback-ablations": (("Method", *ACCURACIES), ("Width", "256")),
}
DEEP = (  # the tables that are shown on deep networks
    "deep-charformer-shakespeare-12-20",
    "deep-charformer-shakespeare-4-20",
    "deep-mlp-mnist1d-12-300",
    "deep-residual-mnist1d-24-100",
    "deep-resnet18-cifar10-3-50",
    "deep-resnet18-cifar10-3-10",
    "deep-vit-cifar10-8-20",
)
REACHED = ("rule", "error: mean (least to most)", "MB kept")
STREAMS = dict.fromkeys(("recall12", "recall40", "copy40", "tmaze40", "characters"), REACHED) | {
    "price": ("task", "rule", "ms a step", "MB kept")
}
GLANCE = ("backprop", "students", "students-chained", "feedback-chained", "wperp-exact", "wperp", "activation")


def measured(key: str, study: str = "bench") -> dict[str, Any]:
    found = find(RESULTS / study, key)
    assert found is not None, f"nothing is stored under {key!r} in results/{study}"
    return found


@cache
def deep_networks() -> dict[str, Table]:
    return {table.slug: table for table in beyond.deep_tables(load_runs(RESULTS / "deep"))}


@cache
def comparison() -> list[Section]:
    return compared(read_record(RESULTS / "compare"))


def shared_basis(runs: Sequence[Run], quantity: str = "train_accuracy", **settings: Any) -> Summary | None:
    """What the runs reached that have these settings, and all others at their default, on any device."""
    wanted = {name: DEFAULTS[name] for name in EXPERIMENT} | settings
    found = groups([run for run in runs if all(run[name] == value for name, value in wanted.items())], any_device=True)
    return found[0].summary(quantity) if found else None


# --- blocks: from the runs in results/paper to what stands between two marks ---


def published(runs: Sequence[Run], slug: str) -> str:
    """Published numbers beside ours by the paper's definition; times are not compared."""
    rows = [one.row for one in compare(PUBLISHED[slug][1], runs) if one.main and one.verdict != NOT_COMPARED]
    names = ("Method", "Width", "Quantity", "Paper", "Ours", "± sd", "Verdict")
    table = Table("published", "", [{name: row[name] for name in names} for row in rows], same=("Width", "Quantity"))
    return table.markdown()


def differing(runs: Sequence[Run]) -> str:
    """A point for every published number whose main line differs."""
    points = []
    for one in explanations(runs):
        line, closed = one.line, f"closed by: {', '.join(one.closing).lower()}" if one.closing else "unexplained"
        ours, paper = cell(line.ours, line.form).text, cell(line.entry.value, line.form).text
        by = f" ({line.way})" if line.way else ""
        said = f"{line.method}, width {line.entry.width}, {line.quantity.lower()}: {ours}{by}, the paper has {paper}"
        points.append(f"- {said}; {closed}.")
    return "\n".join(points) or "Nothing differs."


def tangents(runs: Sequence[Run]) -> str:
    """What more tangents bring W⊥ with the shared basis at width 256."""
    ways: dict[str, dict[str, Any]] = {
        "with one tangent": {},
        "balanced": {"balance": True},
        "with one tangent per site": {"isolate": True},
        "with ten tangents": {"tangents": 10},
    }
    found = {way: shared_basis(runs, width=256, **settings) for way, settings in ways.items()}
    parts = [f"{cell(ours).text} {way} ({ours.n} seeds)" for way, ours in found.items() if ours]
    return "On the training data W⊥ with the shared basis at width 256 reaches " + ", ".join(parts) + "."


def students_sentence(runs: Sequence[Run]) -> str:
    """Where students end on ResNet-18 after 50 epochs, of the rows with several seeds."""
    rows = [row for row in deep_networks()["deep-resnet18-cifar10-3-50"].cells if row["Seeds"].text != "1"]
    mine = [row for row in rows if row["Method"].text == method_label("students")]
    parts = " and ".join(f"{row['Test'].text} in {row['Pieces'].text} pieces" for row in mine)
    return (
        f"- ResNet-18 on CIFAR-10, 50 epochs, {rows[0]['Seeds'].text} seeds: students end at {parts}, backpropagation "
        f"at {rows[0]['Test'].text}."
    )


def glance(runs: Sequence[Run]) -> str:
    """Each way to train on a small, a deep and a language network, what it sends back, and how many seeds there are."""
    width = max(WIDTHS)
    small = {one.entry.method: one.ours for one in compare(SCALING, runs) if one.main and one.entry.width == width}
    for method in ("feedback-chained", "wperp-exact"):
        small[method] = shared_basis(runs, width=width, **settings_of(method))
    titles = {"deep-resnet18-cifar10-3-50": "ResNet-18, CIFAR-10, test"}
    titles["deep-charformer-shakespeare-4-20"] = "transformer, text, test bits"
    best = {
        title: {row["Method"].text: row for row in reversed(deep_networks()[slug].cells)}
        for slug, title in titles.items()
    }
    rows, seeds = [], [{str(ours.n) for method, ours in small.items() if ours and method in GLANCE}]
    seeds += [
        {row["Seeds"].text for label, row in found.items() if label in map(method_label, GLANCE)}
        for found in best.values()
    ]
    for method in GLANCE:
        label = method_label(method)
        deep = {title: found[label]["Test"] if label in found else None for title, found in best.items()}
        mlp = {f"MLP of the paper, width {width}, train": small.get(method)}
        rows.append({"": label, **mlp, **deep, "sent back through the network": entry_of(method).sends})
    counts = ", ".join(" or ".join(sorted(known, key=int)) for known in seeds)
    table = Table("glance", "", rows).markdown()
    return f"{table}\n\nMean ± standard deviation over seeds, by column: {counts}."


def ends(runs: Sequence[Run]) -> str:
    """The exact top at the smallest and at the largest width."""
    return beyond.exact_top_table(runs).where("Width", str(min(WIDTHS)), str(max(WIDTHS))).markdown()


def feedback(runs: Sequence[Run], slug: str) -> str:
    columns, rows = FEEDBACK[slug]
    return next(table for table in feedback_tables(runs) if table.slug == slug).where(*rows).markdown(*columns)


def projector(runs: Sequence[Run]) -> str:
    table = beyond.projector_table(load_benchmarks(RESULTS / "paper")).where("Width", "512")
    return table.markdown("Guess", "Layer", "First weights", "Trained weights", "Directions")


def compared_tasks(runs: Sequence[Run]) -> str:
    """Every task with its table, its setting and a figure."""
    parts = []
    for one in comparison():
        drawn = f"![{one.figures[0].title}](figures/{one.figures[0].slug}.png)"
        table = one.tables[0].markdown("Method", "Test", "Time", "Memory", "Sent back")
        parts.append("\n\n".join([f"### {one.title}", one.intro, table, drawn]))
    return "\n\n".join(parts)


def titled(tables: Sequence[Table], *columns: str) -> str:
    return "\n\n".join(f"### {table.title}\n\n{table.markdown(*columns)}" for table in tables)


def deep(runs: Sequence[Run]) -> str:
    tables = [table for slug, table in deep_networks().items() if slug in DEEP]
    return titled(tables, "Method", "Pieces", "Rate", "Test", "Best epoch", "Seeds")


def streams(runs: Sequence[Run]) -> str:
    made = {name: stream_tables.table(RESULTS / "streams", name, GROUPS[name]) for name in STREAMS}
    return "\n\n".join(titled([made[name]], *columns) for name, columns in STREAMS.items())


# --- blocks from other measurements ---


def common_network(runs: Sequence[Run]) -> str:
    """What the guesses measure on one network: the best settings, and in how many settings each number holds."""
    found = measured("networks", "common")
    tried = common.settings(found["rows"])
    columns = ("Trained by", "Biases", "Epochs", "Measured as", *common.SIX, "Hold")
    seeds = " or ".join(sorted({str(len(one)) for one in tried["networks"]}))
    seconds = sum(line["seconds"] for line in found["training"])
    made = f"{len(found['rows'])} networks, trained in {seconds:.0f} s on an {found['environment']['device']}."
    best = common.best_table(tried).markdown(*columns)
    caption = f"The five settings in which most numbers hold; mean ± standard deviation over {seeds} seeds. {made}"
    prose = "\n".join(f"- {sentence}" for sentence in common.sentences(tried))
    return "\n\n".join([prose, best, caption, common.counts_table(tried).markdown()])


def attention(runs: Sequence[Run]) -> str:
    """Attention with its tangent: time and peak memory of each way."""
    names = {
        "gradguess": "this library",
        "blocks": "128 queries at a time",
        "math kernel": "PyTorch's math kernel",
        "jvp_flash_attention": "jvp_flash_attention",
        "flash, no tangent": "value alone, flash",
        "PyTorch, no tangent": "value alone, as PyTorch chooses",
    }
    order, rows = list(names), [row for row in measured("attention-cuda")["rows"] if row.get("way") in names]
    cells = []
    for row in sorted(rows, key=lambda row: order.index(row["way"])):
        b, h, length, size = row["shape"]
        head = f"{row['dtype']}, {b} × {h} heads of {size}, {length} positions"
        cells.append((head, names[row["way"]], f"{row['ms']:.2f} ms, {row['peak_mb']:,.0f} MB"))
    return Table("attention", "", matrix("", cells)).markdown()


def gpt2(runs: Sequence[Run]) -> str:
    """A network of GPT-2's shape: each way to train it, of 400 steps that learn and of 60 whose memory is measured."""
    rows = [
        {
            "": row["way"],
            "steps": row["steps"],
            "step": f"{row['step_ms']:.1f} ms",
            "median": f"{row['median_ms']:.1f} ms",
            "peak": None if row["peak_mb"] is None else f"{row['peak_mb'] / 1024:.1f} GiB",
            "loss, first and last": f"{row['losses'][0]:.2f}, {row['losses'][-1]:.2f}",
        }
        for row in measured("gpt2-cuda")["rows"]
        if row["steps"] in (60, 400)
    ]
    return Table("gpt2", "", rows).markdown()


def trainer(runs: Sequence[Run]) -> str:
    """The loss of Hugging Face's Trainer and of the bridge, early and late in a run."""
    found = measured("trainer", "bridges")["rows"]
    rows = [
        {"": row["way"]}
        | {f"step {step}": row["losses"][step - 1] for step in (1, 50, 100, row["steps"])}
        | {"mean of the last 20": row["last"]}
        for row in found
    ]
    gap = next(row["gap"] for row in found if row["way"] == "backprop")
    table = Table("trainer", "", rows).markdown()
    return f"{table}\n\nOver all steps, `gg.Backprop()` and Trainer differ by at most {gap:.0e}."


def finite(runs: Sequence[Run]) -> str:
    """Errors of the derivative along W⊥'s directions on trained networks, finite and dual, by network and dtype."""
    rows = [row for row in measured("accuracy", "finite")["derivatives"] if row["guess"] == "wperp" and row["epochs"]]
    cells = [
        (row["network"], f"{kind}, {row['dtype']}", " / ".join(f"{v:.0e}" for v in row[kind]))
        for row in rows
        for kind in ("finite", "dual")
    ]
    return Table("finite", "", matrix("network", cells)).markdown()


def finite_runs(runs: Sequence[Run]) -> str:
    """Accuracies after training with finite differences and with dual numbers."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in sorted(
        measured("accuracy", "finite")["runs"], key=lambda row: (row["method"] != "wperp", row["dtype"] != "float32")
    ):
        found.setdefault((method_label(row["method"]), row["dtype"], row["derivative"]), []).append(row)
    rows = [
        dict(zip(("method", "dtype", "derivative"), names, strict=True))
        | {kind: Summary.of([row[f"{kind}_accuracy"] for row in seeds]) for kind in ("train", "test")}
        for names, seeds in found.items()
    ]
    return Table("finite-runs", "", rows).markdown()


def of_record(make: Callable[[dict[str, Any]], Table], *key: str) -> Callable[[Sequence[Run]], str]:
    """The table of a record."""
    return lambda runs: make(measured(*key)).markdown()


BLOCKS: dict[str, Callable[[Sequence[Run]], str]] = {
    "glance": glance,
    "tally-sentence": tally_sentence,
    "differing": differing,
    "claims": lambda runs: claims_table(runs).markdown("The paper says", "Verdict"),
    "claims-cost": lambda runs: bench.speed_claims_table(load_benchmarks(RESULTS / "paper")).markdown(),
    "scaling": lambda runs: scaling_matrix(runs).markdown(),
    **{name: partial(published, slug=name) for name in PUBLISHED if name not in ("ranks", "scaling")},
    "projector": projector,
    "exact-top": ends,
    "tangents": tangents,
    **{slug: partial(feedback, slug=slug) for slug in FEEDBACK},
    "real": lambda runs: beyond.real_matrix(runs).markdown(),
    "students-sentence": students_sentence,
    "deep": deep,
    "cost-students": of_record(bench.students_table, "steps", "deep"),
    "compare": compared_tasks,
    "streams": streams,
    "bench-times": of_record(bench.times_table, "time-cpu"),
    "bench-times-gpu": of_record(bench.times_table, "time-cuda"),
    "bench-memory": of_record(bench.memory_table, "memory-cpu"),
    "bench-compiled-cpu": of_record(bench.compiled_matrix, "compiled-cpu"),
    "bench-compiled-cuda": of_record(bench.compiled_matrix, "compiled-cuda"),
    "common-network": common_network,
    "attention": attention,
    "gpt": gpt2,
    "trainer": trainer,
    "finite": finite,
    "finite-runs": finite_runs,
}


# --- figures ---


def overview_figure(runs: Sequence[Run]) -> Figure:
    """Training accuracy over the width: ours filled, the paper's hollow; W⊥ by its definition."""
    lines = [one for one in compare(SCALING, runs) if one.main and one.ours]
    curves = []
    for method in ("backprop", "feedback-chained", "wperp", "wt", "activation"):
        points: dict[int, Any] = {one.entry.width: one.ours for one in lines if one.entry.method == method}
        if points:
            curves.append(papers_curve(method))
        else:
            found = {width: shared_basis(runs, method=method, width=width) for width in WIDTHS}
            points = {width: ours for width, ours in found.items() if ours}
        label = "Learned feedback, chained" if method == "feedback-chained" else method_label(method)
        curves.append(with_bars(label, method, points))
    return over_width("overview", curves, x_scale="log")


def figures(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the docs."""
    made = [overview_figure(runs), scaling_figure(runs), *(one.figures[0] for one in comparison())]
    return [figure for figure in made if figure is not None]


# --- pages ---


def filled(page: str, made: dict[str, str]) -> str:
    """The page with every marked block replaced: prose in lines of the pages' length, tables as they are."""

    def put(match: re.Match[str]) -> str:
        lines = [line if line.startswith("|") else _fill(line) for line in made[match[1]].split("\n")]
        return "\n".join([f"<!-- {match[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- ([a-z-]+) -->\n.*?<!-- end -->", put, page, flags=re.DOTALL)


def _fill(prose: str) -> str:
    indent = "  " if prose.startswith("- ") else ""
    return textwrap.fill(prose, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    runs = load_runs(RESULTS / "paper")
    made = {name: block(runs) for name, block in BLOCKS.items()}
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
