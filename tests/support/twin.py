"""A slow twin of one step of `gg.ForwardGradient`: no caches, dense matrices, autograd on a graph cut at the sites.

Only the layout (which sites there are, what lies above them, their gates) and the numbers of the directions of the
iterative solvers are taken from the library; all that follows from them is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.model.site import Site
from references import visited


@dataclass
class World:
    """What a step may change besides the state: global random numbers and buffers."""

    model: nn.Module
    random: Tensor = field(init=False)
    buffers: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.random, self.buffers = torch.get_rng_state(), [b.clone() for b in self.model.buffers()]

    def restore(self) -> None:
        torch.set_rng_state(self.random)
        for buffer, value in zip(self.model.buffers(), self.buffers, strict=True):
            buffer.data.copy_(value)

    def same_as(self, other: World) -> bool:
        pairs = zip(self.buffers, other.buffers, strict=True)
        return torch.equal(self.random, other.random) and all(torch.equal(a, b) for a, b in pairs)


def watched(sites: Sequence[Site], visit: Callable[[Site, Tensor], Tensor]) -> AbstractContextManager[None]:
    """While open, what `visit` returns takes the place of each site's output."""
    return visited(((site, site.module, site.call, site.slot) for site in sites), visit)


class Cut:
    """One pass with a graph that is cut at every site."""

    def __init__(self, model: nn.Module, loss_fn: Any, x: Any, t: Any, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.below: dict[str, Tensor] = {}
        self.above: dict[str, Tensor] = {}
        world = World(model)

        def cut(site: Site, s: Tensor) -> Tensor:
            self.below[site.name] = s
            self.above[site.name] = s.detach().requires_grad_()
            return self.above[site.name].clone()

        with watched(sites, cut):
            self.outputs = model(x)
            self.losses = loss_fn(self.outputs, t)
        world.restore()
        self.batch = len(self.losses)

    def to_parameters(self, model: nn.Module, estimates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the mean loss: each estimate through the graph below its site, and what lies above all."""
        pairs = [(self.below[name], g.reshape(self.below[name].shape) / self.batch) for name, g in estimates.items()]
        pairs += [(self.losses, torch.full_like(self.losses, 1 / self.batch))] if self.losses.requires_grad else []
        own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(*_pair(pairs, list(own.values())), retain_graph=True, allow_unused=True)
        return {name: g for name, g in zip(own, grads, strict=True) if g is not None}


def _pair(pairs: list[tuple[Tensor, Tensor]], leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [end for end, _ in pairs], leaves, [weight for _, weight in pairs]


def true_gradients(model: nn.Module, loss_fn: Any, x: Any, t: Any, sites: Sequence[Site]) -> dict[str, Tensor]:
    """d(sum of the losses)/ds, by backpropagation through the whole model."""
    seen: dict[str, Tensor] = {}
    world = World(model)

    def note(site: Site, s: Tensor) -> Tensor:
        seen[site.name] = s if s.requires_grad else s.requires_grad_()
        return s.clone()

    with watched(sites, note):
        total = loss_fn(model(x), t).sum()
    world.restore()
    grads = torch.autograd.grad(total, list(seen.values()), allow_unused=True)
    return {n: torch.zeros_like(s) if g is None else g for (n, s), g in zip(seen.items(), grads, strict=True)}


def estimates(
    directions: Mapping[str, Tensor], c: Tensor, sites: Sequence[Site], *, coupled: bool
) -> dict[str, Tensor]:
    """`ĝ = c y`, averaged over tangents; `c` is (tangents, batch)."""
    found = {}
    for site in sites:
        y = directions[site.name]
        own = c.sum(1, keepdim=True) if coupled or site.batch_dim is None else c
        found[site.name] = (own.reshape(*own.shape, *[1] * (y.dim() - 2)) * y).mean(0)
    return found


def derivative(directions: Mapping[str, Tensor], g: Mapping[str, Tensor], sites: Sequence[Site]) -> Tensor:
    """`Σ_i <y_i, g_i>` for each tangent; summed over the batch."""
    return sum((directions[site.name] * g[site.name]).flatten(1).sum(1) for site in sites)  # type: ignore[return-value]


# --- directions, from the definition ---------------------------------------------------------------------------


def flat(site: Site, s: Tensor) -> Tensor:
    return s.reshape(1, -1) if site.batch_dim is None else s.flatten(1)


def expected_basis(site: Site, k: int, moment: Tensor | None, old: Tensor | None) -> tuple[Tensor, bool]:
    """The projector on the shared basis of a site below a linear layer; is it well defined?

    The strongest directions, or those of an old basis after three iterations.
    """
    assert site.linear is not None
    W = site.linear.weight.detach()
    W, k = W if moment is None else W * moment.sqrt(), min(k, *W.shape)
    follows = old is not None and k < len(W) and old.shape == (W.shape[1], k) and 2 * k <= min(W.shape)
    if follows and old is not None and bool((old != 0).any(0).all()):
        for _ in range(3):
            old = torch.linalg.qr(W.mT @ (W @ old))[0]
        return old @ old.mT, bool(torch.linalg.matrix_rank(W) >= k)
    _, S, Vh = torch.linalg.svd(W, full_matrices=False)
    after = S[k] if k < len(S) else S.new_zeros(())
    return Vh[:k].mT @ Vh[:k], bool(S[k - 1] - after > 1e-5 * S[0]) and bool(S[0] > 0)


def method_parts(method: Any) -> tuple[Any, gg.Feedback | None]:
    """The guess, and the feedback around it, if there is any."""
    return (method.guess, method) if isinstance(method, gg.Feedback) else (method, None)
