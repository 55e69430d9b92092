"""The gradients of a norm come from those of the layer above, and the graph computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gradguess.compile.trace import trace

B, T, C, H = 6, 5, 7, 9


def arguments() -> list[Tensor]:
    shapes = (B, T, C), (C,), (C,), (H, C), (H,), (B, T, H)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def step(below: bool = False, affine: bool = True):
    """The gradients of a norm and the layer above it; with `below` also that of what is below."""

    def run(x: Tensor, *rest: Tensor) -> list[Tensor]:
        *parameters, error = rest
        gamma, beta, W, b = leaves = [p.detach().requires_grad_() for p in parameters]
        x = x.detach().requires_grad_(below)
        with torch.enable_grad():
            y = F.layer_norm(x, (C,), *((gamma, beta) if affine else ()))
            s = F.linear(y, W, b)
            wanted = ([x] if below else []) + (leaves if affine else [W, b])
            return list(torch.autograd.grad((s.tanh() * error).sum(), wanted))

    return run


def products(graph: fx.GraphModule) -> int:
    return sum(n.target is torch.ops.aten.mm.default for n in graph.graph.nodes)


def has_norm_backward(graph: fx.GraphModule) -> bool:
    return any(n.target is torch.ops.aten.native_layer_norm_backward.default for n in graph.graph.nodes)


def test_the_norm_needs_no_product_of_its_own():
    given = arguments()
    graph = trace(step(), given)
    torch.testing.assert_close(list(graph(*given)), step()(*given), rtol=1e-12, atol=1e-12)
    assert not has_norm_backward(graph)
    assert products(graph) == 1  # that of the weights; the value's is an addmm


@pytest.mark.parametrize("shut", ["gamma", "beta"])
def test_a_closed_unit_has_a_gradient(shut: str):
    """With `γ = 0` the layer above sees nothing of the unit; a quotient by `γ` would be NaN."""
    given = arguments()
    given[1 if shut == "gamma" else 2].zero_()
    found, wanted = trace(step(), given)(*given), step()(*given)
    torch.testing.assert_close(list(found), wanted, rtol=1e-12, atol=1e-12)


def test_a_norm_that_is_read_twice_stays():
    """The error at its output has then a second part."""
    given = arguments()

    def run(x, gamma, beta, W, b, error):
        gamma, beta, W, b = leaves = [p.detach().requires_grad_() for p in (gamma, beta, W, b)]
        with torch.enable_grad():
            y = F.layer_norm(x, (C,), gamma, beta)
            s = F.linear(y, W, b)
            return list(torch.autograd.grad((s.tanh() * error).sum() + y.square().sum(), leaves))

    graph = trace(run, given)
    torch.testing.assert_close(list(graph(*given)), run(*given), rtol=1e-12, atol=1e-12)
    assert has_norm_backward(graph)


def test_a_norm_over_two_dimensions_stays():
    given = [torch.randn(s, dtype=torch.float64) for s in ((B, T, C), (T, C), (T, C), (H, C), (H,), (B, T, H))]

    def run(x, gamma, beta, W, b, error):
        gamma, beta, W, b = leaves = [p.detach().requires_grad_() for p in (gamma, beta, W, b)]
        with torch.enable_grad():
            s = F.linear(F.layer_norm(x, (T, C), gamma, beta), W, b)
            return list(torch.autograd.grad((s.tanh() * error).sum(), leaves))

    graph = trace(run, given)
    torch.testing.assert_close(list(graph(*given)), run(*given), rtol=1e-12, atol=1e-12)
    assert has_norm_backward(graph)


def test_under_autocast():
    """As near to float32 as what autocast itself computes."""
    given = [t.float() for t in arguments()]
    exact = step()(*given)

    def run(*given: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return step()(*given)

    graph = trace(run, given)
    assert not has_norm_backward(graph)
    for found, plain, wanted in zip(graph(*given), run(*given), exact, strict=True):
        assert found.dtype == plain.dtype
        assert (found - wanted).norm() < 2 * (plain - wanted).norm() + 0.01 * wanted.norm()


@pytest.mark.parametrize("shared", [True, False])
def test_one_norm_below_three_layers(shared: bool):
    """Queries, keys and values of separate layers. A layer with another input than the norm is none of them."""
    given = arguments()

    def run(x, gamma, beta, W, b, error):
        gamma, beta = norm = [p.detach().requires_grad_() for p in (gamma, beta)]
        weights = [p.detach().requires_grad_() for p in (W, W + 1, W + 2)]
        with torch.enable_grad():
            y = F.layer_norm(x, (C,), gamma, beta)
            q, k, v = (F.linear(y if shared or i else 2 * y, p) for i, p in enumerate(weights))
            return list(torch.autograd.grad((q.tanh() * k.sin() * v * error).sum(), [*norm, *weights]))

    graph = trace(run, given)
    torch.testing.assert_close(list(graph(*given)), run(*given), rtol=1e-12, atol=1e-12)
    assert has_norm_backward(graph) == (not shared)


def rounded(y: Tensor) -> Tensor:
    """To whole numbers, with the gradient of a number that is not rounded."""
    return y + (y.detach().int().to(y.dtype) - y.detach())


@pytest.mark.parametrize("change", ["rows", "rounded", "hook", "positions"])
def test_what_is_not_the_norm_is_not_taken_for_it(change: str):
    """A layer over two positions at once, a norm that is rounded or moved, an error that a hook changes."""
    given = arguments()
    if change == "rows":
        given[3:] = [torch.randn(shape, dtype=torch.float64) for shape in ((H, T * C), (H,), (B, H))]

    def run(x, gamma, beta, W, b, error):
        gamma, beta, W, b = leaves = [p.detach().requires_grad_() for p in (gamma, beta, W, b)]
        with torch.enable_grad():
            y = F.layer_norm(x, (C,), gamma, beta)
            if change == "hook":
                y.register_hook(lambda g: g + 1.0)
            y = {"rows": y.flatten(1), "rounded": rounded(y), "positions": y.flip(1)}.get(change, y)
            return list(torch.autograd.grad((F.linear(y, W, b).tanh() * error).sum(), leaves))

    graph = trace(run, given)
    for found, wanted in zip(graph(*given), run(*given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert has_norm_backward(graph)


def test_gradients_have_the_type_of_the_parameters():
    """The norm of a stream in half precision."""
    x, gamma, beta, *rest = (t.float() for t in arguments())
    given = [x.bfloat16(), gamma, beta, *rest]

    def run(*given: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return step()(*given)

    assert [g.dtype for g in trace(run, given)(*given)] == [g.dtype for g in run(*given)]


@pytest.mark.parametrize("case", ["its own", "another norm's", "needed"])
def test_the_layer_must_read_this_norm_and_nothing_else_its_error(case: str):
    shapes = (B * T, C), (B * T, C), (C,), (C,), (H, C), (B * T, H)
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

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
