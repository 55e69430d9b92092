"""The per-epoch log of a run: JSON lines, appended, and cut to the epochs of the checkpoint on resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError
from gradguess_lab.files import explained

NUMBERS = ("loss", "step_ms", "seconds")  # that every row has


class MetricsLog:
    """Rows in memory and, where a path is given, in `metrics.jsonl`."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def append(self, row: dict[str, Any]) -> None:
        """Add one epoch."""
        self.rows.append(row)
        if self.path is not None:
            with explained(self.path), self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def restore(self, epochs: int) -> None:
        """Go back to the first `epochs` rows: an epoch after them is run again."""
        if self.path is None:
            return
        with explained(self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
        lines = data.split(b"\n")[:-1][:epochs]  # a kill may leave half a row at the end
        if len(lines) < epochs:
            raise GradguessError(
                f"{self.path} is truncated: it has {len(lines)} of the {epochs} epochs of its checkpoint. Restore it, "
                f"or delete {self.path.parent} to start afresh."
            )
        self.rows = [self._row(line, number) for number, line in enumerate(lines, 1)]
        with explained(self.path), self.path.open("ab") as file:
            file.truncate(sum(len(line) + 1 for line in lines))

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        """One epoch of the log, checked."""
        try:
            row = json.loads(line)
            fine = row["epoch"] == number and all(isinstance(row[name], int | float) for name in NUMBERS)
        except (ValueError, KeyError, TypeError, RecursionError):
            fine = False
        if not fine:
            raise GradguessError(
                f"{self.path}, line {number} is not a row that we write. Delete {self.path and self.path.parent} to "
                "start afresh."
            )
        return row
