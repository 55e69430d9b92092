"""What goes beyond the paper: deep and real networks, the exact top, and how far a guess lies from its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from gradguess_lab.methods import method_label, options_of, tried_by, variant_of
from gradguess_lab.tables.runs import DEFAULTS, EXPERIMENT, Group, Run, groups, like
from gradguess_lab.tables.table import Cell, Row, Table, matrix, table
from gradguess_lab.tables.verdicts import Summary
from gradguess_lab.tasks import TASKS


def deep_tables(runs: Sequence[Run]) -> Iterator[Table]:
    """A table per network, data set and number of epochs: backpropagation, and the others from best to worst."""
    tasks: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups(runs):
        tasks.setdefault(tuple(group[name] for name in ("model", "data", "width", "depth", "epochs")), []).append(group)
    for task in sorted(tasks, key=lambda task: (*map(str, task[:2]), -task[3], -task[4])):
        model, data, width, depth, epochs = task
        quantity, sign = ("test_bits", 1) if data == "shakespeare" else ("test_accuracy", -1)  # of bits less is better
        found = [(group, ours) for group in tasks[task] if (ours := group.summary(quantity))]
        found.sort(key=lambda pair: (pair[0]["method"] != "backprop", sign * pair[1].mean))
        title = f"{model} on {data}: depth {depth}, width {width}, {epochs} epochs"
        rows = [_deep_row(group, ours, quantity, min if sign > 0 else max) for group, ours in found]
        yield Table(f"deep-{model}-{data}-{depth}-{epochs}", title, rows)


def _deep_row(group: Group, ours: Summary, quantity: str, best: Callable[[list[float]], float]) -> Row:
    rate = group["student_lr"]
    unusual = "student_lr" in options_of(group["method"]) and rate != DEFAULTS["student_lr"]
    seen = [[row[quantity] for row in run["history"] if quantity in row] for run in group.runs]
    return {
        "Method": method_label(variant_of(group.first, group.first)) + (f", their rate {rate:g}" if unusual else ""),
        "Pieces": group["sites"] if group["sites"].isdecimal() else "–",
        "Rate": group["lr"],
        "Test": ours,
        "Best epoch": Summary.of([best(values) for values in seen if values]),
        "Seeds": len(group.runs),
    }


@table(
    "real",
    "Real networks, real data",
    "All methods at equal epochs (cosine schedule), each at the rate with the best mean on the test set; in brackets "
    "how many rates it was run with. Accuracy, or bits per character for text (there less is better). Rare tangents: "
    "on a quarter of the batch at every fourth step. 3 pieces: sites=3. With B = 0 nothing is predicted, and the "
    "lowest of the three pieces is not trained.",
)
def real_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Real networks on real data: a line per task and method, at the best of the rates it was run with."""
    tasks: dict[tuple[Any, ...], dict[str, dict[float, list[Run]]]] = {}
    for run in runs:
        if "real" in run["experiments"] and f"test_{TASKS[run['task']].quantity}" in run:
            where = tuple(run[name] for name in ("task", "epochs", "samples", "device"))
            tasks.setdefault(where, {}).setdefault(run["variant"], {}).setdefault(run["lr"], []).append(run)
    order = list(TASKS)
    for task in sorted(tasks, key=lambda task: (order.index(task[0]), *task[1:])):
        quantity, base = TASKS[task[0]].quantity, None
        for variant in (name for name in tried_by("real") if name in tasks[task]):
            rates = tasks[task][variant]
            tests = {lr: Summary.of([run[f"test_{quantity}"] for run in found]) for lr, found in rates.items()}
            full = {lr: test for lr, test in tests.items() if test and test.n == max(map(len, rates.values()))}
            lr = (min if quantity == "bits" else max)(full, key=lambda lr: full[lr].mean)  # of those not given up
            base = full[lr] if variant == "backprop" else base
            yield {
                "Task": task[0],
                "Samples": task[2] or "all",
                "Epochs": task[1],
                "Method": method_label(variant),
                "Learning rate": Cell(f"{lr:g}", lr, note=f"of {len(rates)}"),
                "Train": Summary.of([run[f"train_{quantity}"] for run in rates[lr] if f"train_{quantity}" in run]),
                "Test": full[lr],
                "Test against backprop": full[lr].mean - base.mean if base and variant != "backprop" else None,
                "Seeds": full[lr].n,
            }


@table("real")
def real_matrix(runs: Sequence[Run]) -> Iterator[Row]:
    """The same by task and method: the test column alone."""
    rows = real_table(runs).rows
    known = {row["Method"] for row in rows}
    cells = (((row["Task"], row["Samples"]), row["Method"], row["Test"]) for row in rows)
    for row in matrix("", cells, [label for label in map(method_label, tried_by("real")) if label in known]):
        task, samples = row.pop("")
        yield {"Task": task, "Samples": samples, **row}


@table(
    "exact-top",
    "The output guessed, and exact",
    "Accuracy after 300 epochs in the paper's setting; W⊥ with the shared basis. Seeds: of both.",
)
def exact_top_table(runs: Sequence[Run]) -> Iterator[Row]:
    """The output guessed, and exact: a row for every guess and width that was run with the exact top."""
    every = groups(runs, any_device=True)
    chosen = [group for group in every if "exact-top" in group["experiments"] and group["top"] == "exact"]
    for exact in sorted(chosen, key=lambda group: (group.rank, group["width"])):
        ways = {"guessed": like(exact, every, EXPERIMENT, top="guess"), "exact": exact}
        row: dict[str, Any] = {"Guess": method_label(exact["method"]), "Width": exact["width"]}
        for title in ("Train", "Test"):
            for way, group in ways.items():
                row[f"{title}, top {way}"] = group and group.summary(f"{title.lower()}_accuracy")
        yield row | {"Seeds": ", ".join(str(len(group.runs) if group else 0) for group in ways.values())}


_GUESSES = {
    "subspace": "own subspace",
    "shared": "shared basis",
    "ns, nearest": "W⊥-NS, nearest set",
    "ns, placed": "W⊥-NS, threshold placed",
}
_WEIGHTS = {"First weights": True, "Trained weights": False}


@table(
    "projector",
    "Projector error",
    "Spectral norm of the difference to the projector on the sample's own top ten directions: median and worst over "
    "samples and seeds. Directions: the mean trace of the covariance on trained weights.",
    forms={name + worst: ".2g" for name in _WEIGHTS for worst in ("", ", worst")} | {"Directions": ".1f"},
)
def projector_table(records: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """How far each way to find W⊥ is from its definition, first and trained (`scripts/projector_error.py`)."""
    found = [row for record in records if record["kind"] == "projector" for row in record["rows"]]
    frame = pd.DataFrame(found, columns=["width", "guess", "layer", "epoch", "median", "worst", "directions"])
    frame["guess"] = pd.Categorical(frame["guess"], _GUESSES)
    for (width, guess, layer), part in frame.groupby(["width", "guess", "layer"], observed=True):
        row = {"Width": width, "Guess": _GUESSES[guess], "Layer": layer}
        for name, first in _WEIGHTS.items():
            weights = part[(part["epoch"] == 0) == first]
            row |= {name: weights["median"].median(), f"{name}, worst": weights["worst"].max()}
        yield row | {"Directions": weights["directions"].mean()}
