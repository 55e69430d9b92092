"""Samples that mix are noticed at the first step, and the warning names the way out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from models import Calls, Net

LOSS = nn.CrossEntropyLoss(reduction="none")


def sequences_through(layer: nn.Module, time_first: bool = False) -> nn.Module:
    """A recurrent layer or attention, then a linear layer on the last position."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = m.stem(x)
        h = m.layer(h, h, h) if isinstance(m.layer, nn.MultiheadAttention) else m.layer(h)
        h = h[0] if isinstance(h, tuple) else h
        return m.head(h[-1] if time_first else h[:, -1])

    return Net(run, stem=nn.Linear(4, 6), layer=layer, head=nn.Linear(6, 3))


class Towers(nn.Module):
    """Two networks whose outputs are compared sample by sample with those of all samples: a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) @ self.right(x).t()


def own_numbers() -> nn.Module:
    """Noise from a generator of its own, which nobody puts back."""
    source = torch.Generator()
    return Calls(lambda x: x + torch.randn(x.shape, generator=source))


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.ReLU(), nn.Linear(6, 3))


vectors, sequences = (5, 4), (5, 7, 4)
MIXING: dict[str, tuple[Any, tuple[int, ...], str]] = {  # how it is made, its inputs, where the others move first
    "batch norm": (lambda: mlp(nn.BatchNorm1d(6)), vectors, "at '1'"),
    "time first": (lambda: sequences_through(nn.LSTM(6, 6)), sequences, "at 'layer'"),
    "attention, time first": (lambda: sequences_through(nn.MultiheadAttention(6, 2)), sequences, "at 'layer'"),
    "softmax over the batch": (lambda: mlp(nn.Softmax(0)), vectors, "at '3'"),
    "contrastive": (Towers, vectors, "in the loss or right below it"),
}
APART = {
    "mlp": (mlp, vectors),
    "evaluation": (lambda: mlp(nn.BatchNorm1d(6)).eval(), vectors),
    "layer norm and dropout": (lambda: mlp(nn.LayerNorm(6), nn.Dropout(0.5)), vectors),
    "noise of its own": (lambda: mlp(own_numbers()), vectors),
    "batch first": (lambda: sequences_through(nn.GRU(6, 6, batch_first=True)), sequences),
    "attention": (lambda: sequences_through(nn.MultiheadAttention(6, 2, batch_first=True, dropout=0.3)), sequences),
    "the batch is dimension 1": (lambda: sequences_through(nn.LSTM(6, 6), time_first=True), (7, 5, 4)),
    "a statistic that is detached": (lambda: mlp(Calls(lambda x: x - x.mean(0).detach())), vectors),
}


def batch(model: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.arange(5) if isinstance(model, Towers) else torch.randint(3, (5,))


def warned(model: nn.Module, shape: tuple[int, ...], guess: Any = None, steps: int = 2, **options: Any) -> list[str]:
    """What some steps warn of."""
    forward, (x, t) = gg.ForwardGradient(model, guess or gg.WPerp(k=2), **options), batch(model, shape)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            forward(LOSS, x, t)
    assert all(warning.filename == __file__ for warning in seen), "it points at the caller"
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_are_noticed_once(name: str) -> None:
    make, shape, where = MIXING[name]
    (found,) = warned(make(), shape)
    assert found.startswith("Samples mix: the loss of sample")
    assert where in found
    assert all(way in found for way in ("coupling='batch'", "model.eval()", "batch_first=True"))
    assert not warned(make(), shape, coupling="batch")
    model = make()
    with pytest.warns(UserWarning, match="Samples mix"):
        gg.estimate(model, gg.WTranspose(), LOSS, *batch(model, shape))


@pytest.mark.parametrize("name", APART)
def test_samples_that_do_not_mix_are_not_accused(name: str) -> None:
    make, shape = APART[name]
    assert not warned(make(), shape)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "replay"},
        {"chunk": 3},
        {"compile": True},
        {"derivative": "finite"},
        {"derivative": "finite", "memory": "replay"},
        {"isolate": True, "tangents": 2},
        {"sites": 2},
    ],
    ids=str,
)
def test_with_other_options(options: dict[str, Any]) -> None:
    assert len(warned(mlp(nn.BatchNorm1d(6)), vectors, **options)) == 1
    assert not warned(mlp(nn.Dropout(0.5)), vectors, **options)


@pytest.mark.parametrize(
    "method",
    [gg.Backprop(), gg.WeightPerturbation(), gg.baselines.MeZO(), gg.baselines.DFA(), gg.baselines.Frozen()],
    ids=repr,
)
def test_methods_that_do_not_look_at_one_sample_do_not_warn(method: gg.methods.Method) -> None:
    assert not warned(mlp(nn.BatchNorm1d(6)), vectors, method)


@pytest.mark.parametrize(
    "method", [gg.LocalGuess(), gg.Feedback(gg.WPerp(k=2), form="corrected"), gg.baselines.FDFA()], ids=repr
)
def test_methods_that_do_warn(method: gg.methods.Method) -> None:
    assert len(warned(mlp(nn.BatchNorm1d(6)), vectors, method)) == 1


def test_one_sample_mixes_with_none() -> None:
    model = mlp(nn.Softmax(0))
    gg.ForwardGradient(model, gg.WPerp(k=2))(LOSS, torch.randn(1, 4), torch.tensor([1]))


def test_the_check_leaves_no_trace() -> None:
    """The same numbers come out, random state and buffers included, where the check is not made."""

    def run(known: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp(nn.BatchNorm1d(6), nn.Dropout(0.5))
        forward, (x, t) = gg.ForwardGradient(model, gg.WPerp(k=2)), batch(model, vectors)
        forward.mixes = known
        with warnings.catch_warnings(action="ignore"):
            forward(LOSS, x, t)
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

    assert all(map(torch.equal, run(False), run(True)))
