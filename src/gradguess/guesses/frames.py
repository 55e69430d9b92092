"""Frames: linear maps from white noise to directions, one matrix `A` per sample.

Tensors carry the batch in their second to last dimension: noise is (..., batch, latent), directions (..., batch, d).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from gradguess.jacobian import Dense, Jacobian
from gradguess.layers.positions import Pattern
from gradguess.linalg import gram_root, solve_columns


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
    """`A = I`: what the paper draws at the top of the network.

    Args:
        output: of the site, (batch, d).
    """

    def __init__(self, output: Tensor) -> None:
        self.batch, self.latent = output.shape
        self.dtype = output.dtype

    def apply(self, z: Tensor) -> Tensor:
        return z

    def adjoint(self, v: Tensor) -> Tensor:
        return v


class OpenGate(Frame):
    """`A` is the projector on the units whose gate is open.

    Args:
        open_: which units are open: (batch, d), bool.
        dtype: of the directions.
    """

    def __init__(self, open_: Tensor, dtype: torch.dtype) -> None:
        self.mask = open_.to(dtype)
        self.batch, self.latent = open_.shape
        self.dtype = dtype

    def apply(self, z: Tensor) -> Tensor:
        return z * self.mask

    def adjoint(self, v: Tensor) -> Tensor:
        return v * self.mask


class Transposed(Frame):
    """`A = W̃ᵀ`, through products alone.

    Args:
        W: the Jacobian above the site, `view.W`.
        output: of the site, (batch, d).
    """

    def __init__(self, W: Jacobian, output: Tensor) -> None:
        self.W = W
        self.batch, self.latent, self.dtype = output.shape[0], W.m, output.dtype

    def apply(self, z: Tensor) -> Tensor:
        return self.W.vjp(z)

    def adjoint(self, v: Tensor) -> Tensor:
        return self.W.jvp(v)


class Matrix(Transposed):
    """`A = Pᵀ` for a dense matrix per sample.

    Args:
        P: (batch, m, d).
    """

    def __init__(self, P: Tensor) -> None:
        super().__init__(Dense(P), P)
        self.P = P


class Columns(Matrix):
    """`A = Q`, orthonormal columns for each sample (zero columns allowed).

    Args:
        Q: (batch, d, k).
    """

    orthonormal = True

    def __init__(self, Q: Tensor) -> None:
        super().__init__(Q.mT)
        self.Q = Q


class GatedBasis(Frame):
    """`A_b = D_b V C_b^{-½}` with one basis `V` (d, k) for the batch and each sample's gate `D_b`.

    `C_b = Vᵀ D_b² V`, so the columns are orthonormal: `Cov(y)` is an exact projector of rank k (less where `D_b V`
    has less) inside the image of the gate. Any square root of `C_b⁻¹` gives the same law; a Cholesky factor is the
    cheapest. All `C_b` come from one product of the squared gates with the row-wise outer products of `V`.

    Args:
        V: (d, k), orthonormal columns; zero columns are allowed.
        gate: (batch, d), or None for the identity.
        batch: the number of samples.
        binary: the gate is zero or one, so it is its own square.
    """

    orthonormal = True

    def __init__(self, V: Tensor, gate: Tensor | None, batch: int, binary: bool = False) -> None:
        self.V, self.gate, self.binary = V, gate, binary
        self.batch, self.latent, self.dtype = batch, V.shape[1], V.dtype

    @cached_property
    def root(self) -> Tensor:
        """Factors of `C_b`, (batch, k, k), in float64: `C_b^{-½}` is `root_b^{-T}`."""
        assert self.gate is not None
        return gram_root(self.V, self.gate, self.binary)

    def apply(self, z: Tensor) -> Tensor:
        if self.gate is None:
            return z @ self.V.t()
        u = solve_columns(self.root, z.double(), transposed=True)
        return (u @ self.V.double().t()).to(z.dtype).mul_(self.gate)

    def adjoint(self, v: Tensor) -> Tensor:
        if self.gate is None:
            return v @ self.V
        return solve_columns(self.root, (v * self.gate).double() @ self.V.double()).to(v.dtype)


class Separable(Frame):
    """`y = P Z Vᵀ` at a site with positions: one basis `P` of positions and one `V` of features for the batch.

    `A = P ⊗ V` has orthonormal columns, so `Cov(y) = P Pᵀ ⊗ V Vᵀ` is a projector of rank `a v`. A gate that follows
    the site is left out: it would tie features to positions.

    Args:
        P: (positions, a), orthonormal columns; zero columns are allowed.
        V: (features, v), the same.
        pattern: where positions and features lie.
        batch: the number of samples.
    """

    orthonormal = True

    def __init__(self, P: Tensor, V: Tensor, pattern: Pattern, batch: int) -> None:
        self.P, self.V, self.pattern = P, V, pattern
        self.batch, self.latent, self.dtype = batch, P.shape[1] * V.shape[1], V.dtype

    def features(self, z: Tensor) -> Tensor:
        """`Z Vᵀ`, one row for each column of `P`: (..., batch, a v) -> (..., batch, a, features)."""
        return z.unflatten(-1, (self.P.shape[1], -1)) @ self.V.t()

    def apply(self, z: Tensor) -> Tensor:
        return self.pattern.flat(self.P @ self.features(z))

    def adjoint(self, v: Tensor) -> Tensor:
        return (self.P.t() @ self.pattern.tokens(v) @ self.V).flatten(-2)
