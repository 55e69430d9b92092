"""One pass in pieces: each is differentiated as soon as it is complete, and freed before the next one runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradguess.methods.base import Estimate
from gradguess.methods.output_error import pull
from gradguess.model.site import Site
from gradguess.step.base import Step
from gradguess.step.pull_back import Gradients

AtSite = Callable[[Site, Tensor], Tensor | None]  # (site, s) -> the gradient of each sample's loss there, if any


def run_pieces(step: Step, at_site: AtSite) -> Estimate:
    """The parameters below each cut from what `at_site` says there; those above the last cut exactly."""
    own = replace(step, into=None)  # the losses are known when the pass has ended
    gradients, names = Gradients(own), step.layout.reached
    found: dict[str, Tensor] = {}
    tops: dict[str, Tensor] = {}

    def visit(site: Site, x: Any, s: Tensor) -> Tensor:
        if not site.guessed:
            if not step.detail:
                return s
            tops[site.name] = s.clone()
            return tops[site.name].clone()  # what follows may change its input in place
        h = at_site(site, s.detach())
        if h is not None and s.requires_grad:
            gradients.add_vjp(names, s, h.to(s.dtype) / len(site.flat(s)))
        if step.detail:
            found[site.name] = torch.zeros_like(s) if h is None else h
        return s.detach()

    _, losses = step.passes.graph(visit, fused=True, last=not step.detail)
    if tops:
        found |= zip(tops, pull([losses], list(tops.values()), retain_graph=True), strict=True)
    gradients.add_vjp(names, losses, torch.full_like(losses, 1 / len(losses)))
    losses = losses.detach()
    result = Estimate(losses.mean(), gradients.by_name, losses.new_zeros(0, len(losses)), losses=losses)
    result.site_grads = found
    return result
