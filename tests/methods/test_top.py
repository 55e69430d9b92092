"""`top="exact"`: nothing is guessed at the model's output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.compile import compiler
from models import Net
from traced_graphs import as_compiled

LOSS = nn.CrossEntropyLoss(reduction="none")
GUESSES = [gg.WPerp(k=3), gg.WTranspose(), gg.ActivationPerturbation()]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(samples: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 6, dtype=torch.float64), torch.randint(0, 4, (samples,))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("guess", GUESSES, ids=lambda g: type(g).__name__)
def test_the_last_layer_has_the_gradient_of_autograd(guess):
    model, (x, t) = network(), batch()
    est = gg.estimate(model, guess, LOSS, x, t, top="exact")
    LOSS(model(x), t).mean().backward()
    for name in ("4.weight", "4.bias"):
        torch.testing.assert_close(est.grads[name], model.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    outputs = model(x).detach().requires_grad_()
    torch.testing.assert_close(est.site_grads["4"], torch.autograd.grad(LOSS(outputs, t).sum(), outputs)[0])
    assert list(est.directions) == ["0", "2"]


def test_the_derivative_is_along_the_other_directions_alone():
    """The slow twin: `c = Σ_i <y_i, g_i>` over the hidden sites, with gradients by autograd."""
    model, (x, t) = network(), batch()
    est = gg.estimate(model, gg.WPerp(k=3), LOSS, x, t, top="exact")
    truth = gg.estimate(model, gg.Backprop(), LOSS, x, t).site_grads
    c = sum((est.directions[site][0] * truth[site]).sum(1) for site in ("0", "2"))
    torch.testing.assert_close(est.jvp[0], c, rtol=1e-10, atol=1e-12)
    for site in ("0", "2"):
        torch.testing.assert_close(est.site_grads[site], c[:, None] * est.directions[site][0])


def test_less_noise_and_the_same_mean():
    """20,000 copies of one sample: means within 5 standard errors, and every variance smaller."""
    model, (x, t) = network(), batch(1)
    x, t = x.expand(20_000, -1), t.expand(20_000)
    generator = torch.Generator().manual_seed(0)
    found = {top: gg.estimate(model, gg.WPerp(k=3), LOSS, x, t, top=top, generator=generator).site_grads["0"]
             for top in ("guess", "exact")}  # fmt: skip
    error = sum(one.var(0) / len(one) for one in found.values()) ** 0.5
    assert ((found["guess"].mean(0) - found["exact"].mean(0)).abs() <= 5 * error + 1e-12).all()
    assert found["exact"].var(0).sum() < found["guess"].var(0).sum()


@pytest.mark.parametrize(
    "options", [{"memory": "replay"}, {"chunk": 3}, {"memory": "replay", "chunk": 2}, {"compile": True}], ids=repr
)
@pytest.mark.parametrize("sites", ["auto", 2])
def test_however_the_step_is_made(options, sites, monkeypatch):
    monkeypatch.setattr(compiler, "compiled", as_compiled)  # the traced graph is run as it is
    found = []
    for extra in ({}, options):
        model, (x, t) = network(), batch()
        forward = gg.ForwardGradient(model, gg.WPerp(k=3), top="exact", sites=sites, **extra)
        for _ in range(3):
            forward(LOSS, x, t)
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(found[1], found[0])


def test_the_whole_top_piece_is_exact():
    """In pieces the gradient inside the top one follows from that at the output."""
    model, (x, t) = network(), batch()
    est = gg.estimate(model, gg.WPerp(k=3), LOSS, x, t, sites=2, top="exact")
    truth = gg.estimate(model, gg.Backprop(), LOSS, x, t).grads
    exact = [name for name in truth if torch.allclose(est.grads[name], truth[name], rtol=1e-10)]
    assert exact == ["4.weight", "4.bias"] or exact == ["2.weight", "2.bias", "4.weight", "4.bias"]


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """Its gradient by reverse mode is NaN where an output is zero; its tangent is not."""
    return torch.where(outputs > 0, outputs.sqrt(), 0.0).sum(1)


@pytest.mark.parametrize("options", [{}, {"chunk": 3}, {"memory": "replay"}], ids=repr)
def test_an_output_error_that_is_not_finite_is_noticed(options):
    model, (x, t) = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double(), batch()
    with torch.no_grad():
        model[2].weight.zero_(), model[2].bias.zero_()
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), top="exact", **options)
    with pytest.raises(gg.GradguessError, match=r"NaN|not finite|infinite"):
        forward(distance, x, t)
    assert all(p.grad is None for p in model.parameters())


def aside() -> nn.Module:
    """Its output is also read by a layer that the loss reads."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        y = m.b(m.a(x).relu())
        m.z = m.c(y)
        return y

    return Net(run, a=nn.Linear(6, 5), b=nn.Linear(5, 4), c=nn.Linear(4, 3))


def test_an_output_with_a_layer_above_it_is_guessed():
    """The derivative of the loss with respect to the output alone would leave out that layer."""
    torch.manual_seed(0)
    model, (x, t) = aside().double(), batch()
    loss_fn = lambda outputs, targets: LOSS(outputs, targets) + model.z.square().sum(1)  # noqa: E731
    est = gg.estimate(model, gg.ActivationPerturbation(), loss_fn, x, t, top="exact")
    assert "b" in est.directions
