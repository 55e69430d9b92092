"""What is differentiated: a model, a loss and one batch. They are checked here, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map_only

from gradguess.errors import InputError

LossFn = Callable[[Any, Any], Tensor]


def tensors(tree: Any) -> list[Tensor]:
    """The floating-point tensors in a nest of tuples, lists, dicts and model outputs."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def rows_of(tree: Any, rows: slice | Tensor, batch: int) -> Any:
    """The same tree with some of its rows. Tensors whose first dimension is not the batch stay as they are."""

    def cut(leaf: Tensor) -> Tensor:
        if leaf.dim() == 0 or len(leaf) != batch:
            return leaf
        return leaf[rows.to(leaf.device) if isinstance(rows, Tensor) else rows]

    return tree_map_only(Tensor, cut, tree)


def check_model(model: Any) -> None:
    """Refuse what is no module, or one whose parameters cannot carry a tangent."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, found {type(model).__name__}.")
    if any(is_lazy(p) for p in model.parameters()):
        raise InputError("The model has lazy layers that no batch has gone through: call model(inputs) once before.")
    if any(p.is_inference() for p in model.parameters()):
        raise InputError(
            "The model was made under torch.inference_mode(): its parameters can never be trained. Make it outside."
        )


def check_trainable(model: Any) -> None:
    """Refuse what `check_model` does, and a model of which nothing can be trained."""
    check_model(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "The model has no parameter that requires a gradient: there is nothing to train. Set requires_grad_(True) "
            "on what should be trained."
        )


def check_differentiable(losses: Tensor) -> None:
    """Refuse losses that a reverse graph was asked for, and that have none."""
    if not losses.requires_grad:
        raise InputError(
            "loss_fn: expected losses with a derivative, found losses without one. Are they detached, rounded, or "
            "computed under torch.no_grad(), in loss_fn or in the model? With derivative='finite' a guess needs none, "
            "unless sites is a number."
        )


def check_plain(model: nn.Module) -> None:
    """Refuse modules that `torch.compile` has wrapped: their calls and tangents are out of sight."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise InputError(
                f"model: expected modules as they are, found {repr(name) if name else 'the model itself'} compiled by "
                "torch.compile. Pass the model from before it was compiled, and let "
                "gg.ForwardGradient(..., compile=True) compile the whole step."
            )


def with_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """While open, these take the place of the model's own parameters and buffers, under all names of a tied one."""
    names = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    given = {id(own): tensors[name] for name, own in names if name in tensors}
    everywhere = {  # a module that has several names is named once: PyTorch would leave its tensors there for good
        f"{path}.{name}" if path else name: given[id(own)]
        for path, module in model.named_modules()
        for name, own in (*module._parameters.items(), *module._buffers.items())
        if id(own) in given
    }
    return _reparametrize_module(model, everywhere, tie_weights=False)


@dataclass(frozen=True)
class Task:
    """One batch through `model` and `loss_fn`; the loss is one number per sample."""

    model: nn.Module
    loss_fn: LossFn
    inputs: Any
    targets: Any

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            check_model(self.model)
        if not callable(self.loss_fn):
            raise InputError(
                f"loss_fn: expected a function of (outputs, targets) that returns one loss per sample, "
                f"found {type(self.loss_fn).__name__}."
            )
        if torch.is_inference_mode_enabled():
            raise InputError(
                "Tangents vanish without a word under torch.inference_mode(). Use torch.no_grad() or no "
                "context at all: gradguess records no reverse graph by itself. Or pass derivative='finite'."
            )
        leaves = tree_leaves((self.inputs, self.targets))
        if any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves):
            raise InputError(
                "inputs or targets were made under torch.inference_mode(); tangents cannot pass through such "
                "tensors. Make them outside of it, or pass a .clone() made outside of it."
            )

    def outputs(self, parameters: Mapping[str, Tensor] | None = None) -> Any:
        """Call the model: a tuple is several arguments, a dict is keyword arguments.

        `parameters`, where they are given, take the place of the model's own.
        """
        with nullcontext() if parameters is None else with_tensors(self.model, parameters):
            if isinstance(self.inputs, Mapping):
                return self.model(**self.inputs)
            return self.model(*(self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)))

    @property
    def batch(self) -> int:
        """The number of samples, read off the first input."""
        for leaf in tree_leaves(self.inputs):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return int(leaf.shape[0])
        raise InputError("inputs: expected a tensor with one row per sample; without one the batch cannot be cut.")

    @property
    def sample_size(self) -> int:
        """The numbers in one sample of the inputs."""
        leaves = [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        return sum(math.prod(leaf.shape[1:]) for leaf in leaves if len(leaf) == self.batch)

    def losses(self, outputs: Any) -> Tensor:
        """One loss per sample, shape (batch,)."""
        losses = self.loss_fn(outputs, self.targets)
        if not isinstance(losses, Tensor):
            raise InputError(f"loss_fn must return a tensor, found {type(losses).__name__}.")
        if losses.dim() == 0:
            raise InputError(
                "loss_fn must return one loss per sample, shape (batch,), found a scalar. "
                "Use nn.CrossEntropyLoss(reduction='none'), or reduce all but the first dimension: "
                "loss.flatten(1).mean(1)."
            )
        if losses.dim() > 1:
            raise InputError(
                f"loss_fn must return one loss per sample, shape (batch,), found shape {tuple(losses.shape)}. "
                "Reduce all but the batch dimension: loss.flatten(1).mean(1)."
            )
        found, batch = tensors(outputs), losses.shape[0]
        if batch == 0:
            raise InputError("The batch is empty: loss_fn returned no loss. Pass at least one sample.")
        if found and not any(batch in out.shape[:2] for out in found):
            raise InputError(
                f"The outputs have shape {tuple(found[0].shape)} but loss_fn returned {batch} losses: expected "
                "one loss per sample of the batch. If the loss is per token or per pixel, average it over each "
                "sample: loss.view(batch, -1).mean(1)."
            )
        return losses

    def run(self, *, grad: bool) -> tuple[Any, Tensor]:
        """The outputs and losses of one pass; with `grad`, with a reverse graph."""
        with torch.set_grad_enabled(grad):
            outputs = self.outputs()
            return outputs, self.losses(outputs)

    def part(self, rows: slice | Tensor, batch: int) -> Task:
        """The same task on some of its samples."""
        inputs, targets = rows_of((self.inputs, self.targets), rows, batch)
        return replace(self, inputs=inputs, targets=targets)


@contextmanager
def opened(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, finite: bool) -> Iterator[Task]:
    """A task to work on. With `finite`, which needs no tangents, the caller may be in `torch.inference_mode()`: it is
    left as long as the task is open, and tensors that were made in it are cloned.
    """
    with torch.inference_mode(False) if finite else nullcontext():
        if finite:
            own = lambda t: t.clone() if t.is_inference() else t  # noqa: E731
            inputs, targets = tree_map_only(Tensor, own, (inputs, targets))
        yield Task(model, loss_fn, inputs, targets)
