"""One student: a small network from a cut's output to the model's outputs. All of its weights are one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.backends.random import RandomState
from gradguess.errors import InputError
from gradguess.model.site import Layout
from gradguess.model.task import with_tensors

Make = Callable[[tuple[int, ...], tuple[int, ...]], nn.Module]  # (shape of a cut, shape of the outputs), per sample
LINE = 16  # numbers: a tensor that starts at a multiple of so many is read fastest


@dataclass(frozen=True)
class Blueprint:
    """A student without its weights.

    Attributes:
        module: on the meta device.
        shapes: of the parameters, in the order in which the weights hold them.
        fixed: buffers, and parameters that require no gradient. They start anew at every call.
    """

    module: nn.Module
    shapes: dict[str, torch.Size]
    fixed: dict[str, Tensor]

    @property
    def size(self) -> int:
        """The number of weights."""
        return sum(shape.numel() for shape in self.shapes.values())

    def __call__(self, weights: Tensor, s: Tensor) -> Any:
        """`S(s)`."""
        parts = weights.split([shape.numel() for shape in self.shapes.values()])
        own = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        floats = weights.dtype
        fixed = {n: v.to(floats, copy=True) if v.is_floating_point() else v.clone() for n, v in self.fixed.items()}
        with with_tensors(self.module, own | fixed):
            return self.module(s)


def build(
    make: Make, shape: tuple[int, ...], outputs: tuple[int, ...], seed: int, like: Tensor
) -> tuple[Blueprint, Tensor]:
    """What `make` returns, and its weights. PyTorch's random numbers come from `seed`, and are put back afterwards."""
    before = RandomState.everywhere()
    try:
        torch.default_generator.manual_seed(seed)
        with torch.device("cpu"):
            module = make(shape, outputs)
    finally:
        before.restore()
    if not isinstance(module, nn.Module):
        raise InputError(
            f"make: expected a function of (shape, outputs) that returns a torch.nn.Module, and for a cut of shape "
            f"{shape} it returned {type(module).__name__}."
        )
    named = [(name, p.detach()) for name, p in module.named_parameters() if p.requires_grad]
    named.sort(key=lambda item: item[1].numel() % LINE != 0)  # odd ones last, so that the others start at a line
    weights = torch.cat([like.cpu(), *(p.reshape(-1).to(like.dtype) for _, p in named)]).to(like.device)
    rest = [*module.named_buffers(), *((name, p) for name, p in module.named_parameters() if not p.requires_grad)]
    fixed = {name: value.detach().to(like.device, copy=True) for name, value in rest}
    return Blueprint(module.train().to("meta"), {name: p.shape for name, p in named}, fixed), weights


class Outputs:
    """The one tensor that the model returns, wherever it is in the model's outputs.

    Attributes:
        shape: of one sample's.
    """

    def __init__(self, layout: Layout) -> None:
        self.leaves, self.spec = tree_flatten(layout.outputs)
        places = [i for i, t in enumerate(self.leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        if len(places) != 1:
            raise InputError(
                "Students and local losses need a model that returns one floating-point tensor, for which their own "
                f"outputs can stand; found {len(places)}. Wrap the model in a module that returns the loss's tensor."
            )
        self.place = places[0]
        self.shape = tuple(self.leaves[self.place].shape[1:])

    def wrap(self, p: Tensor) -> Any:
        """What the model would have returned with `p` as its tensor."""
        return tree_unflatten([p if i == self.place else leaf for i, leaf in enumerate(self.leaves)], self.spec)
