"""The command `gradguess advise`. Needs the packages typer and rich."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradguess_lab.options import Json, Threads, with_config_options
from gradguess_lab.terminal import emit, interruptible, notes


@with_config_options
def advise(
    config: Any,
    seconds: Annotated[float, typer.Option(help="About how long it may take.")] = 30.0,
    memory_mb: Annotated[float, typer.Option(help="What a step may take; 0: anything.")] = 0.0,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Try the methods on a network for a few steps, and say which one to use. --sites is the number of pieces."""
    import torch

    import gradguess as gg
    from gradguess_lab.data import load
    from gradguess_lab.environment import check_device, use_threads
    from gradguess_lab.loss import smoothed_loss
    from gradguess_lab.train import autocast, build_model

    check_device(config.device)
    use_threads(threads)
    data = load(config.data).first(config.samples or config.batch).to(config.device, getattr(torch, config.dtype))
    batch = data.x_train[: config.batch], data.y_train[: config.batch]
    where: dict[str, Any] = {"pieces": int(config.sites)} if config.sites.isdecimal() else {"sites": config.sites}
    with interruptible(keeps=False), notes.status("trying"), autocast(config):
        model, loss_fn = build_model(config, data), smoothed_loss(config.smoothing)
        limit = memory_mb or None
        found = gg.advise(model, loss_fn, *batch, seconds=seconds, memory_mb=limit, seed=config.seed, **where)
    emit(found.to_dict(), json, [str(found)])
