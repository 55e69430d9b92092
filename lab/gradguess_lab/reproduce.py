"""Run the experiments of the paper, or any list of configurations, each run once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError, InputError
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import explained, read_json, write_atomic, write_json
from gradguess_lab.plan import unique
from gradguess_lab.progress import Progress
from gradguess_lab.run_many import Backend, is_finished, run_directory, run_many


def reproduce(
    runs: dict[str, list[TrainConfig]],
    out: Path,
    jobs: int,
    on_progress: Callable[[Progress], None] | None = None,
    backend: Backend = "processes",
    address: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All results, finished before or now, and the message of each run that failed, by key.

    `runs` are the configurations of each experiment. Interrupted, this loses at most the epoch that each process is in.
    `on_progress` gets, once, what it may ask how far they are.
    Beside the directories of the runs, `results.jsonl` holds all results, one in a line; those of other calls stay.
    """
    configs = unique(runs)
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    earlier = _earlier(out / "results.jsonl")  # before all the work: it may be damaged
    write_json(out / "experiments.json", {name: [config.key for config in group] for name, group in runs.items()})
    failures: dict[str, str] = {}
    if not all(is_finished(out, config) for config in configs):
        if on_progress:
            on_progress(Progress(out, configs))
        failures = run_many(configs, out, jobs, backend, address)
    paths = [run_directory(out, config) / "result.json" for config in configs if is_finished(out, config)]
    records = [read_json(path, "result") for path in paths]
    everything = earlier | {record["key"]: record for record in records}
    write_atomic(out / "results.jsonl", "".join(json.dumps(record) + "\n" for record in everything.values()))
    return records, failures


def _earlier(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file, by key; none if there is no file."""
    if not path.exists():
        return {}
    found = {}
    with explained(path):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            found[record["key"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise GradguessError(
                f"{path}, line {number}: expected a result as JSON, found {error!r}; delete the line."
            ) from error
    return found


def read_configs(path: Path) -> dict[str, list[TrainConfig]]:
    """The runs in a file as `reproduce --dump` writes it: a JSON list of objects with fields of `TrainConfig`.

    What an object leaves out keeps its default.
    """
    entries = read_json(path, "list of configurations", list)
    for entry in entries:
        if not isinstance(entry, dict):
            raise InputError(f"{path} must hold one JSON object for each run, found {entry!r}.")
    return {path.stem: [TrainConfig.from_dict(entry) for entry in entries]}
