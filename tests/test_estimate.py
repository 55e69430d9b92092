"""`gg.estimate`: what it returns, that tangents are spread well, and that it leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import (
    assert_close,
    assert_jvp_matches_autograd,
    assert_same,
    assert_unbiased,
)
from combinations import each, pairwise
from frames import slots_of
from models import BATCH, GUESSES, ZOO, Case, generator, make
from references import gradients, parameter_sample_gradients, sample_gradients

PROJECTORS = {
    "svd": gg.WPerp(k=3, solver="svd"),
    "subspace": gg.WPerp(k=3, solver="subspace"),
    "shared": gg.WPerp(k=3),
    "bottom": gg.WPerp(k=3, solver="svd", end="bottom"),
}


@pytest.mark.parametrize("name", ZOO)
def test_backprop_is_backpropagation(name):
    case = make(name)
    est = gg.estimate(case.model, gg.Backprop(), *case.args)
    assert_close(est.grads, gradients(case), atol=1e-12)


def test_sum_over_the_batch_is_right_where_samples_mix():
    """Batch norm: with coupling='batch' the estimate is unbiased; per sample it is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2)).double()
    case = Case(model, torch.randn(3, 3).double(), torch.tensor([0, 1, 1]))
    true = gradients(case)["0.weight"]
    est = gg.estimate(
        model, gg.ActivationPerturbation(), *case.args, tangents=1000, coupling="batch", generator=generator()
    )

    def samples(c: Tensor) -> Tensor:
        return torch.einsum("tb,tbo,bi->toi", c, est.directions["0"], case.inputs) / 3

    whole = samples(est.jvp.sum(1, keepdim=True).expand_as(est.jvp))
    torch.testing.assert_close(est.grads["0.weight"], whole.mean(0), rtol=0, atol=1e-12)
    assert_unbiased(whole, true)
    g = sample_gradients(case, ["0"])["0"]  # what one sample's loss owes to another's output is lost per sample
    own = torch.einsum("bbo,bi->oi", g, case.inputs) / 3
    assert_unbiased(samples(est.jvp), own)
    assert (own - true).abs().max() > 0.1 * true.abs().max()


# --- several tangents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", PROJECTORS)
def test_tangents_are_orthonormal_in_the_subspace(guess):
    """Scaled by √k; more than k come in blocks of k."""
    case = make("tanh-bias")
    est = gg.estimate(case.model, PROJECTORS[guess], *case.args, tangents=5, generator=generator())
    for site in ("0", "2"):
        y = est.directions[site].transpose(0, 1)  # (batch, tangents, d)
        for block in (y[:, :3], y[:, 3:]):
            gram = block @ block.mT
            expected = 3 * torch.eye(block.shape[1], dtype=y.dtype).expand_as(gram)
            torch.testing.assert_close(gram, expected, rtol=0, atol=1e-9)
        assert (y[:, :3] @ y[:, 3:].mT).abs().max() > 0.1  # the blocks are independent of each other


# --- purity --------------------------------------------------------------------------------------------------


def test_buffers_that_are_replaced_are_put_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.fc(x)

    case = Case(Counter(), torch.randn(BATCH, 6), torch.randint(4, (BATCH,)))
    for guess in (gg.ActivationPerturbation(), gg.WeightPerturbation()):
        gg.estimate(case.model, guess, *case.args)
        assert case.model.calls == 0


@pytest.mark.parametrize(("guess", "name"), each(GUESSES, ["relu-bias", "dropout", "batch-norm", "transformer"]))
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_the_generator_alone_decides(name, guess):
    case = make(name)
    state = torch.get_rng_state()
    first = gg.estimate(case.model, GUESSES[guess], *case.args, generator=generator(3))
    second = gg.estimate(case.model, GUESSES[guess], *case.args, generator=generator(3))
    other = gg.estimate(case.model, GUESSES[guess], *case.args, generator=generator(4))
    assert_same(first.directions, second.directions)
    assert_same(first.grads, second.grads)
    assert any(not torch.equal(first.grads[n], other.grads[n]) for n in first.grads)
    if name != "dropout":
        torch.manual_seed(99)
        assert_same(gg.estimate(case.model, GUESSES[guess], *case.args, generator=generator(3)).grads, first.grads)
    torch.set_rng_state(state)


def test_without_a_generator_every_call_differs():
    case = make("relu-bias")
    a, b = (gg.estimate(case.model, gg.ActivationPerturbation(), *case.args) for _ in range(2))
    assert not torch.equal(a.jvp, b.jvp)


# --- dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "name", "dtype"),
    pairwise(GUESSES, ["cnn", "residual", "branching"], [torch.float32, torch.bfloat16]),
)
def test_low_precision(name, guess, dtype):
    """Dtypes are kept, and the derivative is reverse mode's as far as the dtype goes."""
    case = make(name, dtype=dtype)
    est = gg.estimate(case.model, GUESSES[guess], *case.args, generator=generator())
    for tensor in (*est.grads.values(), *est.directions.values(), *est.site_grads.values()):
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()
    g = parameter_sample_gradients(case) if guess == "weight" else sample_gradients(case, est.directions)
    expected, scale = torch.zeros(BATCH).double(), torch.zeros(BATCH).double()
    for n, y in est.directions.items():
        v, rows = y[0].flatten().double(), g[n].flatten(1).double()
        expected += rows @ v
        scale += rows.norm(dim=1) * v.norm()
    tolerance = 64 * torch.finfo(dtype).eps * scale.max()
    assert ((est.jvp[0].double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize(("guess", "name"), each(GUESSES, ["relu-bias", "residual", "batch-norm", "gru"]))
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_autocast(name, guess):
    """Under autocast: the same sites and parameters, float32 gradients near those of full precision."""
    case = make(name, dtype=torch.float32)
    plain = gg.estimate(case.model, GUESSES[guess], *case.args, generator=generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        est = gg.estimate(case.model, GUESSES[guess], *case.args, generator=generator())
    assert est.directions.keys() == plain.directions.keys()
    for n, p in case.model.named_parameters():
        assert est.grads[n].dtype == p.dtype
        assert est.grads[n].isfinite().all()
    torch.testing.assert_close(est.loss.float(), plain.loss, rtol=0.05, atol=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_jvp_matches_autograd(case, est, slots_of(case), tolerance=0.05)


# --- data-dependent calls ------------------------------------------------------------------------------------


class UntilSmall(nn.Module):
    """Repeats a layer until the largest sample of the batch is small: a few samples need fewer calls than all."""

    def __init__(self):
        super().__init__()
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        while x.detach().abs().max() > 1:
            x = 0.5 * torch.tanh(self.again(x)) + 0.45 * x
        return self.last(x)


def test_calls_that_depend_on_the_whole_batch():
    torch.manual_seed(0)
    x = torch.randn(BATCH, 6).double()
    x[-1] *= 1000
    case = Case(UntilSmall().double(), x, torch.randint(4, (BATCH,)))
    est = gg.estimate(case.model, gg.WTranspose(), *case.args, generator=generator())
    assert len(est.directions) > 4
    assert_jvp_matches_autograd(case, est, dict.fromkeys(est.directions, 0))
    again = Case(case.model, x * 10, case.targets)
    forward = gg.ForwardGradient(case.model, gg.WTranspose())
    for one in (case, again, case):
        forward(*one.args)
    assert case.model.again.weight.grad.abs().max() > 0
