"""Samples that mix: a tangent on the activations of one moves the losses of others."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gradguess.errors import GradguessError
from gradguess.methods.run import Plan
from gradguess.model.find_sites import PROBE
from gradguess.model.site import Layout, LayoutChanged, Site, at_least_float32
from gradguess.model.task import Task
from gradguess.passes import choose_pass


def warn_of_mixing(plan: Plan, task: Task, layout: Layout, *, stacklevel: int) -> bool:
    """Warn where samples mix and the method takes them to be apart. Whether it warned is returned.

    It takes one tangent pass over a few samples, over all where these cannot be cut, and leaves no trace.
    """
    if not plan.method.apart or plan.options.coupling == "batch":
        return False
    probe = task.part(slice(PROBE), task.batch) if layout.sliceable else task
    source, met = torch.Generator().manual_seed(0), list[str]()

    def draw(site: Site, x: object, s: Tensor) -> Tensor | None:
        if site.batch_dim is None:
            return None
        y = torch.zeros_like(s)
        one = y.select(site.batch_dim, _middle(s.shape[site.batch_dim]))
        one.copy_(torch.randn(one.shape, generator=source))
        return y

    def arrive(site: Site, y: Tensor, t: Tensor | None) -> Tensor:
        if t is not None and _others(site.flat(t)):
            met.append(site.name)
        return y

    try:
        passes = choose_pass(probe, layout, finite=plan.options.finite, mixes=True).aside()
        jvp = passes.tangent(draw, arrive).jvp
    except (LayoutChanged, GradguessError):  # the step itself meets this as well, and deals with it
        return False
    others = _others(jvp[:, None])
    if others:
        where = f"at {met[0]!r}" if met else "in the loss or right below it"
        warnings.warn(
            f"Samples mix: the loss of sample {others[0]} moves with the activations of sample {_middle(len(jvp))}, "
            f"which reach it {where}. The estimate leaves out what passes from a sample to the losses of others: a "
            "bias, which gg.diagnose does not see in a guess. Pass coupling='batch' to take it in, with more noise. Or "
            "keep samples apart: model.eval() or another norm for batch norm, batch_first=True for recurrent layers "
            "and attention that see (batch, time).",
            stacklevel=stacklevel,
        )
    return bool(others)


def _middle(count: int) -> int:
    """The sample that is moved. It has others on either side, which a recurrence over the batch tells apart."""
    return (count - 1) // 2


def _others(rows: Tensor) -> list[int]:
    """The samples besides the middle one whose rows, (samples, numbers), are not zero up to rounding."""
    size, own = torch.linalg.vector_norm(at_least_float32(rows), dim=1), _middle(len(rows))
    moved = size > torch.finfo(rows.dtype).eps ** 0.5 * size[own]
    return [i for i in moved.nonzero().flatten().tolist() if i != own]
