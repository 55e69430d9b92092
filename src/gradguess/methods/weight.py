"""Weight perturbation, the forward gradient (Baydin et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradguess.methods.base import Estimate, Method
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
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        padding = padding_rows(model)
        alone = step.pool.size == 1  # else one number is sent for each tangent, and nothing else
        gradients, derivatives, means = Gradients(step), [], []
        directions: dict[str, list[Tensor]] = {name: [] for name in parameters}

        def draw() -> Iterator[tuple[str, Tensor]]:
            """The direction of one parameter after the other."""
            for name, p in parameters.items():
                y = step.noise.normal(p.shape, p.dtype, p.device)
                if name in padding:
                    y[padding[name]] = 0  # the padding row has no gradient
                yield name, y

        for _ in range(count):
            drawn = dict(draw())
            losses, derivative = step.passes.parameter_tangent(drawn)
            derivatives.append(derivative)
            mean = derivative.mean() if alone else step.pool.sum(or_nan(derivative.mean() * step.share, losses))
            means.append(mean)
            for name, y in drawn.items() if step.keeps else ():
                gradients.add(name, mean.to(y.dtype) * y / count)
                if step.detail:
                    directions[name].append(y)
        jvp = torch.stack(derivatives)
        if not step.keeps:
            del drawn
            step.begin(losses, jvp)
            step.noise.rewind()
            for mean in means:
                for name, y in draw():
                    gradients.add(name, mean.to(y.dtype) * y / count)
        kept = {name: torch.stack(ys) for name, ys in directions.items() if ys}
        result = Estimate(losses.mean(), gradients.by_name, jvp, kept, losses=losses)
        if not alone:
            result.pooled, result.all_finite = True, torch.isfinite(torch.stack(means)).all()
        return result, step.state


def or_nan(mean: Tensor, losses: Tensor) -> Tensor:
    """NaN where a loss is not finite: the other processes must know."""
    return torch.where(torch.isfinite(losses).all(), mean, torch.nan)


def padding_rows(model: nn.Module) -> dict[str, int]:
    """The rows of embeddings that are never trained, by the name of the parameter."""
    return {
        f"{name}.weight" if name else "weight": module.padding_idx
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }
