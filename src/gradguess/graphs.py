"""Pure functions on a GPU, launched as one.

What a method does for every sample may be hundreds of small kernels whose shapes are known only when the gates are: no
part of a captured step, and each of them waits for Python. A function that nothing waits for inside is recorded as a
CUDA graph the second time it meets the same shapes, and replayed from then on: the same kernels, the same numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

KEPT = 16  # graphs, of all functions together; the one that was not used for longest goes


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


_seen: OrderedDict[Hashable, _Recorded | None] = OrderedDict()


def graphed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Record `function(*tensors, **options)`; the options are constants. Elsewhere than on CUDA it is just called.

    The function must not wait for the device, draw random numbers, or write to its arguments.
    """

    @wraps(function)
    def call(*tensors: Tensor, **options: Any) -> Tensor:
        first = tensors[0]
        if not first.is_cuda or torch.cuda.is_current_stream_capturing():
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
    line, done = torch.cuda.current_stream(), _done(tensors[0].device)
    line.wait_event(done)
    for old, new in zip(recorded.inputs, tensors, strict=True):
        old.copy_(new)
    recorded.graph.replay()
    output = recorded.output.clone()
    done.record(line)
    return output


@cache
def _memory(device: torch.device) -> Any:
    """One pool for all graphs: they run one after the other, and what they give is copied."""
    return torch.cuda.graph_pool_handle()


@cache
def _done(device: torch.device) -> torch.cuda.Event:
    """When the last of them was."""
    return torch.cuda.Event()
