"""White noise by place: a number depends on the key of its step, on its sample and on its column alone.

Samples are counted in the batch as a whole. Chunks and processes draw the rows of their own samples and no others, and
get the numbers that one pass over the whole batch would have got.

Word `c` of row `r` is the output of SplitMix64 (Steele, Lea and Flood 2014) with the state `key + γ (2⁴⁰ r + c)`. Its
two halves make two numbers by the transform of Box and Muller (1958). Generators of PyTorch cannot do this: those of a
CPU cannot start in the middle, and what those of a GPU draw depends on how many numbers are drawn at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gradguess.backends import kernels
from gradguess.backends.cuda_graphs import recording
from gradguess.backends.random import generator_state

GAMMA, FIRST, SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
ROW = 40  # bits of a column
SHARED = -1  # the row of numbers that belong to no sample


class _Key:
    """The key of a step, drawn when it is first asked for."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.before: Tensor | None = None  # the state of the generator

    @cached_property
    def value(self) -> Tensor:
        """A whole number of 64 bits, 0-dim, on the device of the generator."""
        self.before = generator_state(self.generator)
        return torch.randint(-(2**63), 2**63 - 1, (), generator=self.generator, device=self.generator.device)


class Noise:
    """N(0, 1) numbers of one step. Its generator gives one number, the key, when the first of them is drawn."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self._key = generator, _Key(generator)

    row, shared = 0, SHARED  # of the first sample, and of the numbers that belong to no sample
    column = 0  # words that were drawn of each row; a word makes two numbers

    def at(self, row: int) -> Noise:
        """The noise of the samples from `row` on, from the start."""
        part = copy.copy(self)
        part.row, part.column = row, 0
        return part

    def apart(self, number: int) -> Noise:
        """Noise of no sample, with its own start, for one of several directions."""
        part = self.at(self.row)
        part.shared = SHARED - 1 - number
        return part

    def rewind(self) -> None:
        """Start the order anew."""
        self.column = 0

    @property
    def drawn(self) -> bool:
        """Whether the key was drawn."""
        return "value" in vars(self._key)

    def keys(self) -> list[Tensor]:
        """The key with which the numbers of row 0 are those of the first sample here, and that of no sample."""
        own, shift = self._key.value, (self.row * int(GAMMA) << ROW) % 2**64
        return [own + (shift - 2**64 if shift >= 2**63 else shift) if shift else own, own]

    def undo(self) -> None:
        """Put the generator back to where it was before the key was drawn."""
        if self._key.before is not None:
            self.generator.set_state(self._key.before)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers that belong to no sample."""
        return self._drawn(self.shared, 1, math.prod(shape), dtype).view(tuple(shape)).to(device)

    def batched(self, count: int, batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(count, batch, size), by the samples' places in the whole batch."""
        drawn = self._drawn(self.row, batch, count * size, dtype).view(batch, count, size)
        return drawn.transpose(0, 1).contiguous().to(device)

    def _drawn(self, row: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        start, self.column = self.column, self.column + -(-columns // 2)
        found: Tensor = torch.ops.gradguess.normal_numbers.default(self._key_of(row), row, rows, start, columns, dtype)
        return found

    def _key_of(self, row: int) -> Tensor:
        return self._key.value


class SketchNoise(Noise):
    """Noise with a seed of its own, for what is done now and then.

    `source`, a generator or a device on which one is made, is seeded when it is first drawn from. While a graph is
    recorded no generator can be seeded: whoever replays the graph does it.
    """

    def __init__(self, source: torch.Generator | torch.device, seed: int) -> None:
        self.source, self.seed = source, seed

    @cached_property
    def generator(self) -> torch.Generator:  # type: ignore[override]
        source = self.source if isinstance(self.source, torch.Generator) else torch.Generator(self.source)
        return source if recording() else source.manual_seed(self.seed)

    @cached_property
    def _key(self) -> _Key:  # type: ignore[override]
        return _Key(self.generator)


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


_NAME = "gradguess::normal_numbers"  # one operation in a graph
torch.library.define(_NAME, "(Tensor key, int row, int rows, int column, int columns, ScalarType dtype) -> Tensor")
torch.library.impl(_NAME, "CompositeExplicitAutograd", lambda *args: normal_numbers(*args))


@torch.library.register_fake(_NAME)
def _empty(key: Tensor, row: int, rows: int, column: int, columns: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty(rows, columns, dtype=dtype)
