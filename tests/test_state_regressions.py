"""What the state machine found, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from asserts import assert_same
from combinations import pairwise
from models import Block

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


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("memory", ["store", "replay"])
def test_a_hook_on_a_layer_is_part_of_its_gradient(act: type[nn.Module], memory: str) -> None:
    """Its closed form, and that of the layer above a site, left out what the hook does."""
    model, (x, t) = net(act), batch()
    model[2].register_forward_hook(lambda module, args, output: 3 * output)
    method = gg.Feedback(gg.WPerp(k=3), form="chained", sweeps=9)  # backpropagation
    gg.ForwardGradient(model, method, memory=memory)(cross_entropy, x, t)
    found = grads(model)
    model.zero_grad()
    cross_entropy(model(x), t).mean().backward()
    for name, grad in grads(model).items():
        torch.testing.assert_close(found[name], grad)


def test_a_hook_that_only_looks_keeps_the_closed_form() -> None:
    model, (x, t) = net(), batch()
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: None)
    forward = gg.ForwardGradient(model, gg.WPerp(k=3))
    forward(cross_entropy, x, t)
    assert not forward.layout.needs_graph
    assert forward.layout["0"].linear is model[2]


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


@pytest.mark.parametrize("name", ["wt", "ns", "shared", "chained"])
def test_inputs_with_a_further_dimension(name: str) -> None:
    """The closed form of a layer between rows of numbers was used for rows of rows."""
    model, (x, t) = net(), batch()
    forward = gg.ForwardGradient(model, METHODS[name])
    forward(cross_entropy, x, t)
    model.zero_grad()
    other = gg.ForwardGradient(model, METHODS[name])
    other.load_state_dict(forward.state_dict())
    tokens = x[:, None].repeat(1, 2, 1)
    found = []
    for each in (forward, other):
        each(lambda outputs, targets: cross_entropy(outputs.mean(1), targets), tokens, t)
        found.append(grads(model))
        model.zero_grad()
    assert_same(*found)


def test_a_layer_above_that_becomes_wider() -> None:
    """`WPerp(solver="subspace")` keeps nothing where the layer above has k rows or fewer, and missed it later."""
    method = gg.WPerp(k=3, refresh=9, solver="subspace")
    model, (x, t) = net(upper=3), batch()
    forward = gg.ForwardGradient(model, method)
    forward(cross_entropy, x, t)
    model[2], model[4] = nn.Linear(9, 8).double(), nn.Linear(8, 3).double()
    assert_as_new(forward, method, x, t)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_that_fails_does_not_shift_the_noise(name: str) -> None:
    model, (x, t) = net(), batch()
    forward = gg.ForwardGradient(model, METHODS[name])
    forward(cross_entropy, x, t)
    before = forward.state_dict()

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        forward(broken, x, t)
    assert_same(forward.state_dict(), before)


def test_nan_in_a_step_that_searches() -> None:
    """The error of `eigh` came through from a search; in a step it was taken for what it is."""
    model, (x, t) = net(nn.ReLU), batch()
    model.insert(1, nn.LayerNorm(9).double())
    forward = gg.ForwardGradient(model, gg.WPerpNS(k=8, refresh=3), nonfinite="skip")
    x[0, 0] = torch.nan
    forward(cross_entropy, x, t)
    assert forward.skipped == 1


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


def test_a_batch_in_pieces_where_a_layer_has_no_closed_form() -> None:
    """The search of `solver="subspace"` saw the first piece alone: other directions for the same noise."""
    x, t = batch(50)
    model = nn.Sequential(nn.Linear(6, 7), Block(7), Block(7), nn.Linear(7, 3)).double()
    found = []
    for chunk in (None, 7):
        gg.ForwardGradient(model, gg.WPerp(k=4, solver="subspace"), chunk=chunk)(cross_entropy, x, t)
        found.append(grads(model))
        model.zero_grad()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.xfail(
    strict=True,
    reason="WPerp(end='bottom') asks whether any unit of the piece is closed: a sample's direction depends on others",
)
def test_the_bottom_of_a_batch_in_pieces() -> None:
    torch.manual_seed(1)
    x, t = batch(50)
    model = net(nn.ReLU, width=2)
    with torch.no_grad():
        model[0].bias += 1.0
    found = []
    for chunk in (None, 1):
        gg.ForwardGradient(model, gg.WPerp(k=2, end="bottom"), chunk=chunk)(cross_entropy, x, t)
        found.append(grads(model))
        model.zero_grad()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-5, atol=1e-7)
