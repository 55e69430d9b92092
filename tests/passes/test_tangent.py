"""The tangent pass against reverse mode: every guess on every model."""

import subprocess
import sys

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import gradguess as gg
from asserts import assert_jvp_matches_autograd
from combinations import each, pairwise
from frames import slots_of
from models import BATCH, GUESSES, SITE_GUESSES, ZOO, Case, cross_entropy, generator, make


@pytest.mark.parametrize(("name", "guess"), each([*ZOO] * 3, GUESSES))
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_derivative_is_reverse_modes(name, guess):
    case = make(name)
    state = torch.get_rng_state()
    est = gg.estimate(case.model, GUESSES[guess], *case.args, tangents=2, generator=generator(1))
    assert torch.equal(torch.get_rng_state(), state)  # so that the reference sees the same dropout masks
    assert_jvp_matches_autograd(case, est, slots_of(case))


@pytest.mark.parametrize(
    ("guess", "name"), each(SITE_GUESSES, ["relu-bias", "branching", "transformer", "lstm", "batch-norm", "bare"])
)
@pytest.mark.filterwarnings("ignore:Samples mix")
def test_isolated_derivatives_are_tangent_major(name, guess):
    case = make(name)
    est = gg.estimate(case.model, GUESSES[guess], *case.args, tangents=2, isolate=True, generator=generator(1))
    assert_jvp_matches_autograd(case, est, slots_of(case), isolate=True)


KERNELS = {
    "lstm": lambda: nn.LSTM(6, 5, batch_first=True),  # the fused kernel takes float32 alone
    "gru": lambda: nn.GRU(6, 5, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
}


class Around(nn.Module):
    """A layer with a fused kernel between two sites."""

    def __init__(self, inner):
        super().__init__()
        self.below, self.inner, self.above = nn.Linear(6, 6), inner, nn.LazyLinear(4)

    def forward(self, x):
        out = self.inner(torch.tanh(self.below(x)))
        return self.above(out[0].mean(1) if isinstance(out, tuple) else out.mean(1))


@pytest.mark.parametrize(
    ("guess", "kernel", "training"), pairwise(["activation", "weight", "shared"], KERNELS, [True, False])
)
def test_fused_kernels_make_way(kernel, training, guess):
    torch.manual_seed(0)
    model, x = Around(KERNELS[kernel]()), torch.randn(BATCH, 3, 6)
    model(x)
    model.train(training)
    case = Case(model, x, torch.randint(4, (BATCH,)))
    est = gg.estimate(model, GUESSES[guess], *case.args, generator=generator(1))
    assert_jvp_matches_autograd(case, est, slots_of(case), tolerance=1e-4)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_switches_are_put_back(kernel, enabled):
    before = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    model, x = Around(KERNELS[kernel]()), torch.randn(BATCH, 3, 6)
    model(x)
    try:
        torch.backends.mha.set_fastpath_enabled(enabled)
        torch._C._set_mkldnn_enabled(enabled)
        for guess in (gg.WTranspose(), gg.WeightPerturbation()):
            gg.estimate(model, guess, cross_entropy, x, torch.randint(4, (BATCH,)))
            assert torch.backends.mha.get_fastpath_enabled() == enabled
            assert torch._C._get_mkldnn_enabled() == enabled
        with pytest.raises(gg.InputError, match="scalar"):
            gg.estimate(model, gg.WTranspose(), nn.CrossEntropyLoss(), x, torch.randint(4, (BATCH,)))
        assert torch.backends.mha.get_fastpath_enabled() == enabled
        assert torch._C._get_mkldnn_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        torch._C._set_mkldnn_enabled(before[1])


@pytest.mark.parametrize(
    "use",
    [
        "gg.estimate(torch.nn.Linear(2, 2), gg.WPerp(), torch.nn.CrossEntropyLoss(reduction='none'), x, t)",
        "from gradguess.passes.forward_mode import quiet_jvp; quiet_jvp(torch.sin, (x,), (x,))",
    ],
)
def test_the_first_dual_number_warns_of_nothing(use):
    """PyTorch loads its formulas then, by a function that it deprecates."""
    code = f"import torch, gradguess as gg; x, t = torch.randn(3, 2), torch.zeros(3, dtype=torch.long); {use}"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert "torch.jit.script" not in done.stderr


def test_a_recorded_pass_in_pieces_lets_tangents_go():
    """A reverse graph holds the tangent of what it saves. At a site that all paths cross they are needed no more."""
    alive = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))

        def forward(self, x):
            _, tangent = fwAD.unpack_dual(x)
            if tangent is not None:
                alive.append(StorageWeakRef(tangent.untyped_storage()))
            return self.inner(x.sin())  # which saves its input, with the tangent

    torch.manual_seed(0)
    model = nn.Sequential(*[Watched() for _ in range(6)], nn.Linear(6, 3))
    held = []

    def loss_fn(outputs, targets):
        held.append(sum(not ref.expired() for ref in alive))
        alive.clear()
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    forward = gg.ForwardGradient(model, gg.WPerp(k=2), sites=6)
    forward(loss_fn, torch.randn(BATCH, 6), torch.randint(3, (BATCH,)))
    assert max(held) <= 1
