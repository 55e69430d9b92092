"""An optimiser whose steps are recorded: its rates lie in tensors, so that a replay reads them as they are now."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradguess.errors import InputError

READS_RATES = (torch.optim.Adam, torch.optim.SGD)  # and AdamW; rates of others are recorded as numbers


class CapturedOptimiser:
    """What a recording assumes of an optimiser, and the tensors that it reads."""

    def __init__(self, optimiser: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimiser, self._device = optimiser, device
        self._rates: dict[int, Tensor] = {}  # by group
        if not all(group.get("capturable", group.get("fused")) for group in optimiser.param_groups):
            raise InputError(
                "CapturedStep needs an optimiser made with capturable=True, or, where it has no such option (SGD), "
                "with fused=True."
            )

    def prepare(self) -> None:
        """Put rates that are numbers, or other tensors than before, into the tensors that recordings read."""
        for number, group in enumerate(self.optimiser.param_groups if isinstance(self.optimiser, READS_RATES) else ()):
            rate, own = group["lr"], self._rates.get(number)
            if own is None:
                dtype = rate.dtype if isinstance(rate, Tensor) else torch.float32
                own = self._rates[number] = torch.as_tensor(rate, dtype=dtype, device=self._device)
            if rate is not own:
                own.copy_(torch.as_tensor(rate))
                group["lr"] = own

    def stepped(self) -> None:
        """Tell schedulers that the optimiser made a step: a replay does not call it."""
        self.optimiser._opt_called = True  # type: ignore[attr-defined]

    def state(self) -> Iterator[Tensor]:
        """The tensors that a step reads and writes besides parameters and gradients."""
        for values in self.optimiser.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))

    def key(self) -> Hashable:
        """Parameters and options of each group: a recording has the numbers among them as they were."""
        return tuple(
            (
                tuple(map(id, group["params"])),
                tuple((name, _value(group.get(name))) for name in self.optimiser.defaults),  # schedulers add others
            )
            for group in self.optimiser.param_groups
        )


def _value(option: Any) -> Hashable:
    return id(option) if isinstance(option, Tensor) else tuple(option) if isinstance(option, list) else option
