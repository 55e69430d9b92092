"""The same noise gives the same estimate on CUDA and on a CPU, in float64; and nearly the same in float32."""

from __future__ import annotations

import pytest
import torch

import gradguess as gg
from gpu_networks import CASES, METHODS, batch, loss_fn, make
from gradguess.methods.guessed import as_method
from gradguess.methods.run import Plan, find_layout, run_step
from gradguess.model.task import Task
from gradguess.step.base import Options, State

# These find singular vectors, whose signs differ, or draw fixed noise of the device: the law alone is the same.
LAW_ALONE = ("wperp-subspace", "wperp-ns", "wperp-svd")


def estimates(network: str, method: str, dtype: torch.dtype) -> list[gg.Estimate]:
    """The second step on each device, from the same state: bases are unique up to signs, so the CPU's are used."""
    model, (x, t) = make(network, dtype), batch(64, dtype)
    plan = Plan(as_method(METHODS[method]()), "auto", Options(), detail=True)
    state, found = State(), []
    for device, count in (("cpu", 0), ("cpu", 4), ("cuda", 4)):
        model.to(device)
        task = Task(model, loss_fn, x.to(device), t.to(device))
        generator = torch.Generator().manual_seed(3)  # on the CPU: both devices see the same numbers
        kept, learned = (
            {site: {key: v.to(device) for key, v in values.items()} for site, values in entries.items()}
            for entries in (state.kept, state.learned)
        )
        result, new, _ = run_step(plan, task, find_layout(plan, task), generator, State(kept, learned, count))
        if count:
            found.append(result)
        else:
            state = new
    return found


@pytest.mark.parametrize(("network", "method"), [case for case in CASES if case[1] not in LAW_ALONE])
def test_float64(network: str, method: str):
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


def test_the_bias_of_the_subspace_solver():
    """In float32, to a projector error of 1e-5."""
    model, (x, t) = make("chain"), batch(48)
    exact = gg.diagnose(model, gg.WPerp(solver="svd"), loss_fn, x, t, curve=False)
    found = gg.diagnose(model, gg.WPerp(solver="subspace"), loss_fn, x, t, curve=False)
    for site in exact:
        assert found[site].bias == pytest.approx(exact[site].bias, rel=1e-3, abs=1e-6)
