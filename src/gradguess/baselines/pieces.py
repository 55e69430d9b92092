"""One pass in pieces, each of which is differentiated by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gradguess.methods.base import Estimate
from gradguess.model.site import Site
from gradguess.step.base import Step
from gradguess.step.pieces import Pieces

AtSite = Callable[[Site, Tensor], Tensor | None]  # (site, s) -> the gradient of each sample's loss there, if any


def run_pieces(step: Step, at_site: AtSite) -> Estimate:
    """The parameters below each cut from what `at_site` says there; those above the last cut exactly."""
    own = replace(step, into=None)  # the losses are known when the pass has ended
    cuts = step.layout.guessed
    through = [site for site in step.layout.sites if not (site.guessed or (step.detail and site.top))]
    pieces = Pieces(own, cuts, lambda piece: at_site(piece.site, piece.leaf), through=through)
    _, losses = step.passes.graph(pieces.visit, fused=True, last=not step.detail)
    pieces.settle(losses)
    losses, none = losses.detach(), losses.new_zeros(0, len(losses))
    return Estimate(losses.mean(), pieces.gradients.by_name, none, site_grads=pieces.site_grads, losses=losses)
