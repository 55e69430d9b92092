"""Linear layers in a row: the closed-form tangent pass is the dual numbers' bit for bit, and knows where it holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import gradguess as gg
from gradguess.model.find_sites import lay_out
from gradguess.model.task import Task
from gradguess.passes import choose_pass
from gradguess.passes.relu_chain import ReluChainPass

LOSS = nn.CrossEntropyLoss(reduction="none")


def network(activation=nn.ReLU, bias=True) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (5, 9, 7, 8)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b, bias=bias), activation())]
    return nn.Sequential(*hidden, nn.Linear(8, 3, bias=bias))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(11, 5, generator=generator), torch.randint(3, (11,), generator=generator)


def fits(model: nn.Module, *, keep: bool = True) -> bool:
    """Is the model run as linear layers in a row?"""
    task = Task(model, LOSS, *batch())
    return isinstance(choose_pass(task, lay_out(task), keep=keep), ReluChainPass)


def call_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is run layer by layer from now on."""
    monkeypatch.setattr(ReluChainPass, "fits", lambda task, layout: False)


METHODS = {
    "wperp": gg.WPerp(k=3),
    "wt": gg.WTranspose(),
    "activation": gg.ActivationPerturbation(),
    "direct": gg.Feedback(gg.WPerp(k=3), form="direct"),
    "corrected": gg.Feedback(gg.WPerp(k=3), form="corrected"),
}
OPTIONS = {"plain": {}, "tangents": {"tangents": 3}, "isolate": {"isolate": True}, "balance": {"balance": True}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", METHODS)
def test_the_closed_form_is_what_dual_numbers_give(name, options, monkeypatch):
    def train() -> list[torch.Tensor]:
        model = network()
        forward = gg.ForwardGradient(model, METHODS[name], **OPTIONS[options])
        for _ in range(3):
            forward(LOSS, *batch())
        return [p.grad for p in model.parameters()]

    assert fits(network())
    closed = train()
    call_every_model(monkeypatch)
    assert not fits(network())
    for a, b in zip(closed, train(), strict=True):
        assert torch.equal(a, b)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(self.first(x).relu())
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (network(), True),
        (network(nn.Identity), True),
        (network(lambda: nn.ReLU(inplace=True)), True),
        (network(nn.GELU), False),  # its tangent rounds otherwise
        (network(nn.Dropout), False),
        (nn.Sequential(network(), nn.Sigmoid()), False),
        (Residual(), False),
        (nn.Linear(5, 3), False),
    ],
    ids=["relu", "identity", "inplace", "gelu", "dropout", "sigmoid", "residual", "single"],
)
def test_what_counts_as_linear_layers_in_a_row(model, expected):
    assert fits(model) is expected


# --- layer by layer, without calling the model ---------------------------------------------------------------


FORMS = METHODS | {
    "chained": gg.Feedback(gg.WPerp(k=3), form="chained"),
    "now and then": gg.Feedback(gg.WPerp(k=3), form="direct", every=2),
}


def gradients_over_steps(
    model: nn.Module, method: gg.methods.Method, sizes: tuple[int, ...] = (11, 11, 7, 11), memory: str = "store"
):
    """Of every step, on batches of several sizes: memory is used again in the next one."""
    forward, found = gg.ForwardGradient(model, method, memory=memory), []
    x, t = batch()
    for size in sizes:
        model.zero_grad()
        forward(LOSS, x[:size], t[:size])
        found.append([p.grad.clone() for p in model.parameters()])
    return found


@pytest.mark.parametrize("memory", ["store", "replay"])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_layers_gives_what_the_model_gives(name, memory, monkeypatch):
    assert fits(network(), keep=False)
    row = gradients_over_steps(network(), FORMS[name], memory=memory)
    call_every_model(monkeypatch)
    assert not fits(network(), keep=False)
    for ours, theirs in zip(row, gradients_over_steps(network(), FORMS[name], memory=memory), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_chain_that_begins_with_a_relu():
    """The first layer reads what the ReLU lets through."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, t = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 3, (7,))
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    est = gg.estimate(model, gg.WPerp(k=2), loss_fn, x, t)
    torch.testing.assert_close(est.loss, loss_fn(model(x), t).mean())
