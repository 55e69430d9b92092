"""The table of layers, and the mode in which dual numbers pass through them by its rules.

Where one tensor of an operation has no tangent (a weight, a constant), PyTorch puts a symbolic zero in its place and
works out the shapes of what is computed with it in Python: a quarter of a millisecond each time, many times what the
operation takes. The rules of the table know which tangent is missing. All other operations, and these ones with a
dual number in another place, go to PyTorch's own formulas.

To add a layer: write its rules, and add its line to `LAYERS` of their file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

from gradguess.errors import InputError
from gradguess.layers import attention, cross_entropy, elementwise, linear, norms, recurrence
from gradguess.layers.entry import Layer, TangentRule, is_opaque, recorded, transforms

LAYERS: tuple[Layer, ...] = (
    *linear.LAYERS,
    *norms.LAYERS,
    *elementwise.LAYERS,
    *attention.LAYERS,
    *recurrence.LAYERS,
    *cross_entropy.LAYERS,
)

_BY_MODULE = {module: layer for layer in LAYERS for module in layer.modules}
TANGENTS: dict[Any, TangentRule] = {
    function: layer.tangent for layer in LAYERS if layer.tangent is not None for function in layer.functions
}
_TRACKED = {
    function: partial(TANGENTS[function], tracked=True)
    for layer in LAYERS
    if layer.tracked
    for function in layer.functions
}
_ALWAYS = {function: TANGENTS[function] for layer in LAYERS if layer.always for function in layer.functions}
_WRITTEN_OUT = {
    function: layer.written_out for layer in LAYERS if layer.written_out is not None for function in layer.functions
}
CHANNELS_FIRST = tuple(module for layer in LAYERS if layer.channels_first for module in layer.modules)


def add(layer: Layer) -> None:
    """Teach the table the modules of a layer of your own, from then on."""
    _BY_MODULE.update(dict.fromkeys(layer.modules, layer))


def is_matrix(module: nn.Module) -> bool:
    """Whether the output of the module is `module.weight @ x`, plus a constant."""
    layer = _BY_MODULE.get(type(module))
    return layer is not None and layer.is_matrix


def closed_form(module: nn.Module) -> Layer | None:
    """The line of a module whose parameter gradient has a closed form. Exact types only: a subclass may differ."""
    layer = _BY_MODULE.get(type(module))
    return layer if layer is not None and layer.gradient is not None and layer.holds_for(module) else None


class TangentRules(TorchFunctionMode):
    """While it is open, dual numbers pass through the layers of the table by the table's rules.

    Args:
        always: by those rules alone that hold under autocast, and that passes without a tangent need as well.
        finish: whether each tangent gets the dtype of its primal and leaves the reverse graph. It must under autocast,
            where PyTorch's formulas mix dtypes, and beside a graph, which would hold all that tangents are made of.
        tracked: by those rules alone that let other derivatives pass through tangents. These then stay in the graph.
            None: no transform of `torch.func` is open.
    """

    def __init__(self, *, always: bool = False, finish: bool = False, tracked: bool | None = None) -> None:
        super().__init__()
        self.rules = _TRACKED if tracked else _ALWAYS if always else TANGENTS
        self.finish, self.tracked, self.paused = finish, tracked, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if self.tracked is not None and is_opaque():
            with sdpa_kernel(SDPBackend.MATH):  # through it pass all derivatives
                return func(*args, **kwargs)
        if func is Tensor.unflatten:  # `torch.compile` cannot follow its Python code from here
            func = torch.ops.aten.unflatten.int
        out, written_out, rule = None, _WRITTEN_OUT.get(func), self.rules.get(func)
        if written_out is not None:
            with self:
                out = written_out(func, *args, **kwargs)
        if out is None and rule is not None and args:
            out = rule(func, *args, **kwargs)
        if out is None:
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self._finished(out) if self.finish else out
        several = self.finish and isinstance(out, tuple | list) and any(isinstance(t, Tensor) for t in out)
        return tree_map_only(Tensor, self._finished, out) if several else out  # shapes stay what they are

    def _finished(self, t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        primal, tangent = fwAD.unpack_dual(t)
        if tangent is None:
            return t
        leaves = not self.tracked and recorded(tangent)
        if tangent.dtype == primal.dtype and not leaves:
            return t
        if leaves and transforms().count(TransformType.Jvp) > 1:
            raise InputError(
                "track_tangent_grad=False makes constants of tangents, but torch.func.jvp is open around "
                "torch.func.jvp, and takes their derivative. Use forward_mode() without it."
            )
        return fwAD.make_dual(primal, (tangent.detach() if leaves else tangent).to(primal.dtype))


@contextmanager
def own_kernels() -> Iterator[None]:
    """Rules that are open do nothing: another network runs inside of a pass, by the kernels that it asks for."""
    open_rules = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, TangentRules)]
    before = [rules.paused for rules in open_rules]
    try:
        for rules in open_rules:
            rules.paused = True
        yield
    finally:
        for rules, was in zip(open_rules, before, strict=True):
            rules.paused = was
