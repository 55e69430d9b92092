"""What a pass leaves behind, global random state and buffers, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradguess.backends.random import RandomState


class Snapshot:
    """The global random state and the buffers of a model at one moment."""

    def __init__(self, model: nn.Module, *, random: bool = True, buffers: bool = True) -> None:
        self._random = RandomState(t.device for t in (*model.parameters(), *model.buffers())) if random else None
        self._buffers = [_Buffer(*place) for place in _places(model)] if buffers else []

    def drew(self) -> bool:
        """Has a global generator been used since?"""
        return self._random is not None and self._random.drew()

    def wrote(self) -> bool:
        """Has a buffer been written since?"""
        return any(buffer.changed() for buffer in self._buffers)

    def restore_random(self) -> None:
        if self._random is not None:
            self._random.restore()

    def restore_buffers(self) -> None:
        for buffer in self._buffers:
            buffer.restore()


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None:
                yield module, name, value


class _Buffer:
    """A buffer, where it lives and its value. PyTorch counts writes, but not those of batch norm."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.value = tensor.detach().clone()

    def changed(self) -> bool:
        return self.module._buffers[self.name] is not self.tensor or not torch.equal(self.tensor, self.value)

    def restore(self) -> None:
        self.module._buffers[self.name] = self.tensor
        self.tensor.data.copy_(self.value)  # through .data: a graph that saved the buffer may still be needed


@contextmanager
def untouched(model: nn.Module) -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Restore random state and buffers on exit. Yields a function that tells what has been touched so far."""
    before = Snapshot(model)
    try:
        yield lambda: (before.drew(), before.wrote())
    finally:
        before.restore_random()
        before.restore_buffers()
