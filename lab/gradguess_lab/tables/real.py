"""Real networks on real data: one line per task and method, at the best of the rates it was run with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradguess_lab.methods import method_label, tried_by
from gradguess_lab.tables.averages import mean_cell
from gradguess_lab.tables.compare import Summary
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Cell, Table, number, text
from gradguess_lab.tasks import TASKS

_CAPTION = (
    "All methods at equal epochs (cosine schedule), each at the rate with the best mean on the test set; in brackets "
    "how many rates it was run with. Accuracy, or bits per character for text (there less is better). Rare tangents: "
    "on a quarter of the batch at every fourth step. 3 pieces: sites=3. With B = 0 nothing is predicted, and the "
    "lowest of the three pieces is not trained."
)


@dataclass(frozen=True)
class _Best:
    """The runs of one variant on one task at its best learning rate."""

    variant: str
    lr: float
    rates: int  # how many were tried
    runs: tuple[Run, ...]

    def summary(self, quantity: str) -> Summary | None:
        return Summary.of([run.metrics[quantity] for run in self.runs if quantity in run.metrics])


Setting = tuple[str, int, int, str]  # task, epochs, samples, device


def real_table(runs: Sequence[Run]) -> Table | None:
    """Every task that was run, in the order of `TASKS`; None where none was."""
    settings: dict[Setting, dict[str, list[Run]]] = {}
    for run in runs:
        if (found := _setting(run)) is not None:
            settings.setdefault(found[0], {}).setdefault(found[1], []).append(run)
    rows: list[tuple[Cell, ...]] = []
    for setting in sorted(settings, key=lambda s: (list(TASKS).index(s[0]), *s[1:])):
        rows += _rows(setting, settings[setting])
    if not rows:
        return None
    columns = (
        "Task",
        "Samples",
        "Epochs",
        "Method",
        "Learning rate",
        "Train",
        "Test",
        "Test against backprop",
        "Seeds",
    )
    return Table("real", "Real networks, real data", columns, tuple(rows), _CAPTION)


def real_matrix(runs: Sequence[Run]) -> Table | None:
    """The same by task and method: the test column alone."""
    if (table := real_table(runs)) is None:
        return None
    methods = [
        label for label in map(method_label, tried_by("real")) if any(row[3].text == label for row in table.rows)
    ]
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for task, samples, _, method, _, _, test, *_ in table.rows:
        found.setdefault((task.text, samples.text), {})[method.text] = test
    rows = ((*map(text, task), *(cells.get(name, Cell("–")) for name in methods)) for task, cells in found.items())
    return Table("real", "Real networks, real data", ("Task", "Samples", *methods), tuple(rows))


def _setting(run: Run) -> tuple[Setting, str] | None:
    """What a run is compared with, and as which variant."""
    if "real" not in run.experiments:
        return None
    config = run.config
    return (run.task, config["epochs"], config["samples"], str(config["device"]).partition(":")[0]), run.variant


def _rows(setting: Setting, runs: dict[str, list[Run]]) -> list[tuple[Cell, ...]]:
    name, epochs, samples, _ = setting
    bits = TASKS[name].quantity == "bits"
    quantity = "bits" if bits else "accuracy"
    best = {
        variant: found
        for variant in tried_by("real")
        if variant in runs and (found := _best(variant, runs[variant], f"test_{quantity}", bits))
    }
    base = best.get("backprop")
    return [
        (
            text(name),
            number(samples, "d") if samples else text("all"),
            number(epochs, "d"),
            text(method_label(variant)),
            Cell(f"{one.lr:g}", one.lr, note=f"of {one.rates}"),
            mean_cell(one.summary(f"train_{quantity}")),
            mean_cell(one.summary(f"test_{quantity}")),
            _against(one, base, f"test_{quantity}"),
            number(len(one.runs), "d"),
        )
        for variant, one in best.items()
    ]


def _best(variant: str, runs: Sequence[Run], quantity: str, less: bool) -> _Best | None:
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        if quantity in run.metrics:
            by_rate.setdefault(run.config["lr"], []).append(run)
    if not by_rate:
        return None
    most = max(len(found) for found in by_rate.values())
    full = {lr: found for lr, found in by_rate.items() if len(found) == most}  # a rate with fewer seeds was given up

    def score(lr: float) -> float:
        mean = sum(run.metrics[quantity] for run in full[lr]) / most
        return -mean if less else mean

    lr = max(full, key=score)
    return _Best(variant, lr, len(by_rate), tuple(full[lr]))


def _against(one: _Best, base: _Best | None, quantity: str) -> Cell:
    ours, theirs = one.summary(quantity), base.summary(quantity) if base else None
    if ours is None or theirs is None or one.variant == "backprop":
        return Cell("–")
    return number(ours.mean - theirs.mean, ".3f", signed=True)
