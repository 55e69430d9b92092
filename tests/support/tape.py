"""A stand-in for a CUDA graph on a CPU: the operations of a function, run again on the same memory.

As in a graph, numbers of Python are what they were when the tape was made, and nothing is computed while it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradguess import captured_step
from gradguess.backends import cuda_graphs


class _Writing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what was there, by its place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise cuda_graphs.CannotRecord("a number is read")
        made = {id(t) for *_, out in self.operations for t in tree_leaves(out)}
        for t in tree_leaves((args, kwargs)) if func._schema.is_mutable else ():
            if isinstance(t, Tensor) and id(t) not in made:
                self.before.setdefault(t.data_ptr(), (t, t.detach().clone()))
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out


class Tape:
    """In the place of `cuda_graphs.Recording`."""

    def __init__(self, function: Callable[[], Tensor], *generators: torch.Generator, beside: Any = None) -> None:
        states = [generator.get_state() for generator in generators]
        with (
            mock.patch.multiple(torch.cuda, is_initialized=_yes, is_current_stream_capturing=_yes),
            _Writing() as writing,
        ):
            self.result = function()
        self.operations = writing.operations
        with torch.no_grad():
            for t, value in writing.before.values():
                t.copy_(value)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    @torch.no_grad()
    def replay(self) -> Tensor:
        for func, args, kwargs, out in self.operations:
            found = func(*args, **kwargs)
            given = {None, *map(_memory, tree_leaves((args, kwargs)))}
            for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if _memory(old) not in given:
                    old.copy_(new)
        return self.result


def _yes() -> bool:
    return True


def _memory(leaf: Any) -> int | None:
    """Where the numbers of a tensor lie; tangents of zero lie nowhere."""
    real = isinstance(leaf, Tensor) and not leaf._is_zerotensor()
    return leaf.untyped_storage().data_ptr() if real else None


def on_tape(monkeypatch: pytest.MonkeyPatch, warm_up: int = 2) -> None:
    """`CapturedStep` records on tapes."""
    monkeypatch.setattr(captured_step, "require", lambda device, what: None)
    monkeypatch.setattr(captured_step, "WARM_UP", warm_up)
    monkeypatch.setattr(captured_step, "Recording", Tape)
