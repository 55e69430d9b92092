"""A few runs beside the paper and beside the stored runs of all seeds: what the report of a quick run opens with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gradguess_lab.paper_numbers import SCALING, WIDTHS
from gradguess_lab.store import files_of
from gradguess_lab.tables.averages import curve_of_means
from gradguess_lab.tables.compare import DIFFERS, HOLDS, Summary
from gradguess_lab.tables.paper import SHARED, scaling_title
from gradguess_lab.tables.runs import Run, in_paper_setting, variants
from gradguess_lab.tables.table import Cell, Curve, Figure, Table, mean_text, number, text

STORED = Path(__file__).parents[3] / "results" / "paper"
QUANTITY = "train_accuracy"


@cache
def stored_runs() -> tuple[Run, ...]:
    """The runs of the paper's experiments that the repository holds; none outside of it."""
    from gradguess_lab.report.results import load_runs  # it reads what the tables show

    return tuple(load_runs(STORED)) if files_of(STORED)[0].exists() else ()


def beside_stored(runs: Sequence[Run]) -> list[tuple[Run, Summary]]:
    """Each run in the paper's setting that is not stored itself, with the stored runs of other seeds and devices."""
    if not any(in_paper_setting(run) for run in runs):
        return []
    known = {run.key for run in stored_runs()}
    groups: dict[object, Summary] = {}
    for variant in variants(stored_runs()):
        summary = Summary.of(variant.values(QUANTITY))
        if summary is not None and summary.reach is not None:
            groups.setdefault(_experiment(variant.first), summary)
    found = [run for run in runs if run.key not in known and in_paper_setting(run) and QUANTITY in run.metrics]
    return [(run, groups[_experiment(run)]) for run in found if _experiment(run) in groups]


def judged(run: Run, stored: Summary) -> str:
    """Whether the run lies where one more run lies with 95 %."""
    assert stored.reach is not None
    return HOLDS if abs(run.metrics[QUANTITY] - stored.mean) <= stored.reach else DIFFERS


def said(records: Sequence[Mapping[str, Any]]) -> str:
    """What came out, in one sentence."""
    runs = [Run(record["key"], record["config"], record["metrics"]) for record in records]
    verdicts = [judged(*pair) for pair in beside_stored(runs)]
    if not verdicts:
        return f"{len(runs)} runs."
    return (
        f"{len(runs)} runs. Of {len(verdicts)} in the paper's setting {verdicts.count(HOLDS)} have the training "
        f"accuracy of our stored seeds (95 % interval); {verdicts.count(DIFFERS)} differ."
    )


def beside_stored_table(runs: Sequence[Run]) -> Table | None:
    """A row for each run: its accuracy, the stored mean and interval, and the paper's number."""
    found = sorted(beside_stored(runs), key=lambda pair: (pair[0].label, pair[0].config["width"]))
    if not found:
        return None
    rows = []
    for run, stored in found:
        low, high = stored.mean - (stored.reach or 0), stored.mean + (stored.reach or 0)
        rows.append(
            (
                text(_title(run)),
                number(run.config["width"], "d"),
                Cell(f"{run.metrics[QUANTITY]:.3f}", run.metrics[QUANTITY], judged(run, stored)),
                Cell(mean_text(stored.mean, stored.sd), stored.mean),
                text(f"{low:.3f} – {high:.3f}"),
                number(stored.n, "d"),
                number(_papers(run)),
            )
        )
    return Table(
        "beside-stored",
        "This run beside our seeds and the paper",
        ("Method", "Width", "This run", "Ours, stored", "95 % of single runs", "Seeds", "Paper"),
        tuple(rows),
        "Training accuracy after 300 epochs. A run holds if it lies in the interval in which one more run lies with "
        "95 %, by the stored seeds; one in twenty lies outside by chance.",
    )


def beside_stored_figure(runs: Sequence[Run]) -> Figure | None:
    """Accuracy over the width: the paper's curves dashed, ours with the spread of the seeds, this run's points."""
    found = [(run, stored) for run, stored in beside_stored(runs) if _is_main(run)]
    curves: list[Curve] = []
    styles = [_style(run) for run, _ in found]
    styles += ["wperp"] * ("wperp-shared" in styles)  # the paper's own W⊥ beside the one with a shared basis
    for style in dict.fromkeys(styles):
        points = [(float(entry.width), entry.value) for entry in SCALING if entry.method == style]
        if points:
            curves.append(Curve("", *_columns(points), style, dashed=True, markers=True))
        own = {run.config["width"]: run for run, _ in found if _style(run) == style}
        title = SHARED if style == "wperp-shared" else scaling_title(style)
        if (curve := curve_of_means(title, list(_scaling(style).items()), style)) is not None:
            curves.append(curve)
        here = sorted((float(width), run.metrics[QUANTITY]) for width, run in own.items())
        x, y = _columns(here)
        if here:
            curves.append(Curve("", x, y, "this-run", low=x, high=x, dots=True))
    if not curves:
        return None
    return Figure(
        "beside-stored",
        "Training accuracy as the width increases",
        "Layer width",
        "Train accuracy (300 epochs)",
        tuple(curves),
        "Dashed: the paper. Solid: the mean of our stored seeds, bars of one standard deviation. Crosses: this run.",
        x_ticks=tuple(float(width) for width in WIDTHS),
        y_range=(0.0, 1.05),
        log_x=True,
    )


def _scaling(style: str) -> Mapping[int, Summary]:
    """The stored runs of a curve by their width."""
    found: dict[int, Summary] = {}
    for variant in variants([run for run in stored_runs() if in_paper_setting(run) and _style(run) == style]):
        summary = Summary.of(variant.values(QUANTITY))
        if summary is not None and _is_main(variant.first):
            found.setdefault(int(variant.first.config["width"]), summary)
    return dict(sorted(found.items()))


def _is_main(run: Run) -> bool:
    """Whether the run is a point of the paper's figure of scaling."""
    k = run.config.get("k") == 10 or run.method != "wperp"
    return k and run.config["width"] in WIDTHS and any(run.method == entry.method for entry in SCALING)


def _style(run: Run) -> str:
    return "wperp-shared" if run.method == "wperp" and run.config.get("solver") == "shared" else run.method


def _title(run: Run) -> str:
    return SHARED if _style(run) == "wperp-shared" and run.config.get("k") == 10 else run.label


def _papers(run: Run) -> float | None:
    """The paper's number for the method, width and k of a run; the paper has no shared basis."""
    if _style(run) == "wperp-shared":
        return None
    entries = (e for e in SCALING if e.method == run.method and e.width == run.config["width"])
    return next((entry.value for entry in entries if run.method != "wperp" or run.config.get("k") == 10), None)


def _experiment(run: Run) -> tuple[tuple[str, object], ...]:
    return tuple((name, value) for name, value in run.identity if name != "device")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
