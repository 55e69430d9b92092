"""Checks that need nothing of gradguess but its results: differences of plain passes, autograd, and a second way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

import gradguess as gg
from gradguess.methods import Method
from models import Case, generator
from references import gradients, parse_site, visited
from steps import layout_of, oracle, task_of

STEPS = {1e-6: 1e-6, 1e-8: 1e-5}  # of a central difference, and its tolerance; a kink may lie within the long one
GUESSES: dict[str, gg.Guess | Method] = {
    "activation": gg.ActivationPerturbation(),
    "wperp": gg.WPerp(k=3),
    "weight": gg.WeightPerturbation(),
}


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number or 1."""
    assert found.shape == wanted.shape
    if not found.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))


def seeded(case: Case, function: Callable[[], Any]) -> Any:
    """What the function returns; every call sees the same masks and buffers, also those that a model replaces."""
    before = [(m, name, b, b.clone()) for m in case.model.modules() for name, b in m._buffers.items() if b is not None]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = function()
    for module, name, buffer, value in before:
        module._buffers[name] = buffer
        buffer.data.copy_(value)
    return found


# --- the directional derivative ------------------------------------------------------------------------------


@contextmanager
def moved(case: Case, est: gg.Estimate, step: float) -> Iterator[None]:
    """While open, parameters or the outputs of sites are `step` directions away from where they were."""
    parameters = dict(case.model.named_parameters())
    if est.directions.keys() <= parameters.keys():
        before = {name: parameters[name].data for name in est.directions}
        for name, y in est.directions.items():
            parameters[name].data = before[name] + step * y[0]
        yield
        for name, value in before.items():
            parameters[name].data = value
        return
    modules = dict(case.model.named_modules())
    slots = seeded(case, lambda: {site.name: site.slot for site in layout_of(case).sites})
    parsed = {name: parse_site(name) for name in est.directions}
    places = ((est.directions[n][0], modules[m], call, slots[n]) for n, (m, call) in parsed.items())
    with visited(places, lambda y, s: s + step * y):
        yield


def difference(case: Case, est: gg.Estimate, step: float) -> Tensor:
    """The derivative of each sample's loss along the directions, from two plain passes."""
    ends = []
    for side in (step, -step):
        with moved(case, est, side):
            ends.append(seeded(case, case.losses).detach())
    return (ends[0] - ends[1]) / (2 * step)


def has_forward_mode(case: Case) -> bool:
    """Whether PyTorch carries tangents from all parameters to the losses, or complains."""

    def run() -> None:
        with fwAD.dual_level():
            own = case.model.named_parameters()
            outputs = task_of(case).outputs({name: fwAD.make_dual(p.detach(), torch.ones_like(p)) for name, p in own})
            case.loss_fn(outputs, case.targets)

    try:
        seeded(case, run)
    except NotImplementedError:
        return False
    return True


def check_derivative(case: Case) -> None:
    """What each guess measures is a central difference.

    `gg.ForwardModeError` may be raised where PyTorch has no forward mode. Its way out is then as near.
    """
    for name, guess in GUESSES.items():

        def estimate(guess: Any = guess, **options: Any) -> gg.Estimate:
            return gg.estimate(case.model, guess, *case.args, generator=generator(), **options)

        try:
            est = seeded(case, estimate)
        except gg.ForwardModeError:
            assert not has_forward_mode(case), f"{name}: refused without need"
            est = seeded(case, lambda: estimate(derivative="finite"))
        assert est.jvp.abs().max() > 0, "a derivative that is zero shows nothing"
        errors = {step: relative(est.jvp[0], difference(case, est, step)) for step in STEPS}
        assert any(errors[step] < tolerance for step, tolerance in STEPS.items()), f"{name}: off by {errors}"


# --- gradients -----------------------------------------------------------------------------------------------


def check_backprop(case: Case) -> None:
    """`gg.Backprop` gives autograd's losses and gradients."""
    est = seeded(case, lambda: gg.estimate(case.model, gg.Backprop(), *case.args))
    parameters = {name: p for name, p in case.model.named_parameters() if p.requires_grad}

    def reference() -> tuple[Tensor, tuple[Tensor | None, ...]]:
        losses = case.losses()
        return losses, torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)

    losses, grads = seeded(case, reference)
    assert relative(est.losses, losses.detach()) < 1e-10
    assert est.grads.keys() == parameters.keys()
    for (name, p), grad in zip(parameters.items(), grads, strict=True):
        assert relative(est.grads[name], torch.zeros_like(p) if grad is None else grad) < 1e-10, name


def steps(case: Case, **options: Any) -> dict[str, Tensor]:
    """The gradients of two steps of `gg.ForwardGradient`, added up, and the buffers that they leave."""

    def run() -> dict[str, Tensor]:
        forward = gg.ForwardGradient(case.model, GUESSES["wperp"], seed=7, **options)
        for _ in range(2):
            forward(*case.args)
        found = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
        case.model.zero_grad()
        return found | {name: buffer.clone() for name, buffer in case.model.named_buffers()}

    return seeded(case, run)


def check_steps(case: Case, **options: Any) -> None:
    """Steps with these options are the steps without them."""
    try:
        plain = steps(case)
    except gg.ForwardModeError:
        assert not has_forward_mode(case), "refused without need"
        options["derivative"] = "finite"
        plain = steps(case, derivative="finite")
    other = steps(case, **options)
    assert plain.keys() == other.keys()
    for name, value in plain.items():
        assert relative(other[name], value) < 1e-8, name


def check_chain(case: Case) -> None:
    """True errors at the sites give autograd's gradients by every layer's own rule, and so do chained sweeps."""
    expected = seeded(case, lambda: gradients(case))
    found = [seeded(case, lambda: oracle(case, "leaf"))]
    method = gg.Feedback(GUESSES["activation"], sweeps=1 + len(seeded(case, lambda: layout_of(case, "leaf").sites)))
    try:
        found.append(seeded(case, lambda: gg.estimate(case.model, method, *case.args, sites="leaf")).grads)
    except gg.ForwardModeError:
        assert not has_forward_mode(case), "refused without need"
    for grads in found:
        for name, grad in expected.items():
            assert relative(grads[name], grad) < 1e-9, name


CHECKS: dict[str, Callable[[Case], None]] = {
    "derivative": check_derivative,
    "backprop": check_backprop,
    "chain": check_chain,
    "replay": lambda case: check_steps(case, memory="replay"),
}
