"""`chunk=`: the batch in pieces, the estimate of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradguess as gg
from models import GUESSES, RIVALS, STUDENTS, make

WIDE = {"shared-wide": gg.WPerp(k=20), "subspace-wide": gg.WPerp(k=6, solver="subspace")}
METHODS = {**GUESSES, **WIDE, **RIVALS, **STUDENTS, "backprop": gg.Backprop()}
for _name in ("ns", "ns-nearest", "fdfa", "students-error"):  # these look at each piece, or at the first one, by itself
    del METHODS[_name]


def gradients(name: str, method: gg.methods.Method, chunk: int | None, steps: int = 2, **options) -> list[torch.Tensor]:
    case = make(name)
    forward = gg.ForwardGradient(case.model, method, chunk=chunk, **options)
    optimiser = torch.optim.SGD(case.model.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        optimiser.zero_grad()
        seen.append(forward(*case.args))
        seen += [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
        optimiser.step()
    return [*seen, forward.generator.get_state()]


def assert_same(name, method, chunk, **options):
    whole, pieces = (gradients(name, method, size, **options) for size in (None, chunk))
    assert len(whole) == len(pieces)
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 99])  # of 5 samples: the last one is ragged
def test_any_size_gives_the_estimate_of_the_whole(chunk):
    assert_same("relu-bias", gg.WPerp(k=3), chunk)


@pytest.mark.parametrize("guess", METHODS)
def test_every_method(guess):
    assert_same("gelu-bias", METHODS[guess], 2)


def test_memory_is_bounded_by_the_chunk():
    """No tensor of the whole batch's height is made, but the noise of one site."""
    heights: set[int] = set()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: heights.add(len(output)))
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), chunk=40)  # a search sees 32 samples at most
    forward(nn.CrossEntropyLoss(reduction="none"), torch.randn(100, 6), torch.randint(4, (100,)))
    assert max(heights) == 40


class Stored(nn.Module):
    """A model that gets places in its own data, and no tensor."""

    def __init__(self, model: nn.Module, data: torch.Tensor) -> None:
        super().__init__()
        self.model, self.data = model, data

    def forward(self, places: list[int]) -> torch.Tensor:
        return self.model(self.data[list(places)])


@pytest.mark.parametrize("method", [gg.WPerp(k=3), gg.WPerp(k=3, solver="subspace"), gg.Feedback(gg.WPerp(k=3))])
def test_inputs_need_not_be_tensors(method):
    case = make("relu-bias")
    places = list(range(len(case.inputs)))
    gg.ForwardGradient(case.model, method)(case.loss_fn, case.inputs, case.targets)
    expected = [p.grad.clone() for p in case.model.parameters()]
    case.model.zero_grad()
    gg.ForwardGradient(Stored(case.model, case.inputs), method)(case.loss_fn, places, case.targets)
    torch.testing.assert_close([p.grad for p in case.model.parameters()], expected)


def test_but_a_fraction_of_them_cannot_be_taken():
    case = make("relu-bias")
    forward = gg.ForwardGradient(Stored(case.model, case.inputs), gg.Feedback(gg.WPerp(k=3), fraction=0.4))
    with pytest.raises(gg.InputError, match="inputs: expected a tensor with one row per sample"):
        forward(case.loss_fn, [0, 1, 2, 3, 4], case.targets)
