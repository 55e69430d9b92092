"""White noise by place: the same numbers however a batch is split, and no more of them than there are rows."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import gradguess as gg
from gradguess import noise
from gradguess.compile import compiler
from gradguess.noise import Noise, SketchNoise
from traced_graphs import as_compiled

CPU, F64 = torch.device("cpu"), torch.float64


def source(seed: int = 5) -> Noise:
    return Noise(torch.Generator().manual_seed(seed))


def twin(key: int, row: int, word: int) -> tuple[float, float]:
    """SplitMix64 and the transform of Box and Muller, number by number."""
    x = (key + 0x9E3779B97F4A7C15 * ((row << 40) + word)) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    low, high = x % 2**32, x >> 32
    angle = math.pi * 2**-31 * (high - 2**32 if high >= 2**31 else high)
    radius = math.sqrt(-2 * math.log((low % 2**31 + 1) * 2**-31))
    return radius * math.cos(angle), radius * math.sin(angle)


@pytest.mark.parametrize("columns", [1, 6, 7])
@pytest.mark.parametrize("row", [-3, 0, 2**20])
def test_numbers_are_those_of_the_formula(row, columns):
    key, words = -(2**62) - 12345, -(-columns // 2)
    found = noise.normal_numbers(torch.tensor(key), row, 4, 11, columns, F64)
    for i in range(4):
        pairs = [twin(key, row + i, 11 + c) for c in range(words)]
        expected = [*(pair[0] for pair in pairs), *(pair[1] for pair in pairs)][:columns]
        torch.testing.assert_close(found[i], torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_law(dtype):
    """A million numbers: distribution, and products of neighbours by five standard errors."""
    z = source().batched(2, 1000, 500, dtype, CPU).double()
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-4
    assert 4.5 < z.abs().max() < 6.6
    for a, b in ((z[0], z[1]), (z[:, 1:], z[:, :-1]), (z[..., 1:], z[..., :-1]), (z[..., 250:], z[..., :250])):
        for power in (1, 2):
            products = a**power * b**power
            assert abs(float(products.mean()) - (power - 1)) < 5 * float(products.std()) / products.numel() ** 0.5


def test_steps_and_draws_do_not_repeat_numbers():
    generator, every = torch.Generator().manual_seed(5), []
    for _ in range(3):
        step = Noise(generator)
        every += [step.normal(shape, F64, CPU).flatten() for shape in ((3, 4), (33,), (2, 2, 9))]
        every += [step.batched(2, 7, 5, F64, CPU).flatten(), step.apart(0).normal((9,), F64, CPU)]
        every.append(step.apart(1).normal((9,), F64, CPU))
    assert len(torch.cat(every).unique()) == sum(map(len, every))


def test_samples_have_their_numbers_whatever_the_rows():
    whole, part = source(), source().at(3)
    for count, size in ((1, 4), (3, 5)):
        expected = whole.batched(count, 8, size, F64, CPU)
        assert torch.equal(part.batched(count, 2, size, F64, CPU), expected[:, 3:5])


def test_the_order_starts_anew():
    drawn = source()
    once = [drawn.normal((size,), F64, CPU) for size in (3, 100, 2)]
    drawn.rewind()
    for z in once:
        assert torch.equal(drawn.normal(z.shape, F64, CPU), z)


def test_the_generator_gives_one_number_a_step_and_takes_it_back():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    drawn = Noise(generator)
    assert torch.equal(generator.get_state(), before)  # nothing was drawn
    first = drawn.at(4).normal((3,), F64, CPU)
    drawn.normal((500,), F64, CPU)
    drawn.undo()
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(Noise(generator).normal((3,), F64, CPU), first)


def test_precisions_round_the_same_numbers():
    wide, single, half = (source().normal((100,), dtype, CPU) for dtype in (F64, torch.float32, torch.bfloat16))
    torch.testing.assert_close(single.double(), wide, rtol=1e-5, atol=1e-6)
    assert torch.equal(half, single.bfloat16())


@pytest.mark.parametrize("shape", [(0, 3), ()])
def test_no_number_and_one_number(shape):
    assert source().normal(shape, F64, CPU).shape == shape


def test_a_search_has_its_own():
    first, second = (SketchNoise(CPU, 3).normal((4,), F64, CPU) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, SketchNoise(CPU, 4).normal((4,), F64, CPU))


@pytest.mark.parametrize("guess", [gg.ActivationPerturbation(), gg.WPerp(k=3), gg.Feedback(gg.WPerp(k=3))])
def test_small_chunks_draw_no_more_numbers(monkeypatch, guess):
    drawn: list[int] = []
    real = noise.normal_numbers

    def counted(key: Tensor, row: int, rows: int, column: int, columns: int, dtype: torch.dtype) -> Tensor:
        drawn.append(rows * columns if row >= 0 else 0)
        return real(key, row, rows, column, columns, dtype)

    monkeypatch.setattr(noise, "normal_numbers", counted)
    x, t, found = torch.randn(64, 5), torch.arange(64) % 3, []
    for chunk in (None, 4):
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        gg.ForwardGradient(net, guess, chunk=chunk)(nn.CrossEntropyLoss(reduction="none"), x, t)
        found.append(sum(drawn))
        drawn.clear()
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("batch", [12, 10])
def test_compiled_chunks_with_tangents_on_a_part_are_the_same(batch, monkeypatch):
    """Every chunk has its own rows' noise, the last and shorter one included."""
    monkeypatch.setattr(compiler, "compiled", as_compiled)
    x, t = torch.randn(batch, 5, generator=torch.Generator().manual_seed(1), dtype=F64), torch.arange(batch) % 3
    results = []
    for compile in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)).double()
        forward = gg.ForwardGradient(net, gg.Feedback(gg.WPerp(k=3), fraction=0.5), chunk=4, compile=compile)
        for _ in range(5):
            net.zero_grad()
            forward(nn.CrossEntropyLoss(reduction="none"), x, t)
        results.append([p.grad for p in net.parameters()])
    assert forward.plan.runner._graphs
    assert not forward.plan.runner.refused
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
