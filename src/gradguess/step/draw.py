"""Directions at the sites: the guess's frame, applied to white noise."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gradguess.backends.policy import full_precision
from gradguess.guesses.base import Guess, SiteView, StaleBasis, fits, in_dtype
from gradguess.guesses.frames import Frame, Identity
from gradguess.jacobian import CutGraph, GatedLinear, Jacobian
from gradguess.layers.elementwise import mask
from gradguess.linalg import orthonormal_columns
from gradguess.model.site import LayoutChanged, Site, at_least_float32
from gradguess.noise import SketchNoise
from gradguess.step.base import Step

SEED = 0x5EED  # searches have noise of their own: they must not shift the numbers that directions are drawn from


class Drawing:
    """Draws the directions of one guess for one step.

    Where the guess reads Jacobians that have no closed form, a cut graph of the batch is made first.
    """

    def __init__(self, step: Step, guess: Guess) -> None:
        self.step, self.guess = step, guess
        self.noise = SketchNoise(step.noise.generator.device, SEED + step.state.count)
        self.graph: CutGraph | None = None
        if guess.reads == "frame" and any(site.linear is None for site in step.layout.guessed):
            self.graph = step.passes.cut()

    def frame(self, site: Site, s: Tensor, gate: Tensor | None) -> Frame:
        """The guess's map from white noise to directions at this site; `gate` is `site.gate_at(s)`."""
        flat = at_least_float32(site.flat(s))
        if not site.guessed:
            return Identity(flat)
        kept = self.step.state.kept.get(site.name, {})
        if not fits(kept, flat.shape[1]):
            raise StaleBasis
        if site.linear is not None and site.linear.in_features != flat.shape[1]:  # inputs with another dimension
            raise LayoutChanged
        kept = in_dtype(kept, flat.dtype)
        jacobian = partial(jacobian_at, site, flat, gate, self.graph)
        return self.guess.frame(SiteView(site.name, flat, gate, site.gate is mask, kept, self.noise, jacobian))

    def directions(self, site: Site, s: Tensor, gate: Tensor | None) -> Tensor:
        """All directions of this step at a site: (tangents, *s.shape)."""
        with full_precision(s.device):
            frame = self.frame(site, s, gate)
            y = frame.apply(self._white(site, frame, s.device))
            if site.batch_dim == 0:
                return (y if s.dim() == 2 else y.reshape(-1, *s.shape)).to(s.dtype)
            return torch.stack([site.unflat(part, s) for part in y])

    def _white(self, site: Site, frame: Frame, device: torch.device) -> Tensor:
        """White noise for all tangents of a site: (tangents, batch, latent)."""
        count, noise = self.step.options.tangents, self.step.noise
        if site.batch_dim is None:
            z = noise.normal((count, 1, frame.latent), frame.dtype, device)
        else:
            z = noise.batched(count, frame.batch, frame.latent, frame.dtype, device)
        return spread(z) if count > 1 and frame.orthonormal else z


def jacobian_at(
    site: Site, flat: Tensor, gate: Tensor | None, graph: CutGraph | None, moment: Tensor | None = None
) -> Jacobian:
    """`W̃` above a site: in closed form, or through a cut graph. `moment` as in `GatedLinear`."""
    if site.linear is not None:
        return GatedLinear(site.linear.weight.detach().to(flat.dtype), gate, moment)
    assert graph is not None
    return graph.jacobian(site)


def spread(z: Tensor) -> Tensor:
    """Replace independent draws (n, batch, k) by orthonormal ones scaled by √k: never worse, same covariance.

    More than k draws come in blocks of k.
    """
    k = z.shape[-1]
    blocks = [orthonormal_columns(block.permute(1, 2, 0)).permute(2, 0, 1).contiguous() for block in z.split(k)]
    return torch.cat(blocks) * k**0.5
