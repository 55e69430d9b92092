"""Sites: the places where a gradient is guessed.

A *site* is one call of a module, together with the tensor it returns. A pass over the model visits its sites in
the order of the forward pass (`Watch`). Which sites there are, what follows each of them and which parameters
lie below it is read off the autograd graph of one small pass that is cut at every site (`layout.lay_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.gates import Gate, mask
from gradguess.positions import FULL, Pattern

Sites = str | int | Sequence[str]


@dataclass(frozen=True, eq=False)
class Site:
    """One call of one module, and what the cut graph says about its output `s`."""

    name: str
    module_name: str
    module: nn.Module
    call: int
    slot: int  # which tensor of the module's output
    batch_dim: int | None  # None: the output is shared by the batch (a position embedding)
    gate: Gate | None  # derivative of the one elementwise function that consumes it
    above: tuple[str, ...]  # the sites that its output reaches without crossing another
    reaches_output: bool  # and whether it reaches the loss so
    is_output: bool  # its output is the model's output, unchanged
    linear: nn.Linear | None  # set where the whole path above is elementwise -> this linear layer
    parameters: tuple[str, ...]  # parameters on the paths that end here and cross no other site
    pattern: Pattern = FULL  # its positions, and how feedback is shared over them

    @property
    def top(self) -> bool:
        """Nothing above: the paper draws N(0, I) here."""
        return not self.above

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


class LayoutChanged(Exception):
    """The model made other calls than when it was laid out: lay it out again."""


class Members:
    """The modules and parameters of a model, listed once: walking over a model takes as long as a small layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.name_of = {id(p): name for name, p in self.parameters.items()}
        self.modules = [(module, module.training) for module in model.modules()]
        self._slots = [
            (module, name, p, p.requires_grad)
            for module, _ in self.modules
            for name, p in module._parameters.items()
            if p is not None
        ]

    def current(self) -> bool:
        """Are training mode, parameters and what is frozen still the same?"""
        return all(module.training == mode for module, mode in self.modules) and all(
            module._parameters.get(name) is p and p.requires_grad == free for module, name, p, free in self._slots
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """The sites of a model in call order, and what a pass over it has to watch for."""

    sites: tuple[Site, ...]
    closed: bool  # every parameter's gradient has a closed form at its own site
    tail: tuple[str, ...]  # parameters between the last sites and the loss
    reached: tuple[str, ...]  # parameters that the loss depends on
    sliceable: bool  # the first dimension of the inputs is the batch
    stochastic: bool  # a pass draws from the global generators (dropout)
    mutates: bool  # a pass writes buffers (batch norm)
    members: Members  # what it depends on besides the model's code
    calls: Mapping[nn.Module, int]  # how often each watched module was called
    idle: tuple[nn.Module, ...] = ()  # modules with trainable parameters that were not called

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
    def chain(self) -> bool:
        """Linear layers in a row, ReLUs between them, the last one's output the model's own; nothing random."""
        if self.stochastic or self.mutates or not self.closed or len(self.sites) < 2:
            return False
        top = self.sites[-1]
        if not top.is_output or top.gate is not None or top.batch_dim != 0:
            return False
        return all(_leads_to(site, above) for site, above in pairwise(self.sites))

    @cached_property
    def row(self) -> tuple[nn.Module, ...]:
        """The layers of a chain that is an `nn.Sequential` of them and of ReLUs: a pass may run them one by one.

        Empty where it is not.
        """
        layers = list(unrolled(self.members.model))
        if not self.chain or [layer for layer in layers if type(layer) is nn.Linear] != [s.module for s in self.sites]:
            return ()
        return tuple(layers) if all(type(layer) in (nn.Linear, nn.ReLU, nn.Identity) for layer in layers) else ()

    @cached_property
    def below_tops(self) -> tuple[str, ...]:
        """Parameters whose gradient follows from that at the top alone."""
        others = {name for site in self.sites if not site.top for name in site.parameters}.union(self.tail)
        return tuple(name for site in self.sites if site.top for name in site.parameters if name not in others)

    @cached_property
    def _by_name(self) -> Mapping[str, Site]:
        return {site.name: site for site in self.sites}

    def __getitem__(self, name: str) -> Site:
        return self._by_name[name]


def _leads_to(site: Site, above: Site) -> bool:
    plain = type(site.module) is nn.Linear and site.linear is above.module and site.above == (above.name,)
    return plain and site.gate in (None, mask)


def unrolled(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`s, in the order in which they are called."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from unrolled(child)
    else:
        yield module


Visit = Callable[[Site, Tensor, Tensor], Tensor]


class Watch:
    """While open, `visit(site, x, s)` is called at each site and what it returns takes the place of `s`."""

    def __init__(self, layout: Layout, visit: Visit) -> None:
        self.layout = layout
        self.visit = visit
        self.calls: dict[nn.Module, int] = {}
        self.visited = 0

    def __enter__(self) -> Watch:
        self.handles = [
            module.register_forward_hook(self._hook, with_kwargs=True)
            for module in (*self.layout.modules, *self.layout.idle)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        if kind is None and self.visited != len(self.layout.sites):
            raise LayoutChanged

    def _hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = self.calls.get(module, 0)
        self.calls[module] = call + 1
        sites = self.layout.at.get((module, call))
        if sites is None:
            if call < self.layout.calls.get(module, 0):
                return output
            raise LayoutChanged
        x = first_tensor(args, kwargs)
        if isinstance(output, Tensor):
            self.visited += 1
            return self.visit(sites[0], x, output)
        leaves, spec = tree_flatten(output)
        for site in sites:
            self.visited += 1
            leaves[site.slot] = self.visit(site, x, leaves[site.slot])
        return tree_unflatten(leaves, spec)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The input `x` of a layer."""
    return args[0] if args else next(iter(kwargs.values()), None)
