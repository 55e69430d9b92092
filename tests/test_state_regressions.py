"""What the state machine found, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_same
from combinations import pairwise

cross_entropy = nn.CrossEntropyLoss(reduction="none")
METHODS = {
    "wt": gg.WTranspose(),
    "shared": gg.WPerp(k=3, refresh=4),
    "subspace": gg.WPerp(k=3, refresh=4, solver="subspace"),
    "ns": gg.WPerpNS(k=3, refresh=4),
    "direct": gg.Feedback(gg.WPerp(k=3, refresh=4), form="direct"),
    "chained": gg.Feedback(gg.WPerp(k=3, refresh=4), form="chained"),
    "weight": gg.WeightPerturbation(),
    "backprop": gg.Backprop(),
}


def net(act: type[nn.Module] = nn.Tanh, width: int = 9, upper: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), act(), nn.Linear(width, upper), act(), nn.Linear(upper, 3)).double()


def batch(size: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6).double(), torch.randint(3, (size,))


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_new(forward: gg.ForwardGradient, method: gg.guesses.Method, x: Tensor, t: Tensor) -> None:
    """The next step is that of a new object with the same state."""
    model, state = forward.model, forward.state_dict()
    model.zero_grad()
    forward(cross_entropy, x, t)
    found = grads(model)
    model.zero_grad()
    other = gg.ForwardGradient(model, method)
    other.load_state_dict(state)
    other(cross_entropy, x, t)
    assert_same(found, grads(model))
    assert_same(forward.state_dict(), other.state_dict())


def _hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, output: 2 * output)


def _pre_hook(model: nn.Sequential) -> None:
    model[2].register_forward_pre_hook(lambda module, args: (2 * args[0],))


def _activation(model: nn.Sequential) -> None:
    model[1] = nn.ReLU()


def _layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(9, 8).double()


def _width(model: nn.Sequential) -> None:
    model[0], model[2] = nn.Linear(6, 7).double(), nn.Linear(7, 8).double()


@pytest.mark.parametrize(
    ("name", "change", "steps"),  # at the fourth step a search is due
    pairwise(METHODS, [_hook, _pre_hook, _activation, _layer, _width], [2, 4]),
)
def test_what_is_done_to_a_model_between_steps_is_noticed(
    name: str, change: Callable[[nn.Sequential], None], steps: int
) -> None:
    """A new activation was used with the old one's gate; `.grad` went to layers that were no longer there; a basis of
    another size was the start of a search.
    """
    model, (x, t) = net(), batch()
    forward = gg.ForwardGradient(model, METHODS[name])
    for _ in range(steps):
        forward(cross_entropy, x, t)
    change(model)
    assert_as_new(forward, METHODS[name], x, t)


def test_a_hook_that_changes_in_place() -> None:
    model, (x, t) = net(), batch()
    model[2].register_forward_hook(lambda module, args, output: output.mul_(2))
    gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=3), sweeps=9))(cross_entropy, x, t)
    found = grads(model)
    model.zero_grad()
    cross_entropy(model(x), t).mean().backward()
    for name, grad in grads(model).items():
        torch.testing.assert_close(found[name], grad)


@pytest.mark.parametrize("name", METHODS)
def test_a_model_that_becomes_another_dtype(name: str) -> None:
    """What was kept and learned stayed in the old one, and met the new one in a product."""
    model, (x, t) = net(), batch()
    forward = gg.ForwardGradient(model, METHODS[name])
    forward(cross_entropy, x, t)
    model.float()
    assert_as_new(forward, METHODS[name], x.float(), t)
    model.double()
    assert_as_new(forward, METHODS[name], x, t)


def test_a_basis_that_was_found_on_a_poor_batch_grows_again() -> None:
    """A search that starts from the last basis kept its zero columns for ever."""
    model, (x, t) = net(nn.ReLU), batch()
    forward = gg.ForwardGradient(model, gg.WPerp(k=3, refresh=2))
    with torch.no_grad():
        model[0].bias -= 100
        model[0].bias[0] += 200  # one unit is open
    forward(cross_entropy, x, t)
    assert int((forward.kept["0"]["basis"] != 0).any(0).sum()) == 1
    with torch.no_grad():
        model[0].bias += 100
    for _ in range(2):
        forward(cross_entropy, x, t)
    assert int((forward.kept["0"]["basis"] != 0).any(0).sum()) == 3


@pytest.mark.parametrize("seed", [1, 5, 8, 9])
def test_samples_with_few_open_units(seed: int) -> None:
    """Numbers near the smallest that float32 has came up in the search of W⊥-NS, and `eigh` failed on them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias -= 0.8
    gg.ForwardGradient(model, gg.WPerpNS(k=4))(cross_entropy, torch.randn(50, 6), torch.randint(3, (50,)))
    assert all(torch.isfinite(grad).all() for grad in grads(model).values())
