"""One cell of the coverage table: is an estimate through this layer right, or refused?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import gradguess as gg
from asserts import jvp_error
from coverage_layers import LAYERS, make
from gradguess.methods import Backprop, Estimate, Method
from gradguess.step.base import State, Step
from gradguess.step.pull_back import pull_back
from models import GUESSES, Case, generator
from references import gradients
from steps import layout_of

RIGHT, REFUSED = "✓", "refused"
TOLERANCE = 1e-9
COLUMNS = (*(name for name in GUESSES if name != "ns-nearest"), "feedback", "pull back")  # as "ns" in every layer


@dataclass(frozen=True)
class Truth(Method):
    """The true gradient at every site, pulled back to the parameters by the layers' own chain rule."""

    def run(self, step: Step) -> tuple[Estimate, State]:
        truth, state = Backprop().run(step)
        batch = len(truth.losses)
        grads = pull_back(step, lambda site, s: truth.site_grads[site.name] / batch, {})
        return Estimate(truth.loss, grads, truth.jvp, losses=truth.losses), state


def _largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def _depth(case: Case) -> int:
    """More than the longest chain of sites."""
    return len(layout_of(case, "leaf").sites) + 1


def error(layer: str, column: str) -> float:
    """How far from autograd: a directional derivative for a guess, the gradient for the other columns.

    Feedback with as many sweeps of the chain rule as there are sites in a row is backpropagation.
    """
    case, coupling = make(layer), LAYERS[layer].coupling
    if column in GUESSES:
        slots = {s.name: s.slot for s in layout_of(case, "leaf").sites}
        est = gg.estimate(
            case.model, GUESSES[column], *case.args, sites="leaf", generator=generator(), coupling=coupling
        )
        assert est.jvp.abs().max() > 0, "a derivative that is zero shows nothing"
        return jvp_error(case, est, slots)
    guess: gg.Guess | Method = Truth()
    if column == "feedback":
        guess = gg.Feedback(gg.WPerp(k=3), form="chained", sweeps=_depth(case))
    est = gg.estimate(case.model, guess, *case.args, sites="leaf", generator=generator(), coupling=coupling)
    return _largest_difference(est.grads, gradients(case))


def outcome(layer: str, column: str) -> str:
    """`✓`, `refused`, or what went wrong."""
    try:
        found = error(layer, column)
    except gg.ForwardModeError as refusal:
        if "Replace it by" not in str(refusal):
            return f"refused without a way out: {refusal}"
        return REFUSED
    return RIGHT if found < TOLERANCE else f"wrong by {found:.1e}"
