"""The tangent pass: one forward pass with dual numbers that carries directions to each sample's loss.

No reverse graph is ever recorded: a stray one costs more memory than backpropagation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from gradguess.errors import ForwardModeError, InputError
from gradguess.rules import ClosedForms
from gradguess.sites import Layout, Site, Watch
from gradguess.task import Task, tensors

Direction = Callable[[Site, Any, Tensor, Tensor | None], Tensor | None]


@contextmanager
def forward_mode(model: nn.Module) -> Iterator[None]:
    """Dual numbers under `no_grad`, on kernels that have a forward-mode formula."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(formula_kernels(model))
        stack.enter_context(dual_numbers())
        if any(torch.is_autocast_enabled(device.type) for device in {p.device for p in model.parameters()}):
            stack.enter_context(_TangentsKeepDtype())
        else:
            stack.enter_context(ClosedForms())
        yield


def dual_numbers() -> AbstractContextManager[Any]:
    """A level of dual numbers, the only one."""
    if fwAD._current_level >= 0:
        raise InputError(
            "gradguess was called inside torch.autograd.forward_ad.dual_level(); PyTorch has no nested levels. "
            "Call it outside."
        )
    return fwAD.dual_level()


class _TangentsKeepDtype(TorchFunctionMode):
    """Under autocast a norm with float32 weights returns a half-precision output with a float32 tangent: cast it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            primal, tangent = fwAD.unpack_dual(out)
            if tangent is not None and tangent.dtype != primal.dtype:
                return fwAD.make_dual(primal, tangent.to(primal.dtype))
        return out


@contextmanager
def formula_kernels(model: nn.Module) -> Iterator[None]:
    """Keep away from the fused attention and recurrent kernels that cannot carry a tangent."""
    before = [(switch, is_on()) for switch, is_on, _ in _SWITCHES]
    try:
        for switch, _, wanted in _SWITCHES:
            switch(wanted)
        with _plain_recurrence() if any(isinstance(m, nn.RNNBase) for m in model.modules()) else nullcontext():
            yield
    finally:
        for switch, was_on in before:
            switch(was_on)


# what `sdpa_kernel(MATH)` does, at a tenth of its cost
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
    except (NotImplementedError, RuntimeError) as error:
        if not _is_missing_formula(error):
            raise
        where = _culprit(task)
        raise ForwardModeError(
            f"{where} has no forward-mode formula in PyTorch, so no tangent can pass through it "
            f"({str(error).splitlines()[0][:160]}). Replace it by a layer made of differentiable functions, "
            "give a custom autograd Function a jvp, or keep it below the first site with frozen parameters."
        ) from None


def _is_missing_formula(error: BaseException) -> bool:
    text = str(error)
    return any(mark in text for mark in ("forward AD", "forward mode AD", "jvp", "forward-mode"))


def _culprit(task: Task) -> str:
    """Run the pass once more, watching every module, and name the innermost one that was running."""
    running: list[str] = []
    handles = []
    for name, module in task.model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: running.append(label)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        with forward_mode(task.model):
            duals = {
                name: fwAD.make_dual(p.detach(), torch.ones_like(p))
                for name, p in task.model.named_parameters()
                if p.is_floating_point()
            }
            outputs = torch.func.functional_call(task.model, duals, *_as_call(task.inputs))
            running.append("loss_fn")
            task.losses(outputs)
    except Exception:
        return running[-1] if running else "the model"
    finally:
        for handle in handles:
            handle.remove()
    return "the model"


def _as_call(inputs: Any) -> tuple[Any, ...]:
    if isinstance(inputs, tuple):
        return (inputs,)
    if isinstance(inputs, Mapping):
        return ((), dict(inputs))
    return ((inputs,),)


@dataclass(frozen=True)
class Carried:
    """What arrives at the end of a tangent pass."""

    losses: Tensor  # (batch,)
    jvp: Tensor  # (batch,): the directional derivative c_b = Σ_i <y_i, g_i> of each sample's own loss
    outputs: Any  # of the model, without tangents
    output_tangents: list[Tensor]  # of the floating-point tensors among the outputs


def carry(task: Task, layout: Layout, direction: Direction) -> Carried:
    """One tangent pass. `direction(site, x, s, t)` gives what is added to the tangent `t` at a site, or None."""

    def inject(site: Site, x: Any, s: Tensor) -> Tensor:
        primal, tangent = fwAD.unpack_dual(s)
        if isinstance(x, Tensor):
            x = x.detach()  # not the primal view: that would keep the tangent alive
        with torch._C.DisableTorchFunction():  # no dual numbers in there
            y = direction(site, x, primal, tangent)
        if y is None:
            return s
        return fwAD.make_dual(primal, y if tangent is None else y + tangent)

    with named_failures(task), forward_mode(task.model), Watch(layout, inject):
        outputs = task.outputs()
        losses, jvp = _parts(task.losses(outputs))
        tangents = [_parts(out)[1] for out in tensors(outputs)]
        return Carried(losses, jvp, tree_map_only(Tensor, lambda t: _parts(t)[0], outputs), tangents)


def _parts(t: Tensor) -> tuple[Tensor, Tensor]:
    """Value and tangent of a dual number; the tangent is zero where none arrived."""
    primal, tangent = fwAD.unpack_dual(t)
    return primal, torch.zeros_like(primal) if tangent is None else tangent


def carry_parameters(task: Task, directions: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One tangent pass with directions on the parameters instead: (losses, derivatives), both (batch,)."""
    with named_failures(task), forward_mode(task.model):
        own = dict(task.model.named_parameters())
        duals = {name: fwAD.make_dual(own[name].detach(), y) for name, y in directions.items()}
        outputs = torch.func.functional_call(task.model, duals, *_as_call(task.inputs))
        primal, tangent = fwAD.unpack_dual(task.losses(outputs))
        if tangent is None:
            raise InputError(
                "The loss does not depend on any trainable parameter: its directional derivative is missing. "
                "Is part of the model run under torch.inference_mode() or detached?"
            )
        return primal, tangent
