"""A search through compiled pieces finds what a search through the model finds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.passes import compiled_pieces
from gradguess.step import refresh

LOSS = nn.CrossEntropyLoss(reduction="none")


class Block(nn.Module):
    """`x + W₂ gelu(W₁ norm x)`, times a number."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.scale = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


def network(*blocks: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), *(blocks or (Block(), Block(), Block())), nn.Linear(6, 3)).double()
    return model


def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(12, 5, dtype=torch.float64, generator=source), torch.arange(12) % 3


def found(
    model: nn.Module, steps: int = 5, *, compile: bool, **options
) -> tuple[dict[str, Tensor], gg.ForwardGradient]:
    """The bases and weights after some steps, of which every second searches."""
    model = copy.deepcopy(model)
    options = {"sites": [name for name, _ in model.named_children()], **options}
    forward = gg.ForwardGradient(model, gg.WPerp(k=2, refresh=2), seed=1, compile=compile, **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        forward(LOSS, *batch())
        optimiser.step()
    return {**model.state_dict(), **forward.state_dict()}, forward


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code of what is compiled, which here runs as it was traced."""
    found: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: (found.append(module.code), module)[1])
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, codes: list[str]) -> list[str]:
    """The same, with pieces of any size."""
    monkeypatch.setattr(compiled_pieces, "LARGE", 0)
    return codes


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-9, atol=1e-9)


def test_the_search_is_the_same(small: list[str]):
    plain, _ = found(network(), compile=False)
    pieces, forward = found(network(), compile=True)
    assert_same(plain, pieces)
    assert [type(known) for known in forward.plan.runner._pieces.values()] == [compiled_pieces.CompiledPieces]


def test_compiled_for_good(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_pieces, "LARGE", 0)
    model = network(Block())
    assert_same(found(model, 3, compile=False)[0], found(model, 3, compile=True)[0])


def test_equal_pieces_are_compiled_once(small: list[str]):
    """Two blocks between sites do the same on other weights; a third scales by another number."""
    _, forward = found(network(Block(), Block(), Block(), Block(0.5)), compile=True)
    (pieces,) = forward.plan.runner._pieces.values()
    functions = [piece.fused for piece in pieces._pieces]
    assert functions[1] is functions[2] is functions[3]
    assert len(set(map(id, functions))) == 4  # the stem, blocks, the other block, the head
    assert any("0.5" in code for code in small)


def test_a_number_of_the_model_that_changes_is_seen(small: list[str]):
    """The pieces hold it fast: with another one they are made anew."""
    ends = {}
    for compile in (False, True):
        model = network()
        forward = gg.ForwardGradient(model, gg.WPerp(k=2, refresh=1), sites=list("01234"), compile=compile)
        for step in range(6):
            model[2].scale = 1.0 if step < 3 else 2.0
            forward(LOSS, *batch())
        ends[compile] = forward.state_dict()
    assert_same(ends[False], ends[True])
    assert len(forward.plan.runner._pieces) == 2


class Around(nn.Module):
    """A site's output goes around the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(x + torch.softmax(self.second(x), -1))


@pytest.mark.parametrize(
    "model", [Around().double(), network(Block(), nn.Dropout(0.5), Block())], ids=["around", "noisy"]
)
def test_other_models_are_searched_as_they_are(small: list[str], model: nn.Module):
    torch.manual_seed(0)
    plain, _ = found(model, compile=False)
    torch.manual_seed(0)
    other, forward = found(model, compile=True)
    assert_same(plain, other)
    assert not forward.plan.runner._pieces
    assert not forward.plan.runner.refused


def test_few_numbers_are_not_worth_it(codes: list[str]):
    _, forward = found(network(), compile=True)
    assert not forward.plan.runner._pieces


def test_pieces_that_do_not_compile_are_named(small: list[str], monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: Tensor):
        raise RuntimeError("no compiler")

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda module, **options: broken if "x0" in module.code else compile(module, **options)
    )  # steps are compiled, pieces are not
    plain, _ = found(network(), compile=False)
    with pytest.warns(UserWarning, match="no compiler"):
        other, forward = found(network(), compile=True)
    assert forward.plan.runner.refused
    assert_same(plain, other)


def test_large_samples_are_searched_with_fewer_of_them(monkeypatch: pytest.MonkeyPatch):
    """Twelve samples by 8 vectors, or four by 24: as many rows."""
    seen: list[tuple[int, int]] = []
    inner = refresh.CutGraph.sketch
    monkeypatch.setattr(
        refresh.CutGraph,
        "sketch",
        lambda self, site, count, noise: (
            seen.append((len(self.above[site.name]), count)),
            inner(self, site, count, noise),
        )[1],
    )
    found(network(), steps=1, compile=False)
    assert set(seen) == {(12, 8)}
    seen.clear()
    monkeypatch.setattr(refresh, "PROBE_NUMBERS", 4 * 6)
    whole, _ = found(network(), steps=1, compile=False)
    assert set(seen) == {(4, 24)}
    chunked, _ = found(network(), steps=1, compile=False, chunk=5)
    assert_same(whole, chunked)  # however the batch is split
