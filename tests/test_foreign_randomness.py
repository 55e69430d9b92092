"""Models that draw from Python's or NumPy's global generator: all passes of a step see the same numbers."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.compile import compiler
from traced_graphs import as_compiled

DRAWS = {"python": random.random, "numpy": lambda: float(np.random.rand())}


class Drops(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([DRAWS[self.kind]() for _ in range(x.shape[1])], dtype=x.dtype)


def trained(kind: str, **options) -> tuple[list[Tensor], float]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(5, 8), Drops(kind), nn.Tanh(), nn.Linear(8, 3)).double()
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), **options)
    x, t = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    for _ in range(3):
        forward(nn.CrossEntropyLoss(reduction="none"), x, t)
    return [p.grad for p in model.parameters()], DRAWS[kind]()


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("options", [{"memory": "replay"}, {"compile": True}], ids=str)
def test_all_passes_draw_the_same(kind, options, monkeypatch):
    monkeypatch.setattr(compiler, "compiled", as_compiled)
    expected, after = trained(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="compile=True has no effect")
        found, other = trained(kind, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert after == other


@pytest.mark.parametrize("kind", DRAWS)
def test_an_estimate_leaves_no_trace(kind):
    random.seed(3)
    np.random.seed(3)
    expected = DRAWS[kind]()
    random.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(5, 8), Drops(kind), nn.Linear(8, 3))
    gg.estimate(model, gg.WPerp(k=3), nn.CrossEntropyLoss(reduction="none"), torch.randn(6, 5), torch.arange(6) % 3)
    assert DRAWS[kind]() == expected
