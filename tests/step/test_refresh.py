"""Searches for bases: how many samples they see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.step import refresh

LOSS = nn.CrossEntropyLoss(reduction="none")
SITES = ["first", "a", "b", "last"]


class Block(nn.Module):
    """`x + W₂ gelu(W₁ norm x)`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Rows(nn.Module):
    """Of sequences of any length, or of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(5, 6), Block(), Block(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(self.first(x)))
        return self.last(h if h.dim() == 2 else h.mean(1))


def searching(x: Tensor, chunk: int | None = None, model: nn.Module | None = None) -> gg.ForwardGradient:
    torch.manual_seed(0)
    model = model or Rows().double()
    forward = gg.ForwardGradient(model, gg.WPerp(k=2, refresh=1), sites=SITES, chunk=chunk)
    forward(LOSS, x, torch.arange(len(x)) % 3)
    return forward


def assert_same(left: gg.ForwardGradient, right: gg.ForwardGradient) -> None:
    torch.testing.assert_close(left.state_dict(), right.state_dict(), rtol=1e-9, atol=1e-9)


def test_large_samples_are_searched_with_fewer_of_them(monkeypatch: pytest.MonkeyPatch):
    """Twelve samples by 8 vectors, or four by 24: as many rows, and the same however the batch is split."""
    seen: list[tuple[int, int]] = []
    sketch = refresh.CutGraph.sketch

    def noting(self, site, count, noise):
        seen.append((len(self.above[site.name]), count))
        return sketch(self, site, count, noise)

    monkeypatch.setattr(refresh.CutGraph, "sketch", noting)
    x = torch.randn(12, 5, dtype=torch.float64)
    searching(x)
    assert set(seen) == {(12, 8)}
    seen.clear()
    monkeypatch.setattr(refresh, "MANY", 4 * 6)
    monkeypatch.setattr(refresh, "FEW", 0)
    whole = searching(x)
    assert set(seen) == {(4, 24)}
    assert_same(whole, searching(x, chunk=5))
