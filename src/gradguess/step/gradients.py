"""Where gradients go: into sums of their own, or into `.grad` as soon as they are made."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class NotFiniteError(Exception):
    """A loss or a derivative is not finite. It was noticed before a gradient was made."""

    def __init__(self, losses: Tensor, jvp: Tensor) -> None:
        self.losses, self.jvp = losses, jvp


class Sums:
    """Sums of gradients, by the name of the parameter.

    Attributes:
        by_name: the sums.
        checks: losses and derivatives must be finite before a gradient is added.
        added: how many gradients were added.
    """

    checks = False

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.added = 0

    def begin(self, losses: Tensor, jvp: Tensor) -> None:
        """Told of losses and derivatives before the gradients that follow from them are added."""
        if self.checks and not (torch.isfinite(losses).all() & torch.isfinite(jvp).all()):
            raise NotFiniteError(losses, jvp)

    def add(self, name: str, grad: Tensor) -> None:
        self.by_name[name] = self.by_name[name] + grad if name in self.by_name else grad
        self.added += 1


class Written(Sums):
    """The same in `.grad`: nothing is kept here.

    Args:
        parameters: by name.
        checks: as above. Gradients that are not finite are noticed as well, once they are written.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], checks: bool) -> None:
        super().__init__()
        self.parameters, self.checks = parameters, checks
        self._taken: set[int] = set()  # two parameters may have got one tensor: x + (a + b)
        self._finite: dict[torch.device, Tensor] = {}

    @property
    def finite(self) -> bool:
        """Were all gradients numbers?"""
        return all(map(bool, self._finite.values()))

    def add(self, name: str, grad: Tensor) -> None:
        parameter, grad = self.parameters[name], grad.detach()
        values = grad._values() if grad.is_sparse else grad
        if self.checks and values.numel():
            largest = torch.linalg.vector_norm(values, torch.inf)  # one number: nothing of the gradient's size is made
            self._finite[grad.device] = largest.isfinite() & self._finite.get(grad.device, True)
        if grad.is_sparse:  # of nn.Embedding(sparse=True)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        elif parameter.grad is None and grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(grad)  # fused optimisers need one layout
        elif parameter.grad is None:
            parameter.grad = grad.clone() if grad.data_ptr() in self._taken else grad
            self._taken.add(grad.data_ptr())
        else:
            parameter.grad += grad
        self.added += 1
