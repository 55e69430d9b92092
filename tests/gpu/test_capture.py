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
    model: nn.Module, method: Any, *, captured: bool, steps: int = STEPS, noisy: bool = False, **options: Any
) -> tuple[Tensor, Tensor, gg.CapturedStep]:
    """The losses of some steps, captured or made one by one, and all that they leave behind."""
    forward = gg.ForwardGradient(model, method, **options)
    rate = torch.tensor(1e-3, device="cuda")  # a captured step puts its rate into a tensor, which rounds it
    optimiser: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    if noisy:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    step = gg.CapturedStep(forward, optimiser, loss_fn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream.*")
        losses = [float(step(*batch(64)) if captured else step._step(*batch(64))) for _ in range(steps)]
    left = [*model.parameters(), *model.buffers(), *(t for one in forward.learned.values() for t in one.values())]
    return torch.tensor(losses), torch.cat([t.detach().flatten().double() for t in left]), step


@pytest.mark.parametrize(("network", "method"), CASES)
def test_captured_equals_eager(network: str, method: str):
    waits = method in ("wperp-svd", "wperp-bottom", "wperp-ns")
    steps = 5 if waits else STEPS  # those that wait for the device take long, and are not recorded
    _, eager, _ = trained(make(network), METHODS[method](), captured=False, steps=steps)
    _, replayed, step = trained(make(network), METHODS[method](), captured=True, steps=steps)
    assert torch.isfinite(eager).all()
    assert torch.equal(eager, replayed)
    assert bool(step.captured) != waits


@pytest.mark.parametrize("method", ["wperp", "rare"])
def test_compiled_steps_are_captured(method: str):
    _, eager, _ = trained(make("residual"), METHODS[method](), captured=False, compile=True)
    _, replayed, step = trained(make("residual"), METHODS[method](), captured=True, compile=True)
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


NOISY = {
    "dropout": lambda: nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)),
    "batch norm": lambda: nn.Sequential(nn.Linear(40, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)),
}
KINDS: dict[str, tuple[Any, dict[str, Any], bool]] = {  # a method, options, and whether its steps are recorded
    "eager": (lambda: gg.WPerp(refresh=5), {}, False),
    "compiled": (lambda: gg.WPerp(refresh=5), {"compile": True}, True),
    "backprop": (gg.Backprop, {"sites": ["0", "3"]}, True),
    "loss": (gg.Students, {"sites": ["0", "3"]}, True),
    "loss chained": (lambda: gg.Students(form="chained"), {"sites": ["0", "3"]}, True),
    "error": (lambda: gg.Students(signal="error"), {"sites": ["0", "3"]}, True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", NOISY)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_noisy_models_are_recorded_if_compiled_or_run_once(network: str, kind: str):
    """Nothing has to be put back for another pass."""
    method, options, recorded = KINDS[kind]
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        losses, left, step = trained(NOISY[network]().cuda(), method(), captured=captured, noisy=True, **options)
        assert len(set(losses.tolist())) == len(losses)
        found.append((losses, left))
    assert bool(step.captured) == recorded
    if network != "dropout":  # a recording draws its own numbers from the global generator
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_students_of_tangents_are_recorded():
    method = gg.Students(signal="error", learn=("outputs", "chain", "tangents"))
    found = [trained(make("chain"), method, captured=captured) for captured in (False, True)]
    assert found[1][2].captured
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)
