"""From directional derivatives to estimates at the sites."""

from __future__ import annotations

from torch import Tensor

from gradguess.backends import elementwise
from gradguess.model.site import Site
from gradguess.step.base import Step


def weigh(step: Step, site: Site, c: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
    """`ĝ = c y`, averaged over tangents: the estimate of each sample's own gradient at the site, times `share`.

    Where the batch shares the site's output, or samples mix, `c` is the sum over the batch. Where nobody asked for
    details, `y` is not needed any more and is overwritten.

    Args:
        c: (tangents, batch).
        y: (tangents, *shape of the output).
    """
    c, own = c.to(y.dtype), not step.detail
    alone = y.shape[0] == 1 and y.dim() == 3 and site.batch_dim == 0 and step.options.coupling == "sample"
    if alone and own:
        return elementwise.weigh(y[0], c[0], share)
    c = c if share == 1 else c * share
    if alone:
        return c.t() * y[0]
    shape = [1] * (y.dim() - 1)
    if site.batch_dim is None:
        c = c.sum(1)
    else:
        shape[site.batch_dim] = c.shape[1]
        if step.options.coupling == "batch":
            c = step.pool.sum(c.sum(1, keepdim=True)).expand_as(c)
    g = y.mul_(c.reshape(-1, *shape)) if own else c.reshape(-1, *shape) * y
    return g[0] if g.shape[0] == 1 else g.mean(0)
