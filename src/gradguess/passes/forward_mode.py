"""Forward mode: dual numbers by rules, on kernels that have a formula, and clear errors where there is neither.

No reverse graph is recorded unless it is asked for: a stray one costs more memory than backpropagation itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

from gradguess.errors import ForwardModeError, InputError
from gradguess.layers.table import TangentRules
from gradguess.model.hooks import call_hooks
from gradguess.model.task import Task


def forward_mode(*, track_tangent_grad: bool = True) -> TangentRules:
    """A context in which PyTorch's forward mode passes through attention, GRU and LSTM.

    `torch.func.jvp`, `torch.func.linearize`, `torch.func.jacfwd` and `torch.autograd.forward_ad` work inside, also in a
    function that `torch.compile` compiles. Values are the model's own. Attention holds no matrix of all pairs of
    positions, but where other transforms are open around `jvp`, and for what its rule does not cover: dropout, masks
    with tangents. A module outside of the context is not changed.

    Args:
        track_tangent_grad: whether gradients pass through tangents as well. Without it tangents are constants, as in
            `loss(u, tangent.detach())`, and no memory is kept for them.

    Example:
        >>> import torch, gradguess as gg
        >>> attention = torch.nn.MultiheadAttention(8, 2)
        >>> x, t = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
        >>> with gg.forward_mode(track_tangent_grad=False):
        ...     u, du = torch.func.jvp(lambda x: attention(x, x, x, need_weights=False)[0], (x,), (t,))
        >>> (u - du).square().mean().backward()
        >>> u.requires_grad, du.requires_grad
        (True, False)
    """
    return TangentRules(finish=True, tracked=track_tangent_grad)


@contextmanager
def dual_pass(model: nn.Module, *, graph: bool = False) -> Iterator[None]:
    """Dual numbers on kernels that have a forward-mode formula; with `graph`, a reverse graph of the values alone."""
    with torch.set_grad_enabled(graph), formula_kernels(model), dual_numbers(), tangent_rules(model, graph=graph):
        yield


def tangent_rules(model: nn.Module, *, graph: bool = False) -> TangentRules:
    """The rules of the table of layers for dual numbers."""
    under_autocast = any(torch.is_autocast_enabled(device.type) for device in {p.device for p in model.parameters()})
    return TangentRules(always=under_autocast, finish=graph or under_autocast)


def dual_numbers() -> AbstractContextManager[Any]:
    """A level of dual numbers, the only one."""
    if fwAD._current_level >= 0:
        raise InputError(
            "gradguess was called inside torch.autograd.forward_ad.dual_level(); PyTorch has no nested levels. "
            "Call it outside."
        )
    _load_formulas()
    return fwAD.dual_level()


def forget_tangents() -> None:
    """Close the level and open it again. While one is open, a reverse graph holds the tangents of what it saves."""
    fwAD.exit_dual_level()
    fwAD.enter_dual_level()


@cache
def _load_formulas() -> None:
    """PyTorch loads its formulas with the first dual number, and warns of a function that it uses for that itself."""
    with warnings.catch_warnings(), fwAD.dual_level():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
        fwAD.make_dual(torch.zeros(1), torch.zeros(1))


def quiet_jvp(function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """`torch.func.jvp`, without the warning of PyTorch's own."""
    _load_formulas()
    found: Any = torch.func.jvp(function, primals, tangents)
    return found


def unpack_dual(t: Tensor) -> tuple[Tensor, Tensor]:
    """Value and tangent of a dual number; the tangent is zero where none arrived."""
    primal, tangent = fwAD.unpack_dual(t)
    return primal, torch.zeros_like(primal) if tangent is None else tangent


@contextmanager
def formula_kernels(model: nn.Module, *, attention: bool = True) -> Iterator[None]:
    """Switch off the fused recurrent kernels, and those of `attention`: they cannot carry a tangent."""
    switches = _SWITCHES if attention else _SWITCHES[-1:]
    before = [(switch, is_on()) for switch, is_on, _ in switches]
    try:
        for switch, _, wanted in switches:
            switch(wanted)
        with _plain_recurrence() if any(isinstance(m, nn.RNNBase) for m in model.modules()) else nullcontext():
            yield
    finally:
        for switch, was_on in before:
            switch(was_on)


# The same as `sdpa_kernel(MATH)`, at a tenth of its cost.
_SWITCHES: list[tuple[Callable[[bool], Any], Callable[[], bool], bool]] = [
    (torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled, True),
    (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled, False),
    (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled, False),
    (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled, False),
    (torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled, False),
]


@contextmanager
def _plain_recurrence() -> Iterator[None]:
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def named_failures(task: Task) -> Iterator[None]:
    """Turn PyTorch's complaint about a missing formula into an error that names the module."""
    try:
        yield
    except ForwardModeError:
        raise
    except (NotImplementedError, RuntimeError) as error:
        if not is_missing_formula(error):
            raise
        where = _culprit(task)
        raise ForwardModeError(
            f"{where} has no forward-mode formula in PyTorch, so no tangent can pass through it "
            f"({str(error).splitlines()[0][:160]}). Replace it by a layer made of differentiable functions, "
            "give a custom autograd Function a jvp, or keep it below the first site with frozen parameters. Or pass "
            "derivative='finite', which runs the model twice more instead and needs no tangents."
        ) from None


def lost_tangent(where: str) -> ForwardModeError:
    """An operation without a formula did not complain: it gave a tensor without a tangent."""
    return ForwardModeError(
        f"No tangent arrived at {where}, which depends on a site with a direction. An operation between them, such as "
        "a custom kernel or a quantised layer, has no forward-mode formula in PyTorch and does not say so. Pass "
        "derivative='finite', which runs the model twice more instead and needs no tangents."
    )


def is_missing_formula(error: BaseException) -> bool:
    """Whether PyTorch complains that an operation cannot carry a tangent."""
    text = str(error)
    return any(mark in text for mark in ("forward AD", "forward mode AD", "jvp", "forward-mode"))


def _culprit(task: Task) -> str:
    """Run the pass once more with tangents on all parameters, and name the innermost module that fails."""
    names = {module: name for name, module in task.model.named_modules()}
    running: list[str] = []

    def leave(module: nn.Module, call: int, x: Any, output: Any) -> Any:
        running.pop()
        return output

    def enter(module: nn.Module, args: Any) -> None:
        running.append(f"{names[module] or 'the model'} ({type(module).__name__})")

    try:
        with call_hooks(names, leave, before=enter), dual_pass(task.model):
            duals = {
                name: fwAD.make_dual(p.detach(), torch.ones_like(p))
                for name, p in task.model.named_parameters()
                if p.is_floating_point()
            }
            outputs = task.outputs(duals)
            running.append("loss_fn")
            task.losses(outputs)
    except Exception as error:  # memory that runs out here names no module, and hides no error
        return running[-1] if running and is_missing_formula(error) else "the model"
    return "the model"
