"""TensorBoard: the numbers of a run as scalars, written beside the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradguess.errors import require


@contextlib.contextmanager
def tensorboard_log(directory: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that logs the numbers of one epoch's row under `directory`/tensorboard."""
    tensorboard = require("torch.utils.tensorboard", "gradguess[track]", "--tensorboard")
    with tensorboard.SummaryWriter(str(directory / "tensorboard")) as writer:

        def log(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "epoch":
                    writer.add_scalar(name, value, row["epoch"])

        yield log
