"""With `memory="store"` the model is called once: values with a reverse graph, cut at the sites, and their tangents."""

from __future__ import annotations

import copy

import pytest
import torch

import gradguess as gg
from asserts import assert_same
from models import ZOO, make


def step(case, memory: str, guess=None, **options) -> tuple[int, dict[str, torch.Tensor], gg.ForwardGradient]:
    """How often the model was called in the second step, and its gradients."""
    model = copy.deepcopy(case.model)
    forward = gg.ForwardGradient(model, guess or gg.WTranspose(), memory=memory, **options)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    torch.manual_seed(0)
    forward(case.loss_fn, case.inputs, case.targets)  # it finds the sites
    calls.clear()
    model.zero_grad()
    torch.manual_seed(1)
    forward(case.loss_fn, case.inputs, case.targets)
    return len(calls), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, forward


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_one_call_of_the_model(name):
    """The gradients are those of `memory="replay"`, which calls it twice."""
    case = make(name)
    guess = gg.ActivationPerturbation()  # reads no Jacobian, so that nothing else calls the model
    once, kept, forward = step(case, "store", guess)
    _, again, _ = step(case, "replay", guess)
    assert once == (1 if forward.layout.sites else once)
    assert_same(kept, again)
