"""`gg.LocalGuess`: its directions, and the law of its estimate, by statistics with a budget of five standard errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import SIGMAS
from models import generator
from pieces import BATCH, CLASSES, WIDTH, batch_of, cross_entropy, model_of, small

DRAWS = 4000
SITES = ["1", "3", "8"]


def local_gradients(model: nn.Sequential, x: Tensor, t: Tensor, seed: int) -> dict[str, Tensor]:
    """`h` at every site from the definition: students from their seeds, the loss itself at the output."""
    found = {}
    for index, name in enumerate(SITES):
        s = model[: int(name) + 1](x).detach().requires_grad_()
        torch.manual_seed(seed + index)
        student = nn.Identity() if name == "8" else small((WIDTH,), (CLASSES,)).double()
        (found[name],) = torch.autograd.grad(cross_entropy(student(s), t).sum(), s)
    return found


@pytest.fixture(scope="module")
def drawn() -> tuple[gg.Estimate, dict[str, Tensor], dict[str, Tensor]]:
    """Many directions at the same samples, each a row of its own; the local gradients, and the true ones."""
    model, (x, t) = model_of(), batch_of()
    h = local_gradients(model, x, t, 4)
    rows = x.repeat(DRAWS, 1), t.repeat(DRAWS)
    est = gg.estimate(model, gg.LocalGuess(small), cross_entropy, *rows, sites=SITES, generator=generator(4))
    est.jvp = est.jvp.view(DRAWS, BATCH)
    est.directions = {name: y.view(DRAWS, BATCH, -1) for name, y in est.directions.items()}
    return est, h, gg.estimate(model, gg.Backprop(), cross_entropy, x, t, sites=SITES).site_grads


def test_directions_lie_along_the_local_gradients(drawn):
    est, h, _ = drawn
    for name in SITES:
        u = h[name] / h[name].norm(dim=1, keepdim=True)
        signs = (est.directions[name] * u).sum(-1)  # (draws, batch)
        torch.testing.assert_close(signs.abs(), torch.ones_like(signs))
        torch.testing.assert_close(est.directions[name], signs[..., None] * u)


def test_signs_are_independent_of_each_other(drawn):
    est, h, _ = drawn
    signs = torch.cat([(est.directions[name] * h[name]).sum(-1).sign() for name in SITES], 1)  # (draws, sites × batch)
    assert signs.shape == (DRAWS, len(SITES) * BATCH)
    bound = SIGMAS / DRAWS**0.5
    assert signs.mean(0).abs().max() < bound
    correlation = signs.T @ signs / DRAWS - torch.eye(signs.shape[1], dtype=signs.dtype)
    assert correlation.abs().max() < bound


def test_the_mean_is_the_projection_and_the_variance_that_of_the_other_sites(drawn):
    """`E[c y_i] = u_i u_iᵀ g_i`; along `u_i` the variance is `Σ_{j≠i} <u_j, g_j>²`, and nothing lies across it."""
    est, h, g = drawn
    u = {name: h[name] / h[name].norm(dim=1, keepdim=True) for name in SITES}
    along = {name: (u[name] * g[name]).sum(1) for name in SITES}
    for name in SITES:
        sample = est.jvp[..., None] * est.directions[name]  # (draws, batch, d)
        wanted = along[name][:, None] * u[name]
        error = sample.std(0) / DRAWS**0.5
        assert ((sample.mean(0) - wanted).abs() <= SIGMAS * error + 1e-12).all()
        along_u = (sample * u[name]).sum(-1)
        variance = sum(along[other].square() for other in SITES if other != name)
        squares = (along_u - along[name]).square()
        spread = squares.std(0) / DRAWS**0.5
        assert ((squares.mean(0) - variance).abs() <= SIGMAS * spread + 1e-12).all()
        torch.testing.assert_close(sample, along_u[..., None] * u[name])
    torch.testing.assert_close(g["8"], along["8"][:, None] * u["8"])  # exact in the mean at the output


def test_students_learn_from_their_own_loss():
    """The update is that of `gg.Students`, whose signal is the same loss."""
    x, t = batch_of()
    for steps in (1, 3):
        learned = []
        for method in (gg.LocalGuess(small), gg.Students(small)):
            forward = gg.ForwardGradient(model_of(), method, sites=SITES, tangents=2 if steps == 1 else 1)
            for _ in range(steps):  # on one batch with weights that stay
                forward(cross_entropy, x, t)
            learned.append(torch.cat([entries["weights"] for entries in forward.learned.values()]))
        torch.testing.assert_close(*learned)
