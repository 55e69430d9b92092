"""White noise by place: a number depends on the key of its step, on its sample and on its column alone.

Samples are counted in the batch as a whole. Chunks and processes draw the rows of their own samples and no others, and
get the numbers that one pass over the whole batch would have got.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gradguess.backends.cuda_graphs import recording
from gradguess.backends.normal import normal_numbers
from gradguess.backends.random import generator_state

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
        return normal_numbers(self._key.value, row, rows, start, columns, dtype)


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
