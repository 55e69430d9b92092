"""Weight perturbation, the forward gradient (Baydin et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradguess.methods.base import Estimate, Method
from gradguess.noise import Noise
from gradguess.step.base import State, Step
from gradguess.step.pull_back import Gradients


@dataclass(frozen=True)
class WeightPerturbation(Method):
    """White noise on every parameter, one direction for the whole batch.

    Direction `Y ~ N(0, I)` of the shape of the parameters; estimate `(mean_b c_b) Y`. Covariance `I`. Bias none.
    Variance grows with the number of parameters. Cost: a tangent pass and nothing else: no input and no
    direction of a layer is kept. Paper: section 2, "Forward Gradient". `directions` are keyed by parameter name.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Linear(4, 3)
    >>> loss_fn = torch.nn.CrossEntropyLoss(reduction="none")
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.WeightPerturbation(), loss_fn, x, t)
    >>> Y = est.directions["weight"][0]
    >>> torch.allclose(est.grads["weight"], est.jvp.mean() * Y)
    True
    """

    uses_sites = False

    def run(self, step: Step) -> tuple[Estimate, State]:
        model, count = step.task.model, step.options.tangents
        gradients, derivatives, means = Gradients(step), [], []
        directions: dict[str, list[Tensor]] = {}
        for _ in range(count):
            drawn = dict(white(model, step.noise))
            losses, derivative = step.passes.parameter_tangent(drawn)
            derivatives.append(derivative)
            means.append(pooled_means(step, derivative[None], losses)[0])
            for name, y in drawn.items() if step.keeps else ():
                gradients.add(name, means[-1].to(y.dtype) * y / count)
                if step.detail:
                    directions.setdefault(name, []).append(y)
        jvp = torch.stack(derivatives)
        if not step.keeps:
            del drawn
            step.begin(losses, jvp)
            step.noise.rewind()
            for mean in means:
                for name, y in white(model, step.noise):
                    gradients.add(name, mean.to(y.dtype) * y / count)
        kept = {name: torch.stack(ys) for name, ys in directions.items()}
        result = Estimate(losses.mean(), gradients.by_name, jvp, kept, losses=losses)
        return pooled(step, result, torch.stack(means)), step.state


def white(model: nn.Module, noise: Noise) -> Iterator[tuple[str, Tensor]]:
    """N(0, I) of the shape of one trainable parameter after the other, by name. Padding rows have no gradient."""
    padding = {id(m._parameters.get("weight")): m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, p in model.named_parameters():
        if p.requires_grad:
            y = noise.normal(p.shape, p.dtype, p.device)
            if (row := padding.get(id(p))) is not None:
                y[row] = 0
            yield name, y


def pooled_means(step: Step, jvp: Tensor, losses: Tensor) -> Tensor:
    """The mean of each direction's derivatives over all processes, (directions,): one number is sent for each, and
    nothing else. It is NaN where a loss is not finite, which the other processes must know.
    """
    means = jvp.mean(1)
    if step.pool.size == 1:
        return means
    return step.pool.sum(torch.where(torch.isfinite(losses).all(), means * step.share, torch.nan))


def pooled(step: Step, result: Estimate, means: Tensor) -> Estimate:
    """The estimate, which is that of all processes."""
    if step.pool.size > 1:
        result.pooled, result.all_finite = True, torch.isfinite(means).all()
    return result
