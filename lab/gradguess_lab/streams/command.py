"""The command `gradguess stream`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from gradguess_lab.options import Json, Threads, with_config_options
from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.terminal import emit, interruptible, notes

SHOWN = ("error", "chance", "step_ms", "memory_mb", "skipped", "failed")


@partial(with_config_options, config=StreamConfig)
def stream(
    config: Any,
    out: Annotated[Path | None, typer.Option(help="Write the whole record, with its curves, to this file.")] = None,
    json: Json = False,
    threads: Threads = 0,
) -> None:
    """Learn online from an endless stream: the error at the end, the time of a step, and the memory that is kept."""
    from gradguess_lab.environment import use_threads
    from gradguess_lab.files import write_json
    from gradguess_lab.streams.run import run

    use_threads(threads)
    with interruptible(), notes.status(config.key) as status:
        record = run(config, lambda point: status.update(f"{config.key}: step {point['step']}, error {point['error']}"))
    if out is not None:
        write_json(out, record)
    shown = {name: record[name] for name in SHOWN}
    lines = [f"{name:>10}  {value:.4g}" for name, value in shown.items() if isinstance(value, int | float)]
    emit({"key": record["key"], **shown}, json, lines + [record["failed"]] * bool(record["failed"]))
