"""`diagnose`: how good a guess is, per site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from gradguess.backends.policy import one_at_a_time
from gradguess.diagnose.comparison import Comparison
from gradguess.diagnose.report import Report
from gradguess.errors import InputError, check_count
from gradguess.estimate import ForwardGradient, fresh_generator
from gradguess.guesses.base import Guess
from gradguess.methods import Method, WeightPerturbation
from gradguess.methods.guessed import as_method
from gradguess.methods.run import Plan, warn_of_mixing
from gradguess.model.hooks import untouched
from gradguess.model.site import Sites
from gradguess.model.task import LossFn, Task
from gradguess.noise import Noise
from gradguess.step.base import Options, State


@one_at_a_time
def diagnose(
    model: nn.Module,
    guess: Guess | Method,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    generator: torch.Generator | None = None,
    *,
    sites: Sites | None = None,
    draws: int = 32,
    curve: bool = True,
    isolate: bool | None = None,
    coupling: Literal["sample", "batch"] | None = None,
    top: Literal["guess", "exact"] | None = None,
    forward: ForwardGradient | None = None,
) -> Report:
    """Bias, variance and more of one step of `guess` with one tangent, at every site. Writes nothing, holds no state.

    Args:
        model: any module, as in `estimate`.
        guess: the guess, or another method, that is examined.
        loss_fn: `loss_fn(outputs, targets)` returns one loss per sample.
        inputs: of the model, as in `estimate`.
        targets: of the loss.
        generator: source of the directions. The `cosine` of the report is that of the estimate which `estimate`
            returns for the same generator.
        sites: where gradients are guessed, as in `estimate`. None is the default there, or what `forward` has; so it is
            with `isolate`, `coupling` and `top`.
        draws: how many random vectors, or estimates, replace a closed form that does not exist. That concerns methods
            that draw no directions at sites, Wᵀ below a large layer that is not linear, and outputs that the batch
            shares.
        curve: decompose the Jacobian above each site, for rank, singular values and overlap.
        isolate: as in `estimate`: the variance is then without the noise of the other sites.
        coupling: as in `estimate`.
        top: as in `estimate`: with "exact" the model's output has neither bias nor variance, and adds none elsewhere.
        forward: a `ForwardGradient` of this model and guess, whose state (bases, feedback matrices) is used. The report
            is then of the step that it would make next, but without `balance` and with one tangent. Without one the
            state is empty.

    Returns:
        a mapping from site name to `SiteReport`; from parameter name for weight perturbation, which has no sites.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> report = gg.diagnose(model, gg.WPerp(k=2), torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> report["2"].bias, len(report["0"].overlap)  # nothing above the last layer: white noise, no bias
    (0.0, 8)
    """
    check_count("draws", draws, least=2)
    if forward is not None and (forward.model is not model or forward.guess != guess):
        differs = "model" if forward.model is not model else "guess"
        raise InputError(
            f"forward: expected a ForwardGradient of the same model and guess, found one of another {differs}. "
            "Pass forward.model and forward.guess."
        )
    usual = Plan(as_method(guess), "auto", Options()) if forward is None else forward.plan
    asked: dict[str, Any] = {"isolate": isolate, "coupling": coupling, "top": top}
    how = {name: getattr(usual.options, name) if value is None else value for name, value in asked.items()}
    plan = Plan(usual.method, usual.sites if sites is None else sites, Options(**how), detail=True)
    task = Task(model, loss_fn, inputs, targets)
    with untouched(model), torch.no_grad():
        state = State() if forward is None else forward.state
        compared = Comparison(plan, task, Noise(generator or fresh_generator()), state, draws)
        warn_of_mixing(plan, task, compared.layout)
        if isinstance(guess, WeightPerturbation):
            return Report(compared.by_parameter())
        if not plan.method.uses_sites:
            raise InputError(f"{guess!r} has neither sites nor a known covariance: there is nothing to diagnose.")
        found = compared.by_frames(guess) if isinstance(guess, Guess) else compared.by_draws()
        return Report(
            {name: replace(site, **compared.spectrum(name)) for name, site in found.items()} if curve else found
        )
