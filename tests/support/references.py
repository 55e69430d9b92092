"""Slow, obvious twins of what the library computes. Dense matrices, full SVDs, autograd; nothing clever."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from models import Case


def parse_site(name: str) -> tuple[str, int]:
    """'rnn#1[2]' -> module 'rnn', its call 1."""
    found = re.fullmatch(r"(.*?)(?:#(\d+))?(?:\[(\d+)\])?", name)
    assert found is not None
    return found[1], int(found[2] or 0)


@contextmanager
def visited(
    places: Iterable[tuple[Any, nn.Module, int, int]], visit: Callable[[Any, Tensor], Tensor]
) -> Iterator[None]:
    """While open, what `visit(key, s)` returns takes the place of s, which a call of a module returns in a slot."""
    wanted, counts = list(places), {}

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        call = counts[module] = counts.get(module, -1) + 1
        leaves, spec = tree_flatten(output)
        for key, own, at, slot in wanted:
            if own is module and at == call:
                leaves[slot] = visit(key, leaves[slot])
        return tree_unflatten(leaves, spec)

    handles = [module.register_forward_hook(hook) for module in dict.fromkeys(module for _, module, _, _ in wanted)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_outputs(model: nn.Module, names: Any, slots: dict[str, int] | None = None):
    """While open, the outputs of the named sites are collected, and can be differentiated to."""
    modules = dict(model.named_modules())
    outputs: dict[str, Tensor] = {}

    def note(name: str, s: Tensor) -> Tensor:
        outputs[name] = s.clone()  # a call may use one of its outputs for another (h of c in an LSTM)
        return outputs[name].clone()  # the next function may work in place

    parsed = {name: parse_site(name) for name in names}
    with visited(((n, modules[m], call, (slots or {}).get(n, 0)) for n, (m, call) in parsed.items()), note):
        yield outputs


def sample_gradients(case: Case, names: Any, slots: dict[str, int] | None = None) -> dict[str, Tensor]:
    """d(loss of sample b)/d(whole output of a site), by one backward pass per sample: (batch, *output)."""
    with no_trace(case.model), recorded_outputs(case.model, names, slots) as outputs:
        rows = [_grad(loss, outputs.values()) for loss in case.losses()]
    return {
        name: torch.stack([torch.zeros_like(s) if row[i] is None else row[i] for row in rows])
        for i, (name, s) in enumerate(outputs.items())
    }


def parameter_sample_gradients(case: Case) -> dict[str, Tensor]:
    """d(loss of sample b)/d(parameter): (batch, *parameter)."""
    parameters = {n: p for n, p in case.model.named_parameters() if p.requires_grad}
    with no_trace(case.model):
        rows = [_grad(loss, parameters.values()) for loss in case.losses()]
    return {
        name: torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in rows])
        for i, (name, p) in enumerate(parameters.items())
    }


def _grad(loss: Tensor, to: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, list(to), retain_graph=True, allow_unused=True)


def gradients(case: Case) -> dict[str, Tensor]:
    """The gradient of the mean loss by backpropagation; zeros where the loss does not depend on a parameter."""
    return {name: grad.mean(0) for name, grad in parameter_sample_gradients(case).items()}


@contextmanager
def no_trace(model: nn.Module):
    """Buffers and global random state as before: the next pass sees the same dropout masks."""
    before = [(b, b.clone()) for b in model.buffers()]
    with torch.random.fork_rng():
        yield
    for buffer, value in before:
        with torch.no_grad():
            buffer.copy_(value)


def mlp_jacobians(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """`W_{i+1} M_i`, explicitly, one matrix per sample, for a plain Linear/activation stack."""
    found: dict[str, Tensor] = {}
    layers = list(model)
    for i in range(0, len(layers) - 1, 2):
        s = layers[i](x).detach().requires_grad_()
        x = layers[i + 1](s.clone())  # in place on the clone, if at all
        (gate,) = torch.autograd.grad(x.sum(), s)  # elementwise: the sum's gradient is the diagonal
        found[str(i)] = torch.stack([layers[i + 2].weight.detach() @ torch.diag(row) for row in gate])
        x = x.detach()
    return found


def projector(columns: Tensor) -> Tensor:
    """Onto the span of orthonormal (or zero) columns."""
    return columns @ columns.mT


def top_projector(W: Tensor, k: int) -> Tensor:
    """`V_k V_kᵀ` of one matrix, cut at the rank."""
    _, S, Vh = torch.linalg.svd(W)
    rank = int((1e-12 * S[0] < S).sum()) if S[0] > 0 else 0
    return projector(Vh[: min(k, rank)].mT)


def row_projector(W: Tensor) -> Tensor:
    """Onto the row space of one matrix."""
    return torch.linalg.pinv(W, rtol=1e-10) @ W


def spectral_norms(A: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(A, ord=2)
