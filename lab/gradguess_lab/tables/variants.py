"""The authors' scripts as variants: which of their ways, that the paper does not say, bring our numbers to its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradguess_lab.paper_numbers import DISTINCT, Published
from gradguess_lab.tables.compare import DIFFERS, HOLDS, Summary, kind_of, within
from gradguess_lab.tables.lines import Line, compare, quantity_cell
from gradguess_lab.tables.runs import Run, Variant, command, overlap_of, select, toggles
from gradguess_lab.tables.table import Cell, Table, number, text

TRAINED = {
    "mask": "Mask with biases",  # that are trained, and not in the forward pass
    "bottom": "Bottom of the reduced SVD",
    "floor": "NS by the floor",  # with norm and sigma_k of sample 0
}
LAST_BATCH, BEFORE, ALL = "Last batch", "Accuracy before the epoch", "All together"
WAYS = (*TRAINED.values(), LAST_BATCH, BEFORE, ALL)


@dataclass(frozen=True)
class Explained:
    """A main line that differs, and our number in each of the scripts' ways that was run."""

    line: Line
    ways: dict[str, Summary]

    @property
    def closing(self) -> list[str]:
        """The ways that explain the difference."""
        return [name for name, ours in self.ways.items() if self.closes(ours)]

    def closes(self, ours: Summary) -> bool:
        """Whether our number in a way is nearer to the paper's, which lies in its interval and in one as wide as that
        of the main line: few seeds have a wide interval, and that explains nothing."""
        entry, main = self.line.entry, self.line.ours
        if main is None or not abs(ours.mean - entry.value) < abs(main.mean - entry.value):
            return False
        intervals = (ours, Summary(ours.mean, main.sd, main.n))
        return all(within(entry.value, entry.rounding, one) for one in intervals)


def explanations(runs: Sequence[Run]) -> list[Explained]:
    """Every published number whose main line differs."""
    lines = (line for line in compare(DISTINCT, runs) if line.main and line.verdict == DIFFERS)
    return [Explained(line, ways_of(line.entry, line.variant, runs)) for line in lines]


def ways_of(entry: Published, main: Variant | None, runs: Sequence[Run]) -> dict[str, Summary]:
    """Our number in each of the scripts' ways: a change of the run, of the measurement, and all of them at once."""
    found: dict[str, Summary | None] = {}
    scripts = _scripts(entry, runs)
    for name, title in TRAINED.items():
        found[title] = _summary(entry, scripts.get((name,)))
    if entry.layer is not None:
        found[LAST_BATCH] = _summary(entry, main, as_scripts=True)
    if entry.quantity == "train_accuracy":
        found[BEFORE] = _summary(entry, main, as_scripts=True)
    if scripts:
        found[ALL] = _summary(entry, scripts[max(scripts, key=len)], as_scripts=True)
    return {name: summary for name, summary in found.items() if summary is not None}


def _scripts(entry: Published, runs: Sequence[Run]) -> dict[tuple[str, ...], Variant]:
    """The runs of an entry in each combination of the scripts' ways."""
    combinations = sorted({toggles(run) for run in runs if run.method == entry.method and toggles(run)})
    found = {names: select(runs, entry.method, entry.width, entry.k, script=",".join(names)) for names in combinations}
    return {names: variants[0] for names, variants in found.items() if variants}


def _summary(entry: Published, variant: Variant | None, as_scripts: bool = False) -> Summary | None:
    """The number in these runs, measured as the paper says or as the scripts do."""
    if variant is None:
        return None
    if as_scripts and entry.quantity == "train_accuracy":
        return Summary.of(variant.values("train_accuracy_before_last"))
    if as_scripts and entry.layer is not None:
        return Summary.of(variant.values(entry.quantity, entry.layer, batch="last_batch"))
    return Summary.of(variant.values(entry.quantity, entry.layer))


def variants_table(runs: Sequence[Run]) -> Table:
    """A row for every published number whose main line differs."""
    found = explanations(runs)
    columns = ("Method", "Width", "Quantity", "Paper", "Ours", *WAYS, "Closed by", "Epochs that agree")
    rows = tuple(_row(one, runs) for one in found)
    shown = {name for one in found for name in one.ways}
    return Table(
        "variants",
        "What the authors' scripts do and the paper does not say",
        columns,
        rows,
        "Every published number whose main line differs, with our number in each of the scripts' ways alone, and in "
        "all that apply at once. ✓: nearer to the paper's number, which lies in the prediction interval of that way "
        "and in one as wide as that of the main line. With many ways some close a gap by chance. Epochs that agree: "
        "the diagnosed epochs at which our number, measured as the paper says, has the paper's in its interval.",
        tuple(_commands(found, runs).items()),
        hidden=frozenset(i for i, name in enumerate(columns) if name in WAYS and name not in shown),
    )


def _row(one: Explained, runs: Sequence[Run]) -> tuple[Cell, ...]:
    line, entry = one.line, one.line.entry
    return (
        text(line.method),
        number(entry.width, "d"),
        text(line.quantity),
        quantity_cell(entry.value, kind_of(entry.quantity)),
        _mean(one, line.ours),
        *(_mean(one, one.ways.get(name), judged=True) for name in WAYS),
        text(", ".join(one.closing) if one.closing else "nothing" if one.ways else "not run"),
        text(", ".join(str(epoch) for epoch in agreeing_epochs(line)) or "–"),
    )


def _mean(one: Explained, ours: Summary | None, judged: bool = False) -> Cell:
    kind = kind_of(one.line.entry.quantity)
    if ours is None:
        return Cell("–")
    spread = "" if ours.sd is None else f" ± {quantity_cell(ours.sd, kind).text}"
    verdict = None if ours.sd is None or not judged else HOLDS if one.closes(ours) else DIFFERS
    return Cell(quantity_cell(ours.mean, kind).text + spread, ours.mean, verdict)


def agreeing_epochs(line: Line) -> list[int]:
    """The diagnosed epochs at which the paper's number lies in our prediction interval."""
    entry, variant = line.entry, line.variant
    if variant is None or entry.layer is None:
        return []
    epochs = sorted({row["epoch"] for run in variant.runs for row in run.diagnostics})
    at = {epoch: Summary.of(variant.values(entry.quantity, entry.layer, epoch=epoch)) for epoch in epochs}
    return [epoch for epoch, ours in at.items() if ours and within(entry.value, entry.rounding, ours)]


def _commands(found: Sequence[Explained], runs: Sequence[Run]) -> dict[str, str]:
    commands = {}
    for one in found:
        for names, variant in _scripts(one.line.entry, runs).items():
            label = f"{one.line.method}, width {one.line.entry.width}: {' and '.join(names)}"
            commands[label] = command(variant.first.config)
    return commands


def overlap_table(runs: Sequence[Run]) -> Table | None:
    """The overlap with ten directions as the paper's text defines it, and squared as in the scripts."""
    rows = []
    for width in (128, 512):
        for variant in select(runs, "wperp", width, k=10):
            for layer in (1, 2, 3):
                parts = [curve[9] for run in variant.runs if len(curve := overlap_of(run, layer)) >= 10]
                if ours := Summary.of(parts):
                    squared = Summary.of([part * part for part in parts]) or ours
                    cells = (number(ours.mean), number(squared.mean), number(ours.n, "d"), text(variant.label))
                    rows.append((number(width, "d"), number(layer, "d"), *cells))
    if not rows:
        return None
    return Table(
        "overlap-squared",
        "Ten directions: the overlap, and its square",
        ("Width", "Layer", "Overlap", "Squared", "Seeds", "Computed by"),
        tuple(rows),
        "The paper's text defines the overlap as a ratio of norms; the scripts plot its square, the share of the "
        "gradient's energy.",
    )
