"""Local losses: heads that learn, pieces that learn from them, and nothing that crosses a cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from models import Case, Net, cross_entropy, make

LOCAL = {"linear": gg.baselines.LocalLinear(lr=0.01), "predsim": gg.baselines.PredSim(lr=0.01)}


def characters() -> nn.Module:
    """One prediction for each position."""
    parts = {"embed": nn.Embedding(7, 5), "mix": nn.Linear(5, 5), "head": nn.Linear(5, 7)}
    return Net(lambda m, x: m.head(torch.tanh(m.mix(m.embed(x)))), **parts)


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def images() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(75, 4),
    )
    return Case(model.double(), torch.randn(6, 2, 5, 5).double(), torch.tensor([0, 1, 2, 3, 0, 1]))


# --- a slow twin -------------------------------------------------------------------------------------------------


class Twin:
    """Pieces as modules, each with its own heads and one Adam for all heads; gradients by `backward`."""

    def __init__(self, pieces: list[nn.Module], seen: list, heads: list[dict[str, Tensor]], beta: float, lr: float):
        self.pieces, self.seen, self.beta = pieces, seen, beta
        self.heads = [{name: value.clone().requires_grad_() for name, value in head.items()} for head in heads]
        self.optimiser = torch.optim.Adam([p for head in self.heads for p in head.values()], lr=lr)

    def step(self, x: Tensor, targets: Tensor) -> None:
        self.optimiser.zero_grad()
        for piece, see, head in zip(self.pieces, self.seen, self.heads, strict=False):
            x = piece(x)
            shown = see(x)
            loss = (1 - self.beta) * cross_entropy(shown.flatten(1) @ head["W"].t() + head["b"], targets).mean()
            if self.beta:
                loss = loss + self.beta * apart(shown, head["S"], targets)
            loss.backward()
            x = x.detach()
        cross_entropy(self.pieces[-1](x), targets).mean().backward()
        self.optimiser.step()


def apart(x: Tensor, S: Tensor, targets: Tensor) -> Tensor:
    """The similarity loss, pair by pair."""
    if S.dim() == 4:
        mapped = F.conv2d(x, S, padding=1)
        rows = torch.stack([torch.stack([channel.std() for channel in sample]) for sample in mapped])
    else:
        rows = x @ S.t()
    classes = torch.eye(4, dtype=x.dtype)[targets]
    total = x.new_zeros(())
    for i in range(len(x)):
        for j in range(len(x)):
            total = total + (cosine(rows[i], rows[j]) - cosine(classes[i], classes[j])).square()
    return total / len(x) ** 2


def cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(), b - b.mean()
    return (a @ b) / (a.norm() * b.norm())


def mlp_pieces(model: nn.Sequential) -> tuple[list[nn.Module], list]:
    return [model[0], nn.Sequential(model[1], model[2]), nn.Sequential(model[3], model[4])], [torch.relu, torch.relu]


def cnn_pieces(model: nn.Sequential) -> tuple[list[nn.Module], list]:
    return [model[0], nn.Sequential(model[1], model[2]), nn.Sequential(*model[3:])], [torch.relu, lambda s: s]


@pytest.mark.parametrize("name", ["linear", "predsim"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_three_steps_are_those_of_pieces_with_heads(kind, name):
    case = make("relu-bias") if kind == "mlp" else images()
    method = LOCAL[name]
    cuts = ["0", "2", "4" if kind == "mlp" else "5"]
    forward = gg.ForwardGradient(case.model, method, sites=cuts)
    state = gg.ForwardGradient(case.model, type(method)(lr=1e-300), sites=cuts)
    state(*case.args)  # heads as they start: they hardly learn
    heads = [{n: t for n, t in state.learned[cut].items() if "." not in n} for cut in ("0", "2")]
    pieces, seen = (mlp_pieces if kind == "mlp" else cnn_pieces)(case.model)
    twin = Twin(pieces, seen, heads, getattr(method, "beta", 0.0), method.lr)
    for _ in range(3):
        case.model.zero_grad()
        twin.step(case.inputs, case.targets)
        expected = [p.grad.clone() for p in case.model.parameters()]
        case.model.zero_grad()
        forward(*case.args)
        for p, grad in zip(case.model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-9, atol=1e-12)
    for cut, head in zip(("0", "2"), twin.heads, strict=True):
        for key, value in head.items():
            torch.testing.assert_close(forward.learned[cut][key], value.detach(), rtol=1e-7, atol=1e-9)


def test_a_text_has_a_prediction_at_every_position():
    x = torch.randint(7, (3, 6))
    case = Case(characters().double(), x, x.roll(-1, 1), per_sample)
    forward = gg.ForwardGradient(case.model, gg.baselines.LocalLinear(lr=0.1), sites=2)
    forward(*case.args)
    (cut,) = forward.learned
    assert forward.learned[cut]["W"].shape == (7, 5)
    case.model.zero_grad()
    W, b = forward.learned[cut]["W"].clone(), forward.learned[cut]["b"].clone()
    forward(*case.args)
    found = case.model.embed.weight.grad.clone()
    case.model.zero_grad()
    s = case.model.embed(x) if cut == "embed" else case.model.mix(case.model.embed(x))
    per_sample(s @ W.t() + b, case.targets).mean().backward()
    torch.testing.assert_close(found, case.model.embed.weight.grad, rtol=1e-10, atol=1e-13)


# --- what holds for all of them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCAL)
def test_nothing_of_what_lies_above_a_cut_is_read_below_it(name):
    """Another head of the network, and the lower pieces get the same gradients."""
    found = []
    for factor in (1.0, -3.0):
        case = make("relu-bias")
        with torch.no_grad():
            case.model[4].weight.mul_(factor)
        forward = gg.ForwardGradient(case.model, LOCAL[name], sites=["0", "2", "4"])
        for _ in range(2):
            case.model.zero_grad()
            forward(*case.args)
        found.append(case.model)
    assert torch.equal(found[0][0].weight.grad, found[1][0].weight.grad)
    assert torch.equal(found[0][2].weight.grad, found[1][2].weight.grad)
    assert found[0][0].weight.grad.any()
    assert not torch.equal(found[0][4].weight.grad, found[1][4].weight.grad)


def test_a_frozen_lower_part_has_no_gradient():
    case = make("relu-bias")
    gg.ForwardGradient(case.model, gg.baselines.Frozen(), sites=["0", "2", "4"])(*case.args)
    assert all(p.grad is None for p in (*case.model[0].parameters(), *case.model[2].parameters()))
    found = case.model[4].weight.grad.clone()
    case.model.zero_grad()
    case.losses().mean().backward()
    torch.testing.assert_close(found, case.model[4].weight.grad, rtol=1e-12, atol=1e-14)


# --- what is refused -----------------------------------------------------------------------------------------------


def test_predsim_needs_classes():
    x = torch.randint(7, (3, 6))
    forward = gg.ForwardGradient(characters(), gg.baselines.PredSim(), sites=2)
    with pytest.raises(
        gg.InputError, match=r"expected targets of whole numbers, shape \(batch,\), found shape \(3, 6\)"
    ):
        forward(per_sample, x, x)
