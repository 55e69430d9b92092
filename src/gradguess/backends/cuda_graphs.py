"""Functions recorded as CUDA graphs, which launch all their kernels at once.

`graphed` is for pure functions whose shapes are known only when the gates are. Such a function may be hundreds of small
kernels, cannot be a part of a captured step, and each of its kernels would wait for Python. `Recording` and
`on_side_stream` are for a whole step with its random numbers and its update of the parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradguess.errors import InputError

__all__ = ["CannotRecord", "Recording", "graphed", "on_side_stream", "recording", "require"]

T = TypeVar("T")

KEPT = 16  # graphs of `graphed`, of all functions together; the one that was not used for longest goes


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
    """Is a graph being recorded on the current stream? False without CUDA."""
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


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


_seen: OrderedDict[Hashable, _Recorded | None] = OrderedDict()


def graphed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function(*tensors, **options)`, recorded the second time it meets the same shapes, replayed from then on.

    The options are constants. The results are those of the plain function, to the bit. On any device but CUDA, and
    while another graph is being recorded, the function is just called. It must not wait for the device, draw random
    numbers, or write to its arguments.
    """

    @wraps(function)
    def call(*tensors: Tensor, **options: Any) -> Tensor:
        first = tensors[0]
        if not first.is_cuda or recording():
            return function(*tensors, **options)
        with torch.cuda.device(first.device):
            shapes = tuple((t.shape, t.dtype) for t in tensors)
            key = function, first.device, shapes, tuple(options.items()), torch.get_float32_matmul_precision()
            known = key in _seen
            recorded = _seen.pop(key, None)
            if known and recorded is None:
                recorded = _record(function, tensors, options)
            _seen[key] = recorded
            while len(_seen) > KEPT:
                _seen.popitem(last=False)
            if recorded is None:
                return function(*tensors, **options)
            return _replay(recorded, tensors)

    return call


def _record(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> _Recorded:
    inputs = [t.clone() for t in tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, pool=_memory(tensors[0].device)):
        output = function(*inputs, **options)
    return _Recorded(graph, inputs, output)


def _replay(recorded: _Recorded, tensors: tuple[Tensor, ...]) -> Tensor:
    stream, done = torch.cuda.current_stream(), _done(tensors[0].device)
    stream.wait_event(done)
    for old, new in zip(recorded.inputs, tensors, strict=True):
        old.copy_(new)
    recorded.graph.replay()
    output = recorded.output.clone()
    done.record(stream)
    return output


@cache
def _memory(device: torch.device) -> Any:
    """One memory pool for all graphs of `graphed`: they run one after the other, and their outputs are copied."""
    return torch.cuda.graph_pool_handle()


@cache
def _done(device: torch.device) -> torch.cuda.Event:
    """Recorded when the last replay on this device ended: the next one may run on another stream, and waits for it."""
    return torch.cuda.Event()
