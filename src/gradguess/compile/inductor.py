"""A traced graph as fused kernels, by the compiler of `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from gradguess.backends.policy import full_precision
from gradguess.compile.trace import NotTraceable
from gradguess.errors import reason_of

Graph = Callable[..., Sequence[Tensor]]
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
        channels = config.patch(
            layout_optimization=device.type != "cpu"
        )  # there turning them takes longer than it gains
        with torch.no_grad(), full_precision(device), channels, warnings.catch_warnings(), _tiles_or_not():
            warnings.simplefilter("ignore")  # the compiler's own
            fused: Graph = _inductor.compile(graph, [shapes.from_tensor(t, static_shapes=True) for t in arguments])
            fused(*arguments)
    except _FAILURES as error:
        raise NotTraceable(f"TorchInductor: {reason_of(error)}") from error
    return fused


@contextmanager
def _tiles_or_not() -> Iterator[None]:
    """PyTorch 2.11 raises `CantSplit` without its arguments where a kernel must be tiled in another way."""
    from torch._inductor.codegen.simd import CantSplit  # here, since it brings sympy

    own, CantSplit.__init__.__defaults__ = CantSplit.__init__.__defaults__, (None, None)
    try:
        yield
    finally:
        CantSplit.__init__.__defaults__ = own
