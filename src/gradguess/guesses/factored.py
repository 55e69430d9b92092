"""Directions that stay factors, `y = P Z Vᵀ`: what is kept of a site does not grow with its positions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from gradguess.guesses.frames import Separable
from gradguess.model.site import Site


class Factored:
    """All directions of one step at a site; one of them; or the estimate that is made of them.

    A parameter gradient that sums `ĝ_t u_tᵀ` over positions t needs the inputs `u` as `Pᵀ u` alone: one row for each
    column of `P`, made while the layer runs.

    Args:
        z: (tangents, batch, latent numbers of the frame); of one direction, or an estimate, (batch, latent numbers).
        s: the site's output; its shape and dtype are kept.
    """

    def __init__(self, site: Site, frame: Separable, z: Tensor, s: Tensor) -> None:
        self.site, self.frame, self.z = site, frame, z
        self.like = s.new_empty(()).expand(s.shape)
        self.inputs: Tensor | None = None  # `Pᵀ u`, (batch, a, features of u)

    @property
    def folds(self) -> bool:
        """Whether the gradients of the site's parameters follow from folded inputs."""
        layer = self.site.gradient
        if layer is None or self.frame.pattern.channels_first or self.like.dim() != 3:
            return False
        return layer.folds(self.site.module)

    def _with(self, z: Tensor) -> Factored:
        one = copy.copy(self)
        one.z = z
        return one

    def __getitem__(self, tangent: int) -> Factored:
        """The direction that a pass carries."""
        return self._with(self.z[tangent])

    def weighed(self, c: Tensor) -> Factored:
        """The estimate: the mean over tangents of `c y`, for `c` (tangents, batch)."""
        return self._with((self.z * c[:, :, None].to(self.z.dtype)).mean(0))

    def dense(self) -> Tensor:
        """All of them, (tangents, *shape of the output); one of them, or the estimate, in the shape of the output."""
        if self.z.dim() == 2:
            return self.site.unflat(self.frame.apply(self.z), self.like)
        return torch.stack([self[tangent].dense() for tangent in range(len(self.z))])

    def added_to(self, t: Tensor) -> Tensor:
        """`t + y`. The direction takes no memory before the tangent has arrived to which it is added."""
        if self.frame.pattern.channels_first or self.site.batch_dim != 0 or t.dim() != 3:
            return t + self.dense()
        P, rows = self.frame.P.to(t.dtype), self.frame.features(self.z).to(t.dtype)
        return torch.baddbmm(t, P.expand(len(t), -1, -1), rows)

    def fold(self, x: Tensor) -> Tensor:
        """`Pᵀ u` from the layer's input."""
        assert self.site.gradient is not None
        u = self.site.gradient.reads(self.site.module, x.detach()).movedim(self.site.batch_dim or 0, 0)
        return self.frame.P.t().to(u.dtype) @ u

    def gradients(self, x: Any) -> dict[str, Tensor]:
        """Those of the layer's parameters, by their names in the layer; `x` where no input was folded before."""
        layer, module = self.site.gradient, self.site.module
        assert layer is not None
        assert layer.gradient is not None
        if not self.folds:
            return layer.of(module, x, self.dense())
        inputs = self.fold(x) if self.inputs is None else self.inputs
        rows = self.frame.features(self.z)  # (batch, a, features)
        grads = layer.gradient(module, inputs, rows.to(inputs.dtype))
        if "bias" in grads:
            grads["bias"] = self.frame.P.sum(0) @ rows.sum(0)
        return grads


def dense(y: Any) -> Any:
    """Directions as tensors, whether they were factors or not."""
    return y.dense() if isinstance(y, Factored) else y
