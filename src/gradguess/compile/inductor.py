"""A traced graph as fused kernels, by the compiler of `torch.compile`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from gradguess.backends.policy import full_precision
from gradguess.compile.trace import NotTraceable
from gradguess.errors import reason_of

Graph = Callable[..., Sequence[Tensor]]
FEW = 2**20  # numbers that a kernel runs over: one with no more of them takes about as long as its start
# no compiler on this machine, a compiler that gives up, or an interface of PyTorch that has another form
_FAILURES = (RuntimeError, OSError, ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError)


def compiled(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> Graph:
    """The graph as fused kernels. Its casts are in it already; it is run once, so that nothing is left for later."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # the compiler lays out anew, and not all of it can be viewed
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    try:
        from torch import _inductor  # it brings sympy. `torch.compile` would trace the graph again, and check it
        from torch._inductor import config
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        shapes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # without it nothing is cached
        device = arguments[0].device
        settings = config.patch(_settings(device))
        with (
            torch.no_grad(),
            full_precision(device),
            settings,
            warnings.catch_warnings(),
            _tiles_or_not(),
            _combining(),
        ):
            warnings.simplefilter("ignore")  # the compiler's own
            fused: Graph = _inductor.compile(graph, [shapes.from_tensor(t, static_shapes=True) for t in arguments])
            fused(*arguments)
    except _FAILURES as error:
        raise NotTraceable(f"TorchInductor: {reason_of(error)}") from error
    return fused


def _settings(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":  # it takes longer to turn channels than convolutions gain
        return {"layout_optimization": False}
    return {"combo_kernels": True}


@contextmanager
def _tiles_or_not() -> Iterator[None]:
    """PyTorch 2.11 raises `CantSplit` without its arguments where a kernel must be tiled in another way."""
    from torch._inductor.codegen.simd import CantSplit  # here, since it brings sympy

    own, CantSplit.__init__.__defaults__ = CantSplit.__init__.__defaults__, (None, None)
    try:
        yield
    finally:
        CantSplit.__init__.__defaults__ = own


@contextmanager
def _combining() -> Iterator[None]:
    """Small kernels that do not wait for each other are started as one. Large ones would get each other's tiles."""
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Combined

    own = Combined.group_algorithm_for_combo_kernels

    def of_small_ones(scheduler: Any) -> list[list[Any]]:
        return [[node for node in nodes if _is_small(node)] for nodes in own(scheduler)]

    Combined.set_group_algorithm_for_combo_kernels(of_small_ones)
    try:
        yield
    finally:
        Combined.set_group_algorithm_for_combo_kernels(own)


def _is_small(node: Any) -> bool:
    """Whether a kernel runs over few numbers. Calls of libraries have no such sizes."""
    _, sizes = getattr(node, "group", (None, ()))
    return len(sizes) == 2 and math.prod(map(int, sizes)) <= FEW  # of what it makes, and of what it sums up
