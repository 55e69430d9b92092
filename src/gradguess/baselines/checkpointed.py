"""Backpropagation that keeps the cuts alone, and computes each piece again (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from gradguess.errors import InputError
from gradguess.methods.backprop import Backprop
from gradguess.methods.base import Estimate, Method
from gradguess.model.hooks import Snapshot
from gradguess.model.site import Layout
from gradguess.model.task import tensors
from gradguess.step.base import State, Step

Run = Callable[..., Any]  # from the arguments of a module to its output


@dataclass(frozen=True)
class Checkpointed(Method):
    """The gradient itself: `torch.utils.checkpoint` over each of the pieces of `sites=n`.

    Bias and variance none. Memory: what enters each piece, and the activations of one piece at a time. Time: one more
    forward pass, but for the last piece. The error goes back through the whole network. Layers of an `nn.Sequential`
    between two cuts are one checkpoint; elsewhere each module of several layers without a cut inside it is one, and
    what lies outside of these is kept. Dropout draws the same masks again, and batch norm counts a batch once. Where
    gradients at sites are asked for (`gg.estimate`), nothing is computed again. Chen et al., "Training Deep Nets with
    Sublinear Memory Cost", 2016, arXiv 1604.06174.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
    >>> forward = gg.ForwardGradient(model, gg.baselines.Checkpointed(), sites=4)
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> exact = gg.estimate(model, gg.Backprop(), torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> torch.allclose(model[0].weight.grad, exact.grads["0.weight"])
    True
    """

    def run(self, step: Step) -> tuple[Estimate, State]:
        # where the gradients at the sites are asked for, these are kept
        with nullcontext() if step.detail else _Recomputed(step.task.model, step.layout):
            return Backprop().run(step)


class _Recomputed:
    """While open, the pieces of a model between the cuts of a layout are checkpoints, all but the last."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout, self.cuts = layout, set(layout.modules)
        self.changed = dict(self._forwards(model))
        self.last = layout.guessed[-1].module if layout.guessed else None
        self.passed = self.last is None  # the last piece is differentiated at once: it need not be computed again

    def __enter__(self) -> None:
        for module, forward in self.changed.items():
            module.forward = forward

    def __exit__(self, *_: object) -> None:
        for module in self.changed:
            del module.forward

    def _forwards(self, module: nn.Module) -> Iterator[tuple[nn.Module, Run]]:
        """The modules that run as checkpoints, or in parts that do, each with its new `forward`.

        A module whose `forward` was replaced already stays as it is.
        """
        for child in module.children():
            if self._cut_inside(child):
                yield from self._forwards(child)
            elif not _is_sequence(module) and "forward" not in child.__dict__:
                yield child, partial(self._again, child, type(child).forward.__get__(child))
        if _is_sequence(module) and self._cut_inside(module):
            yield module, partial(self._in_parts, module)

    def _cut_inside(self, module: nn.Module) -> bool:
        """Whether there is a cut in a module at another place than its end."""
        ends = [module]
        while _is_sequence(ends[-1]) and len(ends[-1]):
            ends.append(ends[-1][-1])
        return any(inner in self.cuts for inner in module.modules() if inner not in ends)

    def _in_parts(self, sequence: nn.Sequential, x: Any) -> Any:
        """A sequence whose layers between two cuts are one checkpoint."""
        part: list[nn.Module] = []
        for layer in sequence:
            whole = not self._cut_inside(layer)
            if whole:
                part.append(layer)
            if not whole or not self.cuts.isdisjoint(layer.modules()):
                x, part = self._chain(part, x), []
            x = x if whole else layer(x)
        return self._chain(part, x)

    def _chain(self, part: list[nn.Module], x: Any) -> Any:
        return self._again(nn.ModuleList(part), lambda x: reduce(lambda x, layer: layer(x), part, x), x)

    def _again(self, module: nn.Module, run: Run, *args: Any, **kwargs: Any) -> Any:
        """Runs a part of the model, and keeps its arguments alone. A single layer keeps no more than these anyway."""
        layers = [inner for inner in module.modules() if not list(inner.children())]
        if self.passed or len(layers) < 2:
            out = run(*args, **kwargs)
        else:
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.layout.stochastic}
            if self.layout.mutates:
                before = Snapshot(module, random=False)
                options["context_fn"] = lambda: (nullcontext(), _buffers_of(before, module))  # of the two runs
            copies = getattr(layers[0], "inplace", False)  # the first layer writes to its input
            own = (lambda *args, **kwargs: run(*tree_map_only(Tensor, Tensor.clone, args), **kwargs)) if copies else run
            versions = [x._version for x in tensors((args, kwargs))]
            out = checkpoint(own, *args, **options, **kwargs)
            if versions != [x._version for x in tensors((args, kwargs))]:
                raise InputError(
                    "Checkpointed: a piece changes its input in place, which is then not there to compute the piece "
                    "again. Write x = x + y instead of x += y, or cut the model at another place."
                )
        self.passed = self.passed or any(inner is self.last for inner in module.modules())
        return out


def _is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__


@contextmanager
def _buffers_of(before: Snapshot, module: nn.Module) -> Iterator[None]:
    """Around the second run: buffers are as they were when it is run once more, and are put back."""
    now = Snapshot(module, random=False)
    before.restore()
    try:
        yield
    finally:
        now.restore()
