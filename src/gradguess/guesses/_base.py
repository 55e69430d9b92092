"""What a guess is.

A guess is a random map from a site to a direction `y` of the shape of the site's output. Every guess of the paper
is linear in white noise, `y = A z` with `z ~ N(0, I)`, so it is given by its `Frame`, the map `A` of every sample:

    covariance of y    Cov(y) = A Aᵀ
    bias               E[c y] - g = (Cov(y) - I) g         (eq. 5 of the paper)

To add one: subclass `Guess`, implement `frame`, return one of the frames below (or your own).
Tensors carry the batch in their second to last dimension: noise is (..., batch, latent), directions (..., batch, d).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from gradguess.linalg import semidefinite_cholesky, triangular_apply

if TYPE_CHECKING:
    from gradguess.noise import Noise
    from gradguess.step import Step
    from gradguess.upstream import Upstream


# --- frames: linear maps from white noise to directions ------------------------------------------------------


class Frame(ABC):
    """`A`, one matrix per sample, seen through its products."""

    batch: int
    latent: int  # length of z per sample
    dtype: torch.dtype
    orthonormal: bool = False  # columns of A are orthonormal (or zero): several tangents are drawn orthonormal

    @abstractmethod
    def apply(self, z: Tensor) -> Tensor:
        """`A z`: (..., batch, latent) -> (..., batch, d)."""

    @abstractmethod
    def adjoint(self, v: Tensor) -> Tensor:
        """`Aᵀ v`: (..., batch, d) -> (..., batch, latent)."""

    def covariance_times(self, v: Tensor) -> Tensor:
        """`Cov(y) v = A Aᵀ v`."""
        return self.apply(self.adjoint(v))


class Identity(Frame):
    """`A = I`: what the paper draws at the top of the network."""

    def __init__(self, output: Tensor) -> None:
        self.batch, self.latent = output.shape
        self.dtype = output.dtype

    def apply(self, z: Tensor) -> Tensor:
        return z

    def adjoint(self, v: Tensor) -> Tensor:
        return v


class Open(Frame):
    """`A` is the projector on the units whose gate is open: (batch, d), bool."""

    def __init__(self, open_: Tensor, dtype: torch.dtype) -> None:
        self.mask = open_.to(dtype)
        self.batch, self.latent = open_.shape
        self.dtype = dtype

    def apply(self, z: Tensor) -> Tensor:
        return z * self.mask

    def adjoint(self, v: Tensor) -> Tensor:
        return v * self.mask


class Columns(Frame):
    """`A = Q`, orthonormal columns for each sample (zero columns allowed): (batch, d, k)."""

    orthonormal = True

    def __init__(self, Q: Tensor) -> None:
        self.Q = Q
        self.batch, _, self.latent = Q.shape
        self.dtype = Q.dtype

    def apply(self, z: Tensor) -> Tensor:
        return (self.Q @ z[..., None])[..., 0]

    def adjoint(self, v: Tensor) -> Tensor:
        return (self.Q.mT @ v[..., None])[..., 0]


class Matrix(Frame):
    """`A = Pᵀ` for a dense matrix per sample: (batch, m, d)."""

    def __init__(self, P: Tensor) -> None:
        self.P = P
        self.batch, self.latent, _ = P.shape
        self.dtype = P.dtype

    def apply(self, z: Tensor) -> Tensor:
        return (self.P.mT @ z[..., None])[..., 0]

    def adjoint(self, v: Tensor) -> Tensor:
        return (self.P @ v[..., None])[..., 0]


class Transposed(Frame):
    """`A = W̃ᵀ`, through products alone."""

    def __init__(self, upstream: Upstream, output: Tensor) -> None:
        self.upstream = upstream
        self.batch, self.latent, self.dtype = output.shape[0], upstream.m, output.dtype

    def apply(self, z: Tensor) -> Tensor:
        return self.upstream.vjp(z)

    def adjoint(self, v: Tensor) -> Tensor:
        return self.upstream.jvp(v)


class GatedBasis(Frame):
    """`A_b = D_b V C_b^{-½}` with one basis `V` (d, k) for the batch and each sample's gate `D_b`.

    `C_b = Vᵀ D_b² V`, so the columns are orthonormal: `Cov(y)` is an exact projector of rank k (less where `D_b V`
    has less) inside the image of the gate. Any square root of `C_b⁻¹` gives the same law; a Cholesky factor is the
    cheapest. All `C_b` come from one product of the squared gates with the row-wise outer products of `V`.
    """

    orthonormal = True

    def __init__(self, V: Tensor, gate: Tensor | None, batch: int) -> None:
        self.V, self.gate = V, gate
        self.batch, self.latent, self.dtype = batch, V.shape[1], V.dtype
        self.L: Tensor | None = None
        if gate is not None:
            d, k = V.shape
            outer = (V[:, :, None] * V[:, None, :]).reshape(d, k * k)
            C = (gate.square() @ outer).reshape(-1, k, k)
            self.L, self.alive = semidefinite_cholesky(C) if C.device.type == "cpu" else _jittered_cholesky(C)

    def apply(self, z: Tensor) -> Tensor:
        if self.L is None or self.gate is None:
            return z @ self.V.t()
        return (triangular_apply(self.L, z * self.alive, transpose=True) @ self.V.t()) * self.gate

    def adjoint(self, v: Tensor) -> Tensor:
        if self.L is None or self.gate is None:
            return v @ self.V
        return triangular_apply(self.L, (v * self.gate) @ self.V, transpose=False) * self.alive


def _jittered_cholesky(C: Tensor) -> tuple[Tensor, Tensor]:
    """The same without waiting for the device: a diagonal of `100 eps` makes every matrix regular.

    A direction that `D V` does not have comes out as zero by itself: with `C + δI = L Lᵀ` the covariance has the
    eigenvalues `λ / (λ + δ)`. A matrix that is not finite gives no direction at all.
    """
    k = C.shape[-1]
    size = C.diagonal(dim1=-2, dim2=-1).amax(-1)
    delta = 100 * torch.finfo(C.dtype).eps * size + torch.finfo(C.dtype).tiny
    eye = torch.eye(k, dtype=C.dtype, device=C.device)
    L, info = torch.linalg.cholesky_ex(C + delta[:, None, None] * eye)
    good = (info == 0) & (size > 0)
    return torch.where(good[:, None, None], L, eye), good[:, None].expand(-1, k)


# --- guesses -------------------------------------------------------------------------------------------------


@dataclass
class SiteView:
    """What a guess may look at: one site with something above it, on one batch."""

    name: str
    output: Tensor  # s, (batch, d)
    gate: Tensor | None  # derivative of the elementwise function that follows, (batch, d)
    upstream: Callable[[Tensor | None], Upstream]
    cache: dict[str, Tensor]  # kept between steps, saved with the state
    due: bool  # time to refresh what is cached
    noise: Noise

    @property
    def W(self) -> Upstream:
        """The Jacobian above, `W̃`."""
        return self.upstream(self.gate)


@dataclass
class Estimate:
    """The gradient as a method estimated it, and how.

    Attributes:
        loss: mean loss, 0-dim.
        grads: estimated gradient of the mean loss by parameter name.
        jvp: (tangents, batch), the directional derivative of each sample's own loss.
        directions: site name -> (tangents, *shape of the output).
        site_grads: site name -> estimate of d(loss of that sample)/ds, in the shape of the output.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    jvp: Tensor
    directions: dict[str, Tensor] = field(default_factory=dict)
    site_grads: dict[str, Tensor] = field(default_factory=dict)
    losses: Tensor | None = None


class Method(ABC):
    """Anything that estimates a gradient: a guess, weight perturbation, learned feedback, backpropagation."""

    uses_sites: ClassVar[bool] = True

    def phase(self, count: int) -> str | None:
        """Steps with the same phase do the same work and may share one CUDA graph; None: this one stands alone."""
        return "step"

    @abstractmethod
    def run(self, step: Step) -> Estimate:
        """The gradient of one batch."""


class Guess(Method):
    """A method that draws a direction at every site. Subclasses implement `frame` and nothing else."""

    reads: ClassVar[Literal["never", "refresh", "always"]] = "always"  # when `frame` looks at `view.W`
    refresh: int = 1

    @abstractmethod
    def frame(self, view: SiteView) -> Frame:
        """The map from white noise to this guess's directions at a site."""

    def phase(self, count: int) -> str | None:
        return None if count % self.refresh == 0 and self.refresh > 1 else "step"

    def run(self, step: Step) -> Estimate:
        seen = step.measure(self)
        batch = seen.losses.shape[0]

        def estimate(site: Any, s: Tensor | None) -> Tensor:
            record = seen.records.get(site.name)
            y = None if record is None else record.y
            if y is None:
                assert s is not None
                y = step.draw(self, site, s)
            return step.weigh(site, seen.of(site), y)

        if not seen.records:
            step.noise.rewind()  # the replay draws the same directions again
        grads = step.pull_back(lambda site, s: estimate(site, s) / batch, seen.records)
        result = Estimate(seen.losses.mean(), grads, seen.jvp, losses=seen.losses)
        if step.detail:
            for site in step.layout.sites:
                injected = seen.injected(site)
                assert injected is not None
                result.directions[site.name] = injected
                result.site_grads[site.name] = estimate(site, seen.records[site.name].s)
        return result


def keep(cache: dict[str, Tensor], key: str, value: Tensor) -> None:
    """Cache in place where possible, so that a captured step sees the new value."""
    if key in cache and cache[key].shape == value.shape:
        cache[key].copy_(value)
    else:
        cache[key] = value


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but a whole number of at least `least`."""
    from gradguess.errors import InputError

    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, found {value!r}.")
