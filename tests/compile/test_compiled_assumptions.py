"""What changes between two steps acts on compiled ones, and what comes back finds its graph again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.compile import compiler
from traced_graphs import as_compiled

SCALE, TABLE = 1.0, {"gain": 1.0}
SETTINGS = ModuleType("settings")
SETTINGS.bias = 0.0  # type: ignore[attr-defined]
CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")


def doubled(x: Tensor) -> Tensor:
    return 2 * x * TABLE["gain"]


class Options:
    power = 1.0


class Net(nn.Module):
    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = nn.Linear(5, 8), nn.Linear(8, 3)
        self.factor, self.factors = 1.0, [1.0]
        self.config = SimpleNamespace(gain=1.0, inner=SimpleNamespace(gain=1.0))
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def middle(self, x: Tensor) -> Tensor:
        return doubled(x) * self.config.inner.gain + SETTINGS.bias  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.act(self.low(x)) * self.factor * self.factors[0] * self.config.gain)
        return self.high(h * self.slope * Options.power) * SCALE


class Loop:
    def __init__(self, compile: bool) -> None:
        self.model = Net().double()
        self.forward = gg.ForwardGradient(self.model, gg.WTranspose(), compile=compile)
        self.loss_fn: Any = CROSS_ENTROPY
        self.x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.t = torch.arange(6) % 3

    def step(self) -> tuple[float, Tensor]:
        self.model.zero_grad()
        loss = self.forward(self.loss_fn, self.x, self.t)
        grads = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return float(loss), torch.cat(grads)


@pytest.fixture(autouse=True)
def _graphs_alone(monkeypatch):
    monkeypatch.setattr(compiler, "compiled", as_compiled)


def smoothed(weight: float, outputs: Tensor, targets: Tensor) -> Tensor:
    return CROSS_ENTROPY(outputs, targets) * weight


def of_closure(weight: float) -> Any:
    return lambda outputs, targets: CROSS_ENTROPY(outputs, targets) * weight


CHANGES: dict[str, Callable[[Loop, pytest.MonkeyPatch], Any]] = {
    "attribute": lambda loop, patch: setattr(loop.model, "factor", 2.0),
    "list": lambda loop, patch: loop.model.factors.__setitem__(0, 2.0),
    "configuration": lambda loop, patch: setattr(loop.model.config, "gain", 2.0),
    "inner configuration": lambda loop, patch: setattr(loop.model.config.inner, "gain", 2.0),
    "function": lambda loop, patch: setattr(loop.model, "act", torch.tanh),
    "class attribute": lambda loop, patch: patch.setattr(Net, "slope", 2.0),
    "attribute of a class": lambda loop, patch: patch.setattr(Options, "power", 2.0),
    "attribute over that of the class": lambda loop, patch: setattr(loop.model, "slope", 2.0),
    "global": lambda loop, patch: patch.setitem(globals(), "SCALE", 2.0),
    "global of a helper": lambda loop, patch: patch.setitem(TABLE, "gain", 2.0),
    "helper": lambda loop, patch: patch.setitem(globals(), "doubled", lambda x: 3 * x),
    "module of settings": lambda loop, patch: patch.setattr(SETTINGS, "bias", 0.5),
    "loss": lambda loop, patch: setattr(loop, "loss_fn", nn.CrossEntropyLoss(reduction="none", label_smoothing=0.3)),
    "closure of the loss": lambda loop, patch: setattr(loop, "loss_fn", of_closure(2.0)),
    "partial": lambda loop, patch: setattr(loop, "loss_fn", partial(smoothed, 2.0)),
    "default dtype": lambda loop, patch: torch.set_default_dtype(torch.float64),
    "nothing": lambda loop, patch: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_acts(name):
    found = []
    for compile in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            loop, before = Loop(compile), torch.get_default_dtype()
            try:
                seen = [loop.step() for _ in range(3)]
                CHANGES[name](loop, patch)
                seen += [loop.step() for _ in range(3)]
            finally:
                torch.set_default_dtype(before)
        found.append(seen)
    assert loop.forward.plan.runner._graphs
    assert not loop.forward.plan.runner.refused
    for (loss, grads), (expected, expected_grads) in zip(found[1], found[0], strict=True):
        assert loss == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-12)


def test_freezing_to_and_fro_keeps_both_graphs():
    loops = [Loop(False), Loop(True)]
    for i in range(100):
        for loop in loops:
            loop.model.low.weight.requires_grad_(i % 2 == 0)
        (_, expected), (_, found) = (loop.step() for loop in loops)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    runner = loops[1].forward.plan.runner
    assert not runner.refused
    assert len(runner._graphs) == 2


def test_a_loss_that_is_made_anew_at_every_step_finds_its_graph():
    loop = Loop(True)
    for _ in range(70):
        loop.loss_fn = of_closure(2.0)
        loop.step()
    assert len(loop.forward.plan.runner._graphs) == 1


def test_what_changes_at_every_step_is_named(monkeypatch):
    monkeypatch.setattr(compiler, "MOST", 5)
    loop = Loop(True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(12):
            loop.model.factor = 1.0 + i
            loop.step()
    assert [str(one.message) for one in told] == [
        "compile=True has no effect. 5 steps were each of another kind: 'factor' of Net was the last to change. Steps "
        "run uncompiled, with the same result."
    ]
