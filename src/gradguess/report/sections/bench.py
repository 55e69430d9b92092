"""What a step costs."""

from __future__ import annotations

from pathlib import Path

from gradguess.errors import GradguessError
from gradguess.experiments.bench.run import SCHEMA
from gradguess.experiments.bench.shown import figures, tables
from gradguess.experiments.files import read_json
from gradguess.report.section import Section

__all__ = ["bench"]

_INTRO = (
    "Time and memory of a training step against backpropagation written as a plain loop, AdamW fused on both sides. "
    "Loops take turns in one process; memory is measured in processes of their own."
)
_NEEDED = ("kind", "environment", "rows", "growth")


def bench(results_dir: Path) -> Section | None:
    """From the `bench/*.json` under a directory of results, or else beside it."""
    paths = sorted(path for path in results_dir.rglob("*.json") if path.parent.name == "bench")
    paths = paths or sorted((results_dir.resolve().parent / "bench").glob("*.json"))
    records = [_read(path) for path in paths]
    shown = [table for record in records for table in tables(record)]
    drawn = [figure for record in records for figure in figures(record)]
    return Section("bench", "What a step costs", _INTRO, tuple(shown), tuple(drawn)) if records else None


def _read(path: Path) -> dict[str, object]:
    record = read_json(path, "benchmark")
    missing = [name for name in _NEEDED if name not in record]
    if record.get("schema") != SCHEMA or missing:
        what = f"schema {record.get('schema')!r}" if not missing else f"no {missing[0]!r}"
        raise GradguessError(f"{path}: expected a benchmark of schema {SCHEMA}, found {what}.")
    return record
