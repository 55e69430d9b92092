"""The tangent pass against reverse mode: every guess on every model."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import gradguess as gg
from asserts import assert_jvp_matches_autograd
from combinations import each, pairwise
from frames import slots_of
from models import BATCH, GUESSES, SITE_GUESSES, ZOO, Case, Net, cross_entropy, generator, make


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


def around(inner: nn.Module) -> nn.Module:
    """A layer with a fused kernel between two sites."""

    def run(m, x):
        out = m.inner(torch.tanh(m.below(x)))
        return m.above(out[0].mean(1) if isinstance(out, tuple) else out.mean(1))

    return Net(run, below=nn.Linear(6, 6), inner=inner, above=nn.LazyLinear(4))


@pytest.mark.parametrize(
    ("guess", "kernel", "training"), pairwise(["activation", "weight", "shared"], KERNELS, [True, False])
)
def test_fused_kernels_make_way(kernel, training, guess):
    torch.manual_seed(0)
    model, x = around(KERNELS[kernel]()), torch.randn(BATCH, 3, 6)
    model(x)
    model.train(training)
    case = Case(model, x, torch.randint(4, (BATCH,)))
    est = gg.estimate(model, GUESSES[guess], *case.args, generator=generator(1))
    assert_jvp_matches_autograd(case, est, slots_of(case), tolerance=1e-4)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_switches_are_put_back(kernel, enabled):
    before = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    model, x = around(KERNELS[kernel]()), torch.randn(BATCH, 3, 6)
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
