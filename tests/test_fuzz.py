"""Whatever is asked for: a right result, or an error of ours. Bounded in time; more with GRADGUESS_FUZZ=1000."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gradguess as gg

CASES = int(os.environ.get("GRADGUESS_FUZZ", "60"))
calm = settings(
    max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
counts = st.sampled_from([1, 2, 3, 5, 1, 2, 0, -1, 2.5, "2", None, True])
numbers = st.sampled_from([0.1, 0.3, 1.0, 0.0, 1.9, 2.0, -1.0, float("nan"), float("inf"), "x", None])


def words(*known: str) -> st.SearchStrategy[Any]:
    return st.sampled_from([*known, *known, "", "nonsense", None, 3])


perps = st.builds(
    lambda **options: lambda: gg.WPerp(**options),
    k=counts,
    solver=words("svd", "subspace", "shared"),
    refresh=counts,
    end=words("top", "bottom"),
)
others = st.sampled_from(
    [
        gg.WeightPerturbation,
        gg.ActivationPerturbation,
        gg.WTranspose,
        gg.WPreconditioned,
        gg.Backprop,
        gg.WPerp,
        lambda: gg.WPerpNS(k=2),
        lambda: gg.WPerp,  # forgotten parentheses
        lambda: None,
    ]
)
feedbacks = st.builds(
    lambda guess, **options: lambda: gg.Feedback(guess(), **options),
    guess=perps | others,
    form=words("direct", "chained", "corrected"),
    rate=numbers,
    every=counts,
    fraction=numbers,
    sweeps=counts,
    bootstrap=numbers,
)
methods = perps | others | feedbacks


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, torch.Size]:
    """A chain of layers that fit together, and the shape of one sample."""
    torch.manual_seed(draw(st.integers(0, 9)))
    width = draw(st.integers(1, 6))
    activations = st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.Identity, lambda: nn.ReLU(inplace=True), nn.SiLU])
    first = draw(st.sampled_from(["vector", "image", "tokens"]))
    layers: list[nn.Module] = []
    shape = torch.Size([width])
    if first == "image":
        layers, shape = (
            [nn.Conv2d(2, width, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
            torch.Size([2, 4, 4]),
        )
    elif first == "tokens":
        layers, shape = [nn.Unflatten(1, (2, width)), nn.Linear(width, width), nn.Flatten()], torch.Size([2 * width])
        layers.append(nn.Linear(2 * width, width))
    for _ in range(draw(st.integers(0, 3))):
        wider = draw(st.integers(1, 6))
        layers += [nn.Linear(width, wider, bias=draw(st.booleans())), draw(activations)()]
        extra = st.sampled_from([None, None, nn.Dropout(0.5), nn.LayerNorm(wider), nn.BatchNorm1d(wider)])
        if (layer := draw(extra)) is not None:
            layers.append(layer)
        width = wider
    return nn.Sequential(*layers, nn.Linear(width, 3)), shape


LOSSES = {
    "samples": nn.CrossEntropyLoss(reduction="none"),
    "scalar": nn.CrossEntropyLoss(),
    "none": lambda outputs, targets: None,
    "squares": lambda outputs, targets: outputs.square().mean(-1),
    "no batch": lambda outputs, targets: outputs.mean(0),
}


@calm
@given(
    model=models(),
    method=methods,
    batch=st.sampled_from([1, 2, 5, 0, 7]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.int64]),
    loss=st.sampled_from(["samples", "samples", "samples", *LOSSES]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "tangents": counts,
            "memory": words("store", "replay"),
            "sites": st.sampled_from(["auto", "leaf", "branch", ["0"], [], ["nothing"], "x"]),
            "isolate": st.booleans(),
            "coupling": words("sample", "batch"),
            "balance": st.booleans(),
            "chunk": counts,
            "nonfinite": words("raise", "skip", "ignore"),
        },
    ),
)
def test_a_step_is_right_or_refused(model, method, batch, dtype, loss, options):
    model, shape = model
    if dtype.is_floating_point:
        model = model.to(dtype)
    x = torch.zeros(batch, *shape).normal_().to(dtype)
    t = torch.randint(3, (batch,))
    before = [p.clone() for p in model.parameters()]
    try:
        forward = gg.ForwardGradient(model, method(), **options)
        values = [forward(LOSSES[loss], x, t) for _ in range(2)]
    except gg.GradguessError:
        return
    except (RuntimeError, ValueError) as error:
        # what the model says by itself to such a batch is the user's to hear
        with pytest.raises(type(error)):
            LOSSES[loss](model.train()(x), t)
        return
    with torch.no_grad():
        stochastic = any(isinstance(m, nn.Dropout) for m in model.modules())
        wanted = LOSSES[loss](model(x), t).mean()
    if not stochastic and options.get("chunk") is None and forward.skipped == 0:
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(values[1].to(wanted.dtype), wanted, **tolerance)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None or (p.grad.shape == p.shape and p.grad.dtype == p.dtype)
        if forward.skipped == 0 and p.grad is not None:
            assert torch.isfinite(p.grad).all()
