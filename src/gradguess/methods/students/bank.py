"""The students of a step: their weights in the state, what they were called with, and how they change."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.layers.table import own_kernels
from gradguess.methods.adam import adam
from gradguess.methods.students.default import default_student
from gradguess.methods.students.student import Blueprint, Make, Outputs, build
from gradguess.model.site import Site, at_least_float32
from gradguess.passes.forward_mode import formula_kernels
from gradguess.step.base import Kept, Step

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
