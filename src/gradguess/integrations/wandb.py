"""Weights & Biases: the rows of a run, written beside it; `wandb sync` uploads them if and when you want."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradguess.errors import require


@contextlib.contextmanager
def wandb_log(directory: Path, name: str, config: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that logs the numbers of one epoch's row, offline, under `directory`/wandb."""
    wandb = require("wandb", "gradguess[track]", "--wandb")
    directory.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project="gradguess", name=name, config=config, dir=str(directory), mode="offline")

    def log(row: dict[str, Any]) -> None:
        run.log({key: value for key, value in row.items() if isinstance(value, int | float)}, step=row["epoch"])

    try:
        yield log
    finally:
        run.finish()
