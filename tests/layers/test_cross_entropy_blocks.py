"""A large cross entropy in blocks, against the same at once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradguess as gg
from gradguess.layers import cross_entropy
from gradguess.layers.table import TangentRules
from models import Net

CLASSES = 6


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))


CASES = {
    "rows": ((7, CLASSES), targets(7), {}),
    "ignored": ((7, CLASSES), targets(7), {"ignore_index": int(targets(7)[0])}),
    "smooth": ((7, CLASSES), targets(7), {"label_smoothing": 0.2}),
    "weighted": ((7, CLASSES), targets(7), {"weight": noise(CLASSES, seed=3).exp()}),
    "probabilities": ((7, CLASSES), noise(7, CLASSES, seed=4).softmax(1), {}),
    "positions": ((3, CLASSES, 5), targets(3, 5), {}),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Two rows at a time, or one."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 2 * CLASSES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dual", [False, True])
def test_blocks_are_the_whole(case, graph, dual, small_blocks):
    shape, target, options = CASES[case]
    x, t = noise(*shape), noise(*shape, seed=1)

    def found(rules: bool) -> list[Tensor]:
        leaf = x.clone().requires_grad_(graph)
        with fwAD.dual_level(), torch.set_grad_enabled(graph), TangentRules(always=True) if rules else nullcontext():
            s = fwAD.make_dual(leaf, t) if dual else leaf
            losses = F.cross_entropy(s, target, reduction="none", **options)
            value, moved = fwAD.unpack_dual(losses)
            value = value.clone()
        grads = torch.autograd.grad((value * value).sum(), leaf) if graph else ()
        return [value.detach(), *([moved.detach()] if dual else []), *grads]

    for ours, theirs in zip(found(True), found(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_more_than_a_block_is_computed_at_once(small_blocks):
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "log_softmax" in str(func):
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    shape, target, _ = CASES["rows"]
    leaf = noise(*shape).requires_grad_()
    with TangentRules(always=True), Watch():
        losses = F.cross_entropy(leaf, target, reduction="none")
        torch.autograd.grad(losses.sum(), leaf)
    assert sizes
    assert max(sizes) <= 2 * CLASSES


def test_the_gradient_under_autocast_is_that_of_autocast(small_blocks):
    """The graph runs when autocast is over, and must round as it would have inside."""
    x, target = noise(7, CLASSES).bfloat16(), targets(7)

    def gradient(rules: bool) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if rules:
                with TangentRules(always=True):
                    losses = F.cross_entropy(leaf, target, reduction="none")
            else:
                losses = F.cross_entropy(leaf, target, reduction="none")
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

    ours, theirs = gradient(True), gradient(False)
    assert ours[0].dtype == theirs[0].dtype == torch.float32
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("which", ["gradient", "tangent"])
def test_what_else_is_differentiated_is_left_to_pytorch(which, small_blocks):
    """Targets that are probabilities may have gradients and tangents of their own."""
    x, soft = noise(7, CLASSES), noise(7, CLASSES, seed=4).softmax(1)

    def found(rules: bool) -> Tensor:
        with fwAD.dual_level(), TangentRules(always=True) if rules else nullcontext():
            if which == "tangent":
                losses = F.cross_entropy(x, fwAD.make_dual(soft, noise(7, CLASSES, seed=5)), reduction="none")
                return fwAD.unpack_dual(losses).tangent
            leaf = soft.clone().requires_grad_()
            return torch.autograd.grad(F.cross_entropy(x, leaf, reduction="none").sum(), leaf)[0]

    torch.testing.assert_close(found(True), found(False))


def test_gradients_of_gradients(small_blocks):
    def found(rules: bool) -> Tensor:
        leaf = noise(7, CLASSES).requires_grad_()
        with TangentRules(always=True) if rules else nullcontext():
            losses = F.cross_entropy(leaf, targets(7), reduction="none")
        (g,) = torch.autograd.grad(losses.sum() + (leaf**3).sum(), leaf, create_graph=True)
        return torch.autograd.grad((g**2).sum(), leaf)[0]

    torch.testing.assert_close(found(True), found(False))


def test_a_weight_that_changes_before_the_gradient_is_noticed(small_blocks):
    leaf, weight = noise(7, CLASSES).requires_grad_(), noise(CLASSES, seed=3).exp()
    with TangentRules(always=True):
        losses = F.cross_entropy(leaf, targets(7), weight, reduction="none")
    weight.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


HIDDEN = 5
fused = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="PyTorch 2.13 brought it")


def linear(rules: bool, dual: str, graph: bool, **options: object) -> list[Tensor]:
    """Losses, what the tangent of one argument moves, and the gradients of all."""
    given = {"x": noise(7, HIDDEN), "weight": noise(CLASSES, HIDDEN, seed=1), "bias": noise(CLASSES, seed=3)}
    leaves = {name: t.requires_grad_(graph) for name, t in given.items()}
    with fwAD.dual_level(), torch.set_grad_enabled(graph), TangentRules(always=True) if rules else nullcontext():
        moving = {name: fwAD.make_dual(t, noise(*t.shape, seed=4)) if name == dual else t for name, t in leaves.items()}
        chosen = {"linear_bias": moving["bias"], "reduction": "none"} | options
        value, moved = fwAD.unpack_dual(F.linear_cross_entropy(moving["x"], moving["weight"], targets(7), **chosen))
        value = value.clone()
    grads = torch.autograd.grad((value * value).sum(), list(leaves.values())) if graph else ()
    return [value.detach(), *([moved.detach()] if dual else []), *grads]


@fused
@pytest.mark.parametrize("options", [{}, {"weight": noise(CLASSES, seed=3).exp(), "label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dual", ["", "x", "weight", "bias"])
def test_a_linear_cross_entropy_in_blocks_is_the_whole(dual, graph, options, small_blocks):
    for ours, theirs in zip(linear(True, dual, graph, **options), linear(False, dual, graph, **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@fused
def test_no_pass_of_a_linear_cross_entropy_holds_all_logits(small_blocks):
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
            return out

    with Watch():
        linear(True, "x", True)
    assert largest < 7 * CLASSES


@fused
@pytest.mark.parametrize("dual", ["x", "weight", "bias"])
def test_a_linear_cross_entropy_in_chunks_carries_a_tangent(dual):
    """PyTorch's own chunks lose it and do not say so."""
    chunks = linear(True, dual, False, options=torch.nn.LinearCrossEntropyOptions())
    for a, b in zip(chunks, linear(False, dual, False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@fused
def test_a_head_inside_of_the_loss_learns_as_one_beside_it(small_blocks):
    """Where the output's derivative is exact, the last layer's gradient is that of backpropagation."""
    stem, head = torch.nn.Linear(4, HIDDEN).double(), torch.nn.Linear(HIDDEN, CLASSES).double()

    def losses(m, x, t):
        return F.linear_cross_entropy(
            torch.tanh(m.stem(x)), m.head.weight, t, linear_bias=m.head.bias, reduction="none"
        )

    model, x = Net(losses, stem=stem, head=head), noise(7, 4)
    gg.ForwardGradient(model, gg.WPerp(k=2))(lambda out, t: out, (x, targets(7)), targets(7))
    found = [head.weight.grad, head.bias.grad]
    expected = torch.autograd.grad(losses(model, x, targets(7)).mean(), [head.weight, head.bias])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
