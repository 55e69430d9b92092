"""Models in pieces: which places are found, and that what is computed there is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gradguess import InputError
from gradguess.model.find_sites import lay_out
from gradguess.model.task import Task
from models import Net

LOSS = nn.CrossEntropyLoss(reduction="none")


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Tokens(nn.Module):
    """Position embeddings, attention, tied weights: an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 6), nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(5))
        for block in self.blocks:
            h = block(h)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        return self.head(h).mean(1)


def across() -> nn.Module:
    """A connection from the first layer to the last: nothing is narrow between them."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(h + m.middle(h.relu()).relu())

    return Net(run, first=nn.Linear(4, 6), middle=nn.Linear(6, 6), last=nn.Linear(6, 3))


class Ends(nn.Module):
    """A block that ends with its last layer, which runs inside of it; its skip connection returns what came in."""

    def __init__(self, last: nn.Module, aside: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.last, self.skip, self.aside = nn.Linear(6, 6), last, nn.Identity(), aside

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(x.tanh()) + self.skip(x))
        if self.aside is not None:
            self.said = self.aside(out)
        return out


def residual(blocks: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), *(Block() for _ in range(blocks)), nn.LayerNorm(6), nn.Linear(6, 3))


def mlp(depth: int = 12) -> nn.Sequential:
    layers = [layer for _ in range(depth - 1) for layer in (nn.Linear(4, 4), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def task(model: nn.Module, dtype: torch.dtype = torch.float64) -> Task:
    torch.manual_seed(1)
    x = torch.randint(7, (9, 5)) if isinstance(model, Tokens) else torch.randn(9, 4, dtype=dtype)
    return Task(model.to(dtype), LOSS, x, torch.randint(3, (9,)))


@pytest.mark.parametrize(
    ("model", "pieces", "expected"),
    [
        (residual(), 1, ["14"]),
        (residual(), 2, ["6", "14"]),
        (residual(), 3, ["4", "8", "14"]),
        (residual(), 15, [*map(str, range(15))]),
        (mlp(), 3, ["6", "14", "22"]),
        (mlp(2), 2, ["0", "2"]),
        (Tokens(), 3, ["blocks.0", "blocks.2"]),  # the outputs are no module's own
        (across(), 2, ["first", "last"]),
    ],
)
def test_the_places(model, pieces, expected):
    assert [site.name for site in lay_out(task(model), pieces).sites] == expected


@pytest.mark.parametrize(("model", "pieces"), [(across(), 3), (residual(2), 9), (mlp(2), 20)])
def test_there_are_not_enough(model, pieces):
    with pytest.raises(InputError, match=f"for {pieces} pieces .* at {pieces - 1} or more places"):
        lay_out(task(model), pieces)


@pytest.mark.parametrize("memory", ["store", "replay"])
@pytest.mark.parametrize("make", [residual, mlp, Tokens])
def test_two_pieces_chained_are_exact(make, memory):
    """The upper piece knows the error, and the chain rule brings it to the lower."""
    torch.manual_seed(0)
    job = task(make())
    forward = gg.ForwardGradient(job.model, gg.Feedback(gg.WPerp(k=3), form="chained"), sites=2, memory=memory)
    forward(LOSS, job.inputs, job.targets)
    found = [p.grad.clone() for p in job.model.parameters()]
    job.model.zero_grad()
    LOSS(job.model(job.inputs), job.targets).mean().backward()
    for grad, parameter in zip(found, job.model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (lambda: Ends(nn.ReLU()), "1"),
        (lambda: nn.Sequential(Ends(nn.ReLU())), "1"),
        (lambda: Ends(nn.Linear(6, 6)), "1.last"),  # better known than the block
        (lambda: Ends(nn.ReLU(), nn.Linear(6, 6)), "1"),  # what reads it aside does not reach the loss
    ],
)
def test_a_cut_is_at_the_end_of_the_outermost_module(block, name):
    """Inside of it the cut would hold the block's local tensors."""
    model = nn.Sequential(nn.Linear(4, 6), block(), block(), nn.Linear(6, 3))
    layout = lay_out(Task(model, LOSS, torch.randn(4, 4), torch.tensor([0, 1, 2, 0])), 2)
    assert [site.name for site in layout.sites] == [name, "3"]
