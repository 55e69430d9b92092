"""Noise that is drawn many numbers at once, as on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess import noise
from gradguess.methods import compiled
from gradguess.noise import ALIGNED, Noise, SketchNoise
from traced_graphs import as_compiled

CPU, F64 = torch.device("cpu"), torch.float64


@pytest.fixture(autouse=True)
def _together(monkeypatch):
    monkeypatch.setattr(noise, "drawn_together", lambda device: 4 * ALIGNED)


def source() -> Noise:
    return Noise(torch.Generator().manual_seed(5))


def test_no_number_is_given_out_twice():
    drawn = source()
    parts = [drawn.normal(shape, F64, CPU) for shape in ((3, 4), (ALIGNED,), (2, 2, 9), (ALIGNED + 1,), (500,), (7,))]
    every = torch.cat([part.flatten() for part in parts])
    assert len(every.unique()) == len(every)
    assert all(part.storage_offset() % ALIGNED == 0 for part in parts)


def test_what_is_written_to_one_draw_is_not_seen_in_the_next():
    drawn, again = source(), source()
    first = drawn.normal((5,), F64, CPU)
    first.zero_()
    again.normal((5,), F64, CPU)
    assert torch.equal(drawn.normal((40,), F64, CPU), again.normal((40,), F64, CPU))


def test_the_order_starts_anew():
    drawn = source()
    once = [drawn.normal((size,), F64, CPU) for size in (3, 100, 60, 300, 2)]
    drawn.rewind()
    for z in once:
        assert torch.equal(drawn.normal(z.shape, F64, CPU), z)


def test_another_precision_is_drawn_anew():
    drawn = source()
    assert drawn.normal((3,), F64, CPU).dtype == F64
    assert drawn.normal((3,), torch.float32, CPU).dtype == torch.float32


def test_nothing_is_wanted():
    assert source().normal((0, 3), F64, CPU).shape == (0, 3)


def test_the_law():
    """200,000 numbers in draws of 50; five standard errors."""
    drawn = source()
    z = torch.stack([drawn.normal((50,), F64, CPU) for _ in range(4000)])
    count = z.numel()
    assert abs(float(z.mean())) < 5 / count**0.5
    assert abs(float(z.var()) - 1) < 5 * (2 / count) ** 0.5
    neighbours = (z[:-1] * z[1:]).mean()
    assert abs(float(neighbours)) < 5 / (z[1:].numel()) ** 0.5


def test_a_search_has_its_own():
    first, second = (SketchNoise(CPU, 3).normal((4,), F64, CPU) for _ in range(2))
    assert torch.equal(first, second)


def test_one_number():
    assert source().normal((), F64, CPU).shape == ()


class Looking(nn.Module):
    """It cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 1e9 else x * 2


def gradients(*layers: nn.Module, **options: Any) -> tuple[list[list[Tensor]], gg.ForwardGradient]:
    """Of each of four steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 8), nn.GELU(), *layers, nn.Linear(8, 3)).double()
    forward = gg.ForwardGradient(net, gg.WPerp(k=3), **options)
    x, t = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=F64), torch.arange(12) % 3
    loss_fn, found = nn.CrossEntropyLoss(reduction="none"), []
    for _ in range(4):
        net.zero_grad()
        forward(loss_fn, x, t)
        found.append([p.grad for p in net.parameters()])
    return found, forward


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{"chunk": 5}, {"memory": "replay"}])
def test_steps_are_the_same_however_they_are_run(options):
    assert_same(gradients(**options)[0], gradients()[0])


@pytest.mark.parametrize("options", [{}, {"chunk": 5}])
def test_compiled_steps_are_the_same(options, monkeypatch):
    monkeypatch.setattr(compiled, "compiled", as_compiled)
    found, forward = gradients(compile=True, **options)
    assert forward.plan.runner._graphs
    assert_same(found, gradients()[0])


def test_steps_that_cannot_be_compiled_are_the_same():
    with pytest.warns(UserWarning, match="compile=True has no effect"):
        found, _ = gradients(Looking(), compile=True)
    assert_same(found, gradients(Looking())[0])
