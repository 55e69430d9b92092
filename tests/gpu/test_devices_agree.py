"""The same noise gives the same estimate on CUDA and on a CPU, in float64; and nearly the same in float32."""

from __future__ import annotations

import pytest
import torch

import gradguess as gg
from gpu_networks import METHODS, NETWORKS, batch, loss_fn, make

# A solver of its own on a GPU, to a stated accuracy of its subspace; on random weights the law alone agrees.
OTHER_SOLVER = ("wperp-subspace", "wperp-ns")


def estimates(network: str, method: str, dtype: torch.dtype) -> list[gg.Estimate]:
    model, (x, t) = make(network, dtype), batch(dtype=dtype)
    found = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(3)  # on the CPU: both devices see the same numbers
        model.to(device)
        found.append(gg.estimate(model, METHODS[method](), loss_fn, x.to(device), t.to(device), generator=generator))
    return found


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", [name for name in METHODS if name not in OTHER_SOLVER])
def test_float64(network: str, method: str):
    if method == "wperp-svd" or method == "wperp-bottom":
        pytest.skip("singular vectors are unique up to a sign, and null spaces up to a rotation")
    on_cpu, on_cuda = estimates(network, method, torch.float64)
    for name, expected in on_cpu.grads.items():
        found = on_cuda.grads[name].cpu()
        assert torch.allclose(found, expected, rtol=1e-7, atol=1e-9 * float(expected.norm() + 1)), name


@pytest.mark.parametrize("method", ["wt", "activation", "wperp", "direct", "chained"])
def test_float32_on_the_chain(method: str):
    on_cpu, on_cuda = estimates("chain", method, torch.float32)
    for name, expected in on_cpu.grads.items():
        error = (on_cuda.grads[name].cpu() - expected).norm() / expected.norm()
        assert error < 1e-3, name


@pytest.mark.parametrize("solver", ["subspace"])
def test_the_projector_of_the_subspace_solver(solver: str):
    """Its stated accuracy: a projector error below 1e-2 for nine samples in ten."""
    model, (x, t) = make("chain"), batch()
    exact = gg.diagnose(model, gg.WPerp(solver="svd"), loss_fn, x, t, curve=False)
    found = gg.diagnose(model, gg.WPerp(solver=solver), loss_fn, x, t, curve=False)
    for site in exact:
        assert found[site].bias == pytest.approx(exact[site].bias, rel=2e-2, abs=1e-6)
