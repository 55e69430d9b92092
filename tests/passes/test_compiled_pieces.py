"""A search through compiled pieces finds what a search through the model finds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch._inductor as inductor
from torch import Tensor, fx, nn

import gradguess as gg
from gradguess.backends.tracing import Graph
from gradguess.model.task import Task
from gradguess.passes import compiled_pieces
from gradguess.step import refresh
from traced_graphs import as_compiled

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

    def compile(module: fx.GraphModule, arguments: Sequence[Tensor]) -> Graph:
        found.append(module.code)
        return as_compiled(module, arguments)

    monkeypatch.setattr(inductor, "compile", compile)
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


@pytest.mark.slow
def test_compiled_for_good(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_pieces, "LARGE", 0)
    model = network(Block())
    assert_same(found(model, 3, compile=False)[0], found(model, 3, compile=True)[0])


def test_equal_pieces_are_compiled_once(small: list[str]):
    """Two blocks between sites do the same on other weights; a third scales by another number."""
    _, forward = found(network(Block(), Block(), Block(), Block(0.5)), compile=True)
    (pieces,) = forward.plan.runner._pieces.values()
    for functions in ([piece.forward for piece in pieces._pieces], [piece.back for piece in pieces._pieces]):
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


def test_pieces_that_do_not_compile_are_named(small: list[str], monkeypatch: pytest.MonkeyPatch):
    """The steps stay compiled."""

    def broken(*arguments: Tensor):
        raise RuntimeError("no compiler")

    compile = inductor.compile
    monkeypatch.setattr(
        inductor, "compile", lambda module, given: broken if "x0" in module.code else compile(module, given)
    )
    plain, _ = found(network(), compile=False)
    with pytest.warns(UserWarning, match="searches for bases run uncompiled: TorchInductor: RuntimeError: no compiler"):
        other, forward = found(network(), compile=True)
    assert forward.plan.runner._graphs
    assert_same(plain, other)


class Own(nn.Module):
    """Layers whose derivative is not that of what they compute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.kind == "detached":
            return h * torch.sigmoid(5 * h).detach()
        if self.kind == "no_grad":
            with torch.no_grad():
                gate = torch.sigmoid(5 * h)
            return h * gate
        return StraightThrough.apply(h)


class StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return torch.tanh(3 * h)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None: ...

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g

    @staticmethod
    def jvp(ctx, t: Tensor) -> Tensor:
        return t.clone()


@pytest.mark.parametrize("kind", ["detached", "no_grad", "straight through"])
def test_derivatives_of_the_models_own_making(small: list[str], kind: str):
    model = network(*(Own(kind) for _ in range(3)))
    plain, _ = found(model, compile=False)
    pieces, forward = found(model, compile=True)
    assert_same(plain, pieces)
    assert any(forward.plan.runner._pieces.values())


class Crossing(nn.Module):
    """What a site says decides two sites above, without a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(5, 6), Block(), Block(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gate = (x > 0).to(x.dtype)
        return self.last(self.b(self.a(x)) * gate)


def test_values_that_cross_a_site(small: list[str]):
    torch.manual_seed(0)
    model = Crossing().double()
    plain, _ = found(model, compile=False)
    with pytest.warns(UserWarning, match="do not lie in a line"):
        other, forward = found(model, compile=True)
    assert forward.plan.runner._graphs
    assert_same(plain, other)


class Encoded(nn.Module):
    """Every block reads the same frozen encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(5, 6), Block(), Block(), nn.Linear(6, 3)
        self.encoder = nn.Sequential(*(nn.Linear(5, 5).requires_grad_(False) for _ in range(30)), nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            code = self.encoder(x)
        return self.last(self.b(self.a(self.first(x)) + code) + code)


def test_pieces_that_share_most_of_their_work_are_left(small: list[str]):
    torch.manual_seed(0)
    model, sites = Encoded().double(), ["first", "a", "b", "last"]
    plain, _ = found(model, compile=False, sites=sites)
    with pytest.warns(UserWarning, match="share what they compute"):
        other, _ = found(model, compile=True, sites=sites)
    assert_same(plain, other)


class Rows(nn.Module):
    """A sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(5, 6), Block(), Block(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(self.first(x))).mean(1))


def test_a_search_follows_the_size_of_its_batch(monkeypatch: pytest.MonkeyPatch):
    """Sites were found on short samples: on long ones a search sees as few of them as if they had been found there."""
    monkeypatch.setattr(refresh, "MANY", 12 * 2 * 6)
    monkeypatch.setattr(refresh, "FEW", 0)
    torch.manual_seed(0)
    model, sites, t = Rows().double(), ["first", "a", "b", "last"], batch()[1]
    short, long = (torch.randn(12, length, 5, dtype=torch.float64) for length in (2, 8))
    ends = []
    for resumed in (False, True):
        forward = gg.ForwardGradient(model, gg.WPerp(k=2, refresh=1), sites=sites)
        forward(LOSS, short, t)
        if resumed:
            saved = forward.state_dict()
            forward = gg.ForwardGradient(model, gg.WPerp(k=2, refresh=1), sites=sites)
            forward.load_state_dict(saved)
        forward(LOSS, long, t)
        ends.append({**forward.state_dict(), "rows": torch.tensor(forward.layout.largest(Task(model, LOSS, long, t)))})
    assert_same(*ends)


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
    monkeypatch.setattr(refresh, "MANY", 4 * 6)
    monkeypatch.setattr(refresh, "FEW", 0)
    whole, _ = found(network(), steps=1, compile=False)
    assert set(seen) == {(4, 24)}
    chunked, _ = found(network(), steps=1, compile=False, chunk=5)
    assert_same(whole, chunked)  # however the batch is split


class Turned(nn.Module):
    """Mixes the other dimension, and returns a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).transpose(1, 2)


def test_sites_that_are_not_contiguous(small: list[str]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 6), Turned(), Turned(), nn.Flatten(), nn.Linear(36, 3))
    model, sites, x = model.double(), list("1235"), torch.randn(12, 6, dtype=torch.float64)
    ends = []
    for compile in (False, True):
        forward = gg.ForwardGradient(model, gg.WPerp(k=2, refresh=1), sites=sites, compile=compile)
        for _ in range(3):
            forward(LOSS, x, batch()[1])
        ends.append(forward.state_dict())
    assert any(forward.plan.runner._pieces.values())
    assert_same(*ends)


class Heads(nn.Module):
    """Attention with its heads still apart: PyTorch's kernels lay them out as no formula does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(query, key, value)


def test_a_site_that_a_kernel_lays_out(small: list[str]):
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (5, 1)), nn.Linear(1, 8), Heads(), nn.LayerNorm(4), nn.Flatten(), nn.Linear(40, 3)]
    model = nn.Sequential(*layers).double()
    plain, _ = found(model, compile=False, sites=list("1235"))
    other, forward = found(model, compile=True, sites=list("1235"))
    assert any(forward.plan.runner._pieces.values())
    assert_same(plain, other)


def test_layers_of_many_widths(small: list[str]):
    """They have the same code. Each shape is compiled by itself, since a compiled function has few."""
    widths = range(6, 16)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Softmax(-1))]
    model = nn.Sequential(nn.Linear(5, 6), nn.Softmax(-1), *layers, nn.Linear(15, 3)).double()
    sites = [name for name, module in model.named_children() if isinstance(module, nn.Softmax | nn.Linear)]
    plain, _ = found(model, 3, compile=False, sites=sites[1::2] + sites[-1:])
    other, forward = found(model, 3, compile=True, sites=sites[1::2] + sites[-1:])
    (pieces,) = forward.plan.runner._pieces.values()
    assert len({id(piece.back) for piece in pieces._pieces[1:]}) == len(widths)
    assert_same(plain, other)
