"""The operations of a function as a graph that depends on its arguments alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradguess.backends.policy import full_precision
from gradguess.compile.norms import without_products
from gradguess.errors import GradguessError, reason_of

aten = torch.ops.aten
_LOOKED = "it looks at numbers (`if x.sum() > 0`, `.item()`, `.tolist()`), and may go another way next time"
_SHAPED = "the shape of a tensor depends on numbers (`x[x > 0]`, `nonzero`, `unique`), and may be another next time"
_FRESH = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # of `torch.tensor(2.0)`: they return their argument
_LOOKS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)
_BATCH_NORMS = tuple(getattr(aten, f"{library}_batch_norm").default for library in ("native", "cudnn", "miopen"))


class NotTraceable(GradguessError):
    """The step cannot be a graph. The message says why."""


def trace(
    function: Callable[..., list[Tensor]],
    arguments: Sequence[Tensor],
    constants: Collection[Tensor] = (),
    drawn: Sequence[Tensor] = (),
) -> fx.GraphModule:
    """The operations of `function` on these tensors, each value computed once.

    Args:
        function: returns new tensors.
        arguments: what it depends on. Any other tensor is an error, but for numbers that it makes itself.
        constants: tensors that are never written to: the graph may hold them.
        drawn: tensors that the function puts here as it is traced: further arguments of the graph.
    """
    arguments = [t.clone() if any(t is other for other in arguments[:i]) else t for i, t in enumerate(arguments)]

    def watched(*given: Tensor) -> list[Tensor]:
        with _OneWay(), _Made() as made, torch.autograd.graph.saved_tensors_hooks(made.tracked, lambda t: t):
            return function(*given)

    try:
        return _merged(_checked(_graph_of(watched, arguments), [*constants, *drawn]), arguments, drawn)
    except NotTraceable:
        raise
    except Exception as error:  # a model may do anything; what it does untraced as well, the caller will see
        raise NotTraceable(reason_of(error)) from error


class _Made(TorchDispatchMode):
    """While open, remembers every tensor that an operation makes, and which of them are the same in every step.

    A branch may look at numbers that are the same in every step, such as positions, and not at others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_place = WeakValueDictionary[Any, Tensor]()  # a trace needs no more memory than what it follows
        self.steady = WeakSet[torch.UntypedStorage]()  # made here, and not from arguments or other tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _plain((args, kwargs))
        wrapped = any(map(is_wrapped, tree_leaves((args, kwargs))))
        steady = not (wrapped or draws(func, args, kwargs)) and (func in _FRESH or all(map(self._is_steady, given)))
        if not steady and _has_shape_of_numbers(func, args):
            raise NotTraceable(_SHAPED)
        if func in _LOOKS:
            if not steady:
                raise NotTraceable(_LOOKED)
            with disable_proxy_modes_tracing():
                return func(*args, **kwargs)
        out = _batch_norm(func, *args) if func in _BATCH_NORMS else func(*args, **kwargs)
        made = _plain(out)
        self.by_place.update({_place(t): t for t in made if t.data_ptr()})  # meta tensors lie nowhere
        if steady:
            self.steady.update(t.untyped_storage() for t in made if not t._is_zerotensor())
        elif func._schema.is_mutable:
            self.steady.difference_update(t.untyped_storage() for t in given if not t._is_zerotensor())
        return out

    def tracked(self, t: Tensor) -> Tensor:
        """What a reverse graph saves in place of `t`: a copy of a node's own output would be a constant of the trace.

        It is detached: a node must not hold what holds the node.
        """
        return self.by_place.get(_place(t), t).detach()

    def _is_steady(self, t: Tensor) -> bool:
        return t._is_zerotensor() or t.untyped_storage() in self.steady

    def __exit__(self, *error: Any) -> None:
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


def _plain(nest: Any) -> list[Tensor]:
    """The tensors of a nest that no transform of `torch.func` holds."""
    return [t for t in tree_leaves(nest) if isinstance(t, Tensor) and not is_wrapped(t)]


def is_wrapped(t: Any) -> bool:
    """Whether a transform of `torch.func` holds the tensor."""
    return isinstance(t, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t)


def _has_shape_of_numbers(func: Any, args: Any) -> bool:
    """Whether the shape of what an operation makes depends on numbers."""
    if func is aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _place(t: Tensor) -> Any:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation with these arguments draws random numbers. Attention does so for dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


def _graph_of(function: Callable[..., Any], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Every operation, with the shapes of what it makes. Without the context each of them would note a stack."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # here, since it brings sympy

    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
        return make_fx(function)(*arguments)


def _checked(graph: fx.GraphModule, constants: Collection[Tensor]) -> fx.GraphModule:
    """The graph without what is not needed, if it depends on its arguments and on constants alone."""
    for node in reversed(list(graph.graph.nodes)):
        if node.target is aten.is_same_size.default and not node.users:  # a check, which has done its work
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    places = {_place(t) for t in constants}

    def may_be_held(node: fx.Node) -> bool:
        value = getattr(graph, str(node.target))
        if not isinstance(value, Tensor):
            return False
        made = value.numel() == 1 and all(user.target in _FRESH for user in node.users)  # a number, by the step itself
        return made or _place(value) in places

    held = [node for node in graph.graph.nodes if node.op == "get_attr" and not may_be_held(node)]
    if held:
        raise NotTraceable(
            f"{len(held)} of its tensors are not parameters, buffers, inputs or targets (does the loss have its own?)"
        )
    drawn = [node for node in graph.graph.nodes if draws(node.target, node.args, node.kwargs)]
    if drawn:
        raise NotTraceable(f"it draws random numbers by {drawn[0].target} that cannot be drawn beforehand")
    graph.recompile()
    return graph


def _merged(graph: fx.GraphModule, arguments: Sequence[Tensor], drawn: Sequence[Tensor]) -> fx.GraphModule:
    """The graph with every value computed once: a second pass over the model costs only what differs from the first.

    Values can be told to be equal where nothing is written in place.
    """
    from torch._functorch.compile_utils import fx_graph_cse  # here, since it brings sympy

    held = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    number = {_place(t): i for i, t in enumerate(drawn, len(arguments))}
    lifted = {name: number[_place(getattr(graph, name))] for name in held if _place(getattr(graph, name)) in number}

    def run(*given: Tensor) -> Any:
        for name, i in lifted.items():
            setattr(graph, name, given[i])
        return graph(*given[: len(arguments)])

    with torch.no_grad(), full_precision(arguments[0].device):  # its casts are in it already
        pure = _graph_of(torch.func.functionalize(run, remove="mutations"), [*arguments, *drawn])
    for node in pure.graph.nodes:
        if (same := _same_numbers(node)) is not None:
            node.replace_all_uses_with(same)
        if node.target is aten._scaled_dot_product_efficient_attention.default:
            node.update_arg(4, True)  # one operation, whether a graph asked for the sum of weights as well or not
    pure.graph.eliminate_dead_code()
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
