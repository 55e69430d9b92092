"""Watching the calls of a model's modules. All hooks that gradguess puts on a model are put on, and taken off, here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.model.site import Layout, LayoutChanged, Site

After = Callable[[nn.Module, int, Any, Any], Any]  # (module, number of the call, first input, output) -> output
Visit = Callable[[Site, Any, Tensor], Tensor]  # (site, input x, output s) -> what takes the place of s


class OwnOutputs:
    """While open, notes which modules return something else than their class says: a hook changed it, or `forward` is
    another.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.altered = {m for m in modules if _module._global_forward_hooks or "forward" in m.__dict__}
        self._hooked = [m for m in modules if m._forward_hooks and m not in self.altered]
        self._own: dict[nn.Module, tuple[Any, list[int]]] = {}

    def __enter__(self) -> OwnOutputs:
        self._handles = [m.register_forward_hook(self._first, prepend=True) for m in self._hooked]
        self._handles += [m.register_forward_hook(self._last) for m in self._hooked]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _first(self, module: nn.Module, args: Any, output: Any) -> None:
        self._own[module] = output, _versions(output)

    def _last(self, module: nn.Module, args: Any, output: Any) -> None:
        own, versions = self._own.pop(module)
        if output is not own or _versions(output) != versions:
            self.altered.add(module)


def _versions(output: Any) -> list[int]:
    return [leaf._version for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


class CallHooks:
    """While open, `after` sees each call of some modules, and what it returns takes the place of the output.

    `before`, where it is given, sees each module before it runs.
    """

    def __init__(
        self, modules: Iterable[nn.Module], after: After | None, before: Callable[[nn.Module, Any], None] | None = None
    ) -> None:
        self.modules, self._after, self.before = modules, after, before
        self.calls: dict[nn.Module, int] = {}
        self._visiting = False  # a checkpoint that is computed again while a site is looked at makes no calls

    def __enter__(self) -> CallHooks:
        self._handles = []
        for module in self.modules:
            if self.before is not None:
                self._handles.append(module.register_forward_pre_hook(self.before))
            self._handles.append(module.register_forward_hook(self._hook, with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._visiting:
            return output
        call = self.calls.get(module, 0)
        self.calls[module] = call + 1
        x = args[0] if args else next(iter(kwargs.values()), None)
        self._visiting = True
        try:
            return self.after(module, call, x, output)
        finally:
            self._visiting = False

    def after(self, module: nn.Module, call: int, x: Any, output: Any) -> Any:
        assert self._after is not None
        return self._after(module, call, x, output)


class SiteHooks(CallHooks):
    """While open, `visit(site, x, s)` is called at each site, and what it returns takes the place of `s`.

    A model that makes other calls than when its sites were found raises `LayoutChanged`.
    """

    def __init__(self, layout: Layout, visit: Visit) -> None:
        super().__init__((*layout.modules, *layout.idle), None)  # a bound method here would be a cycle that keeps all
        self.layout, self.visit = layout, visit
        self.visited = 0

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(kind, *rest)
        if kind is None and self.visited != len(self.layout.sites):
            raise LayoutChanged

    def after(self, module: nn.Module, call: int, x: Any, output: Any) -> Any:
        sites = self.layout.at.get((module, call))
        if sites is None:
            if call < self.layout.calls.get(module, 0):
                return output
            raise LayoutChanged
        self.visited += len(sites)
        if isinstance(output, Tensor):
            return self.visit(sites[0], x, output)
        leaves, spec = tree_flatten(output)
        for site in sites:
            leaves[site.slot] = self.visit(site, x, leaves[site.slot])
        return tree_unflatten(leaves, spec)
