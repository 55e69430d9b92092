"""The cross entropy of each sample and its derivative, where a device has one kernel for both."""

from __future__ import annotations

from typing import Any

import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor

from gradguess.backends import elementwise
from gradguess.layers.entry import Layer, unpack


def tangent(
    function: Any,
    x: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Tensor | None:
    """For classes as targets and one loss for each row. `F.cross_entropy` names all of its options to a rule."""
    p, t = unpack(x)
    if t is None or p.dim() != 2 or target.shape != p.shape[:1] or target.is_floating_point():
        return None
    if weight is not None or size_average is not None or reduce is not None or label_smoothing or reduction != "none":
        return None
    found = elementwise.cross_entropy(p, t, target, ignore_index)
    return None if found is None else fwAD.make_dual(*found)


LAYER = Layer(functions=(F.cross_entropy,), tangent=tangent)
