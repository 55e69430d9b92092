"""Check the results of a study or under a directory.

A result is the JSON object of a finished run: a file `result.json`, a line of a `*.jsonl` file, or a row that is
stored. A benchmark is a JSON file in a directory `bench`, or a row of the study `bench`. The tables rely on what is
checked here, so a damaged file is refused by name and never half read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError, InputError
from gradguess_lab import store
from gradguess_lab.bench.run import SCHEMA as BENCH_SCHEMA
from gradguess_lab.tables.runs import Run

SCHEMA = 1


def load_runs(directory: Path, may_be_empty: bool = False) -> list[Run]:
    """Every run of a study, or under a directory, by key; a key that is found twice counts once."""
    if not directory.is_dir() and not store.files_of(directory)[0].exists():
        raise InputError(f"expected a directory with results, found no directory at {directory}.")
    runs: dict[str, Run] = {}
    for where, record in store.runs(directory):
        run = _parse(record, where)
        runs.setdefault(run.key, run)
    if not runs and not may_be_empty:
        raise InputError(
            f"no results under {directory}: expected result.json or *.jsonl files of finished runs. "
            "Make some with `gradguess reproduce` or `gradguess train --out DIR`."
        )
    return [runs[key] for key in sorted(runs)]


def load_benchmarks(directory: Path) -> list[dict[str, Any]]:
    """The records in the `bench/*.json` under `directory`, or else beside it, of the kinds that are shown."""
    folders = {path.parent for path in directory.rglob("*.json") if path.parent.name == "bench"}
    found = [
        one for folder in sorted(folders or {directory.resolve().parent / "bench"}) for one in store.records(folder)
    ]
    # "fast-paths" are measurements of single switches, which the report leaves out
    return [_benchmark(where, record) for where, record in found if record.get("kind") != "fast-paths"]


def _benchmark(where: str, record: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in ("kind", "environment", "rows", "growth") if name not in record]
    if record.get("schema") != BENCH_SCHEMA or missing:
        found = f"no {missing[0]!r}" if missing else f"schema {record.get('schema')!r}"
        raise GradguessError(f"{where}: expected a benchmark of schema {BENCH_SCHEMA}, found {found}.")
    return record


def _parse(record: Any, where: str) -> Run:
    _expect(isinstance(record, dict), where, "a JSON object", record)
    _expect(record.get("schema") == SCHEMA, where, f"schema {SCHEMA}", record.get("schema"))
    _expect(isinstance(record.get("key"), str), where, "text under 'key'", record.get("key"))
    for name, required in {"config": True, "metrics": True, "environment": False}.items():
        value = record.get(name, None if required else {})
        _expect(isinstance(value, dict), where, f"an object under {name!r}", value)
    history, diagnostics = record.get("history", []), record.get("diagnostics", [])
    _check_config(record["config"], where)
    for name, rows in {"history": history, "diagnostics": diagnostics}.items():
        _expect(isinstance(rows, list), where, f"a list under {name!r}", rows)
        for row in rows:
            _expect(isinstance(row, dict) and _is_number(row.get("epoch")), where, f"epochs in {name!r}", row)
    for row in diagnostics:
        _check_sites(row.get("sites"), where)
        _check_sites(row.get("last_batch", {}), where)
    return Run(
        key=record["key"],
        config=record["config"],
        metrics=_numbers(record["metrics"], f"{where}, metrics"),
        history=[_numbers(row, f"{where}, history") for row in history],
        diagnostics=diagnostics,
        environment=record.get("environment", {}),
        experiments=record.get("experiments", ()),
        task=record.get("task", ""),
        variant=record.get("variant", ""),
    )


def _numbers(values: Mapping[str, Any], where: str) -> dict[str, float]:
    """The entries that are numbers; text and the like is refused, null means not measured."""
    for name, value in values.items():
        _expect(value is None or _is_number(value), where, f"a number under {name!r}", value)
    return {name: value for name, value in values.items() if value is not None}


def _check_config(config: Mapping[str, Any], where: str) -> None:
    _expect(isinstance(config.get("method"), str), where, "a method in 'config'", config.get("method"))
    for name in ("width", "depth", "epochs", "seed", "batch"):
        value = config.get(name, 0)
        whole = isinstance(value, int) and not isinstance(value, bool)
        _expect(whole, where, f"a whole number under {name!r} in 'config'", value)


def _check_sites(sites: Any, where: str) -> None:
    _expect(isinstance(sites, dict), where, "an object under 'sites'", sites)
    for name, site in sites.items():
        place = f"{where}, site {name!r}"
        _expect(isinstance(site, dict), place, "an object", site)
        for key, value in site.items():
            if key == "overlap":
                fine = isinstance(value, list) and all(_is_number(number) for number in value)
                _expect(fine, place, "a list of numbers under 'overlap'", value)
            else:
                _expect(value is None or _is_number(value), place, f"a number under {key!r}", value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _expect(true: bool, where: str, expected: str, found: object) -> None:
    if not true:
        shown = repr(found)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise GradguessError(f"{where}: expected {expected}, found {shown}.")
