"""A step recorded as a CUDA graph, with its random numbers and its update of the parameters.

A graph launches all its kernels at once. Without it each of some hundred small kernels would wait for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from gradguess.errors import InputError

T = TypeVar("T")


class CannotRecord(Exception):
    """A function under recording has come to something that must wait for the device: it has to run by itself."""


def require(device: torch.device, what: str) -> None:
    """Raise `InputError` unless `device` can record graphs; `what` needs it.

    >>> require(torch.device("cpu"), "CapturedStep")
    Traceback (most recent call last):
    gradguess.errors.InputError: CapturedStep needs a model on CUDA, found cpu.
    """
    if device.type != "cuda":
        raise InputError(f"{what} needs a model on CUDA, found {device}.")


def recording() -> bool:
    """Whether a graph is being recorded on the current stream. False without CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Recording(Generic[T]):
    """`function()`, recorded once and replayed: the same kernels on the same memory.

    While it is recorded nothing is computed: call `replay` for the first result. The function must not wait for the
    device, and must have run before (`on_side_stream`), so that libraries and optimisers have set themselves up. It may
    draw from the `generators`: every replay draws new numbers, the same as calls one by one would. It reads its inputs
    from tensors that the caller keeps and overwrites between replays.

    It uses the memory of the recording `beside` it, if there is one: of the two, replayed one after the other in any
    order, what one returns is valid until the other is replayed.
    """

    def __init__(
        self, function: Callable[[], T], *generators: torch.Generator, beside: Recording[T] | None = None
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        torch.clear_autocast_cache()  # what was cast before would be a constant of the graph
        try:
            with torch.cuda.graph(self._graph, pool=None if beside is None else beside._graph.pool()):
                self._result = function()
        finally:
            torch.clear_autocast_cache()  # and what is cast now has not been computed

    def replay(self) -> T:
        """Run it again; returns what the function returned, with new values in the same tensors."""
        self._graph.replay()
        return self._result


def on_side_stream(function: Callable[[], T]) -> T:
    """`function()` on a stream of its own, as a recording runs it; the current stream waits for it. Without CUDA, just
    called.

    There is one such stream for each device, since every stream takes memory for its products.
    """
    if not torch.cuda.is_available():
        return function()
    side, current = _side(torch.cuda.current_device()), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = function()
    current.wait_stream(side)
    return result


@cache
def _side(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
