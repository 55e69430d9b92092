"""From a directory of results to the report's files, and to its page. Every name from a result is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from gradguess_lab.compare.run import read_record
from gradguess_lab.compare.tables import compared
from gradguess_lab.files import explained, write_atomic
from gradguess_lab.report.sections import Section, build_sections, is_of_the_paper
from gradguess_lab.tables.figure import colours, draw
from gradguess_lab.tables.listing import environments_table
from gradguess_lab.tables.runs import Run, load_benchmarks, load_runs
from gradguess_lab.tables.stored import beside_stored, judged
from gradguess_lab.tables.table import slugify
from gradguess_lab.tables.tally import tally
from gradguess_lab.tables.verdicts import DIFFERS, HOLDS, NOT_COMPARED, NOT_RUN, RULES, SINGLE, UNCLEAR, ZERO

MARKS = {HOLDS: "✓", DIFFERS: "✗", UNCLEAR: "?", ZERO: "0", SINGLE: "1", NOT_COMPARED: "–", NOT_RUN: "○"}
OTHER_RUNS = (
    "Loss and accuracy over the epochs, and a line for each run. None of the runs is in the paper's setting, so the "
    "paper's numbers are left out. Click a column's title to sort by it."
)
COMPARED = (
    "Every method trains the same network for the same number of epochs, at the learning rate of one grid that short "
    "runs chose. A cost is that of a training step over backpropagation's. Click a column's title to sort by it."
)
_RAISED = {"Wᵀ": "W<sup>T</sup>", "W⊥": "W<sup>⊥</sup>", "Wᴾ": "W<sup>P</sup>"}


def write_report(results_dir: Path, out: Path | None = None) -> Path:
    """Read every result under `results_dir`, write the report into the folder `out`, return the page's path.

    `out` defaults to `results_dir/report`; a name that ends in `.html` is the page itself. Beside the page
    come `tables/*.csv`, `tables/*.tex`, `figures/*.png` and `figures/*.svg`.
    """
    results_dir = Path(results_dir)
    out = results_dir / "report" if out is None else Path(out)
    page = out if out.suffix == ".html" else out / "report.html"
    benchmarks = load_benchmarks(results_dir)
    runs = load_runs(results_dir, may_be_empty=bool(benchmarks))
    sections = build_sections({"runs": runs, "benchmarks": benchmarks})
    if is_of_the_paper(runs):
        return write_page(page, "The paper, reproduced", runs, sections, tiles=tiles(runs, sections), rules=RULES)
    return write_page(page, "Runs", runs, sections, guide=OTHER_RUNS)


def write_comparison(directory: Path) -> Path:
    """Read the comparison in a directory, write its page into `report` there, return the page's path."""
    sections, runs = compared(read_record(directory)), load_runs(directory, may_be_empty=True)
    return write_page(directory / "report" / "compare.html", "Methods compared", runs, sections, guide=COMPARED)


def write_page(
    page: Path,
    title: str,
    runs: Sequence[Run],
    sections: Sequence[Section],
    guide: str = "",
    tiles: Mapping[str, Mapping[str, int]] | None = None,
    rules: Sequence[str] = (),
) -> Path:
    """Every table and every figure as files, and the page of all; without a guide it is that of the paper."""
    import jinja2
    from markupsafe import Markup, escape

    def math(words: str) -> Markup:
        """Escape, then set the methods' names with a raised sign."""
        escaped = str(escape(words.replace("; ", ";\n")))  # a list of comparisons, one to a line
        for plain, raised in {" ± ": "\u00a0±\u00a0", "k = ": "k\u00a0=\u00a0", **_RAISED}.items():
            escaped = escaped.replace(plain, raised)
        return Markup(escaped)

    environments, drawings, script = environments_table(runs), {}, _asset("page.js")
    for name in ("tables", "figures"):
        with explained(page.parent / name):
            (page.parent / name).mkdir(parents=True, exist_ok=True)
    for table in [environments, *(table for section in sections for table in section.tables)]:
        write_atomic(page.parent / "tables" / f"{table.slug}.csv", table.csv())
        write_atomic(page.parent / "tables" / f"{table.slug}.tex", table.latex())
    for figure in (figure for section in sections for figure in section.figures):
        drawing = draw(figure)
        write_atomic(page.parent / "figures" / f"{figure.slug}.png", drawing.png)
        write_atomic(page.parent / "figures" / f"{figure.slug}.svg", drawing.svg)
        drawings[figure.slug] = Markup(drawing.inline)
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    env.filters |= {"math": math, "css": slugify, "uri": _data_uri}
    shown = env.from_string(_asset("page.html.j2")).render(
        title=title,
        lead=lead(runs),
        guide=guide,
        tiles=tiles or {},
        rules=rules,
        sections=sections,
        drawings=drawings,
        environments=environments,
        marks=MARKS,
        css=Markup(_asset("page.css") + _colour_variables()),
        script=Markup(script),
        script_hash=Markup("sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )
    write_atomic(page, shown)
    return page


def tiles(runs: Sequence[Run], sections: Sequence[Section]) -> dict[str, dict[str, int]]:
    """Runs that stand beside stored ones, or else each published number and each claim once."""
    if beside := Counter(judged(*pair) for pair in beside_stored(runs)):
        return {"Runs in the interval of our stored seeds": beside}
    rows = [row for one in sections for table in one.tables if table.slug.startswith("claims") for row in table.rows]
    found = {"Published numbers": tally(runs), "Claims": Counter(row["Verdict"] for row in rows)}
    return {title: {word: counts[word] for word in MARKS if counts.get(word)} for title, counts in found.items()}


def lead(runs: Sequence[Run]) -> str:
    """What was run, in one sentence."""
    hours = sum(run.get("seconds", 0.0) for run in runs) / 3600
    methods, seeds = ({run[name] for run in runs} for name in ("method", "seed"))
    return f"Runs: {len(runs)}. Methods: {len(methods)}. Seeds: {len(seeds)}. Training: {hours:.2g} hours."


def _data_uri(content: str, kind: str) -> str:
    return f"data:{kind};charset=utf-8;base64," + base64.b64encode(content.encode()).decode()


def _asset(name: str) -> str:
    return files("gradguess_lab.report").joinpath("template", name).read_text(encoding="utf-8")


def _colour_variables() -> str:
    light = "".join(f"--c{a[1:]}:{a};" for a in colours())
    dark = "".join(f"--c{a[1:]}:{b};" for a, b in colours().items())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
