"""How many of the paper's numbers hold, and which of the authors' ways that it does not say explain the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradguess_lab.paper_numbers import DISTINCT
from gradguess_lab.tables.paper import Line, compare
from gradguess_lab.tables.runs import Group, Run, select
from gradguess_lab.tables.table import Table, cell
from gradguess_lab.tables.verdicts import DIFFERS, HOLDS, LEVEL, Summary, verdict, within

TRAINED = {
    "mask": "Mask with biases",  # that are trained, and not in the forward pass
    "bottom": "Bottom of the reduced SVD",
    "floor": "NS by the floor",  # with norm and sigma_k of sample 0
}
LAST_BATCH, BEFORE, ALL = "Last batch", "Accuracy before the epoch", "All together"


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
    return [Explained(line, ways_of(line, runs)) for line in lines]


def ways_of(line: Line, runs: Sequence[Run]) -> dict[str, Summary]:
    """Our number in each of the scripts' ways: a change of the run, of the measurement, and all of them at once."""
    entry = line.entry
    names = sorted({run["script"] for run in runs if run["method"] == entry.method and run["script"]})
    chosen = {name: select(runs, entry.method, entry.width, entry.k, script=name) for name in names}
    scripts = {name: several[0] for name, several in chosen.items() if several}

    def as_scripts(group: Group | None) -> Summary | None:
        """Measured as the scripts do, where that is another number."""
        if group is None:
            return None
        if entry.layer is not None:
            return group.summary(entry.quantity, entry.layer, batch="last_batch")
        return group.summary(entry.quantity + "_before_last" * (entry.quantity == "train_accuracy"))

    ways = {
        title: scripts[name].summary(entry.quantity, entry.layer) for name, title in TRAINED.items() if name in scripts
    }
    if entry.layer is not None or entry.quantity == "train_accuracy":
        ways[BEFORE if entry.layer is None else LAST_BATCH] = as_scripts(line.group)
    if scripts:
        ways[ALL] = as_scripts(scripts[max(scripts, key=lambda names: names.count(","))])
    return {name: ours for name, ours in ways.items() if ours}


def variants_table(runs: Sequence[Run]) -> Table:
    """A row for every published number whose main line differs."""
    found, rows = explanations(runs), []
    order = (*TRAINED.values(), LAST_BATCH, BEFORE, ALL)
    titles = [name for name in order if any(name in one.ways for one in found)]
    for one in found:
        line, ways = one.line, {}
        for name in titles:
            ours = one.ways.get(name)
            closes = None if ours is None or ours.sd is None else HOLDS if one.closes(ours) else DIFFERS
            ways[name] = cell(ours, line.form, closes)
        row = {name: line.row[name] for name in ("Method", "Width", "Quantity", "Paper")}
        closed = ", ".join(one.closing) or ("nothing" if one.ways else "not run")
        rows.append({**row, "Ours": cell(line.ours, line.form), **ways, "Closed by": closed})
    return Table(
        "variants",
        "What the authors' scripts do and the paper does not say",
        rows,
        f"{tally_sentence(runs)} Each published number counts once, by its main line: the method as the paper defines "
        "it. Here is every one whose main line differs, with our number in each of the scripts' ways alone, and in "
        "all that apply at once. ✓: nearer to the paper's number, which lies in the prediction interval of that way "
        "and in one as wide as that of the main line. With many ways some close a gap by chance.",
    )


def tally(runs: Sequence[Run]) -> Mapping[str, int]:
    """How many of the published numbers got which verdict, each once by its main line, and what follows from that.

    "lower": how many of those that hold would hold as well if our means were lower by 5 %.
    """
    lines = [line for line in compare(DISTINCT, runs) if line.main]
    counts = Counter(line.verdict for line in lines)
    for line in lines:
        if line.ours and line.verdict == HOLDS:
            counts["lower"] += verdict(line.entry, replace(line.ours, mean=0.95 * line.ours.mean)) == HOLDS
    counts["judged"] = counts[HOLDS] + counts[DIFFERS]
    counts["explained"] = sum(bool(one.closing) for one in explanations(runs))
    return counts


def tally_sentence(runs: Sequence[Run]) -> str:
    """How many of the paper's numbers hold, in words."""
    found, closing = tally(runs), [one for one in explanations(runs) if one.closing]
    seeds = " or ".join(map(str, sorted({one.ways[way].n for one in closing for way in one.closing})))
    return (
        f"Of {found['judged']} published numbers that can be judged, {found[HOLDS]} hold and {found[DIFFERS]} differ; "
        f"{LEVEL * found['judged']:.0f} would differ by chance alone. The paper has one run a number, so that a wide "
        f"interval passes easily: with our means 5 % lower, {found['lower']} of the {found[HOLDS]} would hold as well. "
        f"Of those that differ, {found['explained']} are met when we do as the authors' scripts do and the paper does "
        f"not say ({seeds or 'no'} seeds); {found[DIFFERS] - found['explained']} remain unexplained."
    )
