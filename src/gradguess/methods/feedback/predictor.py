"""The predictor: a matrix `B` for every site."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradguess.methods.output_error import OutputError
from gradguess.model.site import Site
from gradguess.step.base import Kept
from gradguess.step.parts import Pool

RIDGE = 0.1  # of the mean diagonal entry of the errors' second moment, in `regress`
LEAST = 0.1  # a gate that is open more rarely than this counts as open this often, in `regress`

Start = Callable[[Site, tuple[int, int], Tensor], Tensor]  # (site, shape of B, a tensor like it) -> the first B


def zeros(site: Site, shape: tuple[int, int], like: Tensor) -> Tensor:
    return like.new_zeros(shape)


class Predictor:
    """The matrices as they are while a step runs. The state they came from is not written.

    Attributes:
        entries: site name -> "B", the matrix (d, C), or smaller where positions share it, and "v", the direction in
            which the regressors are largest.
        start: gives a matrix that is not there yet.
    """

    def __init__(self, learned: Kept, pool: Pool, start: Start = zeros) -> None:
        self.entries = {site: dict(entries) for site, entries in learned.items()}
        self.pool, self.start = pool, start

    def at(self, site: Site) -> dict[str, Tensor]:
        return self.entries.setdefault(site.name, {})

    def matrix(self, site: Site, d: int, e: Tensor) -> Tensor:
        """`B` of a site with `d` numbers, for errors like `e`."""
        entries = self.at(site)
        shape = site.pattern.width(d), site.pattern.rows(e, d).shape[1]
        if "B" not in entries or entries["B"].shape != shape:
            entries["B"] = self.start(site, shape, e)
        elif entries["B"].dtype != e.dtype:  # the model has become another dtype
            entries["B"] = entries["B"].to(e.dtype)
        return entries["B"]

    def predict(self, site: Site, gate: Tensor | None, d: int, error: OutputError) -> Tensor:
        """`h_i = D_i B_i e`, (batch, d)."""
        pattern, e = site.pattern, error.flat
        value = pattern.unfold(pattern.rows(e, d) @ self.matrix(site, d, e).t(), len(e), d)
        return value if gate is None else value.mul_(gate)

    def regress(self, site: Site, gate: Tensor | None, error: OutputError, g: Tensor, rate: float) -> None:
        """Draw `B` towards the least-squares fit of the gradients `g` by `D B e` on this batch."""
        pattern, d, pool = site.pattern, g.shape[1], self.pool
        B, e = self.matrix(site, d, error.flat), pattern.rows(error.flat, d)
        h = pattern.unfold(e @ B.t(), len(g), d)
        wrong = pattern.fold(g - h if gate is None else (g - h * gate) * gate)
        moment = pool.sum(e.t() @ e)
        ridge = RIDGE * moment.diagonal().mean() + torch.finfo(e.dtype).tiny
        moment = moment + ridge * torch.eye(len(moment), dtype=e.dtype, device=e.device)
        if gate is not None:
            often = pool.sum(pattern.fold(gate.square()).sum(0)) / sum(pool.counts(len(e)))
            wrong = wrong / often.clamp_min(LEAST)  # a unit that is mostly off sees fewer samples
        elif pattern.kind == "shared":
            wrong = wrong * pattern.features / d  # the mean over positions
        self.at(site)["B"] = B + rate * torch.linalg.solve_ex(moment, pool.sum(e.t() @ wrong))[0].t()
