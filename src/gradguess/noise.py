"""White noise from an explicit generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gradguess.backends.cuda_graphs import recording
from gradguess.backends.random import drawn_together, generator_state

ALIGNED = 32  # numbers: what is given out begins at a multiple of them, as compiled kernels like it


class Noise:
    """Draws N(0, 1) numbers in a fixed order from one generator; `rewind` starts the order anew.

    With `rows`, a draw for a batch gives the rows of that slice of a batch of `total` samples: the numbers of a
    sample depend on its place in the whole batch and not on how the batch is split.
    """

    _left: Tensor | None = None  # numbers that were drawn together with others, for the next draws

    def __init__(self, generator: torch.Generator, rows: slice | None = None, total: int | None = None) -> None:
        self.generator = generator
        self.rows, self.total = rows, total
        self._start = generator_state(generator)

    def rewind(self) -> None:
        """Start the order anew."""
        assert self._start is not None, "a step that is recorded as a graph cannot draw its noise a second time"
        self.generator.set_state(self._start)
        self._left = None

    def first(self, count: int) -> Noise:
        """The noise of the first `count` samples, from here on."""
        if self.rows is None:
            return Noise(self.generator)
        return Noise(self.generator, slice(self.rows.start, self.rows.start + count), self.total)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        wanted, together = math.prod(shape), drawn_together(self.generator.device)
        if wanted > together:
            return self._drawn(shape, dtype).to(device)
        if self._left is None or self._left.dtype != dtype or len(self._left) < wanted:
            self._left = self._drawn([together], dtype)
        z, self._left = self._left[:wanted], self._left[-(-wanted // ALIGNED) * ALIGNED :]
        return z.view(tuple(shape)).to(device)

    def _drawn(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device, dtype=dtype)

    def batched(self, count: int, batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(count, batch, size), tied to the samples' places in the whole batch."""
        if self.rows is None:
            return self.normal((count, batch, size), dtype, device)
        assert self.total is not None
        return self.normal((count, self.total, size), dtype, device)[:, self.rows]


class SketchNoise(Noise):
    """Noise with a seed of its own, for what is done now and then.

    `source`, a generator or a device on which one is made, is seeded when it is first drawn from. While a graph is
    recorded no generator can be seeded: whoever replays the graph does it.
    """

    def __init__(self, source: torch.Generator | torch.device, seed: int) -> None:
        self.source, self.seed = source, seed
        self.rows = self.total = None

    @cached_property
    def generator(self) -> torch.Generator:  # type: ignore[override]
        source = self.source if isinstance(self.source, torch.Generator) else torch.Generator(self.source)
        return source if recording() else source.manual_seed(self.seed)
