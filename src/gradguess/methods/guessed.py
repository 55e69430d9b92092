"""The estimate of a guess: `ĝ = c y` at every site, pulled back to the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.guesses.base import Guess
from gradguess.guesses.factored import Factored, dense
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.model.site import Layout, Site
from gradguess.step.base import Options, State, Step
from gradguess.step.measure import Drawing, measure
from gradguess.step.pull_back import OutputError, pull_back


@dataclass(frozen=True)
class Guessed(Method):
    """Directions of `guess` at every site, one tangent pass for each, and the layers' own chain rule."""

    guess: Guess

    apart = True

    def draws(self, count: int) -> Draws:
        return Draws(self.guess, count)

    def run(self, step: Step) -> tuple[Estimate, State]:
        return estimate_from(Drawing(step, self.guess)), step.state


def not_guessed(layout: Layout, options: Options) -> set[str]:
    """The sites whose derivative is taken as it is known: the model's output, with `top="exact"`."""
    return {site.name for site in layout.sites if site.is_output and site.top and options.top == "exact"}


def estimate_from(drawing: Drawing) -> Estimate:
    """Draw, measure, weigh, and pull back to the parameters."""
    step = drawing.step
    known = not_guessed(step.layout, step.options)
    seen = measure(drawing, lambda site: site.name not in known, keep_pieces=True)
    share = 1 / len(seen.losses)  # of a sample in the mean loss
    exact = OutputError(step.task, seen.outputs).parts if known else []  # one: the site is all that the model returns

    def cotangent(site: Site, s: Tensor | None) -> Tensor | Factored:
        if site.name in known:
            return exact[0] * share
        record = seen.records.get(site.name)
        y = None if record is None else record.y
        if y is None:  # nothing was kept: the same directions are drawn again
            assert s is not None
            y = drawing.directions(site, s, site.gate_at(s))
        return seen.weigh(step, site, y, share)

    jvp = seen.jvp
    for name in known:  # a derivative there that is not finite is noticed as others are
        jvp = jvp.masked_fill(~step.layout[name].flat(exact[0]).isfinite().all(1), torch.nan)
    step.begin(seen.losses, jvp)
    if not step.keeps:
        step.noise.rewind()
        seen.outputs, seen.output_tangents = None, []  # they may be large, and the second pass makes them again
    grads = pull_back(step, cotangent, seen.records, seen.tail)
    result = Estimate(seen.losses.mean(), grads, jvp, losses=seen.losses)
    if step.detail:
        for site in step.layout.sites:
            if site.name in known:
                result.site_grads[site.name] = exact[0]
                continue
            record, injected = seen.records[site.name], seen.injected(site)
            assert record.y is not None
            assert injected is not None
            result.directions[site.name] = injected
            result.site_grads[site.name] = dense(seen.weigh(step, site, record.y))
    return result


def as_method(guess: Any) -> Method:
    """A guess, or a method that needs none, as a method."""
    if isinstance(guess, Guess):
        return Guessed(guess)
    if isinstance(guess, Method):
        return guess
    hint = " Write WPerp(), with parentheses." if isinstance(guess, type) else ""
    raise InputError(f"guess: expected one of gradguess's methods, gg.WPerp() for instance, found {guess!r}.{hint}")
