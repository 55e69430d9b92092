"""Feedback on sites with positions: which pattern each gets, and that it learns what it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gradguess.layers.positions import WORDS, Pattern
from gradguess.methods.feedback.lesson import Scattered
from gradguess.model.find_sites import lay_out
from gradguess.model.task import Task
from gradguess.step.measure import measure
from models import Case, Net, cross_entropy, per_sequence
from steps import step_of


def token_model(words: int = 5, pooled: bool = False) -> nn.Module:
    """Linear per token, so that the best feedback is known: `Bᵀ` is the head's matrix (over the tokens, if pooled)."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = m.second(m.first(x))
        return m.head(x.mean(1) if pooled else x)

    return Net(run, first=nn.Linear(6, 4), second=nn.Linear(4, 4), head=nn.Linear(4, words))


def patterns(model: nn.Module, x: Tensor, y: Tensor, loss_fn=cross_entropy) -> dict[str, Pattern]:
    return {site.name: site.pattern for site in lay_out(Task(model, loss_fn, x, y)).sites}


def test_which_pattern_a_site_gets():
    y = torch.tensor([0, 1, 2, 0])
    tokens, words = torch.randn(4, 3, 6), torch.randint(5, (4, 3))
    assert patterns(token_model(), tokens, words, per_sequence)["first"] == Pattern("each", 4)
    assert patterns(token_model(pooled=True), tokens, y)["first"] == Pattern("shared", 4)
    conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    assert patterns(conv, torch.randn(4, 1, 8, 8), y)["0"].kind == "full"
    large = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 3)
    )
    assert patterns(large, torch.randn(4, 1, 300, 300), y)["0"] == Pattern("shared", 16, channels_first=True)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("memory", ["store", "replay"])
def test_the_shared_matrix_becomes_the_jacobian(pooled: bool, memory: str):
    torch.manual_seed(0)
    model = token_model(pooled=pooled).double()
    x = torch.randn(32, 3, 6, dtype=torch.float64)
    y = torch.randint(5, (32,) if pooled else (32, 3))
    guess = gg.Feedback(gg.ActivationPerturbation(), form="direct", rate=0.5)
    forward = gg.ForwardGradient(model, guess, memory=memory)
    for _ in range(300):
        forward(cross_entropy if pooled else per_sequence, x, y)
    share = 1 / 3 if pooled else 1.0
    expected = {"second": model.head.weight.T * share, "first": (model.head.weight @ model.second.weight).T * share}
    for site, B in expected.items():
        torch.testing.assert_close(forward.learned[site]["B"], B.detach(), rtol=0, atol=1e-3)


def test_signs_tie_no_two_tokens():
    torch.manual_seed(0)
    model, x, y = token_model().double(), torch.randn(2, 3, 6, dtype=torch.float64), torch.randint(5, (2, 3))
    step = step_of(Case(model, x, y, per_sequence), gg.WPerp(k=1), tangents=400)
    drawn = measure(Scattered(step, gg.WPerp(k=1))).records["first"].y
    assert drawn is not None
    draws = drawn[:, 0]  # (tangents, tokens, features)
    between = (draws[:, 0, :, None] * draws[:, 1, None, :]).mean(0)
    sizes = draws[:, :2].square().mean(0).amax(1)  # of the two tokens, which the basis need not weigh alike
    assert between.abs().max() < 0.25 * sizes.prod().sqrt()


def test_a_model_with_a_large_alphabet_trains():
    torch.manual_seed(0)
    model = token_model(words=600)
    x = torch.randn(16, 3, 6)
    y = torch.randint(600, (16, 3))
    forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=4), form="direct"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        losses.append(forward(per_sequence, x, y).item())
        optimiser.step()
    assert forward.learned["first"]["B"].shape == (4, WORDS)
    exact = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    assert exact < losses[0] - 1
