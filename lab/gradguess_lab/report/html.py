"""The page: sections, drawings and numbers put into the template. Every name from a result is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from gradguess_lab.report.export import to_csv, to_latex
from gradguess_lab.report.palette import colours
from gradguess_lab.report.sections import Section, is_of_the_paper
from gradguess_lab.tables.beside_stored import beside_stored, judged
from gradguess_lab.tables.compare import (
    DIFFERS,
    HOLDS,
    NOT_COMPARED,
    NOT_RUN,
    RULES,
    SINGLE,
    UNCLEAR,
    ZERO,
)
from gradguess_lab.tables.runs import Run
from gradguess_lab.tables.table import Table, slugify
from gradguess_lab.tables.tally import verdicts

_MARKS = {
    HOLDS: "✓",
    DIFFERS: "✗",
    UNCLEAR: "?",
    ZERO: "0",
    SINGLE: "1",
    NOT_COMPARED: "–",
    NOT_RUN: "○",
}
_GUIDE = (
    "Loss and accuracy over the epochs, and a line for each run. None of the runs is in the paper's setting, so the "
    "paper's numbers are left out. Click a column's title to sort by it."
)
_MATH = {"Wᵀ": "W<sup>T</sup>", "W⊥": "W<sup>⊥</sup>", "Wᴾ": "W<sup>P</sup>"}


@dataclass(frozen=True)
class Tile:
    """How many lines got which verdict."""

    title: str
    counts: list[tuple[str, int]]


@dataclass(frozen=True)
class Opening:
    """What a page says before its sections. Without a guide it is that of the paper."""

    title: str
    lead: str
    tiles: Sequence[Tile] = ()
    guide: str = ""
    rules: Sequence[str] = ()


def render(runs: Sequence[Run], sections: Sequence[Section], environments: Table, drawings: Mapping[str, str]) -> str:
    """The page of the paper, or of other runs, as one string; `drawings` holds each figure's themed SVG by its slug."""
    if is_of_the_paper(runs):
        opening = Opening("The paper, reproduced", lead(runs), _tiles(runs, sections), rules=RULES)
    else:
        opening = Opening("Runs", lead(runs), guide=_GUIDE)
    return render_page(opening, sections, environments, drawings)


def render_page(opening: Opening, sections: Sequence[Section], environments: Table, drawings: Mapping[str, str]) -> str:
    """A page as one string."""
    from markupsafe import Markup

    script = _asset("page.js")
    return _templates().get_template("page").render(
        opening=opening,
        sections=sections,
        drawings={slug: Markup(svg) for slug, svg in drawings.items()},
        environments=environments,
        marks=_MARKS,
        css=Markup(_asset("page.css") + _colour_variables() + _number_columns(sections, environments)),
        script=Markup(script),
        script_hash=Markup("sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )  # fmt: skip


def _number_columns(sections: Sequence[Section], environments: Table) -> str:
    """A table of class `n3` has numbers in its third column: said once for each column, and not in every cell."""
    tables = [environments, *(table for section in sections for table in section.tables)]
    columns = range(1, 1 + max(len(table.shown) for table in tables))
    return ", ".join(f".n{i} td:nth-child({i})" for i in columns) + " { text-align: right; }\n"


def _templates() -> Any:
    import jinja2

    env = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.DictLoader({"page": _asset("page.html.j2")}),
    )
    env.filters["math"] = _math
    env.filters["css"] = slugify
    env.filters["csv_uri"] = lambda table: _data_uri("text/csv", to_csv(table))
    env.filters["latex_uri"] = lambda table: _data_uri("application/x-tex", to_latex(table))
    return env


def _math(words: str) -> Any:
    """Escape, then set the methods' names with a raised sign."""
    from markupsafe import Markup, escape

    escaped = str(escape(words.replace("; ", ";\n")))  # a list of comparisons, one to a line
    for tight in (" ± ", "k = "):
        escaped = escaped.replace(tight, tight.replace(" ", "\u00a0"))
    for plain, raised in _MATH.items():
        escaped = escaped.replace(plain, raised)
    return Markup(escaped)


def _data_uri(kind: str, content: str) -> str:
    return f"data:{kind};charset=utf-8;base64," + base64.b64encode(content.encode()).decode()


def _asset(name: str) -> str:
    return files("gradguess_lab.report").joinpath("page", name).read_text(encoding="utf-8")


def _colour_variables() -> str:
    light = "".join(f"--c{a[1:]}:{a};" for a in colours())
    dark = "".join(f"--c{a[1:]}:{b};" for a, b in colours().items())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _tiles(runs: Sequence[Run], sections: Sequence[Section]) -> list[Tile]:
    """Runs that stand beside stored ones, or else each published number and each claim once."""
    if beside := Counter(judged(*pair) for pair in beside_stored(runs)):
        return [Tile("Runs in the interval of our stored seeds", [(word, beside[word]) for word in beside])]
    claims = [table for section in sections for table in section.tables if table.slug.startswith("claims")]
    claimed = Counter(cell.verdict for table in claims for row in table.rows for cell in row)
    found: dict[str, Counter[str | None]] = {"Published numbers": Counter(verdicts(runs)), "Claims": claimed}
    return [Tile(title, [(word, counts[word]) for word in _MARKS if counts[word]]) for title, counts in found.items()]


def lead(runs: Sequence[Run]) -> str:
    """One sentence on what was run."""
    methods = {run.method for run in runs}
    seeds = {run.config.get("seed") for run in runs}
    seconds = sum(run.metrics.get("seconds", 0.0) for run in runs)
    if seconds < 120:
        spent = f"{seconds:.0f} seconds"
    else:
        spent = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
    return (
        f"{_plural(len(runs), 'run')} of {_plural(len(methods), 'method')}, {_plural(len(seeds), 'seed')}, "
        f"{spent} of training."
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
