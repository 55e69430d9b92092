"""Weight perturbation by two plain passes (MeZO, Malladi et al. 2023)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.methods.base import Estimate, Method
from gradguess.methods.weight import pooled, pooled_means, white
from gradguess.noise import Noise
from gradguess.passes import Pass
from gradguess.step.base import State, Step


@dataclass(frozen=True)
class MeZO(Method):
    """The loss on either side of the weights, along one random direction for the whole batch.

    Definition: `c = (L(θ + εz) - L(θ - εz)) / 2ε` with `z ~ N(0, I)`, estimate `c z`. Bias of the order of `ε²`.
    Variance grows with the number of parameters. Memory: a plain pass, and one copy of the weights, which holds them
    while they are moved in place and the gradient afterwards; `z` is drawn again wherever it is needed. The weights
    come back as they were, to the bit. Time: two plain passes, and three draws of `z`. Malladi et al., "Fine-Tuning
    Language Models with Just Forward Passes", NeurIPS 2023, arXiv 2305.17333. There the update is that of SGD; here any
    optimiser follows.

    Args:
        epsilon: `ε`, how far the weights are moved.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Linear(4, 3)
    >>> forward = gg.ForwardGradient(model, gg.baselines.MeZO())
    >>> before = model.weight.detach().clone()
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> torch.equal(model.weight, before), model.weight.grad.shape
    (True, torch.Size([3, 4]))
    """

    epsilon: float = 1e-3

    uses_sites = False

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise InputError(f"MeZO(epsilon): expected a positive number, found {self.epsilon!r}.")

    def kind(self, count: int) -> str | None:
        """None: a recorded step cannot draw its noise again."""
        return None

    @torch.no_grad()
    def run(self, step: Step) -> tuple[Estimate, State]:
        model, passes = step.task.model, Pass(step.task, step.layout)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in parameters.items()}
        sources = [step.noise.apart(number) for number in range(step.options.tangents)]

        def drawn(source: Noise) -> Iterator[tuple[str, Tensor]]:
            """`z` of one parameter after the other, the same at each call."""
            source.rewind()
            return white(model, source)

        sides = []
        try:
            for source, distance in itertools.product(sources, (self.epsilon, -self.epsilon)):
                for name, z in drawn(source):  # through .data: PyTorch need not see that the weights were elsewhere
                    parameters[name].data.copy_(z.mul_(distance).add_(before[name]))
                sides.append(step.task.losses(passes.moved(None, first=True)))
        finally:
            for name, p in parameters.items():
                p.data.copy_(before[name])
        above, below = torch.stack(sides).unflatten(0, (-1, 2)).unbind(1)  # (tangents, batch) each
        jvp, losses = (above - below) / (2 * self.epsilon), ((above + below) / 2).mean(0)
        means = pooled_means(step, jvp, losses)
        grads = before  # the memory of the copy, which is no longer needed
        for i, source in enumerate(sources):
            for name, z in drawn(source):
                part = z.mul_(means[i].to(z.dtype) / len(sources))
                grads[name] = grads[name].add_(part) if i else grads[name].copy_(part)
        result = Estimate(losses.mean(), grads, jvp, losses=losses)
        if step.detail:
            directions = [dict(drawn(source)) for source in sources]
            result.directions = {name: torch.stack([one[name] for one in directions]) for name in parameters}
        return pooled(step, result, means), step.state
