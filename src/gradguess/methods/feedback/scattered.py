"""Directions that are uncorrelated between the positions of a site; the teacher of feedback that positions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradguess.guesses.base import Guess, SiteView
from gradguess.guesses.frames import Frame
from gradguess.layers.positions import Pattern
from gradguess.model.site import Layout


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


@dataclass(frozen=True)
class Scattered(Guess):
    """A guess whose directions at different tokens of a site are uncorrelated, for sites that share `B`.

    Not for the pixels of a convolution: there it taught worse (see the docs, "Sites with positions").
    """

    guess: Guess
    patterns: Mapping[str, Pattern]

    @property
    def reads(self) -> Literal["never", "search", "frame"]:  # type: ignore[override]
        return self.guess.reads

    def frame(self, view: SiteView) -> Frame:
        frame, pattern = self.guess.frame(view), self.patterns[view.name]
        if pattern.kind == "full" or pattern.channels_first:
            return frame
        return _Signed(frame, pattern, view.output.shape[1])


def scattered(guess: Guess, layout: Layout) -> Guess:
    """The guess itself, or, where positions share a matrix, one with uncorrelated directions at the positions."""
    patterns = {site.name: site.pattern for site in layout.sites}
    plain = all(pattern.kind == "full" for pattern in patterns.values())
    return guess if plain else Scattered(guess, patterns)
