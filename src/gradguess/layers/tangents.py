"""Tangents in closed form through the layers that PyTorch's forward mode carries slowly.

Where one tensor of an operation has no tangent (a weight, a constant), PyTorch puts a symbolic zero in its place and
works out the shapes of what is computed with it in Python: a quarter of a millisecond each time, many times what the
operation takes. The rules of the table know which tangent is missing. All other operations, and these ones with a
dual number in another place, go to PyTorch's own formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from gradguess.layers.table import ALWAYS, TANGENTS, WRITTEN_OUT


class TangentRules(TorchFunctionMode):
    """While it is open, dual numbers pass through the layers of the table by the table's rules."""

    def __init__(self, *, few: bool = False) -> None:
        """With `few`, by those rules alone that hold under autocast, and that passes without a tangent need as well."""
        super().__init__()
        self.rules = ALWAYS if few else TANGENTS
        self.paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        written_out = WRITTEN_OUT.get(func)
        if written_out is not None:
            with self:
                out = written_out(func, *args, **kwargs)
            if out is not None:
                return out
        rule = self.rules.get(func)
        if rule is not None and args:
            out = rule(func, *args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


@contextmanager
def own_kernels() -> Iterator[None]:
    """Rules that are open do nothing: another network runs inside of a pass, by the kernels that it asks for."""
    open_rules = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, TangentRules)]
    before = [rules.paused for rules in open_rules]
    try:
        for rules in open_rules:
            rules.paused = True
        yield
    finally:
        for rules, was in zip(open_rules, before, strict=True):
            rules.paused = was
