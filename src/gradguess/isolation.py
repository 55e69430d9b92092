"""Passes that leave no trace: global random state and buffers are put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def _devices(model: nn.Module) -> list[torch.device]:
    found = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    return sorted(found, key=str)


class Snapshot:
    """The global random state and the buffers of a model at one moment."""

    def __init__(self, model: nn.Module, *, random: bool = True, buffers: bool = True) -> None:
        self.cpu = torch.get_rng_state() if random else None
        self.cuda = {d: torch.cuda.get_rng_state(d) for d in _devices(model)} if random else {}
        self.buffers: list[tuple[Tensor, Tensor, int]] = (
            [(b, b.detach().clone(), b._version) for b in model.buffers()] if buffers else []
        )

    def drew(self) -> bool:
        """Has the global generator been used since?"""
        if self.cpu is not None and not torch.equal(self.cpu, torch.get_rng_state()):
            return True
        return any(not torch.equal(state, torch.cuda.get_rng_state(d)) for d, state in self.cuda.items())

    def wrote(self) -> bool:
        """Has a buffer been written since?"""
        return any(b._version != version for b, _, version in self.buffers)

    def restore_random(self) -> None:
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)

    def restore_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value, version in self.buffers:
                if buffer._version != version:
                    buffer.copy_(value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Restore random state and buffers on exit. Yields a function that tells what has been touched so far."""
    before = Snapshot(model)
    try:
        yield lambda: (before.drew(), before.wrote())
    finally:
        before.restore_random()
        before.restore_buffers()
