"""The students that are made where the user makes none.

    a vector (d)         one residual block of width d
    tokens (T, d)        one transformer block of width d; causal where the model has an output for every token
    maps (C, H, W)       three convolutions of min(4 C, 256) channels, the first two strided while a side exceeds 4

A student of tokens costs what one block of the model's own width does. One of maps has half as many channels, and half
again, until it costs at most a quarter of the model. On ResNet-18's cuts that is never needed: it costs between 5 % (at
4 × 4 pixels) and 20 % (at 32 × 32) of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.errors import InputError

WIDEST, LARGEST, SMALLEST, HEAD = 256, 32, 4, 32  # channels; sides of maps; features of an attention head
NARROWEST, PART = 8, 1 / 4  # channels; of the model's cost, for a student of maps


def default_student(shape: tuple[int, ...], outputs: tuple[int, ...], model: float = math.inf) -> nn.Module:
    """A student for a cut of this shape and outputs of that shape, both of one sample.

    Args:
        model: multiplications of the model for one sample.

    >>> sum(p.numel() for p in default_student((64, 32, 32), (10,)).parameters())
    1338890
    """
    kinds: dict[int, Callable[..., nn.Module]] = {
        1: _of_vectors,
        2: _of_tokens,
        3: partial(_of_maps, most=PART * model),
    }
    if len(shape) not in kinds:
        raise InputError(
            f"Students: expected a cut with 1 (a vector), 2 (tokens) or 3 dimensions (a map) for each sample, found "
            f"shape {shape}. Pass make=, a function of (shape, outputs) that returns a student for it."
        )
    return kinds[len(shape)](shape, outputs)


class _Residual(nn.Module):
    """`x + f(norm(x))`."""

    def __init__(self, width: int, f: nn.Module) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(width), f

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.f(self.norm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.heads = next(h for h in (16, 8, 4, 2, 1) if h == 1 or (width % h == 0 and width // h >= HEAD))
        self.causal = causal
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, ·)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.outer(mixed.transpose(1, 2).flatten(2))
        return out


class _Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _head(width: int, outputs: tuple[int, ...]) -> list[nn.Module]:
    shaped = {0: [nn.Flatten(0)], 1: []}.get(len(outputs), [nn.Unflatten(-1, outputs)])
    return [nn.Linear(width, math.prod(outputs)), *shaped]


def _of_vectors(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
    (d,) = shape
    block = _Residual(d, nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)))
    return nn.Sequential(block, nn.LayerNorm(d), *_head(d, outputs))


def _of_tokens(shape: tuple[int, ...], outputs: tuple[int, ...]) -> nn.Module:
    tokens, d = shape
    each = len(outputs) == 2 and outputs[0] == tokens
    attention = _Residual(d, _Attention(d, causal=each))  # else a student would see the targets in the tokens above
    block = _Residual(d, nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)))
    head = [nn.Linear(d, outputs[1])] if each else [_Mean(), *_head(d, outputs)]
    return nn.Sequential(attention, block, nn.LayerNorm(d), *head)


def _of_maps(shape: tuple[int, ...], outputs: tuple[int, ...], most: float) -> nn.Module:
    below, *sides = shape
    sides, width = [min(side, LARGEST) for side in sides], min(4 * below, WIDEST)
    strides = _strides(max(sides))
    while width > NARROWEST and _multiplications(below, width, sides, strides) > most:
        width //= 2
    layers: list[nn.Module] = [nn.AdaptiveAvgPool2d(tuple(sides))] if max(shape[1:]) > LARGEST else []
    for stride in strides:
        norm = nn.BatchNorm2d(width, track_running_stats=False)  # a student is never evaluated
        layers += [nn.Conv2d(below, width, 3, stride, padding=1, bias=False), norm, nn.ReLU()]
        below = width
    if len(outputs) == 3:  # a map of outputs
        return nn.Sequential(*layers, nn.Conv2d(width, outputs[0], 1), nn.Upsample(outputs[1:]))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *_head(4 * width, outputs))


def _strides(side: int) -> list[int]:
    """Of the three convolutions.

    >>> _strides(8), _strides(5), _strides(4)
    ([2, 1, 1], [2, 1, 1], [1, 1, 1])
    """
    first = 2 if side > SMALLEST else 1
    return [first, 2 if -(-side // first) > SMALLEST else 1, 1]


def _multiplications(below: int, width: int, sides: list[int], strides: list[int]) -> int:
    """Of the convolutions, for one sample."""
    total = 0
    for stride in strides:
        sides = [-(-side // stride) for side in sides]
        total += math.prod(sides) * 9 * below * width
        below = width
    return total
