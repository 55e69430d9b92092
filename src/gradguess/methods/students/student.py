"""The students of a step: small networks from a cut's output to the model's outputs, whose weights live in the state.

All weights of a student are one tensor, so that Adam and the state see one number of tensors whatever its layers are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.backends.random import RandomState
from gradguess.errors import InputError
from gradguess.layers.table import own_kernels
from gradguess.methods.students.default import default_student
from gradguess.model.site import Layout, Site, at_least_float32
from gradguess.model.task import with_tensors
from gradguess.passes.forward_mode import formula_kernels
from gradguess.step.base import Kept, Step

Make = Callable[[tuple[int, ...], tuple[int, ...]], nn.Module]  # (shape of a cut, shape of the outputs), per sample
LINE = 16  # numbers: a tensor that starts at a multiple of so many is read fastest
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam


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


Built = dict[Any, Blueprint]  # what one `make` returned, by all that it depends on


class Bank:
    """The students while a step runs. The state that they came from is not written.

    Attributes:
        entries: site name -> "weights"; "mean" and "square", Adam's moments; "count", its updates; and, between the
            parts of a batch, "gradient", the sum so far.
    """

    def __init__(self, step: Step, make: Make | None, lr: float, built: Built) -> None:
        self.step, self.lr, self.built = step, lr, built
        self.size = step.layout.members.size
        self.make = partial(default_student, model=self.size) if make is None else make
        self.entries = {site: dict(entries) for site, entries in step.state.learned.items()}
        self.outputs = Outputs(step.layout)

    def student(self, site: Site, s: Tensor, *, twice: bool = False) -> Student:
        """The student of a cut, called with its output `s`. With `twice` its gradients have a graph as well."""
        like = at_least_float32(s.detach().new_empty(0))
        kind = site.shape, self.outputs.shape
        key = kind, self.size, like.dtype, like.device
        if key not in self.built:
            self.built[key], _ = build(self.make, *kind, 0, like)
        blueprint, entries = self.built[key], self.entries.setdefault(site.name, {})
        if "weights" not in entries or len(entries["weights"]) != blueprint.size:
            seed = (self.step.noise.generator.initial_seed() + self.step.layout.sites.index(site)) % 2**63
            _, weights = build(self.make, *kind, seed, like)
            self.step.pool.agree([weights])
            entries.clear()
            entries.update(weights=weights, mean=torch.zeros_like(weights), square=torch.zeros_like(weights))
            entries["count"] = weights.new_zeros(())
        elif entries["weights"].dtype != like.dtype:  # the model has become another dtype
            entries.update({key: value.to(like.dtype) for key, value in entries.items()})
        return Student(self, site, s, blueprint, twice)

    def add(self, site: Site, grad: Tensor) -> None:
        """A part of the gradient of what a student shall minimise: the parts of a batch and the processes add up."""
        entries = self.entries[site.name]
        entries["gradient"] = entries["gradient"] + grad if "gradient" in entries else grad

    def close(self) -> Kept:
        """What is known from now on: after the last part of a batch the students have made a step."""
        for entries in self.entries.values() if self.step.last else ():
            if "gradient" in entries:
                grad, entries["count"] = self.step.pool.sum(entries.pop("gradient")), entries["count"] + 1
                old = entries["weights"], entries["mean"], entries["square"]
                found = adam(*old, entries["count"], grad, self.lr)
                entries |= zip(("weights", "mean", "square"), found, strict=True)
        return self.entries


class Student:
    """A student in a step.

    Attributes:
        s: the output of its cut, a leaf.
        weights: a leaf.
        p: its outputs.
        h: the gradient that it predicts, once that is known; with a graph where one was asked for.
        delivered: the gradient that the piece above delivers at the cut, once that is known.
    """

    h: Tensor
    delivered: Tensor

    def __init__(self, bank: Bank, site: Site, s: Tensor, blueprint: Blueprint, twice: bool) -> None:
        self.bank, self.site, self.blueprint = bank, site, blueprint
        self.s, self.weights = s.detach().requires_grad_(), bank.entries[site.name]["weights"].detach().requires_grad_()
        kernels = formula_kernels(blueprint.module, attention=twice)
        with torch.enable_grad(), own_kernels(), kernels:
            self.p: Tensor = self(self.s)
        wanted = (len(s), *bank.outputs.shape)
        found = tuple(self.p.shape) if isinstance(self.p, Tensor) else type(self.p).__name__
        if not isinstance(self.p, Tensor) or (tuple(s.shape[1:]) == site.shape and found != wanted):
            raise InputError(
                f"make: the student at {site.name!r} must return the shape of the model's outputs, {wanted}, "
                f"found {found}."
            )

    def __call__(self, s: Tensor) -> Any:
        mixed = torch.is_autocast_enabled(s.device.type)
        return self.blueprint(self.weights if mixed else self.weights.to(s.dtype), s)

    @cached_property
    def losses(self) -> Tensor:
        """The loss of its own outputs, (batch,)."""
        with torch.enable_grad():
            return self.bank.step.task.losses(self.bank.outputs.wrap(self.p))

    @property
    def share(self) -> float:
        """Of one sample in the mean over the batch."""
        return self.bank.step.share / len(self.s)


def adam(
    weights: Tensor, mean: Tensor, square: Tensor, count: Tensor, grad: Tensor, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Step number `count` (Kingma and Ba 2015): the new weights and moments. Nothing is written."""
    mean = mean.lerp(grad, 1 - BETAS[0])
    square = square.lerp(grad.square(), 1 - BETAS[1])
    root = (square / (1 - BETAS[1] ** count)).sqrt().add_(EPSILON)
    return weights - lr * (mean / (1 - BETAS[0] ** count)) / root, mean, square
