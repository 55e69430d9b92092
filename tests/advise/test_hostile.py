"""`gg.advise` on models, batches and losses that are not plain."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.advise.advice import Advice
from gradguess.advise.candidates import BACKPROP, CHECKPOINTED
from gradguess.errors import InputError
from gradguess_lab.loss import per_sample_loss


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module("gradguess.advise.advise"), "ROUNDS", 1)
    monkeypatch.setattr(import_module("gradguess.advise.trial"), "SHORTEST", 0.0)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randint(3, (6,))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def advise(model: nn.Module, loss_fn, inputs, targets, **options) -> Advice:
    return gg.advise(model, loss_fn, inputs, targets, **({"seconds": 60} | options))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.top((self.left(x) + self.right(y)).relu())


@pytest.mark.parametrize("form", [lambda x: (x, x), lambda x: {"x": x, "y": x}])
def test_every_line_of_code_runs_with_these_inputs(form):
    model, (x, t) = Two(), batch()
    names = {"gg": gg, "model": model, "loss_fn": per_sample_loss, "inputs": form(x), "targets": t}
    rows = [row for row in advise(model, per_sample_loss, form(x), t) if row.works]
    assert len(rows) > 5
    for row in rows:
        model.zero_grad()
        exec(row.code, names)
        if row.method != BACKPROP:
            names["forward"](per_sample_loss, names["inputs"], t)
        assert all(p.grad is not None for p in model.parameters())


def test_a_loss_that_is_a_method_of_the_model_is_copied_with_it():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = mlp(), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return per_sample_loss(self.norm(outputs), targets)

    model, (x, t) = Own(), batch()
    advice = advise(model, model.loss, x, t, seconds=0.01)
    assert model.norm.num_batches_tracked == 0
    assert advice[CHECKPOINTED].cosine == pytest.approx(1)


def test_a_batch_that_the_model_changes_is_copied():
    x, t = batch()
    before = x.clone()
    advise(nn.Sequential(nn.ReLU(inplace=True), mlp()), per_sample_loss, x, t, seconds=0.01)
    assert torch.equal(x, before)


def test_gradients_may_be_sparse():
    x, t = torch.randint(5, (6, 4)), torch.randint(3, (6,))
    model = nn.Sequential(nn.EmbeddingBag(5, 8, mode="sum", sparse=True), nn.ReLU(), nn.Linear(8, 3))
    row = advise(model, per_sample_loss, x, t)[BACKPROP]
    assert row.cosine == pytest.approx(1)
    assert row.lowest_cosine == pytest.approx(1)


def test_a_model_that_returns_its_own_loss_too():
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"loss": per_sample_loss(logits[:, 0], labels).mean(), "logits": logits}

    x, t = torch.randn(6, 5, 4), torch.randint(3, (6,))
    loss_fn = lambda out, t: per_sample_loss(out["logits"][:, 0], t)  # noqa: E731
    advice = advise(Labelled(), loss_fn, {"x": x, "labels": t}, t)
    for name in (CHECKPOINTED, "W⊥", "MeZO"):
        assert advice[name].works
    assert "leave the labels out" in advice["Feedback, chained"].problem


def test_what_cannot_be_tried_is_an_error_that_says_why():
    model, (x, t) = mlp(), batch()
    with pytest.raises(InputError, match="no derivative with respect to any parameter"):
        advise(model, lambda out, t: per_sample_loss(out.detach(), t), x, t)
    with pytest.raises(InputError, match="lazy layers"):
        advise(nn.LazyLinear(3), per_sample_loss, x, t)
    with pytest.raises(InputError, match="seconds: expected a positive number, found None"):
        advise(model, per_sample_loss, x, t, seconds=None)
    with pytest.raises(InputError, match="seed: expected a whole number"):
        advise(model, per_sample_loss, x, t, seed="a")
    model.compile(backend="eager")  # a copy of it would not be compiled, and pass
    with pytest.raises(InputError, match=r"compiled by torch\.compile"):
        advise(model, per_sample_loss, x, t)
