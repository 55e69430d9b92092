"""Steps as graphs: what must know that a trace is being made, and how one is made.

While a step is traced, everything is a plain operation of PyTorch: no kernel of ours, no NumPy, and no branch that
looks at numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradguess.backends.norm_gradients import without_products
from gradguess.backends.policy import full_precision
from gradguess.errors import GradguessError

aten = torch.ops.aten
Graph = Callable[..., Sequence[Tensor]]
_LOOKED = "it looks at numbers (`if x.sum() > 0`, `.item()`, `.tolist()`), and may go another way next time"
_SHAPED = "the shape of a tensor depends on numbers (`x[x > 0]`, `nonzero`, `unique`), and may be another next time"
_FRESH = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # of `torch.tensor(2.0)`
_BATCH_NORMS = tuple(getattr(aten, f"{library}_batch_norm").default for library in ("native", "cudnn", "miopen"))
_FIXED: dict[int, Tensor] = {}  # where they lie
_LOOKS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)


class NotTraceable(GradguessError):
    """The step cannot be a graph. The message says why."""


class _Made(TorchDispatchMode):
    """While open, remembers every tensor that an operation makes, by its place in memory.

    A branch may look at numbers that are the same in every step, such as positions, and not at others.
    """

    now: _Made | None = None

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.by_place = WeakValueDictionary[Any, Tensor]()  # a trace needs no more memory than what it follows
        self.varying = {_memory(t) for t in arguments}  # what depends on the arguments
        self.steady = {_memory(torch.empty(0))}  # what was made in the trace and does not; a user may write to the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        varies = draws(func, args, kwargs or {}) or (func not in _FRESH and not all(map(self._is_steady, given)))
        if varies and _has_shape_of_numbers(func, args):
            raise NotTraceable(_SHAPED)
        if func in _LOOKS:
            if varies:
                raise NotTraceable(_LOOKED)
            with disable_proxy_modes_tracing():
                return func(*args, **(kwargs or {}))
        out = _batch_norm(func, *args) if func in _BATCH_NORMS else func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not is_wrapped(t)]
        self.by_place.update({_place(t): t for t in made if t.data_ptr()})  # meta tensors lie nowhere
        fresh = {_memory(t) for t in made}
        if func not in _FRESH:  # those return what they were given
            fresh -= {_memory(t) for t in given if not is_wrapped(t)}
        self.varying -= fresh  # what lay there before is gone
        self.steady -= fresh
        if varies:
            written = given if func._schema.is_mutable else []
            self.varying |= {_memory(t) for t in (*made, *written) if not is_wrapped(t)}
        else:
            self.steady |= {_memory(t) for t in made}
        return out

    def known(self, t: Tensor) -> Tensor:
        """What a reverse graph saves in place of `t`: a copy of a node's own output would be a constant of the trace.

        It is detached: a node must not hold what holds the node.
        """
        return self.by_place.get(_place(t), t).detach()

    def _is_steady(self, t: Tensor) -> bool:
        return not is_wrapped(t) and _memory(t) in self.steady and _memory(t) not in self.varying

    def __enter__(self) -> _Made:
        _Made.now = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _Made.now = None
        self.by_place.clear()  # reverse graphs among them hold this object, and would keep all of them
        super().__exit__(*error)


class _OneWay(TorchFunctionMode):
    """Refuses what reads numbers past the dispatcher, and computes products in one way.

    PyTorch takes another way for a linear layer that asks for gradients, so that two passes would have less in common.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.__array__, Tensor.numpy):
            raise NotTraceable(_LOOKED)
        if func is F.linear and args and args[0].dim() > 2:
            x, *rest = args
            return func(x.reshape(-1, x.shape[-1]), *rest, **(kwargs or {})).unflatten(0, x.shape[:-1])
        return func(*args, **(kwargs or {}))


def _batch_norm(
    func: Any, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch norm that writes its running statistics by operations of their own: its kernels write them unsaid."""
    if not training or mean is None:
        return func(x, weight, bias, mean, var, training, momentum, eps)
    out = func(x, weight, bias, None, None, training, momentum, eps)
    of_batch, inverse, count = out[1], out[2], x.numel() / x.shape[1]
    mean.mul_(1 - momentum).add_(of_batch, alpha=momentum)
    var.mul_(1 - momentum).add_(inverse.square().reciprocal() - eps, alpha=momentum * count / (count - 1))
    return out


def _has_shape_of_numbers(func: Any, args: Any) -> bool:
    """Does the shape of what it makes depend on numbers?"""
    if func is aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def is_wrapped(t: Tensor) -> bool:
    """Does a transform of `torch.func` hold the tensor?"""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def _memory(t: Tensor) -> int:
    """Where its numbers lie; tangents that are zero have none."""
    return -1 if t._is_zerotensor() else t.untyped_storage().data_ptr()


def _place(t: Tensor) -> Any:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def fixed(make: Callable[[], Tensor]) -> Tensor:
    """A tensor that is made once, kept for good and never written to: a graph may hold it."""
    with disable_proxy_modes_tracing():
        t = make()
    _FIXED[_memory(t)] = t
    return t


class Form:
    """What a nest of tensors is besides its tensors: how it is built, and what else is in it. A graph holds it fast."""

    def __init__(self, nest: Any) -> None:
        leaves, self._spec = tree_flatten(nest)
        self._leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The same nest of other tensors."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if leaf is Tensor else leaf for leaf in self._leaves], self._spec)


def tensors_of(nest: Any) -> list[Tensor]:
    """The tensors of a nest, as a graph takes them."""
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def tracing() -> bool:
    """Is a trace being made?"""
    return _Made.now is not None


def trace(function: Callable[..., list[Tensor]], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of `function` on these tensors. What is not among the arguments is a constant of the graph."""
    arguments = [t.clone() if any(t is other for other in arguments[:i]) else t for i, t in enumerate(arguments)]

    def watched(*given: Tensor) -> list[Tensor]:
        with _OneWay(), _Made(given) as made, torch.autograd.graph.saved_tensors_hooks(made.known, lambda t: t):
            return function(*given)

    try:
        return _merged(_checked(_graph_of(watched, arguments)), arguments)
    except NotTraceable:
        raise
    except Exception as error:  # a model may do anything; what it does untraced as well, the caller will see
        raise NotTraceable(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """The type of an error of others and what it says, in one line. That memory is out is no reason: it is raised."""
    cause = getattr(error, "inner_exception", error)  # the compiler wraps what it meets
    text = str(cause)
    if isinstance(cause, torch.OutOfMemoryError | MemoryError) or "out of memory" in text or "allocate memory" in text:
        raise cause
    return ": ".join([type(cause).__name__, *text.splitlines()[:1]])[:200]


def _checked(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph without what is not needed, if it depends on its arguments alone."""
    for node in reversed(list(graph.graph.nodes)):
        if node.target is aten.is_same_size.default and not node.users:  # a check, which has done its work
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    baked = [node for node in graph.graph.nodes if node.op == "get_attr" and not _may_be_held(graph, node)]
    if baked:
        raise NotTraceable(
            f"{len(baked)} of its tensors are not parameters, buffers, inputs or targets (does the loss have its own?)"
        )
    drawn = [node for node in graph.graph.nodes if draws(node.target, node.args, node.kwargs)]
    if drawn:
        raise NotTraceable(f"it draws random numbers by {drawn[0].target} that cannot be drawn beforehand")
    graph.recompile()
    return graph


def _graph_of(function: Callable[..., Any], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Every operation, with the shapes of what it makes. Without the context each of them would note a stack."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # here, since it brings sympy

    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
        return make_fx(function)(*arguments)


def _may_be_held(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Is a constant of the graph one number, which the step itself makes? Or is it fixed?"""
    value = getattr(graph, str(node.target))
    if not isinstance(value, Tensor):
        return False
    return _memory(value) in _FIXED or (value.numel() == 1 and all(user.target in _FRESH for user in node.users))


def _merged(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The graph with every value computed once: a second pass over the model costs only what differs from the first.

    Values can be told to be equal where nothing is written in place.
    """
    with torch.no_grad(), full_precision(arguments[0].device):  # its casts are in it already
        pure = _graph_of(torch.func.functionalize(graph, remove="mutations"), arguments)
    for node in pure.graph.nodes:
        if (same := _same_numbers(node)) is not None:
            node.replace_all_uses_with(same)
        if node.target is aten._scaled_dot_product_efficient_attention.default:
            node.update_arg(4, True)  # one operation, whether a graph asked for the sum of weights as well or not
    pure.graph.eliminate_dead_code()
    from torch._functorch.compile_utils import fx_graph_cse  # here, since it brings sympy

    merged = fx.GraphModule(pure, fx_graph_cse(pure.graph))
    merged.graph.eliminate_dead_code()
    return without_products(merged)


def _same_numbers(node: fx.Node) -> Any:
    """What `node` is a copy of, if that has its strides and is no argument: results do not share memory with those."""
    if node.target in (aten.detach.default, aten.alias.default):
        return node.args[0]
    if node.target not in (aten.clone.default, aten.copy.default):
        return None
    source: Any = node.args[-1]
    ours, its = node.meta["tensor_meta"], source.meta.get("tensor_meta")
    alike = its is not None and (ours.shape, ours.stride, ours.dtype) == (its.shape, its.stride, its.dtype)
    return source if alike and source.op == "call_function" else None


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Does an operation with these arguments draw random numbers? Attention does so for dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))
