"""The rows of a study: `results/paper.jsonl.gz` holds those of the study `results/paper`, one in a line.

A row is a JSON object with a `key`. Its long lists, `CURVES`, lie under that key in `results/paper.curves.jsonl.gz`.
What was made since lies in the folder `results/paper`, as every command leaves it, and counts before what is stored.
`python -m gradguess_lab.store results/paper` puts it into the study.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError
from gradguess_lab.files import decoded, explained, read_json, write_atomic

CURVES = ("history", "diagnostics", "curve")
Row = dict[str, Any]


def files_of(study: Path) -> tuple[Path, Path]:
    """The file of the rows and that of their curves, which need not exist."""
    return study.with_name(f"{study.name}.jsonl.gz"), study.with_name(f"{study.name}.curves.jsonl.gz")


def read(study: Path) -> list[Row]:
    """The stored rows; none where nothing is stored."""
    return list(_stored(study).values())


def write(study: Path, rows: Iterable[Row]) -> None:
    """Store these rows and no others; equal rows give equal bytes. Each file is written whole or not at all."""
    by_key: dict[str, Row] = {}
    for row in rows:
        if not isinstance(row.get("key"), str) or row["key"] in by_key:
            raise GradguessError(f"{study}: expected a row with a key of its own, found {row.get('key')!r}.")
        by_key[row["key"]] = row
    curves = [{name: row[name] for name in ("key", *CURVES) if name in row} for row in by_key.values()]
    short = [{name: value for name, value in row.items() if name not in CURVES} for row in by_key.values()]
    for path, kept in zip(files_of(study)[::-1], ([one for one in curves if len(one) > 1], short), strict=True):
        lines = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in kept)
        if kept or path.exists():
            write_atomic(path, gzip.compress(lines.encode(), 9, mtime=0))
    _by_key.cache_clear()  # a clock may be too coarse to tell


def merge(study: Path, rows: Iterable[Row]) -> None:
    """Store these rows beside the others; one with a key that is stored takes its place."""
    write(study, (_stored(study) | {row["key"]: row for row in rows}).values())


def find(place: Path, key: str) -> Row | None:
    """The row with this key: a file in the folder, of a measurement or of a run, or else what is stored."""
    run = place / "runs" / key
    for path in (place / f"{key}.json", run / "result.json", run / "failed.json"):
        if path.exists():
            return read_json(path, "record")
    return _stored(place).get(key)


def runs(place: Path) -> Iterator[tuple[str, Any]]:
    """Each finished run on batches and where it was found, unchecked."""
    stored = ((f"{files_of(place)[0]}, {row['key']}", row) for row in read(place) if "kind" not in row)
    for where, row in [*_loose_runs(place), *stored]:
        if not (isinstance(row, dict) and ("error" in row or row.get("failed"))):  # on a stream, or not finished
            yield where, row


def rows(place: Path) -> dict[str, Row]:
    """All that a study or a folder holds, by key; of a run what all runs of the folder say of it counts first."""
    loose = {row["key"]: row for _, row in _loose_runs(place) if "key" in row}
    return _stored(place) | _loose_records(place) | loose


def keep(folder: Path, new: Iterable[Row]) -> dict[str, Row]:
    """Write rows to `results.jsonl` in a folder, where others stay; all that are there then, by key."""
    path = folder / "results.jsonl"
    found: dict[str, Row] = {row["key"]: row for _, row in (_lines(path) if path.exists() else ())}
    found |= {row["key"]: row for row in new}
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in found.values()))
    return found


def _loose_runs(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("result.json")):  # a run's own file counts before a collection of results
        yield str(path), read_json(path, "result", object)
    for path in sorted(folder.rglob("*.jsonl")):
        yield from _lines(path)


def _loose_records(folder: Path) -> dict[str, Row]:
    """By key, which is the file's name where the record has none."""
    found = {}
    for path in [*folder.glob("*.json"), *folder.glob("bench/*.json")]:
        row = {"key": path.relative_to(folder).as_posix().removesuffix(".json"), **read_json(path, "record")}
        found[row["key"]] = row
    return found


def _stored(study: Path) -> dict[str, Row]:
    return _by_key(*((path, path.stat().st_mtime_ns) if path.exists() else None for path in files_of(study)))


@lru_cache(maxsize=16)
def _by_key(*files: tuple[Path, int] | None) -> dict[str, Row]:
    rows, curves = ({row["key"]: row for row in _unpacked(file[0])} if file else {} for file in files)
    return {key: row | curves.get(key, {}) for key, row in rows.items()}


def _unpacked(path: Path) -> list[Row]:
    try:
        with explained(path):
            return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    except (EOFError, zlib.error, ValueError) as error:
        raise GradguessError(f"{path} is damaged ({error}); take it from the repository again.") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The lines of a file of results; other logs (epochs, failures) carry no schema and are left alone."""
    with explained(path):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            record = decoded(line, where, "run it again")
            if number == 1 and isinstance(record, dict) and "schema" not in record:
                return
            yield where, record


def main(study: Path) -> None:
    """Put what lies in the folder of a study into the study."""
    found = [*(row for _, row in _loose_runs(study)), *_loose_records(study).values()]
    loose = [row for row in found if {"schema", "environment"} & row.keys()]
    merge(study, reversed(loose))  # of two with one key the first
    print(f"{files_of(study)[0]}: {len(read(study))} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
