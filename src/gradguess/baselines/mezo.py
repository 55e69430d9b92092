"""Weight perturbation by two plain passes (MeZO, Malladi et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradguess.errors import InputError
from gradguess.methods.base import Estimate, Method
from gradguess.methods.weight import or_nan, padding_rows
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
        weights, passes = _Weights(step.task.model), Pass(step.task, step.layout)
        sources = [step.noise.apart(number) for number in range(step.options.tangents)]
        sides = []
        try:
            for source in sources:
                for distance in (self.epsilon, -self.epsilon):
                    weights.move(distance, source)
                    sides.append(step.task.losses(passes.moved(None, first=True)))
        finally:
            weights.restore()
        above, below = torch.stack(sides).unflatten(0, (-1, 2)).unbind(1)  # (tangents, batch) each
        jvp, losses = (above - below) / (2 * self.epsilon), ((above + below) / 2).mean(0)
        alone = step.pool.size == 1  # else one number is sent for each direction, and nothing else
        means = jvp.mean(1) if alone else step.pool.sum(or_nan(jvp.mean(1) * step.share, losses))
        result = Estimate(losses.mean(), weights.gradients(means, sources), jvp, losses=losses)
        if not alone:
            result.pooled, result.all_finite = True, torch.isfinite(means).all()
        if step.detail:
            result.directions = weights.directions(sources)
        return result, step.state


class _Weights:
    """The weights of a model, which are moved in place and come back."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.padding = padding_rows(model)

    def _draw(self, source: Noise) -> Iterator[tuple[str, Tensor]]:
        """`z` of one parameter after the other, from the start."""
        source.rewind()
        for name, p in self.parameters.items():
            z = source.normal(p.shape, p.dtype, p.device)
            if name in self.padding:
                z[self.padding[name]] = 0  # the padding row has no gradient
            yield name, z

    def move(self, distance: float, source: Noise) -> None:
        """Moves the weights to `θ + distance z`, through `.data`: PyTorch need not see that they were elsewhere."""
        for name, z in self._draw(source):
            self.parameters[name].data.copy_(z.mul_(distance).add_(self.kept[name]))

    def restore(self) -> None:
        for name, p in self.parameters.items():
            p.data.copy_(self.kept[name])

    def gradients(self, means: Tensor, sources: Sequence[Noise]) -> dict[str, Tensor]:
        """`c z`, averaged over directions, in the memory of the copy that is no longer needed."""
        grads, self.kept = self.kept, {}
        for i, source in enumerate(sources):
            for name, z in self._draw(source):
                part = z.mul_(means[i].to(z.dtype) / len(sources))
                grads[name] = grads[name].add_(part) if i else grads[name].copy_(part)
        return grads

    def directions(self, sources: Sequence[Noise]) -> dict[str, Tensor]:
        """`z` of all directions by the parameter's name, (directions, *shape)."""
        drawn = [dict(self._draw(source)) for source in sources]
        return {name: torch.stack([one[name] for one in drawn]) for name in self.parameters}
