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

# Lines are numbered; 0 is the main one. Each with large products takes cuBLAS's memory once more (32 MB on an H200).
LINES = 6
DRAWS = 1  # and from there on: the directions of the top and of the sites in their order
PRODUCTS = (0, 2, 3, 4)  # the gradients of layers, in turn
LOSS = 5  # its mean


class _Sides:
    """The streams beside the main one."""

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(1, LINES)]
        self.used: list[torch.cuda.Stream] = []  # since the last `join`


@contextmanager
def beside(device: torch.device, line: int) -> Iterator[None]:
    """Run the block on a line beside the main one (they are numbered from 1, and again); without CUDA, at once."""
    if device.type != "cuda":
        yield
        return
    sides = _sides(device)
    side = sides.streams[(line - 1) % len(sides.streams)]
    if side not in sides.used:
        sides.used.append(side)
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
