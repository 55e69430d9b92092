"""Directions that are uncorrelated between the positions of a site; the teacher of feedback that positions share."""

from __future__ import annotations

import torch
from torch import Tensor

from gradguess.guesses.frames import Frame
from gradguess.layers.positions import Pattern
from gradguess.model.site import Site
from gradguess.step.measure import Drawing


class _Signed(Frame):
    """The directions of a frame, with a random sign at every token, so that tokens are uncorrelated."""

    def __init__(self, frame: Frame, pattern: Pattern, d: int) -> None:
        self.frame, self.pattern, self.d = frame, pattern, d
        self.batch, self.dtype = frame.batch, frame.dtype
        self.latent = frame.latent + d // pattern.features

    def apply(self, z: Tensor) -> Tensor:
        y, pattern = self.frame.apply(z[..., : self.frame.latent]), self.pattern
        signs = torch.where(z[..., self.frame.latent :] < 0, -1.0, 1.0).to(y.dtype)  # (..., batch, positions)
        return (y.unflatten(-1, (-1, pattern.features)) * signs.unsqueeze(-1)).flatten(-2)

    def adjoint(self, v: Tensor) -> Tensor:
        raise NotImplementedError


class Scattered(Drawing):
    """Draws so that the directions at different tokens of a site are uncorrelated, for sites that share `B`.

    Not for the pixels of a convolution: there it taught worse (see the docs, "Sites with positions").
    """

    def frame(self, site: Site, s: Tensor, gate: Tensor | None) -> Frame:
        frame = super().frame(site, s, gate)
        if not site.guessed or site.pattern.kind == "full" or site.pattern.channels_first:
            return frame
        return _Signed(frame, site.pattern, site.flat(s).shape[1])
