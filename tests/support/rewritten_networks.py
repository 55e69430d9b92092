"""Networks that each once broke a rewrite of a traced graph, in float64, and methods that are tried on them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradguess as gg
from models import Calls

B, T, C = 24, 5, 8
LOSS = nn.CrossEntropyLoss(reduction="none")


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Turned(nn.Module):
    """A layer as in Hugging Face's GPT-2, its weight transposed; or kept as one long vector."""

    def __init__(self, below: int, above: int, flat: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(below * above if flat else (below, above)))
        self.bias, self.shape = nn.Parameter(torch.zeros(above)), (below, above)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.addmm(self.bias, x.reshape(-1, self.shape[0]), self.weight.view(self.shape))
        return made.view(*x.shape[:-1], -1)


def perceptron(layer: Callable[[int, int], nn.Module] = nn.Linear) -> Residual:
    return Residual(nn.LayerNorm(C), layer(C, 16), nn.GELU(), layer(16, C))


def convolutions(*between: nn.Module) -> Residual:
    return Residual(nn.Conv2d(C, C, 3, padding=1), *between, nn.ReLU(), nn.Conv2d(C, C, 3, padding=1))


def channels_last() -> Residual:
    turn, back = Calls(lambda x: x.permute(0, 2, 3, 1)), Calls(lambda x: x.permute(0, 3, 1, 2))
    return Residual(turn, nn.LayerNorm(C), nn.Linear(C, C), back, nn.Conv2d(C, C, 3, padding=1))


def mean() -> Calls:
    return Calls(lambda x: x.mean(1))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    tokens, images = torch.randn(B, T, 6), torch.randn(B, 3, 8, 8)
    stem, maps = nn.Linear(6, C), nn.Conv2d(3, C, 3, padding=1)
    unflat = [nn.Flatten(), nn.Linear(30, 30, bias=False), nn.Unflatten(1, (2, 15)), nn.Linear(15, 2), nn.Flatten()]
    end = [nn.Flatten(), nn.Linear(C * 64, 5)]
    found = {
        "tokens": ([stem, perceptron(), perceptron(), nn.LayerNorm(C), mean(), nn.Linear(C, 5)], tokens),
        "a norm below all tokens": ([stem, perceptron(), nn.LayerNorm(C), nn.Flatten(), nn.Linear(T * C, 5)], tokens),
        "turned weights": ([stem, perceptron(Turned), perceptron(Turned), mean(), nn.Linear(C, 5)], tokens),
        "flat weights": ([stem, perceptron(lambda *s: Turned(*s, True)), mean(), nn.Linear(C, 5)], tokens),
        "maps": ([maps, convolutions(nn.GroupNorm(2, C)), convolutions(), *end], images),
        "channels last": ([maps, channels_last(), channels_last(), *end], images),
        "batch norm": ([maps, convolutions(nn.BatchNorm2d(C)), *end], images),
        "a narrow layer on parts": ([*unflat, nn.Linear(4, 5)], tokens),
        "a narrow layer on tokens": ([nn.Linear(6, 2, bias=False), nn.Linear(2, C), mean(), nn.Linear(C, 5)], tokens),
    }
    return {name: (nn.Sequential(*layers).double(), x.double()) for name, (layers, x) in found.items()}


METHODS = {
    "wperp": (gg.WPerp(k=3), {}),
    "exact top": (gg.WPerp(k=3), {"top": "exact"}),
    "three tangents": (gg.WPerp(k=3), {"tangents": 3}),
    "isolated": (gg.WPerp(k=3), {"isolate": True}),
    "balanced": (gg.WPerp(k=3), {"balance": True}),
    "leaves": (gg.WPerp(k=3), {"sites": "leaf"}),
    "chained": (gg.Feedback(gg.WPerp(k=3)), {}),
    "backprop": (gg.Backprop(), {}),
}


def gradients(model: nn.Module, method: gg.Method, x: Tensor, **options) -> dict[str, Tensor]:
    """Those of the third step, which is compiled where that is asked for."""
    model, t = copy.deepcopy(model), torch.arange(B, device=x.device) % 5
    forward = gg.ForwardGradient(model, method, seed=1, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compile=True")  # a step that is not compiled says so
        for _ in range(3):
            model.zero_grad()
            forward(LOSS, x, t)
    return {name: p.grad for name, p in model.named_parameters()}


def of_method(method: str, network: str) -> tuple[gg.Method, dict]:
    guess, options = METHODS[method]
    return guess, {**options, "coupling": "batch"} if network == "batch norm" else options


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float) -> None:
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, expected in wanted.items():
        torch.testing.assert_close(
            found[name], expected, rtol=rtol, atol=1e-3 * rtol * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert found[name].stride() == expected.stride()
