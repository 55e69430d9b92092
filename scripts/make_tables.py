"""Write the tables, the sentences with numbers and the figures of the README and of the docs, from the results.

Run after new results: `python scripts/make_tables.py`. Text between `<!-- NAME -->` and `<!-- end -->` is replaced.
`docs/figures/fingerprints.json` says what the figures show, so that a test can tell when they are stale.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from gradguess_lab.compare.run import read_record
from gradguess_lab.compare.tables import compared
from gradguess_lab.methods import entry_of, method_label, settings_of
from gradguess_lab.paper_numbers import SCALING, WIDTHS
from gradguess_lab.report.sections import Section, build_sections
from gradguess_lab.store import find
from gradguess_lab.streams import page as stream_tables
from gradguess_lab.streams.plan import GROUPS
from gradguess_lab.tables import bench, beyond, common
from gradguess_lab.tables.figure import Figure, draw, with_bars
from gradguess_lab.tables.paper import PUBLISHED, compare, over_width, papers_curve, scaling_figure
from gradguess_lab.tables.runs import DEFAULTS, EXPERIMENT, Run, groups, load_benchmarks, load_runs
from gradguess_lab.tables.table import Row, Table, cell, matrix, table
from gradguess_lab.tables.tally import explanations, tally_sentence
from gradguess_lab.tables.verdicts import NOT_COMPARED, Summary

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))))
ACCURACIES = ("Train accuracy", "Test accuracy", "Seeds")
ENDS = (str(min(WIDTHS)), str(max(WIDTHS)))
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


# --- results ---


@cache
def paper() -> list[Run]:
    return load_runs(RESULTS / "paper")


@cache
def report() -> dict[str, Table]:
    """The tables of the report."""
    made = build_sections({"runs": paper(), "benchmarks": load_benchmarks(RESULTS / "paper")})
    return {table.slug: table for section in made for table in section.tables}


@cache
def deep_networks() -> dict[str, Table]:
    return {table.slug: table for table in beyond.deep_tables(load_runs(RESULTS / "deep"))}


@cache
def comparison() -> list[Section]:
    return compared(read_record(RESULTS / "compare"))


def measured(key: str, study: str = "bench") -> dict[str, Any]:
    found = find(RESULTS / study, key)
    assert found is not None, f"nothing is stored under {key!r} in results/{study}"
    return found


def shared_basis(**settings: Any) -> Summary | None:
    """The training accuracy of the runs that have these settings, and all others at their default, on any device."""
    wanted = {name: DEFAULTS[name] for name in EXPERIMENT} | settings
    found = groups([one for one in paper() if all(one[n] == value for n, value in wanted.items())], any_device=True)
    return found[0].summary("train_accuracy") if found else None


# --- blocks: what stands between two marks ---


def of_report(slug: str, *columns: str, **rows: tuple[str, ...]) -> str:
    """A table of the report: these columns, or all that are shown, and the rows that say one of these in a column."""
    made = report()[slug]
    for column, kept in rows.items():
        made = made.where(column, *kept)
    return made.markdown(*columns)


def published(slug: str) -> Table:
    """Published numbers beside ours by the paper's definition; times are not compared."""
    rows = [one.row for one in compare(PUBLISHED[slug][1], paper()) if one.main and one.verdict != NOT_COMPARED]
    names = ("Method", "Width", "Quantity", "Paper", "Ours", "± sd", "Verdict")
    return Table("published", "", [{name: row[name] for name in names} for row in rows], same=("Width", "Quantity"))


def differing() -> str:
    """A point for every published number whose main line differs."""
    points = []
    for one in explanations(paper()):
        line, closed = one.line, f"closed by: {', '.join(one.closing).lower()}" if one.closing else "unexplained"
        numbers = f"{cell(line.ours, line.form).text}{f' ({line.way})' if line.way else ''}, the paper has "
        numbers += cell(line.entry.value, line.form).text
        points.append(f"- {line.method}, width {line.entry.width}, {line.quantity.lower()}: {numbers}; {closed}.")
    return "\n".join(points) or "Nothing differs."


def tangents() -> str:
    """What more tangents bring W⊥ with the shared basis at width 256."""
    ways: dict[str, dict[str, Any]] = {
        "with one tangent": {},
        "balanced": {"balance": True},
        "with one tangent per site": {"isolate": True},
        "with ten tangents": {"tangents": 10},
    }
    found = {way: shared_basis(width=256, **settings) for way, settings in ways.items()}
    parts = [f"{cell(ours).text} {way} ({ours.n} seeds)" for way, ours in found.items() if ours]
    return "On the training data W⊥ with the shared basis at width 256 reaches " + ", ".join(parts) + "."


def students_sentence() -> str:
    """Where students end on ResNet-18 after 50 epochs, of the rows with several seeds."""
    rows = [row for row in deep_networks()["deep-resnet18-cifar10-3-50"].cells if row["Seeds"].text != "1"]
    mine = [row for row in rows if row["Method"].text == method_label("students")]
    parts = " and ".join(f"{row['Test'].text} in {row['Pieces'].text} pieces" for row in mine)
    return (
        f"- ResNet-18 on CIFAR-10, 50 epochs, {rows[0]['Seeds'].text} seeds: students end at {parts}, backpropagation "
        f"at {rows[0]['Test'].text}."
    )


def glance() -> str:
    """Each way to train on a small, a deep and a language network, what it sends back, and how many seeds there are."""
    width = max(WIDTHS)
    small = {one.entry.method: one.ours for one in compare(SCALING, paper()) if one.main and one.entry.width == width}
    small |= {
        method: shared_basis(width=width, **settings_of(method)) for method in ("feedback-chained", "wperp-exact")
    }
    titles = {
        "ResNet-18, CIFAR-10, test": "deep-resnet18-cifar10-3-50",
        "transformer, text, test bits": "deep-charformer-shakespeare-4-20",
    }
    best = {
        title: {row["Method"].text: row for row in reversed(deep_networks()[slug].cells)}
        for title, slug in titles.items()
    }
    labels = {method: method_label(method) for method in GLANCE}
    rows = [
        {"": label, f"MLP of the paper, width {width}, train": small.get(method)}
        | {title: found[label]["Test"] if label in found else None for title, found in best.items()}
        | {"sent back through the network": entry_of(method).sends}
        for method, label in labels.items()
    ]
    seeds = [{ours.n for method, ours in small.items() if ours and method in GLANCE}]
    seeds += [
        {int(row["Seeds"].text) for label, row in found.items() if label in labels.values()} for found in best.values()
    ]
    counts = ", ".join(" or ".join(map(str, sorted(known))) for known in seeds)
    return f"{Table('glance', '', rows).markdown()}\n\nMean ± standard deviation over seeds, by column: {counts}."


def compared_tasks() -> str:
    """Every task with its table, its setting and a figure."""
    parts = []
    for one in comparison():
        drawn = f"![{one.figures[0].title}](figures/{one.figures[0].slug}.png)"
        shown = one.tables[0].markdown("Method", "Test", "Time", "Memory", "Sent back")
        parts += [f"### {one.title}", one.intro, shown, drawn]
    return "\n\n".join(parts)


def titled(made: Table, *columns: str) -> str:
    return f"### {made.title}\n\n{made.markdown(*columns)}"


def deep() -> str:
    tables = [made for slug, made in deep_networks().items() if slug in DEEP]
    return "\n\n".join(map(titled, tables))


def streams() -> str:
    made = {name: stream_tables.table(RESULTS / "streams", name, GROUPS[name]) for name in STREAMS}
    return "\n\n".join(titled(made[name], *columns) for name, columns in STREAMS.items())


def common_network() -> str:
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


@table("attention")
def attention() -> Iterable[Row]:
    """Attention with its tangent: time and peak memory of each way."""
    names = {
        "gradguess": "this library",
        "blocks": "128 queries at a time",
        "math kernel": "PyTorch's math kernel",
        "jvp_flash_attention": "jvp_flash_attention",
        "flash, no tangent": "value alone, flash",
        "PyTorch, no tangent": "value alone, as PyTorch chooses",
    }
    rows, cells = measured("attention-cuda")["rows"], []
    for way, row in ((way, row) for way in names for row in rows if row.get("way") == way):
        b, h, length, size = row["shape"]
        head = f"{row['dtype']}, {b} × {h} heads of {size}, {length} positions"
        cells.append((head, names[way], f"{row['ms']:.2f} ms, {row['peak_mb']:,.0f} MB"))
    return matrix("", cells)


@table("gpt2")
def gpt2() -> Iterator[Row]:
    """A network of GPT-2's shape: each way to train it, of 400 steps that learn and of 60 whose memory is measured."""
    for row in measured("gpt2-cuda")["rows"]:
        if row["steps"] in (60, 400):
            yield {
                "": row["way"],
                "steps": row["steps"],
                "step": f"{row['step_ms']:.1f} ms",
                "median": f"{row['median_ms']:.1f} ms",
                "peak": None if row["peak_mb"] is None else f"{row['peak_mb'] / 1024:.1f} GiB",
                "loss, first and last": f"{row['losses'][0]:.2f}, {row['losses'][-1]:.2f}",
            }


def trainer() -> str:
    """The loss of Hugging Face's Trainer and of the bridge, early and late in a run."""
    found = measured("trainer", "bridges")["rows"]
    rows = [
        {"": row["way"]}
        | {f"step {step}": row["losses"][step - 1] for step in (1, 50, 100, row["steps"])}
        | {"mean of the last 20": row["last"]}
        for row in found
    ]
    gap = next(row["gap"] for row in found if row["way"] == "backprop")
    shown = Table("trainer", "", rows).markdown()
    return f"{shown}\n\nOver all steps, `gg.Backprop()` and Trainer differ by at most {gap:.0e}."


@table("finite")
def finite() -> Iterable[Row]:
    """Errors of the derivative along W⊥'s directions on trained networks, finite and dual, by network and dtype."""
    rows = [row for row in measured("accuracy", "finite")["derivatives"] if row["guess"] == "wperp" and row["epochs"]]
    ways = ((row, kind) for row in rows for kind in ("finite", "dual"))
    shown = ((row["network"], f"{k}, {row['dtype']}", " / ".join(f"{v:.0e}" for v in row[k])) for row, k in ways)
    return matrix("network", shown)


@table("finite-runs")
def finite_runs() -> Iterator[Row]:
    """Accuracies after training with finite differences and with dual numbers."""
    rows = measured("accuracy", "finite")["runs"]
    rows = sorted(rows, key=lambda row: (row["method"] != "wperp", row["dtype"] != "float32"))
    names = ["method", "dtype", "derivative"]
    for (method, *more), seeds in pd.DataFrame(rows).groupby(names, sort=False):
        reached = {kind: Summary.of(list(seeds[f"{kind}_accuracy"])) for kind in ("train", "test")}
        yield dict(zip(names, (method_label(method), *more), strict=True)) | reached


BLOCKS: dict[str, Callable[[], str | Table]] = {
    "glance": glance,
    "tally-sentence": lambda: tally_sentence(paper()),
    "differing": differing,
    "claims": partial(of_report, "claims", "The paper says", "Verdict"),
    "claims-cost": partial(of_report, "claims-cost"),
    "scaling": partial(of_report, "scaling-matrix"),
    "projector": partial(
        of_report, "projector", "Guess", "Layer", "First weights", "Trained weights", "Directions", Width=("512",)
    ),
    "exact-top": partial(of_report, "exact-top", Width=ENDS),
    "feedback-width": partial(of_report, "feedback-width", "Method", "Width", *ACCURACIES, Width=ENDS),
    "feedback-depth": partial(
        of_report, "feedback-depth", "Method", "Depth", "Learning rate", *ACCURACIES, Depth=("12",)
    ),
    "feedback-residual": partial(of_report, "feedback-residual", "Method", "Depth", *ACCURACIES, Depth=("24",)),
    "feedback-quality": partial(
        of_report, "feedback-quality", "Method", "Layer 1", "Layer 2", "Layer 3", Epoch=("300",)
    ),
    "feedback-ablations": partial(of_report, "feedback-ablations", "Method", *ACCURACIES, Width=("256",)),
    **{name: partial(published, name) for name in PUBLISHED if name not in ("ranks", "scaling")},
    "tangents": tangents,
    "real": lambda: beyond.real_matrix(paper()),
    "students-sentence": students_sentence,
    "deep": deep,
    "cost-students": lambda: bench.students_table(measured("steps", "deep")),
    "compare": compared_tasks,
    "streams": streams,
    "bench-times": lambda: bench.times_table(measured("time-cpu")),
    "bench-times-gpu": lambda: bench.times_table(measured("time-cuda")),
    "bench-memory": lambda: bench.memory_table(measured("memory-cpu")),
    "bench-compiled-cpu": lambda: bench.compiled_matrix(measured("compiled-cpu")),
    "bench-compiled-cuda": lambda: bench.compiled_matrix(measured("compiled-cuda")),
    "common-network": common_network,
    "attention": attention,
    "gpt": gpt2,
    "trainer": trainer,
    "finite": finite,
    "finite-runs": finite_runs,
}


def blocks() -> dict[str, str]:
    """What stands between each pair of marks."""
    made = {name: block() for name, block in BLOCKS.items()}
    return {name: one.markdown() if isinstance(one, Table) else one for name, one in made.items()}


# --- figures ---


def overview_figure() -> Figure:
    """Training accuracy over the width: ours filled, the paper's hollow; W⊥ by its definition."""
    lines = [one for one in compare(SCALING, paper()) if one.main and one.ours]
    curves = []
    for method in ("backprop", "feedback-chained", "wperp", "wt", "activation"):
        if points := {one.entry.width: one.ours for one in lines if one.entry.method == method}:
            curves.append(papers_curve(method))
        else:
            points = {width: shared_basis(method=method, width=width) for width in WIDTHS}
        label = "Learned feedback, chained" if method == "feedback-chained" else method_label(method)
        curves.append(with_bars(label, method, {width: ours for width, ours in points.items() if ours}))
    return over_width("overview", curves, x_scale="log")


def figures() -> list[Figure]:
    """The figures of the docs."""
    return [overview_figure(), scaling_figure(paper()), *(one.figures[0] for one in comparison())]


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
    made, folder = blocks(), ROOT / "docs" / "figures"
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    for figure in figures():
        (folder / f"{figure.slug}.png").write_bytes(draw(figure).png)
    prints = {figure.slug: figure.fingerprint for figure in figures()}
    (folder / "fingerprints.json").write_text(json.dumps(prints, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
