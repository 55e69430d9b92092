"""Sites below operations that have no derivative in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gaps import NoDerivative, numpy_tanh, opaque_tanh
from gradguess.model.find_sites import lay_out
from gradguess.model.task import Task
from models import CLASSES, INPUTS, Calls, Net, cross_entropy, generator


def gapped(function) -> nn.Module:
    """A residual branch with a gap in it, a layer whose output nobody uses, and dropout."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.relu(m.stem(x))
        m.idle(x)
        return m.head(m.drop(x + m.b(m.gap(torch.tanh(m.a(x))))))

    branch = {"stem": nn.Linear(INPUTS, 7), "a": nn.Linear(7, 7), "b": nn.Linear(7, 7), "gap": Calls(function)}
    return Net(run, **branch, idle=nn.Linear(7, 7), drop=nn.Dropout(0.3), head=nn.Linear(7, CLASSES))


def task_with(function) -> Task:
    torch.manual_seed(0)
    model = gapped(function).double()
    return Task(model, cross_entropy, torch.randn(5, INPUTS).double(), torch.randint(CLASSES, (5,)))


@pytest.mark.parametrize("sites", ["auto", "leaf"])
@pytest.mark.parametrize("function", [numpy_tanh, opaque_tanh, NoDerivative.apply], ids=["numpy", "custom", "function"])
def test_a_site_below_a_gap_is_a_top(function, sites):
    """A unit of the branch below the gap is a site of its own: no vjp leads to it from the branch's end."""
    layout = lay_out(task_with(function), sites, beyond_graph=True)
    names = [site.name for site in layout.sites]
    assert names == ["stem", "a", "b", "head"] if sites == "leaf" or function is numpy_tanh else ["stem", "b", "head"]
    if "a" in names:
        assert layout["a"].severed
        assert layout["a"].parameters == ("a.weight", "a.bias")
    assert not layout["b"].severed
    assert not any("idle.weight" in site.parameters for site in layout.sites)


def test_a_gap_at_the_very_end():
    """Not even the losses have a graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 7), nn.ReLU(), nn.Linear(7, CLASSES), Calls(numpy_tanh)).double()
    twin = nn.Sequential(*model[:3], nn.Tanh())
    batch = cross_entropy, torch.randn(5, INPUTS).double(), torch.randint(CLASSES, (5,))
    found = gg.estimate(model, gg.WPerp(k=3), *batch, generator=generator(), derivative="finite")
    exact = gg.estimate(twin, gg.WPerp(k=3), *batch, generator=generator())
    assert list(found.directions) == ["0", "2"]
    assert not any(site.is_output for site in lay_out(Task(model, *batch), beyond_graph=True).sites)
    torch.testing.assert_close(found.jvp, exact.jvp, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.grads["0.weight"], exact.grads["0.weight"], rtol=1e-6, atol=1e-8)
