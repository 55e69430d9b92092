"""`gg.diagnose` against dense twins in float64, and against Monte Carlo with a stated budget.

Monte Carlo: the batch is repeated `REPEATS` times, so that one call of `gg.estimate` draws that many independent
estimates of every sample. What is compared must agree within `SIGMAS` standard errors of the Monte Carlo side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradguess as gg
from gradguess.diagnose import Report, SiteReport, comparison
from gradguess.methods import Estimate, Method
from gradguess.methods.run import Plan, find_layout, run_step
from gradguess.model.task import Task
from gradguess.step.base import Options, State
from models import Net, make

REPEATS, SIGMAS = 3000, 5
loss_fn = nn.CrossEntropyLoss(reduction="none")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((6, 12), (12, 9), (9, 4))]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double()


def data(batch: int = 7) -> tuple[Tensor, Tensor]:
    """The last sample is zero: without biases every unit is off, and the gradient below the top is zero."""
    x = torch.randn(batch, 6, dtype=torch.float64, generator=seeded(1))
    x[-1] = 0
    return x, torch.arange(batch) % 4


def diagnosed(guess: Method, model: nn.Module | None = None, **options: Any) -> Report:
    return gg.diagnose(mlp() if model is None else model, guess, loss_fn, *data(), seeded(), **options)


# --- the dense twin ------------------------------------------------------------------------------------------


@dataclass
class Dense:
    """One site: each sample's gradient of the mean loss (batch, d), `W̃` (batch, m, d), `Cov(y)` (batch, d, d)."""

    g: Tensor
    W: Tensor | None
    cov: Tensor


def dense_sites(model: nn.Sequential, covariance_of: Any) -> dict[str, Dense]:
    x, t = data()
    outputs = {}
    h = x
    for index, layer in enumerate(model):
        h = layer(h)
        if isinstance(layer, nn.Linear):
            h.retain_grad()
            outputs[str(index)] = h
    loss_fn(h, t).mean().backward()
    sites = {}
    for name, above in (("0", "2"), ("2", "4"), ("4", None)):
        s = outputs[name]
        eye = torch.eye(s.shape[1], dtype=s.dtype).expand(len(s), -1, -1)
        if above is None:
            sites[name] = Dense(s.grad, None, eye)
            continue
        gate = (s > 0).double()
        W = model[int(above)].weight.detach() * gate[:, None, :]
        sites[name] = Dense(s.grad, W, covariance_of(model[int(above)].weight.detach(), gate, W, eye))
    return sites


def top(W: Tensor, k: int) -> Tensor:
    """Projectors on the top-k right singular vectors, of lower rank where the matrix has it."""
    _, S, Vh = torch.linalg.svd(W)
    kept = torch.zeros(Vh.shape[:2], dtype=W.dtype)
    kept[:, : S.shape[1]] = (S > 1e-10) & (torch.arange(S.shape[1]) < k)
    return Vh.mT @ (kept[..., None] * Vh)


def shared(weight: Tensor, gate: Tensor, k: int) -> Tensor:
    V = torch.linalg.svd(weight * gate.mean(0).sqrt())[2][:k].mT
    return torch.stack([A @ torch.linalg.pinv(A, rtol=1e-9) for A in gate[:, :, None] * V])


COVARIANCES = {
    gg.ActivationPerturbation(): lambda weight, gate, W, eye: eye,
    gg.WTranspose(): lambda weight, gate, W, eye: W.mT @ W,
    gg.WPerp(k=2, solver="svd"): lambda weight, gate, W, eye: top(W, 2),
    gg.WPerp(k=6, solver="subspace"): lambda weight, gate, W, eye: top(W, 6),
    gg.WPerp(k=50, solver="svd"): lambda weight, gate, W, eye: top(W, 50),
    gg.WPerp(k=2, solver="shared"): lambda weight, gate, W, eye: shared(weight, gate, 2),
    gg.WPreconditioned(): lambda weight, gate, W, eye: eye if W.shape[1] >= W.shape[2] else top(W, W.shape[1]),
}


def dense_report(sites: dict[str, Dense], name: str) -> dict[str, float]:
    """Bias, variance and covariance norm, from the fourth moments of all directions at once (Isserlis)."""
    site = sites[name]
    batch, d = site.g.shape
    bias = torch.einsum("bij,bj->bi", site.cov - torch.eye(d), site.g).mean(0)
    error = torch.zeros(d, dtype=torch.float64)
    for b in range(batch):
        g = torch.cat([other.g[b] for other in sites.values()])
        C = torch.block_diag(*(other.cov[b] for other in sites.values()))
        own = slice(*(sum(o.g.shape[1] for n, o in sites.items() if n < last) for last in (name, chr(ord(name) + 1))))
        first = (C @ g)[own]
        # E y_i² y_j y_k = C_ii C_jk + 2 C_ij C_ik
        second = torch.einsum("j,k,i,jk->i", g, g, C.diagonal(), C) + 2 * torch.einsum("j,k,ij,ik->i", g, g, C, C)
        error += (site.g[b].square() - 2 * site.g[b] * first + second[own]) / batch
    frobenius = (site.cov - torch.eye(d)).square().sum((1, 2)).sqrt().mean() / d
    return {
        "bias": bias.norm().item(),
        "variance": (error - bias.square()).norm().item(),
        "covariance_norm": frobenius.item(),
    }


@pytest.mark.parametrize("guess", COVARIANCES, ids=repr)
def test_closed_forms_match_the_dense_twin(guess):
    model = mlp()
    sites = dense_sites(model, COVARIANCES[guess])
    report = gg.diagnose(model, guess, loss_fn, *data(), seeded())
    for name in sites:  # a gated basis is orthonormal but for the ridge of its factors, 1e-13
        for key, expected in dense_report(sites, name).items():
            assert getattr(report[name], key) == pytest.approx(expected, rel=1e-9, abs=1e-13), (name, key)
        assert report[name].gradient_norm == pytest.approx(sites[name].g.norm().item(), rel=1e-12)


def test_spectrum_matches_the_dense_twin():
    model = mlp()
    sites = dense_sites(model, COVARIANCES[gg.WTranspose()])
    report = gg.diagnose(model, gg.WTranspose(), loss_fn, *data(), seeded())
    for name in ("0", "2"):
        W, g = sites[name].W, sites[name].g
        d, alive = g.shape[1], g.norm(dim=1) > 0
        assert 0 < alive.sum() < len(alive)
        lengths = g[alive].norm(dim=1)
        curve = [
            ((torch.linalg.vector_norm((top(W[alive], k) @ g[alive, :, None])[..., 0], dim=1) / lengths).mean().item())
            for k in range(1, d + 1)
        ]
        assert report[name].overlap == pytest.approx(curve, rel=1e-9)
        assert report[name].overlap[-1] == pytest.approx(1, rel=1e-9)  # the gradient lies in the row space
        assert report[name].overlap[0] < 0.999
        assert report[name].rank == torch.linalg.matrix_rank(W).double().mean().item()
        values = torch.zeros(len(W), d, dtype=torch.float64)
        values[:, : min(W.shape[1:])] = torch.linalg.svdvals(W)
        assert report[name].singular_values == pytest.approx(values.mean(0).tolist(), abs=1e-9)


# --- Monte Carlo ---------------------------------------------------------------------------------------------


def assert_moments(report: SiteReport, draws: Tensor, g: Tensor) -> None:
    """`draws` (n, batch, d) of the estimate against the report; `g` (batch, d); of the mean loss."""
    blocks = (draws - g).unflatten(0, (20, -1))  # (20, n / 20, batch, d)
    means = blocks.mean((1, 2))  # one estimate of the bias per block
    bias = means.mean(0)
    spread = (means.var(0).sum() / len(means)).sqrt()
    assert abs(report.bias - bias.norm()) <= SIGMAS * spread + 1e-15
    squares = blocks.square().mean((1, 2))
    variance = squares.mean(0) - bias.square() + means.var(0) / len(means)
    spread = (squares.var(0).sum() / len(squares)).sqrt()
    assert spread < 0.2 * report.variance, "the budget is too small to tell anything"
    assert abs(report.variance - variance.norm()) <= SIGMAS * spread


def assert_monte_carlo(
    model: nn.Module, guess: Method, x: Tensor, t: Tensor, skip: tuple[str, ...] = (), **options: Any
) -> None:
    report = gg.diagnose(model, guess, loss_fn, x, t, seeded(), **options)
    many = x.repeat(REPEATS, *[1] * (x.dim() - 1)), t.repeat(REPEATS)
    est = gg.estimate(model, guess, loss_fn, *many, generator=seeded(2), **options)
    true = gg.estimate(model, gg.Backprop(), loss_fn, x, t)
    for name in [name for name in report if name not in skip]:
        draws = est.site_grads[name].unflatten(0, (REPEATS, len(x))).flatten(2) / len(x)
        assert_moments(report[name], draws, true.site_grads[name].flatten(1) / len(x))


GUESSES = [
    gg.ActivationPerturbation(),
    gg.WTranspose(),
    gg.WPerp(k=2, solver="svd"),
    gg.WPerp(k=2, solver="shared"),
    gg.WPerp(k=40, solver="shared"),
    gg.WPerp(k=2, end="bottom"),
    gg.WPerp(k=2, end="bottom", solver="svd"),
    gg.WPerpNS(k=3),
    gg.WPreconditioned(),
]


@pytest.mark.parametrize("guess", GUESSES, ids=repr)
def test_monte_carlo(guess):
    assert_monte_carlo(mlp(), guess, *data())


@pytest.mark.parametrize("isolate", [False, True])
def test_monte_carlo_with_the_exact_top(isolate):
    report = gg.diagnose(mlp(), gg.WPerp(k=2), loss_fn, *data(), seeded(), top="exact", isolate=isolate)
    top = report["4"]
    assert (top.bias, top.variance, top.covariance_norm) == (0.0, 0.0, None)
    assert top.cosine == pytest.approx(1)
    assert_monte_carlo(mlp(), gg.WPerp(k=2), *data(), skip=("4",), top="exact", isolate=isolate)


def residual() -> nn.Module:
    """A convolution, a residual block and a head: no site has a closed form above it but by the cut graph."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.stem(x[:, None]).flatten(1)
        return m.head(nn.functional.gelu(h + m.branch(torch.tanh(h))))

    torch.manual_seed(0)
    stem = nn.Conv1d(1, 2, 3, padding=1)
    return Net(run, stem=stem, branch=nn.Linear(12, 12), head=nn.Linear(12, 4)).double()


@pytest.mark.parametrize("guess", [gg.WTranspose(), gg.WPerp(k=3, solver="svd"), gg.WPerp(k=3)], ids=repr)
@pytest.mark.parametrize("sites", ["auto", "leaf"])
def test_monte_carlo_on_general_sites(guess, sites):
    assert_monte_carlo(residual(), guess, *data(), sites=sites)


def test_a_few_products_agree_with_many(monkeypatch):
    """Above large layers diag Cov and ‖Cov - I‖ are estimated: 1000 draws, 5 %."""
    exact = gg.diagnose(residual(), gg.WTranspose(), loss_fn, *data(), seeded())
    monkeypatch.setattr(comparison, "COLUMNS", 0)
    drawn = gg.diagnose(residual(), gg.WTranspose(), loss_fn, *data(), seeded(), draws=1000)
    for name in ("stem", "branch"):
        assert drawn[name].covariance_norm != exact[name].covariance_norm
        assert drawn[name].covariance_norm == pytest.approx(exact[name].covariance_norm, rel=0.05)
        assert drawn[name].variance == pytest.approx(exact[name].variance, rel=0.05)


def positions() -> nn.Module:
    """A position embedding: one output for the whole batch."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.head(torch.tanh(m.embed(x[..., None]) + m.position(torch.arange(6))).flatten(1)),
        embed=nn.Linear(1, 3),
        position=nn.Embedding(6, 3),
        head=nn.Linear(18, 4),
    )
    nn.init.normal_(model.head.weight)  # large: most of the derivative comes from below the head
    return model.double()


@pytest.mark.parametrize("coupling", ["sample", "batch"])
def test_monte_carlo_where_the_batch_shares_an_output_or_a_derivative(coupling):
    """White noise at every site: 2000 independent tangents of one call are the draws."""
    tangents = 2000
    model, (x, t), guess = positions(), data(), gg.ActivationPerturbation()
    options: Any = {"sites": "leaf", "coupling": coupling}
    report = gg.diagnose(model, guess, loss_fn, x, t, seeded(), draws=400, **options)
    est = gg.estimate(model, guess, loss_fn, x, t, tangents=tangents, generator=seeded(1), **options)
    true = gg.estimate(model, gg.Backprop(), loss_fn, x, t, sites="leaf")
    assert report["position"].d == 18
    for name in report:
        alone = name == "position"
        c = est.jvp.sum(1, keepdim=True) if alone or coupling == "batch" else est.jvp
        draws = c[..., None] * est.directions[name].reshape(tangents, 1 if alone else len(x), -1)
        g = true.site_grads[name].reshape(draws.shape[1:])
        assert_moments(report[name], draws / len(x), g / len(x))


def test_weight_perturbation_by_parameter():
    """2000 independent tangents of one call are the draws."""
    tangents = 2000
    model, (x, t) = mlp(), data()
    report = gg.diagnose(model, gg.WeightPerturbation(), loss_fn, x, t, seeded())
    assert set(report) == {"0.weight", "2.weight", "4.weight"}
    est = gg.estimate(model, gg.WeightPerturbation(), loss_fn, x, t, tangents=tangents, generator=seeded(1))
    true = gg.estimate(model, gg.Backprop(), loss_fn, x, t)
    for name, site in report.items():
        draws = est.jvp.mean(1)[:, None, None] * est.directions[name].flatten(1)[:, None]
        assert_moments(site, draws, true.grads[name].reshape(1, -1))
        assert (site.bias, site.covariance_norm, site.rank) == (0.0, 0.0, None)


# --- methods without directions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noisy(Method):
    """The gradient of each sample's loss, `offset` and noise of deviation `sigma` added to each number."""

    offset: float
    sigma: float

    def run(self, step: Any) -> tuple[Estimate, State]:
        found, state = gg.Backprop().run(step)
        for name, g in found.site_grads.items():
            noise = step.noise.normal(g.shape, g.dtype, g.device)
            found.site_grads[name] = g + self.offset + self.sigma * noise
        return found, state


def test_other_methods_by_draws():
    """400 draws at 7 samples: the variance to 5 %, the bias to 0.01 / 7 (four standard errors)."""
    for offset in (0.0, 0.3):
        report = diagnosed(Noisy(offset, 0.2), draws=400)
        for site in report.values():
            assert site.bias == pytest.approx(offset * site.d**0.5 / 7, abs=0.01 / 7)
            assert site.variance == pytest.approx(0.04 * site.d**0.5 / 49, rel=0.05)


def test_the_noise_of_few_draws_is_taken_off():
    """From two draws, without an offset: the bias is zero or what chance leaves, not the deviation of an average.

    In 40 runs the squared bias is off by `± 0.2²/7 · √(2/12)`; without the correction it would be `0.2²/7` in the mean.
    """
    found = [
        gg.diagnose(mlp(), Noisy(0.0, 0.2), loss_fn, *data(), seeded(i), draws=2, curve=False)["0"].bias * 7
        for i in range(40)
    ]
    uncorrected = 0.2**2 / 7 * 12 / 2
    assert sum(bias**2 for bias in found) / len(found) < 0.5 * uncorrected
    assert found.count(0.0) > 8


# --- edges ---------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return out


@pytest.mark.parametrize("guess", [gg.WTranspose(), gg.WPerp(k=4)], ids=repr)
def test_no_array_of_batch_times_d_times_d(guess):
    batch, d = 200, 64
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))
    with Largest() as largest:
        gg.diagnose(model, guess, loss_fn, torch.randn(batch, 6), torch.arange(batch) % 4, seeded())
    assert largest.numbers <= max(comparison.PROBE * d * d, batch * d * 4)
    assert largest.numbers < batch * d * d


def touchy() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 4)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("guess", [gg.WTranspose(), gg.WPerp(k=2), gg.Backprop(), gg.WeightPerturbation()], ids=repr)
def test_nothing_is_written(guess):
    model = touchy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first = gg.diagnose(model, guess, loss_fn, *data(), seeded(), coupling="batch")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert gg.diagnose(model, guess, loss_fn, *data(), seeded(), coupling="batch") == first


@pytest.mark.parametrize("form", ["direct", "chained", "corrected"])
def test_what_forward_has_learned_is_taken_over(form):
    """The report is of the step that it would make next, with the matrices that it has learned by then."""
    model, (x, t) = mlp(), data()
    method = gg.Feedback(gg.WPerp(k=4, refresh=20), form=form, rate=0.5)
    forward = gg.ForwardGradient(model, method)
    for _ in range(60):
        forward(loss_fn, x, t)
    kept = {key: value.clone() for key, value in forward.state_dict().items()}
    taken = diagnosed(method, model, forward=forward, draws=40)
    fresh = diagnosed(method, model, draws=40)
    assert all(torch.equal(value, kept[key]) for key, value in forward.state_dict().items())
    plan = Plan(method, "auto", Options(), detail=True)
    task = Task(model, loss_fn, x, t)
    result, _, _ = run_step(plan, task, find_layout(plan, task), seeded(), forward.state)
    true = gg.estimate(model, gg.Backprop(), loss_fn, x, t)
    for name, site in taken.items():
        a, b = result.site_grads[name].flatten(), true.site_grads[name].flatten()
        assert site.cosine == pytest.approx(torch.cosine_similarity(a, b, dim=0).item(), rel=1e-9)
    learns = "2" if form != "chained" else "0"  # one hop below the output the chain rule is exact without learning
    assert taken[learns].cosine > 0.9 > fresh[learns].cosine
    error = "variance" if form == "corrected" else "bias"  # what is corrected has no bias
    assert getattr(taken[learns], error) < 0.5 * getattr(fresh[learns], error)


def test_a_forward_of_another_model_or_guess_is_refused():
    case, other = make("relu-bias"), make("relu-bias")
    forward = gg.ForwardGradient(case.model, gg.WPerp(k=2))
    with pytest.raises(gg.InputError, match="found one of another guess"):
        gg.diagnose(case.model, gg.WPerp(k=3), *case.args, forward=forward)
    with pytest.raises(gg.InputError, match="another model"):
        gg.diagnose(other.model, gg.WPerp(k=2), *other.args, forward=forward)
