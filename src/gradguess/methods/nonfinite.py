"""NaN and infinity among the losses and derivatives of an estimate."""

from __future__ import annotations

import math

import torch

from gradguess.errors import NonFiniteError
from gradguess.methods.base import Estimate


def is_finite(result: Estimate) -> bool:
    """Are all losses and derivatives numbers?"""
    if result.all_finite is not None:
        return bool(result.all_finite)  # the processes must not differ in this
    if math.isfinite(float(result.losses.sum() + result.jvp.sum())):  # else the sum itself may have overflowed
        return True
    return bool(torch.isfinite(result.losses).all() & torch.isfinite(result.jvp).all())


def check_finite(result: Estimate, where: str) -> None:
    """Raise an error that says what is not, and where."""
    if is_finite(result):
        return
    what = "loss" if not torch.isfinite(result.losses).all() else "directional derivative"
    bad = int((~torch.isfinite(result.losses)).sum()) or int((~torch.isfinite(result.jvp)).sum())
    if not bad:
        raise NonFiniteError(f"Another process met a NaN or infinite loss or derivative at {where}; see its error.")
    raise NonFiniteError(
        f"The {what} of {bad} sample(s) at {where} is NaN or infinite. Check the data and the learning rate, or "
        "skip such steps with gg.ForwardGradient(..., nonfinite='skip')."
    )
