"""The loggers of a run, by what was asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError


@contextlib.contextmanager
def logs(config: Any, out: Path | None, tensorboard: bool, wandb: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that gives a row to every logger that was asked for, each beside the run."""
    for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb)):
        if wanted and out is None:
            raise GradguessError(f"--{name} needs --out DIR: its log is written beside the run.")
    with contextlib.ExitStack() as stack:
        loggers = []
        if tensorboard and out is not None:
            from gradguess.integrations.tensorboard import tensorboard_log

            loggers.append(stack.enter_context(tensorboard_log(out)))
        if wandb and out is not None:
            from gradguess.integrations.wandb import wandb_log

            loggers.append(stack.enter_context(wandb_log(out, config.key, config.as_dict())))

        def log(row: dict[str, Any]) -> None:
            for write in loggers:
                write(row)

        yield log
