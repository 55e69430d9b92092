"""Random networks × guess × options against dense references, and what they have shown, each by itself.

More of them by hand: `GRADGUESS_CASES=10000 pytest tests/test_random_networks.py -k test_random_networks`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gradguess as gg
from asserts import photograph
from network_checks import check, close, same
from random_networks import Case, make_case

CASES, GROUP = int(os.environ.get("GRADGUESS_CASES", "120")), 20
FIRST = 10_000_000  # runs by hand begin at zero


@pytest.mark.parametrize("group", range(CASES // GROUP))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_networks(group: int) -> None:
    broken = []
    for seed in range(FIRST + group * GROUP, FIRST + (group + 1) * GROUP):
        try:
            check(make_case(seed))
        except Exception as error:
            broken.append(f"{type(error).__name__}: {error}\n{make_case(seed)}")
    assert not broken, "\n\n".join(broken)


def plain_cases(first: int, count: int) -> list[Case]:
    """Guesses at sites, on networks whose samples do not mix and that any precision can run."""
    found, seed = [], first
    while len(found) < count:
        case = make_case(seed)
        mixes = {"batch norm", "parametrised", "in place", "changed input"} & case.features
        if isinstance(case.method, gg.Guess) and not mixes and not isinstance(case.sites, int | list):
            found.append(case)
        seed += 1
    return found


def seeded(case: Case, loss_fn: Any) -> gg.Estimate:
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1)
    return gg.estimate(case.model, case.method, loss_fn, case.inputs, case.targets, sites=case.sites, generator=source)


def test_estimates_are_linear_in_the_loss() -> None:
    """Directions know nothing of the loss, nor a sample of another's."""
    for case in plain_cases(500, 12):
        one = seeded(case, case.loss_fn)
        two = seeded(case, lambda o, t, f=case.loss_fn: 2 * f(o, t))
        close("linear in the loss", two.grads, {name: 2 * g for name, g in one.grads.items()}, 1e-7)

        def first(o: Any, t: Any, f: Any = case.loss_fn) -> Tensor:
            losses = f(o, t)
            return losses * (torch.arange(len(losses)) == 0)

        alone = seeded(case, first)
        close("one sample: derivative", alone.jvp[:, 0], one.jvp[:, 0], 1e-7)
        assert not alone.jvp[:, 1:].any(), str(case)


# --- what they have shown ------------------------------------------------------------------------------------

squares = lambda outputs, targets: outputs.square().flatten(1).mean(1)  # noqa: E731


def source() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def batch(rows: int = 5, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width).double(), torch.zeros(rows)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.LeakyReLU, nn.ReLU, nn.ELU])
@pytest.mark.parametrize("method", [gg.ActivationPerturbation(), gg.WTranspose()])
def test_an_in_place_function_leaves_the_direction_alone(activation: Any, method: Any) -> None:
    """The tangent of the first site was the kept direction itself, and the function behind it wrote to it."""
    x, t = batch()
    layers = nn.Sequential(nn.Linear(4, 6), activation(inplace=True), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    found = gg.estimate(layers, method, squares, x, t, generator=source())
    layers[1] = activation()
    wanted = gg.estimate(layers, method, squares, x, t, generator=source())
    for site, y in wanted.directions.items():
        torch.testing.assert_close(found.directions[site], y, rtol=0, atol=1e-12)
    for name, g in wanted.grads.items():
        torch.testing.assert_close(found.grads[name], g, rtol=0, atol=1e-12)


def test_every_pass_of_a_step_sees_the_weight_of_the_first() -> None:
    """Under spectral norm in training mode a pass moves the vectors from which the next one takes its weight."""
    x, t = batch()
    layer = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), parametrizations.spectral_norm(layer), nn.Linear(6, 3)).double()
    for buffer in model.buffers():
        buffer.copy_(nn.functional.normalize(torch.randn_like(buffer), dim=0))  # far from the fixed point
    direct = [b.clone() for b in model.buffers()]
    loss = squares(model(x), t)
    wanted = torch.autograd.grad(loss.mean(), list(model.parameters()))
    for buffer, value in zip(model.buffers(), direct, strict=True):
        buffer.copy_(value)
    method = gg.Feedback(gg.ActivationPerturbation(), form="chained", sweeps=4)
    est = gg.estimate(model, method, squares, x, t, generator=source())
    torch.testing.assert_close(est.losses, loss.detach(), rtol=0, atol=1e-12)
    for (name, _), g in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(est.grads[name], g, rtol=0, atol=1e-12, msg=name)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])


def test_two_samples_of_many_steps_are_not_two_of_three_samples() -> None:
    """Sites are looked for on two and on three rows of the inputs; here both gave two losses."""
    model, x = TimeFirst().double(), torch.randn(4, 2, 3).double()
    est = gg.estimate(model, gg.ActivationPerturbation(), squares, x, torch.zeros(2), generator=source())
    wanted = est.jvp[0][:, None] * est.directions["head"][0]
    torch.testing.assert_close(est.site_grads["head"], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory", ["store", "replay"])
def test_a_fraction_of_a_batch_that_cannot_be_cut_is_refused(memory: Any) -> None:
    model, x = TimeFirst().double(), torch.randn(4, 3, 3).double()
    method = gg.Feedback(gg.WPerp(k=2), form="direct", fraction=0.5)
    with pytest.raises(gg.InputError, match="fraction: the batch is not the first dimension"):
        gg.ForwardGradient(model, method, memory=memory)(squares, x, torch.zeros(3))


def test_chunks_of_a_subspace_on_a_graph() -> None:
    """`chunk=` promises the estimate of the whole batch up to rounding, but for W⊥-NS."""
    x, t = batch(6)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 5)).double()
    grads = []
    for chunk in (None, 2):
        model.zero_grad()
        gg.ForwardGradient(model, gg.WPerp(k=2, solver="subspace"), chunk=chunk)(squares, x, t)
        grads.append(model[0].weight.grad.clone())
    torch.testing.assert_close(*grads, rtol=0, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Samples mix")
def test_the_global_random_state_is_left_alone() -> None:
    """By an estimate; a step draws as one pass of the model does."""
    for seed in range(40):
        case = make_case(seed)
        torch.manual_seed(0)
        before, start = photograph(case.model), torch.get_rng_state()
        try:
            gg.estimate(case.model, case.method, case.loss_fn, case.inputs, case.targets, sites=case.sites)
        except (gg.GradguessError, RuntimeError):
            continue
        assert torch.equal(torch.get_rng_state(), start), str(case)
        same(before, photograph(case.model))
