"""Learned feedback: the law of its corrected estimate, and that it stays stable."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradguess as gg
from asserts import assert_unbiased
from gradguess.step.base import Kept
from models import CLASSES, INPUTS, Case, Net, cross_entropy, generator, make
from steps import step_of

TEACHERS = {
    "wperp": gg.WPerp(k=4, refresh=20),
    "wt": gg.WTranspose(),
    "activation": gg.ActivationPerturbation(),
}
SLOPES = {"relu": lambda s: (s > 0).double(), "tanh": lambda s: 1 - torch.tanh(s) ** 2}


def run(method: gg.Feedback, case: Case, learned: dict | None = None, **options) -> tuple[gg.Estimate, Kept]:
    """One step from what was learned: the estimate, and what is learned after it."""
    result, state = method.run(step_of(case, method, learned=learned, **options))
    return result, state.learned


def wide(widths: tuple[int, ...] = (8, 7), batch: int = 32, seed: int = 0, classes: int = CLASSES) -> Case:
    """A ReLU network without biases, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = (INPUTS, *widths, classes)
        layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b, bias=False), nn.ReLU())]
        model = nn.Sequential(*layers[:-1]).double()
        return Case(model, torch.randn(batch, INPUTS).double(), torch.randint(classes, (batch,)))


def copies(count: int, widths: tuple[int, ...] = (8, 7)) -> Case:
    """One sample many times: every copy gets directions of its own."""
    case = wide(widths, 1)
    return Case(case.model, case.inputs.expand(count, -1).contiguous(), case.targets.expand(count).contiguous())


class Dense:
    """An MLP written out: outputs, gates, the error, and every sample's Jacobian to the outputs."""

    def __init__(self, case: Case) -> None:
        layers = list(case.model)
        slope = SLOPES[type(layers[1]).__name__.lower()]
        self.weights = [layer.weight.detach() for layer in layers[::2]]
        self.gates, x = [], case.inputs
        for linear, activation in zip(layers[:-1:2], layers[1::2], strict=True):
            s = linear(x).detach()
            self.gates.append(slope(s))
            x = activation(s)
        outputs = layers[-1](x).detach().requires_grad_()
        (self.e,) = torch.autograd.grad(case.loss_fn(outputs, case.targets).sum(), outputs)
        self.J: list[Tensor] = []  # (batch, classes, d) of each hidden site
        J = torch.eye(self.e.shape[1]).double().expand(len(self.e), -1, -1)
        for W, gate in zip(reversed(self.weights[1:]), reversed(self.gates), strict=True):
            J = (J @ W) * gate[:, None, :]
            self.J.insert(0, J)

    def g(self, i: int) -> Tensor:
        return (self.J[i].mT @ self.e[..., None])[..., 0]


def random_B(case: Case, seed: int = 3) -> dict[str, dict[str, Tensor]]:
    dense = Dense(case)
    shape = {str(2 * i): (J.shape[2], J.shape[1]) for i, J in enumerate(dense.J)}
    return {name: {"B": torch.randn(s, generator=generator(seed + int(name))).double()} for name, s in shape.items()}


# --- the corrected estimate ----------------------------------------------------------------------------------

DRAWS = 40_000  # per test; means within 5 standard errors, variances within 12 %


def covariance(name: str, dense: Dense, i: int) -> Tensor:
    W = dense.weights[i + 1] * dense.gates[i][0]
    if name == "activation":
        return torch.eye(W.shape[1]).double()
    if name == "wt":
        return W.mT @ W
    _, S, Vh = torch.linalg.svd(W, full_matrices=False)
    V = Vh[:4][S[:4] > 1e-9].mT  # a closed gate may leave fewer than four
    return V @ V.mT


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("name", TEACHERS)
def test_mean_and_variance_of_the_corrected_estimate(name, isolate):
    """`E ĝ = h + Cov (g - h)`; one tangent per site: `Var ĝ_k = Cov_kk δᵀ Cov δ + (Cov δ)_k²`, `δ = g - h`."""
    case = copies(DRAWS)
    learned = random_B(case)
    guess = gg.WPerp(k=4, solver="svd") if name == "wperp" else TEACHERS[name]
    est, _ = run(gg.Feedback(guess, form="corrected", rate=0.0), case, learned, isolate=isolate)
    dense = Dense(Case(case.model, case.inputs[:1], case.targets[:1]))
    for i, gate in enumerate(dense.gates):
        site, cov = str(2 * i), covariance(name, dense, i)
        h = (gate * (dense.e @ learned[site]["B"].mT))[0]
        delta = dense.g(i)[0] - h
        assert_unbiased(est.site_grads[site], h + cov @ delta)
        if isolate:
            variance = cov.diagonal() * (delta @ cov @ delta) + (cov @ delta).square()
            measured = est.site_grads[site].var(0)
            assert ((measured - variance).abs() <= 0.12 * variance + 1e-12).all()


def test_chained_replay_over_a_graph_is_refused():
    case = make("residual")
    forward = gg.ForwardGradient(case.model, gg.Feedback(gg.WPerp(k=3), form="chained"), memory="replay")
    with pytest.raises(gg.InputError, match=r"memory='store' or form='direct'"):
        forward(*case.args)


# --- a part of the batch -------------------------------------------------------------------------------------


def test_a_part_of_the_batch_teaches_what_it_would_teach_alone():
    case = make("relu-bias")
    method = gg.Feedback(gg.ActivationPerturbation(), form="direct", fraction=0.6)
    _, whole = run(method, case, random_B(case))
    alone = Case(case.model, case.inputs[:3], case.targets[:3])
    _, part = run(gg.Feedback(gg.ActivationPerturbation(), form="direct"), alone, random_B(case))
    assert part.keys() == random_B(case).keys()
    for name in part:
        torch.testing.assert_close(whole[name]["B"], part[name]["B"])


# --- stability -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "batch"), [(1.0, 4), (1.0, 32), (10.0, 32)])
@pytest.mark.parametrize("name", TEACHERS)
def test_just_below_the_largest_rate_it_does_not_diverge(name, scale, batch):
    """300 steps at rate 1.9; a rate above the bound grows by orders of magnitude in as many."""
    case = wide((64, 64), batch=batch, classes=10)
    with torch.no_grad():
        for p in case.model.parameters():
            p *= scale
    forward = gg.ForwardGradient(case.model, gg.Feedback(TEACHERS[name], form="direct", rate=1.9))
    for _ in range(300):
        forward(*case.args)
    for i, J in enumerate(Dense(case).J):
        B = forward.learned[str(2 * i)]["B"]
        assert B.norm() < 30 * J.norm(dim=(1, 2)).max()


# --- balanced sites ------------------------------------------------------------------------------------------


def deep(count: int) -> tuple[Case, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [m for _ in range(12) for m in (nn.Linear(16, 16), nn.ReLU())]
        model = nn.Sequential(nn.Linear(INPUTS, 16), nn.ReLU(), *layers, nn.Linear(16, CLASSES)).double()
        x, t = torch.randn(1, INPUTS).double(), torch.randint(CLASSES, (1,))
    truth = gg.estimate(model, gg.Backprop(), cross_entropy, x, t).site_grads
    return Case(model, x.expand(count, -1).contiguous(), t.expand(count)), truth


def relative_variances(balance: bool) -> dict[str, float]:
    case, truth = deep(20_000)
    est = gg.estimate(case.model, gg.ActivationPerturbation(), *case.args, generator=generator(), balance=balance)
    for name, g in truth.items():
        assert_unbiased(est.site_grads[name], g[0])
    return {
        name: float(est.site_grads[name].var(0).sum() / g.shape[1] / g.square().sum())
        for name, g in truth.items()
        if g.abs().max() > 0
    }


def test_balance_spares_the_deep_layers_the_noise_of_those_above():
    """Relative variance `Σ_j |g_j|² / |g_i|²`: at default initialisation gradients shrink on the way down."""
    plain, balanced = relative_variances(False), relative_variances(True)
    first = next(iter(plain))
    assert plain[first] > 1e3
    assert max(balanced.values()) < 100  # 14 sites: 14 if all weighed exactly the same


# --- graphs --------------------------------------------------------------------------------------------------


def test_a_gate_after_the_last_layer_enters_the_exact_gradient():
    """Linear, then sigmoid: the error is that of the sigmoid's output, not of the layer's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3), torch.nn.Sigmoid()
    ).double()
    batch = (lambda outputs, t: (outputs - t).square().mean(1), torch.randn(5, 4).double(), torch.rand(5, 3).double())
    found = gg.estimate(model, gg.Feedback(gg.WPerp(k=2), sweeps=2), *batch).grads
    exact = gg.estimate(model, gg.Backprop(), *batch).grads
    torch.testing.assert_close(found, exact)


def folded(m: nn.Module, x: Tensor) -> Tensor:
    """Positions are rows of the batch in two layers, as in OPT's blocks."""
    h = m.stem(x)
    inner = m.down(m.up(h.reshape(-1, 4)).relu())
    return m.head((h + inner.view(h.shape)).tanh()).mean(1)


def test_sweeps_pass_layers_whose_rows_are_no_samples():
    torch.manual_seed(0)
    parts = {"stem": nn.Linear(6, 4), "up": nn.Linear(4, 5), "down": nn.Linear(5, 4), "head": nn.Linear(4, CLASSES)}
    batch = cross_entropy, torch.randn(3, 7, 6).double(), torch.tensor([0, 1, 2])
    model, method = Net(folded, **parts).double(), gg.Feedback(gg.ActivationPerturbation(), sweeps=4)
    found, exact = (gg.estimate(model, one, *batch, sites="leaf").grads for one in (method, gg.Backprop()))
    torch.testing.assert_close(found, exact)


class Counting(nn.Linear):
    """It multiplies with a buffer that each pass writes in place."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.count.add_(1)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("options", [{}, {"tangents": 2}, {"isolate": True}], ids=str)
@pytest.mark.parametrize(
    "inner", [lambda: nn.Sequential(nn.Tanh(), Counting()), lambda: Checkpointed(nn.Linear(8, 8), nn.Softmax(-1))]
)
def test_buffers_and_checkpoints_do_not_disturb_the_graph_beside_tangents(inner, options):
    """The gradients are those of `memory="replay"`, where tangents and graph are of two passes."""

    def gradients(memory: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(INPUTS, 8), inner(), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=3)), memory=memory, **options)
        for _ in range(2):
            forward(cross_entropy, torch.randn(5, INPUTS).double(), torch.randint(CLASSES, (5,)))
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(gradients("store"), gradients("replay"))


def test_a_checkpoint_in_a_model_whose_calls_depend_on_the_batch():
    """The sites are found again twice, on few samples and on all, before the checkpoint is met."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))

        def forward(self, x):
            h = checkpoint(lambda v: torch.softmax(self.b(v).tanh() * v.sigmoid(), -1), self.a(x), use_reentrant=False)
            return self.d((self.c if x.sum() > 0 else self.e)(h))

    torch.manual_seed(0)
    x = torch.cat([-torch.ones(3, 4), 5 * torch.rand(9, 4)]).double()  # the first samples go another way than all
    grads = []
    for memory in ("store", "replay"):
        torch.manual_seed(0)
        model = Turns().double()
        feedback = gg.Feedback(gg.WPerp(k=2), form="direct")
        forward = gg.ForwardGradient(model, feedback, sites=["a", "b", "c", "e", "d"], memory=memory)
        for inputs in (x, -x, x):
            forward(cross_entropy, inputs, torch.zeros(12).long())
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


def test_a_lesson_aside_leaves_buffers_to_the_graph_that_saved_them():
    """The weights below a buffer that each pass writes in place, and the loss reads, get the same gradient."""

    class Fading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(CLASSES).double())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.mul_(0.5)

    def learned(memory: str) -> tuple[Tensor, float]:
        case = wide()
        model = nn.Sequential(*case.model, fading := Fading())
        forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=3), fraction=0.5), memory=memory)
        for _ in range(2):
            forward(cross_entropy, case.inputs, case.targets)
        return model[0].weight.grad, fading.scale[0].item()

    stored, replayed = learned("store"), learned("replay")
    torch.testing.assert_close(stored[0], replayed[0])
    assert stored[1] == replayed[1] == 0.25
