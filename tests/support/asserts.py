"""Named properties, asserted wherever they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gradguess as gg
from models import Case
from references import parameter_sample_gradients, sample_gradients

SIGMAS = 5  # budget of every statistical test: a right code fails once in a million entries


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit, tensors in dicts included."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"largest difference {(a - b).abs().max():.2e}"


def jvp_error(case: Case, est: gg.Estimate, slots: dict[str, int] | None = None, *, isolate: bool = False) -> float:
    """Largest |c_b - Σ_i <y_i, dL_b/ds_i>| over tangents and samples, relative to the largest |c|."""
    by_site = next(iter(est.directions)) in slots if slots is not None else False
    g = sample_gradients(case, est.directions, slots) if by_site else parameter_sample_gradients(case)
    # (tangents, sites, batch)
    terms = [y.flatten(1).to(est.jvp.dtype) @ g[n].flatten(1).to(est.jvp.dtype).mT for n, y in est.directions.items()]
    inner = torch.stack(terms, 1)
    expected = inner.flatten(0, 1) if isolate else inner.sum(1)
    assert est.jvp.shape == expected.shape
    return float((est.jvp - expected).abs().max() / expected.abs().max().clamp_min(1.0))


def assert_jvp_matches_autograd(
    case: Case, est: gg.Estimate, slots: dict[str, int], *, isolate: bool = False, tolerance: float = 1e-9
) -> None:
    """The directional derivative of each sample's loss is what reverse mode says."""
    assert est.jvp.abs().max() > 0, "a derivative that is zero shows nothing"
    assert jvp_error(case, est, slots, isolate=isolate) < tolerance


def assert_in_subspace(y: Tensor, P: Tensor, atol: float = 1e-9) -> None:
    """Every direction (..., d) is left alone by the projector P (d, d)."""
    torch.testing.assert_close(y @ P.mT, y, rtol=0, atol=atol)


def assert_projector(P: Tensor, rank: int | None = None, atol: float = 1e-9) -> None:
    """Symmetric, idempotent, of the given rank."""
    torch.testing.assert_close(P, P.mT, rtol=0, atol=atol)
    torch.testing.assert_close(P @ P, P, rtol=0, atol=atol)
    if rank is not None:
        torch.testing.assert_close(
            P.diagonal(dim1=-2, dim2=-1).sum(-1),
            torch.full(P.shape[:-2], float(rank), dtype=P.dtype),
            rtol=0,
            atol=1e-8,
        )


def covariance_error(y: Tensor, C: Tensor) -> tuple[float, float]:
    """(largest entrywise error, the same in standard errors) of the second moment of draws y (n, d) against C.

    For Gaussian draws, var(y_i y_j) = C_ii C_jj + C_ij².
    """
    n = len(y)
    error = (y.mT @ y / n - C).abs()
    variance = C.diagonal()[:, None] * C.diagonal()[None, :] + C.square()
    floor = 1e-12 * C.diagonal().max().clamp_min(1e-12)
    return float(error.max()), float((error / ((variance / n).sqrt() + floor)).max())


def assert_covariance(y: Tensor, C: Tensor) -> None:
    """Draws y (n, d) have mean zero and covariance C: every entry within SIGMAS standard errors."""
    spread = C.diagonal().clamp_min(0).sqrt() / len(y) ** 0.5
    assert (y.mean(0).abs() <= SIGMAS * spread + 1e-12).all()
    assert covariance_error(y, C)[1] < SIGMAS


def assert_unbiased(samples: Tensor, expected: Tensor) -> None:
    """The mean of samples (n, ...) is what is expected: every entry within SIGMAS standard errors."""
    error = samples.std(0) / len(samples) ** 0.5
    floor = 1e-12 * expected.abs().max().clamp_min(1e-12)
    worst = ((samples.mean(0) - expected).abs() / (error + floor)).max()
    assert worst < SIGMAS, f"{worst:.1f} standard errors off"


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def photograph(model: nn.Module) -> dict[str, Any]:
    """All of a model and of PyTorch's global state that an estimate might touch."""
    return {
        "state": {n: t.clone() for n, t in model.state_dict().items()},
        "identity": [id(t) for t in (*model.parameters(), *model.buffers())],
        "versions": [p._version for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "flags": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "random": torch.get_rng_state(),
        "switches": (
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            torch._C._get_mkldnn_enabled(),
            torch.backends.cudnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
    }


def assert_same_photograph(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        if key == "state":
            assert_same(a[key], b[key])
        elif key == "random":
            assert torch.equal(a[key], b[key])
        elif key == "grads":
            assert all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a[key], b[key], strict=True))
        else:
            assert a[key] == b[key], key
