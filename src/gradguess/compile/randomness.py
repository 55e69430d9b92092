"""Random numbers in a graph: white noise from the keys of its step, and what a model draws (dropout), drawn outside.

A global generator gives the same numbers to a graph as to a step that runs by itself only if they are drawn in the same
order. So one step is watched; before each run of the graph the same operations draw again, and the graph takes the
numbers as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gradguess.backends.random import RandomState
from gradguess.compile.trace import NotTraceable, draws
from gradguess.noise import Noise

_FUSED_DROPOUT = torch.ops.aten.native_dropout.default


class KeyedNoise(Noise):
    """Noise whose keys, `Noise.keys`, are given."""

    def __init__(self, source: Noise, keys: Sequence[Tensor]) -> None:
        self.generator, self._given = source.generator, keys

    def _key_of(self, row: int) -> Tensor:
        if not self._given:
            raise NotTraceable("it draws directions in some steps and not in others")
        return self._given[0 if row >= 0 else 1]


class _Draw:
    """One call of an operation that draws: what it is called with, but for the values of its tensors."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.args, self.kwargs = tree_map_only(Tensor, _Like, (args, kwargs))

    def __call__(self) -> Tensor:
        """The result of the same operation on ones: dropout of ones is its mask."""
        args, kwargs = tree_map_only(_Like, _Like.ones, (self.args, self.kwargs))
        out = self.func(*args, **kwargs)
        return out[0] if self.func is _FUSED_DROPOUT else out


class _Like:
    """Shape, strides, dtype and device of a tensor: numbers are drawn in the order in which they lie in memory."""

    def __init__(self, t: Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = t.shape, t.stride(), t.dtype, t.device

    def ones(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).fill_(1)


def _depends_on_shapes_alone(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws the same whatever the values of its tensors. `torch.normal(mean, std)` does not."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    name = func._schema.name.removeprefix("aten::")
    if func is _FUSED_DROPOUT or name.endswith("_like") or not given:
        return True
    return len(given) == 1 and (func._schema.is_mutable or func is torch.ops.aten.bernoulli.p)


def _draws_globally(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws from a global generator."""
    return kwargs.get("generator") is None and draws(func, args, kwargs)


class Watched(TorchDispatchMode):
    """While open, notes what one pass draws. A later pass starts where the first one did, and draws the same."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[_Draw] = []
        self.refused = ""  # an operation whose numbers cannot be drawn beforehand
        self._states: list[int] = []  # of the global generators before each draw
        self._later = False

    def again(self) -> list[Tensor]:
        """New numbers, from the global generator and in the same order."""
        return [draw() for draw in self.draws]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws_globally(func, args, kwargs):
            if not _depends_on_shapes_alone(func, args, kwargs):
                self.refused = str(func)
            state = RandomState.everywhere().fingerprint()
            self._later = self._later or state in self._states[:1]
            if not self._later:
                if state in self._states:
                    self.refused = f"{func} a second time (a checkpoint that is computed again)"
                self._states.append(state)
                self.draws.append(_Draw(func, args, kwargs))
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if RandomState.everywhere().fingerprint() in self._states:
            self.refused = "a pass aside, such as that of Feedback(fraction), which leaves the random state as it was"


class Given(TorchDispatchMode):
    """While open, operations that draw take the numbers that are given; each pass starts with the first of them."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.values, self._next = values, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.values or not _draws_globally(func, args, kwargs):
            return func(*args, **kwargs)  # what draws without a value is found in the graph
        value = self.values[self._next % len(self.values)]
        self._next += 1
        if func is _FUSED_DROPOUT:
            return args[0] * value, value != 0
        if func._schema.is_mutable:  # bernoulli_, normal_, …
            return args[0].copy_(value)
        return value.clone()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self.values and self._next % len(self.values):
            raise NotTraceable("its passes draw different numbers of random numbers")
