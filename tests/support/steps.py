"""One step by hand: the parts that `run_step` puts together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import gradguess as gg
from gradguess.methods import Method
from gradguess.methods.guessed import as_method
from gradguess.methods.run import Plan, refreshed
from gradguess.model.find_sites import lay_out
from gradguess.model.site import Layout, Sites
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import choose_pass
from gradguess.step.base import Options, State, Step
from gradguess.step.measure import Drawing, measure
from gradguess.step.pull_back import pull_back
from models import Case, generator
from references import no_trace, sample_gradients


def task_of(case: Case) -> Task:
    return Task(case.model, *case.args)


def layout_of(case: Case, sites: Sites = "auto") -> Layout:
    return lay_out(task_of(case), sites)


def step_of(
    case: Case,
    method: gg.Guess | Method | None = None,
    *,
    learned: Mapping[str, Any] | None = None,
    state: State | None = None,
    seed: int = 0,
    sites: Sites = "auto",
    layout: Layout | None = None,
    **options: Any,
) -> Step:
    """A step with details, before which `method` has searched."""
    task, chosen = task_of(case), Options(**options)
    layout = lay_out(task, sites) if layout is None else layout
    state = State(learned=learned or {}) if state is None else state
    if method is not None:
        plan = Plan(as_method(method), sites, chosen)
        with no_trace(case.model):
            state = refreshed(plan, task, [task], layout, torch.device("cpu"), state)
    return Step(task, layout, choose_pass(task, layout), Noise(generator(seed)), chosen, state)


def oracle(case: Case, sites: Sites = "auto", *, stored: bool = False) -> dict[str, Tensor]:
    """Parameter gradients from the *true* gradient at each site: must be backpropagation's."""
    layout = layout_of(case, sites)
    true = sample_gradients(case, [s.name for s in layout.sites], {s.name: s.slot for s in layout.sites})
    step = step_of(case, layout=layout)
    with no_trace(case.model):
        records = measure(Drawing(step, gg.ActivationPerturbation())).records if stored else {}
        grads = pull_back(step, lambda site, s: true[site.name].mean(0), records)
    return {n: grads.get(n, torch.zeros_like(p)) for n, p in case.model.named_parameters() if p.requires_grad}
