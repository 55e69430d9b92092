"""Watching the calls of a model's modules, and putting back what a pass leaves behind.

All hooks that gradguess puts on a model are put on, and taken off, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.backends.random import RandomState
from gradguess.model.site import Layout, LayoutChanged, Site

After = Callable[[nn.Module, int, Any, Any], Any]  # (module, number of the call, first input, output) -> output
Visit = Callable[[Site, Any, Tensor], Tensor]  # (site, input x, output s) -> what takes the place of s


@contextmanager
def call_hooks(
    modules: Iterable[nn.Module],
    after: After,
    *,
    before: Callable[[nn.Module, Any], None] | None = None,
    first: Callable[[nn.Module, Any, Any], None] | None = None,
) -> Iterator[dict[nn.Module, int]]:
    """While open, `after` sees each call of some modules, and what it returns takes the place of the output.

    Yields how often each module has been called so far.

    Args:
        before: sees each module before it runs.
        first: where the model has hooks of its own, sees each output before they do: (module, arguments, output).
    """
    calls: dict[nn.Module, int] = {}
    visiting = False  # a checkpoint that is computed again while a site is looked at makes no calls

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal visiting
        if visiting:
            return output
        call = calls.get(module, 0)
        calls[module] = call + 1
        x = args[0] if args else next(iter(kwargs.values()), None)
        visiting = True
        try:
            return after(module, call, x, output)
        finally:
            visiting = False

    handles = []
    for module in modules:
        if before is not None:
            handles.append(module.register_forward_pre_hook(before))
        if first is not None and module._forward_hooks:
            handles.append(module.register_forward_hook(first, prepend=True))
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def site_hooks(layout: Layout, visit: Visit) -> Iterator[None]:
    """While open, `visit(site, x, s)` is called at each site, and what it returns takes the place of `s`.

    A model that makes other calls than when its sites were found raises `LayoutChanged`.
    """
    visited = 0

    def after(module: nn.Module, call: int, x: Any, output: Any) -> Any:
        nonlocal visited
        sites = layout.at.get((module, call))
        if sites is None:
            if call < layout.calls.get(module, 0):
                return output
            raise LayoutChanged
        visited += len(sites)
        if isinstance(output, Tensor):
            return visit(sites[0], x, output)
        leaves, spec = tree_flatten(output)
        for site in sites:
            leaves[site.slot] = visit(site, x, leaves[site.slot])
        return tree_unflatten(leaves, spec)

    with call_hooks((*layout.modules, *layout.idle), after):
        yield
    if visited != len(layout.sites):
        raise LayoutChanged


class Snapshot:
    """The global random state and the buffers of a model at one moment."""

    def __init__(self, model: nn.Module, *, random: bool = True, buffers: bool = True) -> None:
        self._random = RandomState(t.device for t in (*model.parameters(), *model.buffers())) if random else None
        self._buffers = [  # where each lives, itself and its value
            (module, name, value, value.detach().clone())
            for module in (model.modules() if buffers else ())
            for name, value in module._buffers.items()
            if value is not None
        ]

    def drew(self) -> bool:
        """Whether a global generator has been used since."""
        return self._random is not None and self._random.drew()

    def wrote(self) -> bool:
        """Whether a buffer has been written since. PyTorch counts writes, but not those of batch norm."""
        return any(m._buffers[name] is not own or not torch.equal(own, value) for m, name, own, value in self._buffers)

    def restore(self) -> None:
        """Put back what was noted."""
        if self._random is not None:
            self._random.restore()
        for module, name, own, value in self._buffers:
            module._buffers[name] = own
            own.data.copy_(value)  # through .data: a graph that saved the buffer may still be needed


@contextmanager
def untouched(model: nn.Module) -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Restore random state and buffers on exit. Yields a function that tells what has been touched so far."""
    before = Snapshot(model)
    try:
        yield lambda: (before.drew(), before.wrote())
    finally:
        before.restore()
