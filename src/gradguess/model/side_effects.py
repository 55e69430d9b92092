"""What a pass leaves behind, global random state and buffers, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gradguess.backends.random import RandomState


class Snapshot:
    """The global random state and the buffers of a model at one moment."""

    def __init__(self, model: nn.Module, *, random: bool = True, buffers: bool = True) -> None:
        self._random = RandomState(t.device for t in (*model.parameters(), *model.buffers())) if random else None
        self._buffers = [  # where each lives, itself and its value
            (module, name, value, value.detach().clone())
            for module in (model.modules() if buffers else ())
            for name, value in module._buffers.items()
            if value is not None
        ]

    def drew(self) -> bool:
        """Has a global generator been used since?"""
        return self._random is not None and self._random.drew()

    def drew_outside(self) -> bool:
        """Whether Python's or NumPy's generator has been used since."""
        return self._random is not None and self._random.drew_outside()

    def wrote(self) -> bool:
        """Has a buffer been written since? PyTorch counts writes, but not those of batch norm."""
        return any(m._buffers[name] is not own or not torch.equal(own, value) for m, name, own, value in self._buffers)

    def restore(self) -> None:
        """Put back what was noted."""
        if self._random is not None:
            self._random.restore()
        for module, name, own, value in self._buffers:
            module._buffers[name] = own
            own.data.copy_(value)  # through .data: a graph that saved the buffer may still be needed


@contextmanager
def untouched(model: nn.Module) -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Restore random state and buffers on exit. Yields a function that tells what has been touched so far."""
    before = Snapshot(model)
    try:
        yield lambda: (before.drew(), before.wrote())
    finally:
        before.restore()
