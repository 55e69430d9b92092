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


def pull_back(
    step: Step,
    cotangent: Cotangent,
    records: Records,
    pieces: dict[str, GradientEdge] | None = None,
    tail: Tensor | None = None,
) -> dict[str, Tensor]:
    """Parameter gradients from `cotangent(site, s)`, the estimate at each site (of the batch's mean loss).

    With `records` and closed forms no further pass is needed, nor with the graphs of `pieces` and `tail`. Otherwise the
    pass is run again, and each site's own piece of the graph is differentiated as soon as it is complete, then freed.
    What went to `step.into` is not returned.
    """
    gradients = Gradients(step)
    if records and step.layout.has_closed_gradients:
        _from_records(step, cotangent, records, gradients)
    elif step.layout.has_closed_gradients:
        step.passes.plain(lambda site, x, s: gradients.add_closed(site, x, cotangent(site, s)))
    else:
        _from_pieces(step, cotangent, gradients, pieces, tail)
    return gradients.by_name


def _from_records(step: Step, cotangent: Cotangent, records: Records, gradients: Gradients) -> None:
    with torch.no_grad():
        for site in step.layout.sites:
            record = records[site.name]
            gradients.add_closed(site, input_of(record, site), cotangent(site, record.s))


def input_of(record: Record, site: Site) -> Any:
    """The input of a layer, as the layer read it."""
    if isinstance(record.x, Tensor) and record.x._version != record.version:
        raise InputError(
            f"The input of {site.name!r} was changed in place after the layer had read it. Write x = x + y "
            "instead of x += y, or use memory='replay'."
        )
    return record.x


def _closed(site: Site, x: Any, g: Tensor) -> dict[str, Tensor]:
    """Gradients of the layer's own parameters, by name, from its input `x` and the cotangent `g` of its output."""
    assert site.gradient is not None
    dtype = next(parameter.dtype for parameter in site.module._parameters.values() if parameter is not None)
    return site.gradient(site.module, x.to(dtype) if x.is_floating_point() else x, g.to(dtype))


def _from_pieces(
    step: Step, cotangent: Cotangent, gradients: Gradients, pieces: dict[str, GradientEdge] | None, tail: Tensor | None
) -> None:
    def differentiate(site: Site, graph: Tensor | GradientEdge, s: Tensor | None) -> None:
        with torch.no_grad():
            g = cotangent(site, s)
        gradients.add_vjp(site.parameters, graph, g)

    def visit(site: Site, x: Any, s: Tensor) -> Tensor:
        differentiate(site, s, s.detach())
        return s.detach()

    if pieces and tail is not None:
        for site in step.layout.sites:
            piece = pieces.pop(site.name, None)  # freed with its graph
            if piece is not None:
                differentiate(site, piece, None)
    else:
        _, tail = step.passes.graph(visit)
    gradients.add_tail(tail)


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

    def add_own(self, site: Site, grads: dict[str, Tensor]) -> None:
        """What is known of the layer of a site."""
        for name, grad in grads.items():
            self.add(self.name_of[id(getattr(site.module, name))], grad)

    def add_closed(self, site: Site, x: Any, g: Tensor) -> None:
        """By the closed form of the layer of a site."""
        self.add_own(site, _closed(site, x, g))

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
