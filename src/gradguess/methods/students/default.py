"""The students that are made where the user makes none.

    a vector (d)         one residual block of width d
    tokens (T, d)        one transformer block of width d; causal where the model has an output for every token
    maps (C, H, W)       three convolutions of 2 C, 4 C and 4 C channels, at most 256, the first two strided while a
                         side exceeds 4

A student of tokens costs what one block of the model's own width does. One of maps has half as many channels, and half
again, but at least 8, until it has at most a quarter as many parameters as the model. On ResNet-18's cuts that is never
needed: there it costs between 5 % (at 8 × 8 pixels) and 14 % (at 32 × 32) of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from gradguess.errors import InputError

WIDEST, LARGEST, SMALLEST, HEAD = 256, 32, 4, 32  # channels; sides of maps; features of an attention head
NARROWEST, PART = 8, 1 / 4  # channels; of the model's parameters, for a student of maps


def default_student(shape: tuple[int, ...], outputs: tuple[int, ...], model: float = math.inf) -> nn.Module:
    """A student for a cut of this shape and outputs of that shape, both of one sample.

    Args:
        model: the number of parameters of the model.

    >>> sum(p.numel() for p in default_student((64, 32, 32), (10,)).parameters())
    969994
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
    """With at most so many parameters, if it need not be narrower than the narrowest for that."""
    width = min(4 * shape[0], WIDEST)
    while True:
        student = _convolutions(shape, outputs, width)
        if width <= NARROWEST or sum(p.numel() for p in student.parameters()) <= most:
            return student
        width = max(width // 2, NARROWEST)


def _convolutions(shape: tuple[int, ...], outputs: tuple[int, ...], width: int) -> nn.Module:
    below, *sides = shape
    side = min(max(sides), LARGEST)
    layers: list[nn.Module] = []
    if max(sides) > LARGEST:
        layers.append(nn.AdaptiveAvgPool2d((min(sides[0], LARGEST), min(sides[1], LARGEST))))
    for i, channels in enumerate((min(2 * below, width), width, width)):  # the first holds the largest maps
        stride = 2 if side > SMALLEST and i < 2 else 1
        norm = nn.BatchNorm2d(channels, track_running_stats=False)  # a student is never evaluated
        layers += [nn.Conv2d(below, channels, 3, stride, padding=1, bias=False), norm, nn.ReLU()]
        below, side = channels, -(-side // stride)
    if len(outputs) == 3:  # a map of outputs
        return nn.Sequential(*layers, nn.Conv2d(width, outputs[0], 1), nn.Upsample(outputs[1:]))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *_head(4 * width, outputs))
