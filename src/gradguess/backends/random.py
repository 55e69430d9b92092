"""The state of random generators: of one generator, and of the global ones."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradguess.backends.cuda_graphs import recording


def generator_state(generator: torch.Generator) -> Tensor | None:
    """The state of a generator, or None while a CUDA graph is being recorded: there it cannot be read."""
    if generator.device.type == "cuda" and recording():
        return None
    return generator.get_state()


def seed_global(seed: int) -> None:
    """Seed the generators that `RandomState.everywhere` holds.

    `torch.manual_seed` would also leave a seed for CUDA devices that nobody has used yet.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class RandomState:
    """The state of the global generators at the moment of construction: PyTorch's of the CPU and of the CUDA devices
    given, Python's and NumPy's.

    Args:
        devices: where the model lies. Devices other than CUDA are passed over.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self.cpu = torch.get_rng_state()
        found = sorted({device for device in devices if device.type == "cuda"}, key=str)
        self.cuda = {device: torch.cuda.get_rng_state(device) for device in found}
        self.python, self.numpy = random.getstate(), _numpy_state()

    @classmethod
    def everywhere(cls) -> RandomState:
        """Of all devices that are in use."""
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        return cls(torch.device("cuda", index) for index in range(count))

    def drew(self) -> bool:
        """Whether one of these generators has been used since."""
        if self.drew_outside() or not torch.equal(self.cpu, torch.get_rng_state()):
            return True
        return any(not torch.equal(state, torch.cuda.get_rng_state(device)) for device, state in self.cuda.items())

    def drew_outside(self) -> bool:
        """Whether Python's or NumPy's generator has been used since."""
        return self.python != random.getstate() or self.numpy != _numpy_state()

    def fingerprint(self) -> int:
        """Equal where the states of PyTorch's generators are."""
        return hash(tuple(state.numpy().tobytes() for state in (self.cpu, *self.cuda.values())))

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


def _numpy_state() -> tuple[Any, ...]:
    """That of NumPy's global generator, in a form that can be compared."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return name, keys.tobytes(), *rest
