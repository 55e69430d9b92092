"""Directions that are uncorrelated between the positions of a site; the teacher of feedback that positions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradguess.guesses._base import Frame, Guess, SiteView
from gradguess.positions import Pattern


class _Signed(Frame):
    """The directions of a frame, with a random sign at every token: tokens do not speak for each other."""

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
    def reads(self) -> Literal["never", "refresh", "always"]:  # type: ignore[override]
        return self.guess.reads

    @property
    def pools(self) -> bool:  # type: ignore[override]
        return self.guess.pools

    @property
    def refresh(self) -> int:  # type: ignore[override]
        return self.guess.refresh

    def frame(self, view: SiteView) -> Frame:
        frame, pattern = self.guess.frame(view), self.patterns[view.name]
        return (
            frame if pattern.kind == "full" or pattern.channels_first else _Signed(frame, pattern, view.output.shape[1])
        )
