"""Where rivals are run: without gradients, in half precision, compiled, diagnosed."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import gradguess as gg
from combinations import each
from gradguess.compile import compiler
from models import Case, make
from traced_graphs import as_compiled

RIVALS = {name: getattr(gg.baselines, name)() for name in gg.baselines.__all__}
MODELS = ["residual", "batch-norm", "dropout"]


def gradients(case: Case, method: gg.methods.Method, steps: int = 1, **options) -> list[torch.Tensor]:
    model = copy.deepcopy(case.model)
    torch.manual_seed(0)
    forward = gg.ForwardGradient(model, method, sites=2, **options)
    for _ in range(steps):
        model.zero_grad()
        forward(*case.args)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("name", "model"), each(RIVALS, MODELS))
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_gradients_need_not_be_enabled(model, name):
    case = make(model)
    expected = gradients(case, RIVALS[name], steps=2)
    with torch.no_grad():
        found = gradients(case, RIVALS[name], steps=2)
    assert found
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "model"), each(RIVALS, MODELS))
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_compiled_steps_are_the_same(model, name, monkeypatch):
    monkeypatch.setattr(compiler, "compiled", as_compiled)  # the trace alone, without a compiler
    case = make(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile=True")  # no step is refused
        found = gradients(case, RIVALS[name], steps=4, compile=True)
    for a, b in zip(found, gradients(case, RIVALS[name], steps=4), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", RIVALS)
def test_half_precision_by_autocast(name):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    forward = gg.ForwardGradient(model, RIVALS[name], sites=3)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            loss = forward(nn.CrossEntropyLoss(reduction="none"), torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0]))
    assert math.isfinite(loss)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert {g.dtype for g in found} == {torch.float32}
    assert all(torch.isfinite(g).all() for g in found)


@pytest.mark.parametrize("name", [name for name in RIVALS if name != "MeZO"])
def test_they_can_be_diagnosed(name):
    case = make("relu-bias")
    report = gg.diagnose(case.model, RIVALS[name], *case.args, curve=False)
    assert report["4"].cosine == pytest.approx(1.0)  # the output has its exact gradient
