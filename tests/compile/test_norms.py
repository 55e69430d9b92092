"""The gradients of a norm come from those of the layer above, and the graph computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gradguess.compile.trace import trace

B, T, C, H = 6, 5, 7, 9
PLAIN = (B, T, C), (C,), (C,), (H, C), (H,), (B, T, H)  # input, γ, β, weight, bias, error
Above = Callable[[Tensor, Tensor, Tensor], Tensor]  # of the norm's output, the weight and the bias


def arguments(shapes: tuple[tuple[int, ...], ...] = PLAIN) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def step(above: Above = F.linear, aside: Callable[[Tensor], Tensor] | None = None, hook: bool = False):
    """The gradients of a norm and of the layer above it."""

    def run(x: Tensor, *rest: Tensor) -> list[Tensor]:
        *parameters, error = rest
        gamma, beta, W, b = leaves = [p.detach().requires_grad_() for p in parameters]
        with torch.enable_grad():
            y = F.layer_norm(x, gamma.shape, gamma, beta)
            if hook:
                y.register_hook(lambda g: g + 1.0)
            total = (above(y, W, b).tanh() * error).sum()
            return list(torch.autograd.grad(total if aside is None else total + aside(y), leaves))

    return run


def rounded(y: Tensor) -> Tensor:
    """To whole numbers, with the gradient of a number that is not rounded."""
    return y + (y.detach().int().to(y.dtype) - y.detach())


def three(y: Tensor, W: Tensor, b: Tensor, other: float = 1.0) -> Tensor:
    """Queries, keys and values of separate layers; `other` than one is no part of the norm's output."""
    q, k, v = F.linear(other * y if other != 1 else y, W), F.linear(y, W + 1), F.linear(y, W + 2)
    return q * k.sin() * v + b


def turned(y: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """As in Hugging Face's GPT-2."""
    return torch.addmm(b, y.reshape(-1, C), W.view(C, H)).view(B, T, H)


STEPS: dict[str, tuple[Callable[..., list[Tensor]], tuple[tuple[int, ...], ...], bool]] = {  # whether the norm's stays
    "a layer": (step(), PLAIN, False),
    "three layers": (step(three), PLAIN, False),
    "a weight that is turned": (step(turned), ((B, T, C), (C,), (C,), (C, H), (H,), (B, T, H)), False),
    "a weight in a vector": (step(turned), ((B, T, C), (C,), (C,), (C * H,), (H,), (B, T, H)), False),
    "three layers, one of another input": (step(lambda y, W, b: three(y, W, b, 2.0)), PLAIN, True),
    "read twice": (step(aside=lambda y: y.square().sum()), PLAIN, True),
    "over two dimensions": (step(), ((B, T, C), (T, C), (T, C), (H, C), (H,), (B, T, H)), True),
    "rows at once": (
        step(lambda y, W, b: F.linear(y.flatten(1), W, b)),
        ((B, T, C), (C,), (C,), (H, T * C), (H,), (B, H)),
        True,
    ),
    "rounded": (step(lambda y, W, b: F.linear(rounded(y), W, b)), PLAIN, True),
    "moved": (step(lambda y, W, b: F.linear(y.flip(1), W, b)), PLAIN, True),
    "a hook on the error": (step(hook=True), PLAIN, True),
}


def count(graph: fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in graph.graph.nodes)


def has_norm_backward(graph: fx.GraphModule) -> bool:
    return count(graph, torch.ops.aten.native_layer_norm_backward.default) > 0


@pytest.mark.parametrize("name", STEPS)
def test_the_graph_computes_the_same(name: str):
    """An error at the norm's output that the layer above does not explain alone needs the norm's own formula."""
    run, shapes, stays = STEPS[name]
    given = arguments(shapes)
    graph = trace(run, given)
    torch.testing.assert_close(list(graph(*given)), run(*given), rtol=1e-12, atol=1e-12)
    assert has_norm_backward(graph) == stays
    if name == "a layer":
        assert count(graph, torch.ops.aten.mm.default) == 1  # that of the weights; the value's is an addmm


@pytest.mark.parametrize("shut", [1, 2], ids=["gamma", "beta"])
def test_a_closed_unit_has_a_gradient(shut: int):
    """With `γ = 0` the layer above sees nothing of the unit; a quotient by `γ` would be NaN."""
    given = arguments()
    given[shut].zero_()
    torch.testing.assert_close(list(trace(step(), given)(*given)), step()(*given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("half", [False, True], ids=["a stream in float32", "a stream in bfloat16"])
def test_under_autocast(half: bool):
    """As near to float32 as what autocast itself computes, in the types of the parameters."""
    given = [t.float() for t in arguments()]
    exact = step()(*given)
    given[0] = given[0].bfloat16() if half else given[0]

    def run(*given: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return step()(*given)

    graph = trace(run, given)
    assert half or not has_norm_backward(graph)
    for found, plain, wanted in zip(graph(*given), run(*given), exact, strict=True):
        assert found.dtype == plain.dtype
        assert (found - wanted).norm() < 2 * (plain - wanted).norm() + 0.01 * wanted.norm()


@pytest.mark.parametrize("case", ["its own", "another norm's", "needed"])
def test_the_layer_must_read_this_norm_and_nothing_else_its_error(case: str):
    given = arguments(((B * T, C), (B * T, C), (C,), (C,), (H, C), (B * T, H)))

    def run(x, other, gamma, beta, W, delta):
        y, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [C], gamma, beta, 1e-5)
        read = torch.ops.aten.native_layer_norm.default(other, [C], gamma, beta, 1e-5)[0] if "another" in case else y
        error = delta @ W
        _, of_gamma, of_beta = torch.ops.aten.native_layer_norm_backward.default(
            error, x, [C], mean, rstd, gamma, beta, [False, True, True]
        )
        return [of_gamma, of_beta, delta.t() @ read, *([error] if case == "needed" else [])]

    graph = trace(run, given)
    torch.testing.assert_close(list(graph(*given)), run(*given), rtol=1e-12, atol=1e-12)
    assert has_norm_backward(graph) == (case != "its own")
