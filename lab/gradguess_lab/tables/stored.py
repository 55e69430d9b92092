"""A few runs beside the paper and beside the stored runs of all seeds: what the report of a quick run opens with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gradguess_lab.paper_numbers import SCALING
from gradguess_lab.store import files_of
from gradguess_lab.tables.figure import Curve, Figure
from gradguess_lab.tables.paper import scaling_figure
from gradguess_lab.tables.runs import EXPERIMENT, Group, Run, flat, groups, in_paper_setting, load_runs
from gradguess_lab.tables.table import Row, cell, number, table
from gradguess_lab.tables.verdicts import DIFFERS, HOLDS, Summary, within

STORED = Path(__file__).parents[3] / "results" / "paper"
QUANTITY = "train_accuracy"


@cache
def stored_runs() -> tuple[Run, ...]:
    """The runs of the paper's experiments that the repository holds; none outside of it."""
    return tuple(load_runs(STORED)) if files_of(STORED)[0].exists() else ()


@cache
def _stored() -> dict[tuple[Any, ...], Summary]:
    """What several stored seeds reached, by experiment."""
    found = {_experiment(group): group.summary(QUANTITY) for group in groups(stored_runs(), any_device=True)}
    return {experiment: ours for experiment, ours in found.items() if ours and ours.reach is not None}


def _experiment(run: Run | Group) -> tuple[Any, ...]:
    return tuple(run[name] for name in EXPERIMENT)


def beside_stored(runs: Sequence[Run]) -> list[tuple[Run, Summary]]:
    """Each run in the paper's setting that is not stored itself, with the stored runs of other seeds and devices."""
    new = [run for run in runs if in_paper_setting(run) and not run["script"] and QUANTITY in run]
    known = {run["key"] for run in stored_runs()} if new else set()
    return [(run, ours) for run in new if run["key"] not in known and (ours := _stored().get(_experiment(run)))]


def judged(run: Run, stored: Summary) -> str:
    """Whether the run lies where one more run lies with 95 %."""
    return HOLDS if within(run[QUANTITY], 0.0, stored) else DIFFERS


def said(records: Sequence[Mapping[str, Any]]) -> str:
    """What came out, in one sentence."""
    runs = [flat(record) for record in records]
    verdicts = [judged(*pair) for pair in beside_stored([run for run in runs if "method" in run])]
    if not verdicts:
        return f"{len(runs)} runs."
    return (
        f"{len(runs)} runs. Of {len(verdicts)} in the paper's setting {verdicts.count(HOLDS)} have the training "
        f"accuracy of our stored seeds (95 % interval); {verdicts.count(DIFFERS)} differ."
    )


@table(
    "beside-stored",
    "This run beside our seeds and the paper",
    "Training accuracy after 300 epochs. A run holds if it lies in the interval in which one more run lies with 95 %, "
    "by the stored seeds; one in twenty lies outside by chance.",
)
def beside_stored_table(runs: Sequence[Run]) -> list[Row]:
    """A row for each run: its accuracy, the stored mean and interval, and the paper's number."""
    rows = []
    for run, stored in beside_stored(runs):
        shared = run["method"] == "wperp" and run["solver"] == "shared"  # which the paper has not
        same = [e for e in SCALING if (e.method, e.width) == (run["method"], run["width"]) and e.k in (None, run["k"])]
        reach = stored.reach or 0.0
        rows.append({
            "Method": Group([run]).label + ", shared basis" * shared,
            "Width": run["width"],
            "This run": cell(run[QUANTITY], verdict=judged(run, stored)),
            "Ours, stored": stored,
            "95 % of single runs": f"{number(stored.mean - reach)} – {number(stored.mean + reach)}",
            "Seeds": stored.n,
            "Paper": same[0].value if same and not shared else None,
        })  # fmt: skip
    return sorted(rows, key=lambda row: (row["Method"], row["Width"]))


def beside_stored_figure(runs: Sequence[Run]) -> Figure:
    """The figure of scaling, from the stored runs, with those of this run that belong to it as points."""
    known = {(entry.method, entry.width) for entry in SCALING}
    here = [run for run, _ in beside_stored(runs) if (run["method"], run["width"]) in known]
    dots = sorted((float(run["width"]), run[QUANTITY]) for run in here if run["method"] != "wperp" or run["k"] == 10)
    points = Curve("This run", "this-run", [x for x, _ in dots], [y for _, y in dots], kind="points")
    figure = scaling_figure(stored_runs())
    caption = "Dashed: the paper. Solid: the mean of our stored seeds, with its standard deviation. Crosses: this run."
    curves = [*figure.curves, points] if dots else []
    return replace(figure, slug="beside-stored", curves=curves, caption=caption, x_scale="log")
