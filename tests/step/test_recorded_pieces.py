"""A tangent pass that records the graph of every piece beside it: what the graph keeps, and what it notices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends.meter import peak_bytes
from models import Net

CPU, WIDTH, BLOCKS, ROWS = torch.device("cpu"), 64, 6, 512
loss_fn = nn.CrossEntropyLoss(reduction="none")


class Block(nn.Module):
    """`x + W φ(V norm(x))`."""

    def __init__(self, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


def residual(activation: nn.Module, norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block(activation, norm) for _ in range(BLOCKS)), nn.Linear(WIDTH, 10))


def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 8, generator=source), torch.randint(10, (ROWS,), generator=source)


NETWORKS = {
    "gelu": lambda: residual(nn.GELU(), nn.LayerNorm(WIDTH)),
    "relu": lambda: residual(nn.ReLU(), nn.LayerNorm(WIDTH)),
    "rms norm": lambda: residual(nn.GELU(approximate="tanh"), nn.RMSNorm(WIDTH)),
    "silu": lambda: residual(nn.SiLU(), nn.LayerNorm(WIDTH)),
    "tanh": lambda: residual(nn.Tanh(), nn.LayerNorm(WIDTH)),
    "bare": lambda: residual(nn.ReLU(), nn.Identity()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_keeps_no_tangents(name):
    """Beside what backpropagation keeps there are the directions, one of `WIDTH` for each block, and little else."""
    model, (x, t) = NETWORKS[name](), batch()
    forward = gg.ForwardGradient(model, gg.WPerp())
    forward(loss_fn, x, t)
    guessed = peak_bytes(lambda: forward(loss_fn, x, t), CPU)
    exact = peak_bytes(lambda: F.cross_entropy(model(x), t).backward(), CPU)
    row = ROWS * WIDTH * 4
    assert guessed - exact < (BLOCKS + 2 + 5) * row  # and a tangent on its way through a block


def rewriting() -> nn.Module:
    """Writes over what its activation has read."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = m.stem(x)
        wide = m.up(m.norm(h))
        moved = F.gelu(wide)
        wide.mul_(2)
        return m.head(h + m.down(moved))

    parts = {"stem": nn.Linear(8, WIDTH), "norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 64)}
    return Net(run, **parts, down=nn.Linear(64, WIDTH), head=nn.Linear(WIDTH, 10))


def test_what_is_written_over_is_noticed():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gg.estimate(rewriting(), gg.WPerp(), loss_fn, *batch())


def halved() -> nn.Module:
    """A second output that no parameter has a part in."""
    return Net(lambda m, x: (x @ m.w, x * 2), w=nn.Parameter(torch.randn(WIDTH, WIDTH) / 8))


def forked() -> nn.Module:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        a, b = m.fork(m.stem(x))
        return m.head(b + m.act(m.frozen(a)))

    parts = {"stem": nn.Linear(8, WIDTH), "fork": halved(), "act": nn.ReLU()}
    return Net(run, **parts, frozen=nn.Linear(WIDTH, WIDTH).requires_grad_(False), head=nn.Linear(WIDTH, 10))


@pytest.mark.parametrize("sites", ["auto", "leaf", ["stem", "frozen", "head"], ["stem", "act", "head"]])
@pytest.mark.parametrize("isolate", [False, True])
def test_sites_without_parameters_of_their_own(sites, isolate):
    """What was recorded gives what a second pass gives."""
    found = []
    for memory in ("store", "replay"):
        torch.manual_seed(0)
        model = forked().double()
        forward = gg.ForwardGradient(model, gg.WPerp(), memory=memory, sites=sites, isolate=isolate)
        forward(loss_fn, batch()[0].double(), batch()[1])
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for stored, replayed in zip(*found, strict=True):
        torch.testing.assert_close(stored, replayed, rtol=1e-9, atol=1e-14)
