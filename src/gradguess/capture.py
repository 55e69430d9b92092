"""A whole training step, draw and update included, as one CUDA graph.

A step of a small network is a few hundred kernels of a few microseconds: launched one by one they wait for Python. A
captured step is launched at once. Steps that refresh a basis run by themselves, between replays.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from gradguess.errors import InputError
from gradguess.estimate import ForwardGradient
from gradguess.task import LossFn

WARM_UP = 3  # steps before a capture: libraries set themselves up, optimisers make their state


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Any
    targets: Any
    loss: Tensor


class CapturedStep:
    """`forward`, then `optimiser.step()`, replayed from a CUDA graph.

    The result is that of the same calls made one by one. Gradients are set to None before each step; accumulate or
    clip outside of it. NaN is not looked for, since that would wait for the device.

    Args:
        forward: on CUDA, `memory="store"`, a model without dropout or batch norm (their state cannot be replayed).
        optimiser: made with `capturable=True`.
        loss_fn: as in `ForwardGradient.__call__`.
    """

    def __init__(self, forward: ForwardGradient, optimiser: torch.optim.Optimizer, loss_fn: LossFn) -> None:
        if forward.generator.device.type != "cuda":
            raise InputError(f"CapturedStep needs a model on CUDA, found {forward.generator.device}.")
        if forward.options.memory != "store":
            raise InputError("CapturedStep needs memory='store': a replayed pass cannot be captured.")
        if forward.pool.size > 1 or forward.chunk is not None:
            raise InputError("CapturedStep needs one process and chunk=None: parts of a batch cannot be captured.")
        if not all(group.get("capturable", False) for group in optimiser.param_groups):
            raise InputError("CapturedStep needs an optimiser made with capturable=True.")
        self.forward, self.optimiser, self.loss_fn = forward, optimiser, loss_fn
        self.graphs: dict[Hashable, _Captured] = {}
        self.seen: dict[Hashable, int] = {}
        self.side = torch.cuda.Stream()  # one for all steps: every stream takes memory for its products
        forward.nonfinite = "ignore"

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """One training step; returns the mean loss (valid until the next step)."""
        phase = self.forward.guess.phase(self.forward.steps)
        if phase is None:
            return self._eager(inputs, targets)
        key = (phase, _shapes(inputs), _shapes(targets))
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= WARM_UP or self._fragile(phase):
            return self._eager(inputs, targets)
        if key not in self.graphs:
            self.graphs[key] = self._capture(inputs, targets)
        captured = self.graphs[key]
        tree_map(_copy, (captured.inputs, captured.targets), (inputs, targets))
        captured.graph.replay()
        self.forward.steps += 1
        return captured.loss

    def _fragile(self, phase: str) -> bool:
        """Must this step run by itself? Global random state, buffers and sketches of a basis cannot be captured."""
        layout = self.forward.layout
        if layout is None or (layout.sites and (layout.stochastic or layout.mutates)):
            return True
        return phase == "refresh" and any(site.linear is None and not site.top for site in layout.sites)

    def _eager(self, inputs: Any, targets: Any) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # as a capture will see it
            loss = self._step(inputs, targets)
        torch.cuda.current_stream().wait_stream(self.side)
        return loss

    def _step(self, inputs: Any, targets: Any) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.forward(self.loss_fn, inputs, targets)
        self.optimiser.step()
        return loss

    def _capture(self, inputs: Any, targets: Any) -> _Captured:
        inputs, targets = tree_map(_own, (inputs, targets))
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.forward.generator)
        steps = self.forward.steps
        with torch.cuda.graph(graph):
            loss = self._step(inputs, targets)
        self.forward.steps = steps
        return _Captured(graph, inputs, targets, loss)


def _shapes(tree: Any) -> Hashable:
    leaves, spec = tree_flatten(tree)
    return str(spec), tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in leaves)


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _copy(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)
