"""What the methods are measured against beside plain backpropagation: recomputed activations, and MeZO."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradguess.experiments.bench.loops import Loop


def recomputed(model: nn.Module, stride: int = 1) -> nn.Module:
    """The model with every `stride` layers (or blocks) of its sequence as one checkpoint.

    Backpropagation then keeps the inputs of these parts, and computes what is inside them again. A layer without
    parameters belongs to the one before it.
    """
    sequence = next(module for module in model.modules() if isinstance(module, nn.Sequential))
    layers: list[list[nn.Module]] = []
    for layer in sequence:
        if not layers or any(True for _ in layer.parameters()):
            layers.append([])
        layers[-1].append(layer)
    parts = [nn.Sequential(*itertools.chain(*layers[i : i + stride])) for i in range(0, len(layers), stride)]

    def forward(x: Tensor) -> Tensor:
        again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return functools.reduce(lambda x, part: again(part, x), parts, x)

    sequence.forward = forward  # type: ignore[method-assign]
    return model


class MeZOLoop(Loop):
    """Weight perturbation by two plain passes, as in MeZO (Malladi et al. 2023, arXiv 2305.17333).

    The loss is measured on either side along one direction `z`, which is drawn again wherever it is needed. So nothing
    is kept but the weights: no activation, no gradient, no state of an optimiser. The update is that of SGD.
    """

    distance, lr = 1e-3, 1e-6

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, compiled: bool = False) -> None:
        super().__init__(model, x, y, compiled)
        self.generators = [torch.Generator(x.device).manual_seed(0) for _ in range(3)]  # each draws the same numbers

    @torch.no_grad()
    def step(self) -> Tensor:
        out, across, back = self.generators
        self._move(out, self.distance)
        up = self.mean_loss()
        self._move(across, -2 * self.distance)
        down = self.mean_loss()
        slope = (up - down) / (2 * self.distance)
        self._move(back, self.distance - self.lr * slope)  # home, and from there a step of SGD
        return (up + down) / 2

    def _move(self, source: torch.Generator, distance: float | Tensor) -> None:
        for p in self.model.parameters():
            z = torch.randn(p.shape, generator=source, dtype=p.dtype, device=p.device)
            p.add_(z.mul_(distance))
