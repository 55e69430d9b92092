"""What a benchmark leaves: one JSON file with its rows and where they were measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gradguess.errors import InputError
from gradguess_lab import environment
from gradguess_lab.files import explained, write_json
from gradguess_lab.store import find

SCHEMA = 1
Row = dict[str, Any]
Say = Callable[[str], None]


def make_record(kind: str, rows: Sequence[Row], device: str, load: float) -> Row:
    """The rows, with the environment; `load` is that of the machine before they were measured."""
    where = {**environment.describe(device), "load_before": load, "load_after": os.getloadavg()[0]}
    return {"schema": SCHEMA, "kind": kind, "environment": where, "rows": list(rows)}


def keep(record: Row, out: Path | None, name: str) -> Row:
    """Write the record to a directory, if there is one."""
    if out is not None:
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
        write_json(out / name, record)
    return record


def measured(out: Path | None, name: str, device: str, settings: Row) -> list[Row]:
    """The rows that an earlier call with the same code, machine and settings has left."""
    stored = find(out, name.removesuffix(".json")) if out else None
    if stored is None:
        return []
    where = {key: value for key, value in stored.get("environment", {}).items() if not key.startswith("load")}
    same = where == environment.describe(device) and stored.get("settings") == settings
    return list(stored["rows"]) if same else []


def kind_of(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device {device!r} is none of PyTorch's.") from error
