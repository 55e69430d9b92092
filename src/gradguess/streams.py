"""Work beside the main line on a GPU.

Directions at different sites, and gradients of different layers, do not wait for each other. Their kernels are small:
one after the other they leave most of the device idle. A second stream runs them next to the passes; in a CUDA graph
the streams become branches. Every piece of work beside starts after what the main line has done so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run the block on the second stream; elsewhere than on CUDA, at once."""
    if device.type != "cuda":
        yield
        return
    side = _second(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What was done beside so far, for `join`."""
    return _second(device).record_event() if device.type == "cuda" else None


def join(device: torch.device, done: torch.cuda.Event | None = None) -> None:
    """What follows may use what was done beside: all of it, or what was done at a `mark`."""
    if device.type == "cuda":
        line = torch.cuda.current_stream(device)
        line.wait_stream(_second(device)) if done is None else line.wait_event(done)


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
