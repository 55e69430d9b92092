"""The pass whose gradient is wanted: outputs, gates, the chain rule one site up, and the way to the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradguess.methods.output_error import OutputError
from gradguess.model.site import Layout, Site
from gradguess.model.task import tensors
from gradguess.step.base import Step
from gradguess.step.measure import Measurement, Records, record
from gradguess.step.pieces import pull
from gradguess.step.pull_back import pull_back

Values = dict[str, Tensor]  # site name -> (batch, d)


class Forward(ABC):
    """One pass that is kept."""

    step: Step
    outputs: Any

    @abstractmethod
    def output(self, site: Site) -> Tensor:
        """`s`, in its own shape."""

    @abstractmethod
    def gate(self, site: Site) -> Tensor | None:
        """`D`, (batch, d)."""

    @abstractmethod
    def exact_tops(self, error: OutputError) -> Values:
        """The gradient at sites with nothing above, and at those that the batch shares."""

    @abstractmethod
    def chain(self, h: Values, error: OutputError) -> Values:
        """`Σ_j W̃_ijᵀ h_j` at every site: one hop of the chain rule, exact at the output."""

    @abstractmethod
    def to_parameters(self, g: Values, batch: int) -> dict[str, Tensor]:
        """Gradients of the mean loss from the estimates at the sites."""

    def size(self, site: Site) -> int:
        return self.step.layout[site.name].flat(self.output(site)).shape[1]

    def shaped(self, site: Site, g: Values) -> Tensor:
        """An estimate in the shape of the site's output."""
        return site.unflat(g[site.name], self.output(site))


def is_closed(layout: Layout, chained: bool) -> bool:
    """Has everything that is used a closed form, so that no graph is needed?"""
    plain = all(site.guessed or site.is_output for site in layout.sites)
    linear = not chained or all(site.linear is not None for site in layout.sites if not site.top)
    return not layout.needs_graph and plain and linear


def keep_pass(step: Step, seen: Measurement | None, chained: bool) -> Forward:
    """The measured pass where closed forms suffice, else another pass with a cut graph."""
    if is_closed(step.layout, chained):
        return ClosedForward(step, seen)
    return GraphForward(step)


class ClosedForward(Forward):
    """By the records of a plain or a tangent pass, for layers in closed form."""

    def __init__(self, step: Step, seen: Measurement | None) -> None:
        self.step = step
        self.records: Records = {} if seen is None else seen.records
        self.outputs = step.passes.plain(self._observe) if seen is None else seen.outputs

    def _observe(self, site: Site, x: Any, s: Tensor) -> None:
        self.records[site.name] = record(site, x, s, site.gate_at(s))

    def output(self, site: Site) -> Tensor:
        s = self.records[site.name].s
        assert s is not None
        return s

    def gate(self, site: Site) -> Tensor | None:
        return self.records[site.name].gate

    def exact_tops(self, error: OutputError) -> Values:
        return {site.name: error.exact for site in self.step.layout.sites if site.top}

    def chain(self, h: Values, error: OutputError) -> Values:
        above = h | self.exact_tops(error)
        return {
            site.name: above[site.name] if site.top else down(site, above[site.above[0]], self.gate(site))
            for site in self.step.layout.sites
        }

    def to_parameters(self, g: Values, batch: int) -> dict[str, Tensor]:
        def cotangent(site: Site, s: Tensor | None) -> Tensor:
            value = self.shaped(site, g)
            ours = site.guessed and value.is_contiguous() and not self.step.detail  # nobody reads the value after this
            return value.div_(batch) if ours else value / batch

        return pull_back(self.step, cotangent, self.records)


def down(site: Site, value: Tensor, gate: Tensor | None) -> Tensor:
    """`W̃ᵀ v` from the linear layer above to a site."""
    assert site.linear is not None
    value = value @ site.linear.weight.detach().to(value.dtype)
    return value if gate is None else value.mul_(gate)


class GraphForward(Forward):
    """By a graph that is cut at every site."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph = step.passes.cut(twice=False)
        self.outputs = self.graph.outputs
        self._gates: dict[str, Tensor | None] = {}

    def output(self, site: Site) -> Tensor:
        return self.graph.above[site.name].detach()

    def gate(self, site: Site) -> Tensor | None:
        if site.name not in self._gates:
            self._gates[site.name] = site.gate_at(self.output(site))
        return self._gates[site.name]

    def exact_tops(self, error: OutputError) -> Values:
        return self._pull({}, error, [site for site in self.step.layout.sites if not site.guessed])

    def chain(self, h: Values, error: OutputError) -> Values:
        return self._pull(h | self.exact_tops(error), error, self.step.layout.sites)

    def _pull(self, h: Values, error: OutputError, sites: Sequence[Site]) -> Values:
        """One cut backward pass from the predictions and the output error to the sites."""
        ends = [self.graph.below[name] for name in h]
        seeds = [self.step.layout[name].unflat(value, end) for (name, value), end in zip(h.items(), ends, strict=True)]
        ends, seeds = ends + tensors(self.graph.outputs), seeds + error.parts
        grads = pull(ends, [self.graph.above[site.name] for site in sites], seeds, retain_graph=True)
        return {site.name: site.flat(grad) for site, grad in zip(sites, grads, strict=True)}

    def to_parameters(self, g: Values, batch: int) -> dict[str, Tensor]:
        layout = self.step.layout
        sites = [layout[name] for name in g]
        ends = [self.graph.below[site.name] for site in sites]
        seeds = [site.unflat(g[site.name] / batch, end) for site, end in zip(sites, ends, strict=True)]
        if layout.tail:
            ends.append(self.graph.losses)
            seeds.append(torch.full_like(self.graph.losses, 1 / batch))
        own = [layout.members.parameters[name] for name in layout.reached]
        grads = torch.autograd.grad(ends, own, seeds, allow_unused=True)
        return {name: grad for name, grad in zip(layout.reached, grads, strict=True) if grad is not None}
