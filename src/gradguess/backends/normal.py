"""N(0, 1) numbers by place: a hash of key, row and column, and a formula. Nothing is kept from number to number.

Word `c` of row `r` is the output of SplitMix64 (Steele, Lea and Flood 2014) with the state `key + γ (2⁴⁰ r + c)`. Its
two halves make two numbers by the transform of Box and Muller (1958). Generators of PyTorch cannot do this: those of a
CPU cannot start in the middle, and what those of a GPU draw depends on how many numbers are drawn at once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gradguess.backends import kernels

GAMMA, FIRST, SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
ROW = 40  # bits of a column


def normal_numbers(key: Tensor, row: int, rows: int, column: int, columns: int, dtype: torch.dtype) -> Tensor:
    """(rows, columns), from word `column` of row `row` on; half precision is rounded from float32."""
    wide = dtype if dtype == torch.float64 else torch.float32
    if kernels.fills(key):
        return kernels.normal_numbers(key, row, rows, column, columns, wide).to(dtype)
    z = _on_cpu(int(key), row, rows, column, -(-columns // 2), np.float64 if wide == torch.float64 else np.float32)
    return torch.from_numpy(z[:, :columns]).contiguous().to(key.device, dtype)


def _on_cpu(key: int, row: int, rows: int, column: int, words: int, dtype: type[np.floating]) -> np.ndarray:
    """(rows, 2 words): the cosines, then the sines."""
    halves = _hashed(key, row, rows, column, words).view("<i4").astype("=i4", copy=False)
    z = np.empty((rows, 2 * words), dtype)
    angle = halves[:, 1::2] * dtype(math.pi * 2**-31)
    np.cos(angle, out=z[:, :words])
    np.sin(angle, out=z[:, words:])
    radius = ((halves[:, ::2] & 0x7FFFFFFF) + dtype(1)) * dtype(2**-31)  # in (0, 1]
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    z[:, :words] *= radius
    z[:, words:] *= radius
    return z


def _hashed(key: int, row: int, rows: int, column: int, words: int) -> np.ndarray:
    """SplitMix64, (rows, words)."""
    places = np.arange(row, row + rows).astype(np.uint64) << np.uint64(ROW)
    x: np.ndarray = places[:, None] + np.arange(column, column + words, dtype=np.uint64)
    x *= GAMMA
    x += np.uint64(key % 2**64)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        x ^= x >> np.uint64(shift)
        if factor is not None:
            x *= factor
    return x
