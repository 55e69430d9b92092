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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from gradguess import kernels, lanes, streams
from gradguess.linalg import semidefinite_cholesky, triangular_apply
from gradguess.scratch import NONE, Scratch
from gradguess.streams import beside, join

if TYPE_CHECKING:
    from gradguess.noise import Noise
    from gradguess.step import Measurement, Step
    from gradguess.upstream import Upstream


Memo = dict[str, Any]

# --- frames: linear maps from white noise to directions ------------------------------------------------------


class Frame(ABC):
    """`A`, one matrix per sample, seen through its products."""

    batch: int
    latent: int  # length of z per sample
    dtype: torch.dtype
    orthonormal: bool = False  # columns of A are orthonormal (or zero): several tangents are drawn orthonormal
    inside: bool = False  # a gate of zeros and ones lets all of `A z` through

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


class Grouped(Frame):
    """Groups of samples, each with a frame of its own: (their places in the batch, the frame)."""

    def __init__(self, groups: Sequence[tuple[Tensor, Frame]]) -> None:
        self.groups = groups
        self.batch = sum(frame.batch for _, frame in groups)
        self.latent, self.dtype = groups[0][1].latent, groups[0][1].dtype
        self.orthonormal = all(frame.orthonormal for _, frame in groups)
        self.back = torch.argsort(torch.cat([rows for rows, _ in groups]))

    def apply(self, z: Tensor) -> Tensor:
        parts = [frame.apply(z.index_select(-2, rows)) for rows, frame in self.groups]
        return torch.cat(parts, -2).index_select(-2, self.back)

    def adjoint(self, v: Tensor) -> Tensor:
        parts = [frame.adjoint(v.index_select(-2, rows)) for rows, frame in self.groups]
        return torch.cat(parts, -2).index_select(-2, self.back)


class Transposed(Frame):
    """`A = W̃ᵀ`, through products alone."""

    def __init__(self, upstream: Upstream, output: Tensor, inside: bool = False) -> None:
        self.upstream, self.inside = upstream, inside
        self.batch, self.latent, self.dtype = output.shape[0], upstream.m, output.dtype

    def apply(self, z: Tensor) -> Tensor:
        return self.upstream.vjp(z)

    def adjoint(self, v: Tensor) -> Tensor:
        return self.upstream.jvp(v)


SMALL = 16  # up to this k, on a CPU, the matrices C_b are factored side by side and not by LAPACK


class GatedBasis(Frame):
    """`A_b = D_b V C_b^{-½}` with one basis `V` (d, k) for the batch and each sample's gate `D_b`.

    `C_b = Vᵀ D_b² V`, so the columns are orthonormal: `Cov(y)` is an exact projector of rank k (less where `D_b V`
    has less) inside the image of the gate. Any square root of `C_b⁻¹` gives the same law; a Cholesky factor is the
    cheapest. All `C_b` come from one product of the squared gates with the row-wise outer products of `V`.
    """

    orthonormal = True

    def __init__(
        self, V: Tensor, gate: Tensor | None, batch: int, binary: bool = False, memo: Memo | None = None
    ) -> None:
        self.V, self.gate, self.binary, self.memo = V, gate, binary, memo
        self.inside = binary and gate is not None
        self.batch, self.latent, self.dtype = batch, V.shape[1], V.dtype

    @cached_property
    def root(self) -> _Root | None:
        if self.gate is None:
            return None
        squared = self.gate if self.binary else self.gate.square()
        if self.latent <= SMALL and self.V.device.type == "cpu":
            return _Lanes(_outer_products(self.V, self.memo), squared)
        return _Stacked(self.V, squared)

    def apply(self, z: Tensor) -> Tensor:
        small = len(self.V) <= kernels.FUSED and self.latent <= kernels.DRAWN
        if self.gate is not None and small and kernels.usable(self.V):
            return kernels.draw(self.V, self.gate, z, self.binary)
        return self.expand(z if self.root is None else self.root.solve(z))

    def expand(self, u: Tensor, room: Tensor | None = None) -> Tensor:
        """`D V u`; one direction per sample may be written to `room`."""
        y = torch.mm(u[0], self.V.t(), out=room)[None] if u.dim() == 3 and u.shape[0] == 1 else u @ self.V.t()
        return y if self.gate is None else y.mul_(self.gate)

    def adjoint(self, v: Tensor) -> Tensor:
        if self.root is None or self.gate is None:
            return v @ self.V
        return self.root.solve_transposed((v * self.gate) @ self.V)


class _Root(ABC):
    """`C^{-½}` of every sample."""

    @abstractmethod
    def solve(self, z: Tensor) -> Tensor:
        """`C^{-½} z`: (..., batch, k) -> the same."""

    @abstractmethod
    def solve_transposed(self, v: Tensor) -> Tensor:
        """`C^{-½ᵀ} v`."""


class _Stacked(_Root):
    """One matrix after the other."""

    def __init__(self, V: Tensor, squared_gate: Tensor) -> None:
        d, k = V.shape
        outer = (V[:, :, None] * V[:, None, :]).reshape(d, k * k)
        self.C = (squared_gate @ outer).reshape(-1, k, k)

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        return semidefinite_cholesky(self.C)

    def solve(self, z: Tensor) -> Tensor:
        if kernels.usable(z, z.shape[-1]):
            return kernels.solve(self.C, z)
        L, alive = self.factors
        return triangular_apply(L, z * alive, transpose=True)

    def solve_transposed(self, v: Tensor) -> Tensor:
        L, alive = self.factors
        return triangular_apply(L, v, transpose=False) * alive


class _Lanes(_Root):
    """Side by side, the samples in the last dimension; factored when first used, so that sites can share the work."""

    def __init__(self, outer: Tensor, squared_gate: Tensor) -> None:
        self.outer, self.squared_gate = outer, squared_gate

    def fill(self, room: Tensor) -> Tensor:
        """Every sample's `C`, (k (k + 1) / 2, batch): the lower triangles, C is symmetric."""
        return torch.mm(self.outer, self.squared_gate.t(), out=room)

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        return lanes.cholesky(self.fill(self.outer.new_empty(len(self.outer), len(self.squared_gate))))

    def solve(self, z: Tensor) -> Tensor:
        return _from_lanes(lanes.solve(*self.factors, _to_lanes(z)), z.dim())

    def solve_transposed(self, v: Tensor) -> Tensor:
        return _from_lanes(lanes.solve(*self.factors, _to_lanes(v), transpose=True), v.dim())


def _outer_products(V: Tensor, memo: Memo | None) -> Tensor:
    """They change when the basis does."""
    if memo is not None and "outer" in memo:
        basis, version, outer = memo["outer"]
        if basis is V and version == V._version:
            return outer
    outer = lanes.outer_products(V)
    if memo is not None:
        memo["outer"] = (V, V._version, outer)
    return outer


def _to_lanes(z: Tensor) -> Tensor:
    """(batch, k) or (n, batch, k), with k first and the batch last."""
    return z.t() if z.dim() == 2 else z.permute(2, 0, 1)


def _from_lanes(u: Tensor, dim: int) -> Tensor:
    return u.t() if dim == 2 else u.permute(1, 2, 0)


def apply_together(
    frames: Sequence[Frame], zs: Sequence[Tensor], names: Sequence[str], scratch: Scratch = NONE
) -> list[Tensor]:
    """`frame.apply(z)` for several sites, bit for bit; small factorisations are done for all sites at once."""
    if zs and zs[0].device.type != "cpu":
        return [frame.apply(z) for frame, z in zip(frames, zs, strict=True)]
    together = [
        (frame, frame.root, z, name)
        for frame, z, name in zip(frames, zs, names, strict=True)
        if isinstance(frame, GatedBasis) and isinstance(frame.root, _Lanes) and frame.latent == frames[0].latent
    ]
    if not together:
        return [frame.apply(z) for frame, z in zip(frames, zs, strict=True)]
    sizes = [frame.batch for frame, _, _, _ in together]
    first = together[0][1].outer
    packed = scratch.take("packed", first.shape[0], sum(sizes), first)
    room = scratch.take("factor", frames[0].latent ** 2, sum(sizes), first)
    for (_, root, _, _), part in zip(together, packed.split(sizes, -1), strict=True):
        root.fill(part)
    noise = torch.cat([_to_lanes(z) for _, _, z, _ in together], -1)
    us = lanes.solve(*lanes.cholesky(packed, room=room), noise).split(sizes, -1)
    drawn = {}
    for (frame, _, z, name), u in zip(together, us, strict=True):
        y = scratch.take(f"{name}/y", frame.batch, frame.V.shape[0], frame.V) if z.shape[0] == 1 else None
        drawn[id(frame)] = frame.expand(_from_lanes(u, z.dim()), y)
    return [drawn[id(frame)] if id(frame) in drawn else frame.apply(z) for frame, z in zip(frames, zs, strict=True)]


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
    binary: bool = False  # the gate is zero or one
    memo: Memo = field(default_factory=dict)  # kept between steps, not saved: what can be computed again

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
    shared: bool = False  # the gradients are of all processes' samples already
    fine: Tensor | None = None  # False where some process met NaN or infinity


class Method(ABC):
    """Anything that estimates a gradient: a guess, weight perturbation, learned feedback, backpropagation."""

    uses_sites: ClassVar[bool] = True

    def phase(self, count: int) -> str | None:
        """Steps with the same phase do the same work and may share one CUDA graph; None: this one stands alone."""
        return "step"

    def pools_at(self, count: int, first: bool) -> bool:
        """Does this step look at the batch as a whole before it draws? `first`: nothing is cached yet."""
        return False

    @abstractmethod
    def run(self, step: Step) -> Estimate:
        """The gradient of one batch."""


class Guess(Method):
    """A method that draws a direction at every site. Subclasses implement `frame` and nothing else."""

    reads: ClassVar[Literal["never", "refresh", "always"]] = "always"  # when `frame` looks at `view.W`
    pools: ClassVar[bool] = False  # does a refresh look at the batch as a whole (`W.shared_basis`)?
    refresh: int = 1

    @abstractmethod
    def frame(self, view: SiteView) -> Frame:
        """The map from white noise to this guess's directions at a site."""

    def phase(self, count: int) -> str | None:
        return None if count % self.refresh == 0 and self.refresh > 1 else "step"

    def pools_at(self, count: int, first: bool) -> bool:
        return self.pools and (first or count % self.refresh == 0)

    def run(self, step: Step) -> Estimate:
        seen = step.measure(self)
        batch = seen.losses.shape[0]

        def estimate(site: Any, s: Tensor | None, seen: Measurement) -> Tensor:
            record = seen.records.get(site.name)
            y = None if record is None else record.y
            if y is None:
                assert s is not None
                y = step.draw(self, site, s)
            return step.weigh(site, seen.of(site), y, own=not step.detail, share=share)

        if not seen.records:
            step.noise.rewind()  # the replay draws the same directions again
        with beside(seen.losses.device, streams.LOSS):
            loss = seen.losses.mean()
        share = 1 / batch if kernels.usable(seen.jvp) else 1.0  # of a sample in the mean loss
        mean = seen if share < 1 else replace(seen, jvp=seen.jvp / batch)
        grads = step.pull_back(lambda site, s: estimate(site, s, mean), seen.records)
        join(seen.losses.device)
        result = Estimate(loss, grads, seen.jvp, losses=seen.losses)
        if step.detail:
            for site in step.layout.sites:
                injected = seen.injected(site)
                assert injected is not None
                result.directions[site.name] = injected
                result.site_grads[site.name] = estimate(site, seen.records[site.name].s, seen)
        return result


def keep(cache: dict[str, Tensor], key: str, value: Tensor) -> None:
    """Cache in place where possible, so that a captured step sees the new value.

    Row by row: products with another order in memory round differently, and a checkpoint would change it.
    """
    if key in cache and cache[key].shape == value.shape:
        cache[key].copy_(value)
    else:
        cache[key] = value.contiguous()


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but a whole number of at least `least`."""
    from gradguess.errors import InputError

    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, found {value!r}.")
