"""Sites: the places where a gradient is guessed.

A *site* is one call of a module, together with one tensor that it returns. Which sites there are, what follows each of
them and which parameters lie below it is read off the autograd graph of one small pass that is cut at every site
(`find_sites.lay_out`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gradguess.layers.entry import Gate, Layer
from gradguess.layers.positions import FULL, Pattern
from gradguess.model.task import Task

Sites = str | int | Sequence[str]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, eq=False)
class Site:
    """One call of one module, and what the cut graph says about its output `s`."""

    name: str
    module: nn.Module
    call: int
    slot: int  # which tensor of the module's output
    batch_dim: int | None  # None: the output is shared by the batch (a position embedding)
    gate: Gate | None  # derivative of the one elementwise function that consumes the output
    above: tuple[str, ...]  # the sites that its output reaches without crossing another
    reaches_output: bool  # its output reaches the loss without crossing another site
    is_output: bool  # its output is the model's output, unchanged
    linear: nn.Linear | None  # set where the whole path above is elementwise -> this linear layer
    parameters: tuple[str, ...]  # parameters on the paths that end here and cross no other site
    gradient: Layer | None = None  # what is known of the layer, where all `parameters` have gradients in closed form
    pattern: Pattern = FULL  # its positions, and how feedback is shared over them
    shape: tuple[int, ...] = ()  # of one sample's output, as it was when the site was found

    @cached_property
    def top(self) -> bool:
        """Whether no site lies above. The paper draws N(0, I) at such a site."""
        return not self.above

    @cached_property
    def severed(self) -> bool:
        """Whether the loss depends on the output through an operation that has no derivative in PyTorch."""
        return self.top and not self.reaches_output

    @cached_property
    def guessed(self) -> bool:
        """Whether there is a Jacobian above from which directions can be guessed. Else they are N(0, I)."""
        return not self.top and self.batch_dim is not None

    def flat(self, s: Tensor) -> Tensor:
        """`s` as (batch, d); (1, d) where it is shared by the batch."""
        if self.batch_dim == 0 and s.dim() == 2:
            return s
        if self.batch_dim is None:
            return s.reshape(1, -1)
        return s.movedim(self.batch_dim, 0).flatten(1) if s.dim() > 1 else s.unsqueeze(1)

    def unflat(self, v: Tensor, like: Tensor) -> Tensor:
        """The inverse of `flat`, in the shape and dtype of `like`."""
        if self.batch_dim:
            shape = like.movedim(self.batch_dim, 0).shape
            return v.reshape(shape).movedim(0, self.batch_dim).to(like.dtype)
        return v.reshape(like.shape).to(like.dtype)

    def gate_at(self, s: Tensor) -> Tensor | None:
        """The gate `D` where the output is `s`: (batch, d), at least float32."""
        return None if self.gate is None else self.gate(at_least_float32(self.flat(s)))


class Members:
    """The modules and parameters of a model, listed once: a walk over the model takes as long as a small layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.size = sum(p.numel() for p in self.parameters.values())
        self.name_of = {id(p): name for name, p in self.parameters.items()}
        self.modules = list(model.modules())
        self._training = [module.training for module in self.modules]
        self._own = [vars(module) for module in self.modules]
        self._forwards = [own.get("forward") for own in self._own]  # one that was put on a module
        self._inside = [own[name] for own in self._own for name in (*_HOOKS, "_modules", "_parameters")]
        self._copies = [inside.copy() for inside in self._inside]
        self._slots = [p for own in self._own for p in own["_parameters"].values() if p is not None]
        self._free = [p.requires_grad for p in self._slots]

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now, without a walk where there are none."""
        return dict(self.model.named_buffers()) if any(module._buffers for module in self.modules) else {}

    def current(self) -> bool:
        """Whether layers, hooks, training mode, parameters and what is frozen are still the same."""
        return (
            [p.requires_grad for p in self._slots] == self._free
            and [module.training for module in self.modules] == self._training
            and [own.get("forward") for own in self._own] == self._forwards
            and same_contents(self._inside, self._copies)
        )

    @property
    def key(self) -> Hashable:
        """Equal for members that are the same objects in the same state."""
        contents = tuple((len(copy), *((key, id(value)) for key, value in copy.items())) for copy in self._copies)
        return contents, tuple(self._training), tuple(self._free), tuple(map(id, self._forwards))


def same_contents(own: Any, copy: Any) -> bool:
    """Whether containers hold the same. Objects that are identical are not looked into."""
    try:
        return bool(own == copy)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays are compared number by number
        return False


class LayoutChanged(Exception):
    """The model made other calls than when its sites were found: they must be found again."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The sites of a model in call order, and what a pass over it has to watch for."""

    sites: tuple[Site, ...]
    tail: tuple[str, ...]  # parameters between the last sites and the loss
    sliceable: bool  # the first dimension of the inputs is the batch
    stochastic: bool  # a pass draws from the global generators (dropout)
    mutates: bool  # a pass writes buffers (batch norm)
    members: Members  # what the layout depends on besides the model's code
    calls: Mapping[nn.Module, int]  # how often each watched module was called
    idle: tuple[nn.Module, ...] = ()  # modules with trainable parameters that were not called
    checkpoints: bool = False  # a vjp runs parts of the model again, so that no graph is recorded beside tangents
    sample_size: int = 0  # of the inputs, when the sites were found
    outputs: Any = None  # what the model returned on the few samples, with meta tensors: shapes without numbers

    @cached_property
    def needs_graph(self) -> bool:
        """Whether the gradient of some parameter has no closed form at a site, and needs a reverse graph."""
        return bool(self.tail) or any(site.parameters and site.gradient is None for site in self.sites)

    @cached_property
    def leaves_traces(self) -> bool:
        """Whether a pass draws random numbers or writes buffers."""
        return self.stochastic or self.mutates

    @cached_property
    def at(self) -> Mapping[tuple[nn.Module, int], tuple[Site, ...]]:
        """The sites of each call, one per tensor that it returns."""
        table: dict[tuple[nn.Module, int], tuple[Site, ...]] = {}
        for site in self.sites:
            key = (site.module, site.call)
            table[key] = (*table.get(key, ()), site)
        return table

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(dict.fromkeys(site.module for site in self.sites))

    @cached_property
    def guessed(self) -> tuple[Site, ...]:
        """The sites with a Jacobian above."""
        return tuple(site for site in self.sites if site.guessed)

    @cached_property
    def in_a_line(self) -> bool:
        """Whether every site reaches the next one alone, and the last the loss."""
        return all(site.guessed for site in self.sites[:-1]) and all(
            site.above == (above.name,) and not site.reaches_output for site, above in pairwise(self.sites)
        )

    def largest(self, task: Task) -> int:
        """The most numbers that a guessed site has of one sample, taken to grow with the sample itself."""
        found = max((math.prod(site.shape) for site in self.guessed), default=0)
        return found * task.sample_size // self.sample_size if self.sample_size else found

    @cached_property
    def _by_name(self) -> Mapping[str, Site]:
        return {site.name: site for site in self.sites}

    def __getitem__(self, name: str) -> Site:
        return self._by_name[name]


def at_least_float32(t: Tensor) -> Tensor:
    """Convert half precision to float32, which factorisations and sums over the batch need."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
