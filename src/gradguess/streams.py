"""Work beside the main line on a GPU.

Directions at different sites, and gradients of different layers, do not wait for each other. Their kernels are small:
one after the other they leave most of the device idle. More streams run them next to each other; in a CUDA graph the
streams become branches. Every piece of work beside starts after what the main line has done so far. Next to a large
product nothing is gained: two kernels that each fill the device take longer together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

LINES = 6  # the main one and those beside it


class _Sides:
    """The streams beside the main one, taken in turn."""

    def __init__(self, device: torch.device) -> None:
        self.idle = [torch.cuda.Stream(device) for _ in range(LINES - 1)]
        self.used: list[torch.cuda.Stream] = []  # since the last `join`

    def next(self) -> torch.cuda.Stream:
        side = self.idle.pop(0)
        self.idle.append(side)
        if side not in self.used:
            self.used.append(side)
        return side


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run the block beside the main line; elsewhere than on CUDA, at once."""
    if device.type != "cuda":
        yield
        return
    side = _sides(device).next()
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What was done so far in this block beside, for `join`."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def join(device: torch.device, done: torch.cuda.Event | None = None) -> None:
    """What follows may use what was done beside: all of it, or what was done at a `mark`."""
    if device.type != "cuda":
        return
    line = torch.cuda.current_stream(device)
    if done is not None:
        line.wait_event(done)
        return
    sides = _sides(device)
    for side in sides.used:
        line.wait_stream(side)
    sides.used.clear()


@cache
def _sides(device: torch.device) -> _Sides:
    return _Sides(device)
