"""NaN and infinity among the losses, derivatives and gradients of an estimate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradguess.errors import NonFiniteError
from gradguess.methods.base import Estimate


def is_finite(result: Estimate) -> bool:
    """Whether all losses, derivatives and gradients are numbers. It waits for a GPU once."""
    if result.all_finite is not None and not bool(result.all_finite):
        return False  # the processes must not differ in this
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in result.grads.values():
        values = grad._values() if grad.is_sparse else grad
        groups.setdefault((values.device, values.dtype), []).append(values)
    sums = [torch.stack(torch._foreach_norm(group)).sum() for group in groups.values()]
    if result.all_finite is None:
        sums += [result.losses.sum(), result.jvp.sum()]
    total = sum(one.to(result.losses.device, torch.float64) for one in sums)
    return math.isfinite(float(total)) or _bad(result) is None  # numbers may have had an infinite sum


def check_finite(result: Estimate, where: str) -> None:
    """Raise an error that says what is not, and where."""
    if is_finite(result):
        return
    what = _bad(result)
    if what is None:
        raise NonFiniteError(f"Another process met a NaN or infinite loss or derivative at {where}; see its error.")
    raise NonFiniteError(
        f"The {what} at {where} is NaN or infinite. Check the data and the learning rate, or skip such steps with "
        "gg.ForwardGradient(..., nonfinite='skip')."
    )


def _bad(result: Estimate) -> str | None:
    """The first quantity that is not finite, if one is."""
    for name, numbers in (("loss", result.losses), ("directional derivative", result.jvp)):
        bad = int((~numbers.isfinite()).sum())
        if bad:
            return f"{name} of {bad} sample(s)"
    if result.all_finite is not None and not bool(result.all_finite):
        return None  # another process knows
    for name, grad in result.grads.items():
        if not (grad._values() if grad.is_sparse else grad).isfinite().all():
            return f"gradient of {name!r}, though no loss and no derivative is,"
    return None
