"""A captured step is the same step: bit for bit what the calls give one by one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gpu_networks import CASES, METHODS, batch, loss_fn, make

STEPS = 30  # enough that each kind of step is replayed after another kind, in memory that both use


def trained(
    network: str, method: Any, captured: bool, compile: bool = False, steps: int = STEPS
) -> tuple[Tensor, gg.CapturedStep]:
    model = make(network)
    forward = gg.ForwardGradient(model, method, compile=compile)
    rate = torch.tensor(1e-3, device="cuda")  # a captured step puts its rate into a tensor, which rounds it
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    step, data = gg.CapturedStep(forward, optimiser, loss_fn), batch(64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
        for _ in range(steps):
            if captured:
                step(*data)
            else:
                optimiser.zero_grad()
                forward.step(loss_fn, *data, nonfinite="ignore")
                optimiser.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), step


@pytest.mark.parametrize(("network", "method"), CASES)
def test_captured_equals_eager(network: str, method: str):
    waits = method in ("wperp-subspace", "wperp-svd", "wperp-bottom", "wperp-ns")
    steps = 5 if waits else STEPS  # those that wait for the device take long, and are not recorded
    eager, _ = trained(network, METHODS[method](), captured=False, steps=steps)
    replayed, step = trained(network, METHODS[method](), captured=True, steps=steps)
    assert torch.isfinite(eager).all()
    assert torch.equal(eager, replayed)
    assert bool(step.captured) != waits


@pytest.mark.parametrize("method", ["wperp", "rare"])
def test_compiled_steps_are_captured(method: str):
    eager, _ = trained("residual", METHODS[method](), captured=False, compile=True)
    replayed, step = trained("residual", METHODS[method](), captured=True, compile=True)
    assert torch.equal(eager, replayed)
    assert step.captured
    assert step.forward.plan.runner._graphs


def test_a_state_that_is_loaded_reaches_the_recording():
    model, data = make("chain"), batch()
    forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(refresh=5)))
    step = gg.CapturedStep(forward, torch.optim.AdamW(model.parameters(), lr=0.0, capturable=True), loss_fn)
    for _ in range(12):
        step(*data)
    saved = forward.state_dict()
    step(*data)
    expected = {name: entries["B"].clone() for name, entries in forward.learned.items()}
    for _ in range(3):
        step(*data)
    forward.load_state_dict(saved)
    step(*data)
    assert all(torch.equal(B, forward.learned[name]["B"]) for name, B in expected.items())


def test_a_recording_takes_no_more_memory_with_time():
    model, data = make("chain"), batch()
    forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(refresh=10)))
    step = gg.CapturedStep(forward, torch.optim.AdamW(model.parameters(), capturable=True), loss_fn)
    for _ in range(60):
        step(*data)
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        step(*data)
    assert torch.cuda.memory_allocated() <= before


def test_dropout_is_not_recorded():
    model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)).cuda()
    forward = gg.ForwardGradient(model, gg.WPerp())
    step = gg.CapturedStep(forward, torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True), loss_fn)
    losses = [float(step(*batch())) for _ in range(8)]
    assert not step.captured
    assert len(set(losses)) == len(losses)


NOISY = {
    "dropout": lambda: nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)),
    "batch norm": lambda: nn.Sequential(nn.Linear(40, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)),
}


@pytest.mark.parametrize("network", NOISY)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_a_compiled_step_of_a_noisy_model_is_recorded(network: str):
    """Eager, the same compiled, and replayed: the losses agree to rounding, as do the buffers."""
    found = []
    for compile, capture in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        model = NOISY[network]().cuda()
        forward = gg.ForwardGradient(model, gg.WPerp(refresh=5), compile=compile)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        optimiser.param_groups[0]["capturable"] = True
        step, losses = gg.CapturedStep(forward, optimiser, loss_fn), []
        for _ in range(STEPS):
            if capture:
                losses.append(float(step(*batch())))
            else:
                optimiser.zero_grad()
                losses.append(float(forward.step(loss_fn, *batch(), nonfinite="ignore")))
                optimiser.step()
        assert bool(step.captured) == capture
        state = torch.cat([b.detach().flatten().double() for b in model.buffers()] or [torch.zeros(1).cuda()])
        found.append((torch.tensor(losses), state))
    for losses, state in found[1:]:
        if network != "dropout":  # a recording draws its own numbers from the global generator
            torch.testing.assert_close(losses, found[0][0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(state, found[0][1], rtol=1e-3, atol=1e-4)
        assert len(set(losses.tolist())) == len(losses)


STUDENTS = {
    "backprop": gg.Backprop,
    "loss": gg.Students,
    "loss chained": lambda: gg.Students(form="chained"),
    "error": lambda: gg.Students(signal="error"),
}


@pytest.mark.parametrize("method", STUDENTS)
@pytest.mark.parametrize("network", NOISY)
def test_a_method_that_runs_the_model_once_is_recorded(network: str, method: str):
    """With batch norm and dropout, uncompiled: nothing has to be put back for another pass."""
    found = []
    for capture in (False, True):
        torch.manual_seed(0)
        model = NOISY[network]().cuda()
        forward = gg.ForwardGradient(model, STUDENTS[method](), sites=["0", "3"])
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        optimiser.param_groups[0]["capturable"] = True
        step, losses = gg.CapturedStep(forward, optimiser, loss_fn), []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
            for _ in range(STEPS):
                if capture:
                    losses.append(float(step(*batch())))
                else:
                    optimiser.zero_grad()
                    losses.append(float(forward.step(loss_fn, *batch(), nonfinite="ignore")))
                    optimiser.step()
        assert bool(step.captured) == capture
        weights = [entries["weights"] for entries in forward.learned.values()]
        state = torch.cat([b.detach().flatten().float() for b in (*model.parameters(), *model.buffers(), *weights)])
        assert len(set(losses)) == len(losses)
        found.append(state)
    if network != "dropout":  # a recording draws its own numbers from the global generator
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_students_of_tangents_are_recorded():
    found = []
    for capture in (False, True):
        model = make("chain")
        forward = gg.ForwardGradient(model, gg.Students(signal="error", learn=("outputs", "chain", "tangents")))
        step = gg.CapturedStep(forward, torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True), loss_fn)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
            for _ in range(STEPS):
                step(*batch(64)) if capture else step._step(*batch(64))
        assert bool(step.captured) == capture
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
