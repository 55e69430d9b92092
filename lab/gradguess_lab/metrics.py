"""The per-epoch log of a run: JSON lines, appended, and checked against the checkpoint on resumption."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError
from gradguess_lab.files import explained

NUMBERS = ("loss", "step_ms", "seconds")  # that every row has


class MetricsLog:
    """Rows in memory and, where a path is given, in `metrics.jsonl`.

    The checkpoint keeps `position`: length and digest of the file at that epoch. On resumption what was written after
    it is cut off, since that epoch is run again. A change before it is refused.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()
        self._length = 0

    @property
    def position(self) -> dict[str, Any]:
        return {"bytes": self._length, "digest": self._digest.hexdigest()}

    def append(self, row: dict[str, Any]) -> None:
        """Add one epoch."""
        self.rows.append(row)
        line = (json.dumps(row) + "\n").encode()
        self._digest.update(line)
        self._length += len(line)
        if self.path is not None:
            with explained(self.path), self.path.open("ab") as file:
                file.write(line)

    def restore(self, position: dict[str, Any] | None) -> None:
        """Go back to `position`, or to the empty log."""
        if self.path is None:
            return
        with explained(self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
        length = position["bytes"] if position else 0
        kept = data[:length]
        if position and hashlib.sha256(kept).hexdigest() != position["digest"]:
            raise GradguessError(
                f"{self.path} is truncated or was edited: it does not match its checkpoint. Restore it, "
                f"or delete {self.path.parent} to start afresh."
            )
        with explained(self.path), self.path.open("ab") as file:
            file.truncate(length)
        self.rows = [self._row(line, number) for number, line in enumerate(kept.splitlines(), 1)]
        self._digest, self._length = hashlib.sha256(kept), length

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        """One epoch of the log, checked: it matches its checkpoint, but somebody may have made both by hand."""
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
