"""Tangents in closed form through the layers that PyTorch's forward mode carries slowly.

Where one tensor of an operation has no tangent (a weight, a constant), PyTorch puts a symbolic zero in its place and
works out the shapes of what is computed with it in Python: a quarter of a millisecond each time, many times what the
operation takes. The rules of the table know which tangent is missing. All other operations, and these ones with a
dual number in another place, go to PyTorch's own formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from gradguess.layers.table import ALWAYS, TANGENTS, WRITTEN_OUT


class TangentRules(TorchFunctionMode):
    """While it is open, dual numbers pass through the layers of the table by the table's rules."""

    def __init__(self, *, few: bool = False) -> None:
        """With `few`, by those rules alone that hold under autocast, and that passes without a tangent need as well."""
        super().__init__()
        self.rules = ALWAYS if few else TANGENTS

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
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
