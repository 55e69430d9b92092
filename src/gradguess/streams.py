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


def join(device: torch.device) -> None:
    """What follows may use what was done beside."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_second(device))


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
