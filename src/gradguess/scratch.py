"""Memory that a step uses again in the next one.

On a CPU a fresh tensor of a megabyte costs more than to fill it: the system maps its pages one by one. A GPU's
allocator keeps what it was given by itself, and there every request is a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Scratch:
    """Named tensors that last from step to step. What is taken holds anything, until the name is taken again."""

    def __init__(self, lasting: bool = True) -> None:
        self.lasting = lasting
        self._kept: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}  # what was taken last
        self._memos: dict[str, dict[str, Any]] = {}

    def memo(self, name: str) -> dict[str, Any]:
        """What was computed for `name` before, to be used again while it holds."""
        return self._memos.setdefault(name, {}) if self.lasting else {}

    def take(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """A (rows, columns) tensor of the dtype and device of `like`."""
        if not self.lasting or like.device.type != "cpu":
            return torch.empty(rows, columns, dtype=like.dtype, device=like.device)
        last = self._views.get(name)
        if last is not None and last.shape == (rows, columns) and last.dtype == like.dtype:
            return last
        size, kept = rows * columns, self._kept.get(name)
        if kept is None or kept.dtype != like.dtype or kept.shape[0] < size:
            kept = self._kept[name] = torch.empty(size, dtype=like.dtype)
        self._views[name] = kept[:size].view(rows, columns)
        return self._views[name]

    def like(self, name: str, t: Tensor) -> Tensor:
        """The same of the shape of `t`, (rows, columns)."""
        return self.take(name, t.shape[0], t.shape[1], t)

    def part(self, prefix: str) -> Scratch:
        """The same memory under other names."""
        part = _Part(self.lasting)
        part._kept, part._views, part._memos, part.prefix = self._kept, self._views, self._memos, prefix
        return part


class _Part(Scratch):
    prefix = ""

    def take(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        return super().take(f"{self.prefix}/{name}", rows, columns, like)


NONE = Scratch(lasting=False)
