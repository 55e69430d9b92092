"""Differences of plain passes against dual numbers, and against a slow twin that runs sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_close, assert_unbiased
from combinations import each
from gaps import GAPS, gap
from gradguess.model.find_sites import lay_out
from gradguess.model.site import Site
from gradguess.passes import choose_pass, finite_pass
from gradguess.passes.finite_pass import INPUT_SHARE
from models import CLASSES, GUESSES, INPUTS, ZOO, Case, cross_entropy, generator, make
from references import sample_gradients
from steps import task_of

KINDS = ("activation", "shared", "weight")


def both(case: Case, twin: Case, guess: Any, **options: Any) -> tuple[gg.Estimate, gg.Estimate]:
    """The estimates along the same directions: by differences, and by dual numbers."""
    finite = gg.estimate(case.model, guess, *case.args, generator=generator(3), derivative="finite", **options)
    return finite, gg.estimate(twin.model, guess, *twin.args, generator=generator(3), **options)


def off(found: Tensor, exact: Tensor) -> Tensor:
    """The error of every number, relative to the root mean square of what is exact."""
    return (found.double() - exact.double()).abs() / exact.double().square().mean().sqrt()


def along(case: Case, est: gg.Estimate) -> Tensor:
    """The derivative of each sample's loss along the directions, by backpropagation: (tangents, batch)."""
    g = sample_gradients(case, est.directions)
    return sum(y.flatten(1).double() @ g[site].flatten(1).double().mT for site, y in est.directions.items())


def assert_near(found: gg.Estimate, exact: gg.Estimate, tolerance: float) -> None:
    assert exact.jvp.abs().max() > 0, "a derivative that is zero shows nothing"
    assert off(found.jvp, exact.jvp).max() < tolerance
    assert_close(found.directions, exact.directions, 1e-6)
    largest = max(float(grad.abs().max()) for grad in exact.grads.values())
    for name, grad in exact.grads.items():
        assert (found.grads[name] - grad).abs().max() < tolerance * largest, name


# --- against dual numbers, in float64 ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), each(ZOO, KINDS))
def test_the_zoo(name, kind):
    """Dropout, buffers, in-place functions, time first, shared outputs, layers that mix samples: all of it."""
    case = make(name)
    options = {"coupling": "batch"} if name == "batch-norm" else {}
    assert_near(*both(case, case, GUESSES[kind], **options), 1e-7)


@pytest.mark.parametrize("options", [{"tangents": 3}, {"isolate": True}, {"balance": True}], ids=str)
@pytest.mark.parametrize("name", ["in-place", "residual", "transformer", "dropout", "gru-time-first"])
def test_ways_to_measure(name, options):
    """Balanced directions are scaled by a one-sided difference, and differ a little."""
    case = make(name)
    finite, exact = both(case, case, gg.WPerp(k=3), **options)
    if "balance" not in options:
        assert_near(finite, exact, 1e-7)
    else:
        for site, grad in exact.site_grads.items():
            assert off(finite.site_grads[site], grad).max() < 3e-6, site


# --- the slow twin -------------------------------------------------------------------------------------------

COARSE = 0.01  # a power that makes steps so large that the result depends on each of them


def rms(t: Tensor) -> float:
    return float(t.square().mean().sqrt())


@torch.no_grad()
def twin_derivative(model: nn.Module, x: Tensor, target: Tensor, ys: dict[str, Tensor], inputs: dict[str, float]):
    """`c` of one sample: the layers one by one, the step by its formula, the loss by autograd."""

    def run(h: float) -> tuple[Tensor, dict[str, Tensor]]:
        s, seen = x, {}
        for name, layer in model.named_children():
            s = layer(s)
            if name in ys:
                seen[name] = s
                s = s + h * ys[name]
        return s, seen

    outputs, seen = run(0.0)
    sizes = {name: max(rms(s), INPUT_SHARE * inputs[name]) for name, s in seen.items()}
    h = torch.finfo(x.dtype).eps ** COARSE / sum((rms(ys[name]) / sizes[name]) ** 2 for name in ys) ** 0.5
    u = (run(h)[0] - run(-h)[0]) / (2 * h)
    with torch.enable_grad():
        end = outputs.requires_grad_()
        (e,) = torch.autograd.grad(cross_entropy(end, target[None])[0], end)
    return (e * u).sum()


def drawn() -> tuple[Any, dict[str, Tensor], dict[str, float]]:
    """Directions by site; they, and the size of the inputs of the layers, are kept."""
    ys: dict[str, Tensor] = {}
    inputs: dict[str, float] = {}

    def draw(site: Site, x: Any, s: Tensor) -> Tensor:
        ys[site.name] = torch.randn(s.shape, generator=generator(len(ys)), dtype=s.dtype)
        inputs[site.name] = rms(x)
        return ys[site.name]

    return draw, ys, inputs


@pytest.mark.parametrize("name", ["relu-bias", "gelu-bias", "in-place"])
def test_the_twin_runs_sample_by_sample(name, monkeypatch):
    """Samples of different size, and a layer that is near zero: each sample has its own step."""
    monkeypatch.setattr(finite_pass, "POWER", COARSE)
    case = make(name)
    case.inputs = case.inputs * torch.logspace(-1, 1, len(case.inputs), dtype=torch.float64)[:, None]
    case.model[2].weight.data *= 0.1
    task = task_of(case)
    draw, ys, inputs = drawn()
    found = choose_pass(task, lay_out(task), finite=True).tangent(draw).jvp
    exact = choose_pass(task, lay_out(task)).tangent(lambda site, x, s: ys[site.name]).jvp
    assert off(found, exact).max() > 1e-5, "the step must show"
    for b, c in enumerate(found):
        own = {site: y[b : b + 1] for site, y in ys.items()}
        expected = twin_derivative(case.model, case.inputs[b : b + 1], case.targets[b], own, inputs)
        torch.testing.assert_close(c, expected, rtol=1e-10, atol=1e-12)


def test_samples_that_mix_have_one_step(monkeypatch):
    """Else the derivative of a sample's loss along the others' directions would be off by the ratio of the steps."""
    case = make("batch-norm")
    case.inputs[0] *= 30
    task, (draw, ys, _) = task_of(case), drawn()
    exact = choose_pass(task, lay_out(task)).tangent(draw).jvp
    for mixes in (False, True):  # buffers that are written are a sign of it
        found = choose_pass(task, lay_out(task), finite=True, mixes=mixes).tangent(lambda site, x, s: ys[site.name]).jvp
        assert off(found, exact).max() < 1e-6


@pytest.mark.parametrize("name", ["gelu-bias", "transformer"])
@pytest.mark.parametrize("zero", [0.0, 1e-9])
def test_a_branch_that_starts_at_zero(name, zero):
    """Its output says nothing about the size of a step, its input does."""
    case = make(name, dtype=torch.float32)
    top = case.model[4] if name == "gelu-bias" else case.model.down
    nn.init.constant_(top.weight, zero)
    nn.init.zeros_(top.bias)
    finite, exact = both(case, case, gg.ActivationPerturbation())
    assert exact.jvp.abs().max() > 0
    assert off(finite.jvp, exact.jvp).max() < 1e-2


# --- accuracy ------------------------------------------------------------------------------------------------

# median and 90 % of the error of c against float64, twice what was measured
BUDGET = {
    ("relu-bias", torch.float32): (4e-5, 1.2e-4),
    ("gelu-bias", torch.float32): (4e-5, 1e-4),
    ("transformer", torch.float32): (1.4e-4, 4e-4),
    ("relu-bias", torch.bfloat16): (0.03, 0.09),
    ("gelu-bias", torch.bfloat16): (0.03, 0.08),
    ("transformer", torch.bfloat16): (0.06, 0.15),
}


@pytest.mark.parametrize(("name", "dtype"), BUDGET, ids=str)
def test_accuracy(name, dtype):
    """Along many directions, with the same rounded weights and inputs in float64."""
    case = make(name, dtype=torch.float32)
    case.model.to(dtype)
    if case.inputs.is_floating_point():
        case.inputs = case.inputs.to(dtype)
    options = {"tangents": 100, "generator": generator(), "derivative": "finite"}
    finite = gg.estimate(case.model, gg.ActivationPerturbation(), *case.args, **options)
    case.model.double()
    if case.inputs.is_floating_point():
        case.inputs = case.inputs.double()
    error, (median, most) = off(finite.jvp, along(case, finite)), BUDGET[name, dtype]
    assert error.median() < median
    assert error.quantile(0.9) < most


@pytest.mark.parametrize("name", ["function without jvp", "kernel without graph"])
def test_the_estimate_is_unbiased(name):
    """White noise at every site, 20,000 draws in float32: the mean is the gradient, within five standard errors."""
    case, twin = gap(name, torch.float32)
    true = sample_gradients(twin, ["0", "4"])
    case.inputs, case.targets = case.inputs[:1].expand(20_000, -1), case.targets[:1].expand(20_000)
    draws = gg.estimate(case.model, gg.ActivationPerturbation(), *case.args, generator=generator(), derivative="finite")
    for site, g in true.items():
        assert_unbiased(draws.site_grads[site].double(), g[0, 0].double())


# --- models through which no tangent can pass ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GAPS)
def test_gaps_in_forward_mode(name, kind):
    dtype, tolerance = (torch.float32, 3e-3) if name == "grouped products" else (torch.float64, 1e-7)  # its kernel's
    case, twin = gap(name, dtype)
    finite, exact = both(case, twin, GUESSES[kind])
    if kind == "shared" and name in ("function without derivatives", "custom operation", "kernel without graph"):
        assert (
            off(finite.jvp, along(twin, finite)).max() < tolerance
        )  # N(0, I) below the gap: not the twin's directions
    else:
        assert_near(finite, exact, tolerance)


@pytest.mark.parametrize("name", GAPS)
def test_dual_numbers_name_the_way_out(name):
    """Where an operation drops its tangent they would be wrong without a word."""
    case, _ = gap(name, torch.float32)
    if name == "flash attention":
        pytest.skip("its tangent has a rule (layers/attention.py)")
    if name == "kernel without graph":
        est = gg.estimate(case.model, gg.ActivationPerturbation(), *case.args)
        assert list(est.directions) == ["4"]
        return
    with pytest.raises(gg.ForwardModeError, match="derivative='finite'"):
        gg.estimate(case.model, gg.ActivationPerturbation(), *case.args)


def test_a_tangent_that_is_lost_in_the_loss():
    case, _ = gap("custom operation")
    model = nn.Sequential(nn.Linear(INPUTS, CLASSES)).double()

    def opaque(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.ops.gradguess_tests.tanh(cross_entropy(outputs, targets))

    with pytest.raises(gg.ForwardModeError, match=r"No tangent arrived at the loss.*derivative='finite'"):
        gg.ForwardGradient(model, gg.ActivationPerturbation())(opaque, *case.args[1:])
    other = Case(model, case.inputs, case.targets, lambda outputs, targets: cross_entropy(outputs, targets).tanh())
    case = Case(model, case.inputs, case.targets, opaque)
    assert_near(*both(case, other, gg.ActivationPerturbation()), 1e-6)


# --- what is refused -----------------------------------------------------------------------------------------


class Chooses(nn.Module):
    """Calls one layer or the other, as the activations say; the choice turns with a small step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(INPUTS, 7), nn.Linear(7, CLASSES), nn.Linear(7, CLASSES)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        s = self.first(x)
        return self.left(s) if s.sum() >= 0 else self.right(s)


def test_calls_that_depend_on_the_activations():
    case = make("relu-bias")
    with pytest.raises(gg.InputError, match=r"control flow depends on them.*sites="):
        gg.estimate(Chooses().double(), gg.ActivationPerturbation(), *case.args, derivative="finite")
