"""Sites with positions: tokens of a sequence, pixels of an image. How one feedback matrix serves all of them.

A site's output is `(positions, features)` per sample. `B`, which predicts its gradient from the output error `e`, is

    full      one block per position: `h = B e`, (d, C)
    shared    one block for all positions: `h_t = B e`, (features, C); learned from the sum of the directions
    each      where the outputs have the same positions (a language model): `h_t = B e_t`, (features, C per position)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from gradguess.layers.table import CHANNELS_FIRST

Kind = Literal["full", "shared", "each"]
LARGEST = 4_000_000  # numbers in a full matrix
WORDS = 256  # larger alphabets are projected to that many numbers


@dataclass(frozen=True)
class Pattern:
    """The positions of a site, and how `B` is shared over them. `fold` and `unfold` are each other's adjoint.

    Attributes:
        kind: which part of the output error `B` sees.
        features: numbers at one position; 0 where the site has no positions.
        channels_first: the features lie before the positions.
    """

    kind: Kind = "full"
    features: int = 0
    channels_first: bool = False

    def fold(self, v: Tensor) -> Tensor:
        """(batch, d) -> (rows, width of B): what multiplies `B` from the left."""
        if self.kind == "full":
            return v
        tokens = self.tokens(v)
        return tokens.sum(1) if self.kind == "shared" else tokens.flatten(0, 1)

    def unfold(self, h: Tensor, batch: int, d: int) -> Tensor:
        """(rows, width of B) -> (batch, d)."""
        if self.kind == "full":
            return h
        positions = d // self.features
        tokens = h[:, None].expand(batch, positions, -1) if self.kind == "shared" else h.view(batch, positions, -1)
        return self.flat(tokens)

    def rows(self, e: Tensor, d: int) -> Tensor:
        """The output error, or the outputs' tangents, (batch, C), as `B` sees it: (rows, columns of B)."""
        return e.reshape(len(e) * (d // self.features), -1) if self.kind == "each" else e

    def width(self, d: int) -> int:
        return d if self.kind == "full" else self.features

    def tokens(self, v: Tensor) -> Tensor:
        """(..., d) -> (..., positions, features)."""
        if self.channels_first:
            return v.unflatten(-1, (self.features, -1)).mT
        return v.unflatten(-1, (-1, self.features))

    def flat(self, tokens: Tensor) -> Tensor:
        """The inverse of `tokens`."""
        return (tokens.mT if self.channels_first else tokens).flatten(-2)


FULL = Pattern()


def pattern_of(module: nn.Module, s: Tensor, batch_dim: int | None, outputs: list[Tensor]) -> Pattern:
    """The pattern of a site from its output `s` and the model's outputs."""
    if batch_dim is None or s.dim() < 3:
        return FULL
    moved = s.movedim(batch_dim, 0)
    channels_first = s.dim() > 3 or isinstance(module, CHANNELS_FIRST)
    features = moved.shape[1] if channels_first else moved.shape[-1]
    positions = moved[0].numel() // features
    one = outputs[0] if len(outputs) == 1 else None
    if one is not None and one.dim() == 3 and batch_dim == 0 and one.shape[:2] == (len(s), positions):
        return Pattern("each", features, channels_first)
    size = moved[0].numel() * sum(out[0].numel() if out.dim() else 1 for out in outputs)
    if size > LARGEST or not (channels_first or isinstance(module, nn.RNNBase)):
        return Pattern("shared", features, channels_first)
    return Pattern("full", features, channels_first)


def project_words(output: Tensor) -> Tensor:
    """An output (batch, ..., alphabet); a large alphabet through a fixed random projection `P`, `E[P Pᵀ] = I`."""
    if output.dim() < 2 or output.shape[-1] <= WORDS:
        return output
    return output @ _projection(output.shape[-1], output.dtype, output.device)


PROJECTIONS: list[Tensor] = []  # they are never written to: compiled steps hold them


@cache
def _projection(alphabet: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    source = torch.Generator().manual_seed(alphabet)
    P = torch.randn(alphabet, WORDS, generator=source, dtype=torch.float64) / WORDS**0.5
    PROJECTIONS.append(P.to(device, dtype))
    return PROJECTIONS[-1]
