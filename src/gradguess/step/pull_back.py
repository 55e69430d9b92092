"""From estimates at the sites to gradients of the parameters: the local chain rule of each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradguess.errors import InputError
from gradguess.model.site import Site
from gradguess.step.base import Step
from gradguess.step.gradients import Sums
from gradguess.step.measure import Record, Records

Cotangent = Callable[[Site, Tensor | None], Tensor]  # (site, output s if it is known) -> estimate at the site


def pull_back(step: Step, cotangent: Cotangent, records: Records, tail: Tensor | None = None) -> dict[str, Tensor]:
    """Parameter gradients from `cotangent(site, s)`, the estimate at each site (of the batch's mean loss).

    A site is served by the closed form of its layer; where that has none, its own piece of the graph is differentiated.
    What both need is in `records`, where the pass that made them recorded `tail` too or no graph is needed. Otherwise
    the model is run again, and each site is served as soon as it is met. What went to `step.into` is not returned.
    """
    gradients = Gradients(step)
    if records and (tail is not None or not step.layout.needs_graph):
        with torch.no_grad():
            for site in step.layout.sites:
                record = records[site.name]
                piece, record.piece = record.piece, None  # freed with its graph
                if site.parameters:
                    gradients.add_site(site, input_of(record, site), piece, cotangent(site, record.s))
    else:

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            with torch.no_grad():
                gradients.add_site(site, x, s, cotangent(site, s.detach()))
            return s.detach()

        if step.layout.needs_graph:
            tail = step.passes.graph(visit)[1]
        else:
            step.passes.plain(visit)
    if tail is not None:
        gradients.add_tail(tail)
    return gradients.by_name


def input_of(record: Record, site: Site) -> Any:
    """The input of a layer, as the layer read it."""
    if isinstance(record.x, Tensor) and record.x._version != record.version:
        raise InputError(
            f"The input of {site.name!r} was changed in place after the layer had read it. Write x = x + y "
            "instead of x += y, or use memory='replay'."
        )
    return record.x


class Gradients:
    """Takes contributions to each parameter's gradient, under the model's own names.

    Attributes:
        by_name: their sums; nothing where they went to `step.into`.
    """

    def __init__(self, step: Step) -> None:
        self.layout, own = step.layout, Sums()
        self.parameters, self.name_of = step.layout.members.parameters, step.layout.members.name_of
        self._sums, self._share = (own, 1.0) if step.into is None else (step.into, step.share)
        self.by_name = own.by_name

    def add(self, name: str, grad: Tensor) -> None:
        grad = grad.to(self.parameters[name].dtype)
        self._sums.add(name, grad if self._share == 1 else grad * self._share)

    def add_site(self, site: Site, x: Any, s: Tensor | GradientEdge | None, g: Tensor) -> None:
        """By the closed form of the site's layer, from its input `x` and the cotangent `g` of its output; where it has
        none, by a vjp of the graph below `s`.
        """
        if site.gradient is not None:
            x = x.detach().to(g.dtype) if x.is_floating_point() else x
            for name, grad in site.gradient(site.module, x, g).items():
                self.add(self.name_of[id(getattr(site.module, name))], grad)
        elif s is not None:
            self.add_vjp(site.parameters, s, g)

    def add_vjp(self, names: tuple[str, ...], s: Tensor | GradientEdge, g: Tensor) -> None:
        """By a vjp of the graph below `s`."""
        if not names:
            return
        parameters = [self.parameters[name] for name in names]
        grads = torch.autograd.grad(s, parameters, g, retain_graph=True, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                self.add(name, grad)

    def add_tail(self, losses: Tensor) -> None:
        """Exact gradients of the parameters between the last sites and the loss."""
        if self.layout.tail:
            self.add_vjp(self.layout.tail, losses, torch.full_like(losses, 1 / len(losses)))
