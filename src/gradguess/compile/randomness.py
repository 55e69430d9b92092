"""Random numbers in a graph: white noise from the keys of its step, and what a model draws (dropout), drawn outside.

A global generator gives the same numbers to a graph as to a step that runs by itself only if they are drawn in the same
order. So a trace notes the operations that draw; before each run of the graph they draw again, and the graph takes the
numbers as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gradguess.backends.random import RandomState
from gradguess.compile.trace import NotTraceable, draws
from gradguess.noise import Noise

_ASIDE = "it draws random numbers in a pass aside that leaves the random state as it was, as Feedback(fraction) does"
_FUSED_DROPOUT = torch.ops.aten.native_dropout.default


class KeyedNoise(Noise):
    """Noise whose keys, `Noise.keys`, are given."""

    def __init__(self, source: Noise, keys: Sequence[Tensor]) -> None:
        self.generator, self._given = source.generator, keys

    def _key_of(self, row: int) -> Tensor:
        if not self._given:
            raise NotTraceable("it draws directions in some steps and not in others")
        return self._given[0 if row >= 0 else 1]


@dataclass(frozen=True)
class _Like:
    """What a tensor is besides its numbers. Numbers are drawn in the order in which they lie in memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def ones(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).fill_(1)


@dataclass(frozen=True)
class _Draw:
    """One call of an operation that draws: what it is called with, but for the numbers of its tensors."""

    func: Any
    args: Any
    kwargs: Any

    def __call__(self) -> Tensor:
        """The result of the same operation on ones: dropout of ones is its mask."""
        args, kwargs = tree_map_only(_Like, _Like.ones, (self.args, self.kwargs))
        out = self.func(*args, **kwargs)
        return out[0] if self.func is _FUSED_DROPOUT else out


def _depends_on_shapes_alone(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws the same whatever the values of its tensors. `torch.normal(mean, std)` does not."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    name = func._schema.name.removeprefix("aten::")
    if func is _FUSED_DROPOUT or name.endswith("_like") or not given:
        return True
    return len(given) == 1 and (func._schema.is_mutable or func is torch.ops.aten.bernoulli.p)


class Drawn(TorchDispatchMode):
    """While open, operations that draw from a global generator take `values` that a trace does not follow.

    Where a pass starts from the random state of an earlier one, it takes the values of that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self._draws: list[_Draw] = []
        self._met: dict[int, int] = {}  # the random state before a draw -> its number
        self._end = 0  # the random state after the last

    def again(self) -> list[Tensor]:
        """New values, from the global generator and in the same order."""
        return [draw() for draw in self._draws]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = kwargs.get("generator") is None and draws(func, args, kwargs)
        if not drawn or not _depends_on_shapes_alone(func, args, kwargs):
            return func(*args, **kwargs)  # what draws all the same is found in the graph
        like = tree_map_only(Tensor, lambda t: _Like(t.shape, t.stride(), t.dtype, t.device), (args, kwargs))
        with disable_proxy_modes_tracing():
            value = self._value(_Draw(func, *like))
        if func is _FUSED_DROPOUT:
            return args[0] * value, value != 0
        if func._schema.is_mutable:  # bernoulli_, normal_, …
            return args[0].copy_(value)
        return value.clone()

    def _value(self, draw: _Draw) -> Tensor:
        state, value = _random_state(), draw()
        number = self._met.setdefault(state, len(self.values))
        if number == len(self.values) and (not self.values or state == self._end):
            self.values.append(value)
            self._draws.append(draw)
            self._end = _random_state()
        elif number == len(self.values) or self._draws[number] != draw:
            raise NotTraceable(_ASIDE)
        return self.values[number]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self.values and _random_state() != self._end:
            raise NotTraceable(_ASIDE)


def _random_state() -> int:
    with torch._C.DisableTorchFunction():  # the state is looked at
        return RandomState.everywhere().fingerprint()
