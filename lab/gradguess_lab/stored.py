"""The result of a run as it is stored: whole, and of the configuration that asks for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError
from gradguess_lab.config import TrainConfig, differences
from gradguess_lab.files import read_json


def stored_result(directory: Path, config: TrainConfig) -> dict[str, Any] | None:
    """The result in a run's directory, None if there is none; one that is torn, edited or another's is refused."""
    path = directory / "result.json"
    if not path.exists():
        return None
    record: dict[str, Any] = read_json(path, "result")
    metrics, stored = record.get("metrics"), record.get("config")
    if record.get("key") != config.key or not isinstance(metrics, dict) or not metrics:
        raise GradguessError(f"result {path} is not that of {config.key}; delete it to have it written again.")
    if not all(isinstance(value, int | float) for value in metrics.values()):
        raise GradguessError(f"result {path} holds metrics that are not numbers; delete it to have it written again.")
    found = differences(config, stored) if isinstance(stored, dict) else ["no configuration there"]
    if found:
        raise GradguessError(f"result {path} is of another configuration ({'; '.join(found)}). Choose another --out.")
    return record


def has_result(directory: Path, config: TrainConfig) -> bool:
    """Whether `stored_result` gives one. A file is read once, and again when it has changed."""
    try:
        found = (directory / "result.json").stat()
    except OSError:
        return False
    return _is_whole(directory, config, (found.st_mtime_ns, found.st_size))


@cache
def _is_whole(directory: Path, config: TrainConfig, stamp: tuple[int, int]) -> bool:
    try:
        return stored_result(directory, config) is not None
    except GradguessError:
        return False
