"""Steps as graphs: what must know that a trace is being made, and how a graph is compiled.

While a step is traced, everything is a plain operation of PyTorch: no kernel of ours, no NumPy, and no branch that
looks at numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradguess.backends.policy import full_precision
from gradguess.errors import GradguessError

__all__ = ["Graph", "NotTraceable", "compiled", "draws", "trace", "traced_autograd", "tracing"]

Graph = Callable[..., Sequence[Tensor]]
_LOOKED = "it looks at numbers (`if x.sum() > 0`, `.item()`, `.tolist()`), and may go another way next time"
_LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default)


class NotTraceable(GradguessError):
    """The step cannot be a graph. The message says why."""


class _Made(TorchDispatchMode):
    """While open, remembers every tensor that an operation makes, by its place in memory."""

    now: _Made | None = None

    def __init__(self) -> None:
        super().__init__()
        self.by_place: dict[Any, Tensor] = {}  # it holds them, so that no place is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            raise NotTraceable(_LOOKED)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(t):
                self.by_place[_place(t)] = t
        return out

    def __enter__(self) -> _Made:
        _Made.now = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _Made.now = None
        super().__exit__(*error)


class _NoLooking(TorchFunctionMode):
    """Refuses what reads numbers past the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.__array__, Tensor.numpy):
            raise NotTraceable(_LOOKED)
        return func(*args, **(kwargs or {}))


def _place(t: Tensor) -> Any:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def tracing() -> bool:
    """Is a trace being made?"""
    return _Made.now is not None


def traced_autograd() -> AbstractContextManager[Any]:
    """Where a reverse graph is recorded inside a trace: what it saves stays what the trace knows.

    A node that saves its own output saves a copy, which a trace would take for a constant.
    """
    made = _Made.now
    if made is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: made.by_place.get(_place(t), t), lambda t: t)


def trace(function: Callable[..., list[Tensor]], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of `function` on these tensors. What is not among the arguments is a constant of the graph."""
    try:
        graph = make_fx(_watched(function))(*arguments)
    except NotTraceable:
        raise
    except Exception as error:  # whatever a model does that cannot be traced
        first = (str(error).splitlines() or [""])[0][:200]
        raise NotTraceable(f"{type(error).__name__}: {first}") from error
    for node in reversed(list(graph.graph.nodes)):
        if node.target is torch.ops.aten.is_same_size.default and not node.users:  # a check, which has done its work
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    baked = [node for node in graph.graph.nodes if node.op == "get_attr" and getattr(graph, node.target).numel() > 1]
    if baked:
        raise NotTraceable(
            f"{len(baked)} of its tensors are not parameters, buffers, inputs or targets (does the loss have its own?)"
        )
    drawn = [node for node in graph.graph.nodes if draws(node.target, node.args, node.kwargs)]
    if drawn:
        raise NotTraceable(f"it draws random numbers by {drawn[0].target} that cannot be drawn beforehand")
    graph.recompile()
    return graph


def _watched(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def run(*arguments: Tensor) -> list[Tensor]:
        with _NoLooking(), _Made():
            return function(*arguments)

    return run


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Does an operation with these arguments draw random numbers? Attention does so for dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


def compiled(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> Graph:
    """The graph as fused kernels. It is run once, since that is when it is compiled. Its casts are in it already."""
    fused: Graph = torch.compile(graph, fullgraph=True, dynamic=False)
    try:
        with torch.no_grad(), full_precision(arguments[0].device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            fused(*arguments)
    except Exception as error:  # no compiler on this machine, for instance
        raise NotTraceable(f"torch.compile: {str(error).splitlines()[0][:200]}") from error
    return fused
