"""Small factorisations on a GPU, one program per sample, and what lies between the products of a step (Triton, which
comes with PyTorch for CUDA).

A batch of k × k problems is too small for the libraries: a factorisation, two solves and what lies between them are a
dozen kernels that each take as long to start as to run. Here a sample's matrix stays in registers from the gate to the
direction. The twins of these functions are `linalg.semidefinite_cholesky` and `GatedBasis.apply` on a CPU.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

LARGEST = 32  # k; a larger matrix does not fit into the registers of a warp
DRAWN = 16  # directions, and
FUSED = 1024  # units of a layer up to which `draw` is used; beyond, the factorisation is the smaller part of the work
BLOCK = 128  # units of a layer at a time for one sample, and
UNITS = 32  # for many
WIDE = 1024  # numbers at a time where each is for itself
PARTS = 4  # of a layer that are summed by themselves
CLASSES = 4096  # of a cross entropy in one kernel
SWEEPS = 8  # of Jacobi's method
PRECISION = "tf32x3"  # of products: three on the matrix units, as accurate as one in float32


def usable(t: Tensor, k: int = 1) -> bool:
    """Can these kernels work on tensors like `t` with matrices of this size? They run on the current device."""
    if not t.is_cuda or t.dtype != torch.float32 or k > LARGEST:
        return False
    return t.device.index == torch.cuda.current_device() and _installed()


def cholesky(C: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors of `C` (B, k, k), dropping pivots that are not above `floor` (B,); see `semidefinite_cholesky`."""
    k = C.shape[-1]
    L, alive = torch.empty_like(C, memory_format=torch.contiguous_format), C.new_empty(C.shape[:-1], dtype=torch.bool)
    _jit().cholesky[(len(C),)](C.contiguous(), floor.contiguous(), L, alive, k, _padded(k), num_warps=1)
    return L, alive


def solve(C: Tensor, z: Tensor) -> Tensor:
    """`C^{-½} z`, that is `L^{-T} z` with `L Lᵀ = C`: (batch, k, k), (..., batch, k) -> the same."""
    batch, k = z.shape[-2:]
    w = torch.empty_like(z, memory_format=torch.contiguous_format)
    _jit().solve[(batch,)](
        C.contiguous(), z.contiguous(), w, batch, _tolerance(k), _draws(z), k, _padded(k), num_warps=1
    )
    return w


def draw(V: Tensor, gate: Tensor, z: Tensor, binary: bool = False) -> Tensor:
    """`D V C^{-½} z` with `C = Vᵀ D² V`: `V` (d, k), `gate` (batch, d), `z` (..., batch, k) -> (..., batch, d).

    All `C` are one product of the squared gates with `v vᵀ` for each row of `V`, on the matrix units: numbers of 24
    bits are cut in two that those can read. The rest is done sample by sample. For up to `DRAWN` directions and layers
    of up to `FUSED` units. With `binary` the gates are zero or one.
    """
    (batch, k), (d, _) = z.shape[-2:], V.shape
    K, P = _padded(k), max(16, 1 << (k * (k + 1) // 2 - 1).bit_length())
    gate, share = gate.contiguous(), -(-d // (PARTS * UNITS)) * UNITS
    products, VT, C = V.new_empty(d, 2 * P), V.new_empty(k, d), V.new_empty(PARTS, batch, 2 * P)
    y = z.new_empty(*z.shape[:-1], d)
    _jit().outer[(-(-d // 16),)](V.contiguous(), products, VT, d, k, K, P, 16, num_warps=2)
    _jit().moments[(-(-batch // 16), PARTS)](gate, products, C, batch, d, share, binary, P, 16, UNITS, num_warps=4)
    shape = PARTS, _draws(z), d, k, K, P, BLOCK
    _jit().draw[(batch,)](C, VT, gate, z.contiguous(), y, batch, _tolerance(k), *shape, num_warps=1)
    return y


def _draws(z: Tensor) -> int:
    """How many there are of each sample."""
    return math.prod(z.shape[:-2])


def _tolerance(k: int) -> float:
    """The relative size of a pivot that counts as zero, as in `semidefinite_cholesky`."""
    return 100 * k * torch.finfo(torch.float32).eps


def orthonormal_rows(R: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Rows (B, k, d) orthonormalised by three passes of Cholesky QR, and what was left of each (`linalg`).

    A pass is two products and one small kernel, which works out the inverse factor of the Gram matrix of the rows.
    """
    k = R.shape[-2]
    left = R.new_empty(R.shape[:-1])
    for i in range(3):
        C = R @ R.mT
        M = torch.empty_like(C)
        _jit().whiten[(len(C),)](C, left, M, rtol, _tolerance(k), i == 0, i == 2, k, _padded(k), num_warps=1)
        R = M @ R
    return R, left[..., None]


def eigh(H: Tensor, sweeps: int = SWEEPS) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of symmetric matrices (B, n, n), n up to `LARGEST`, that does not wait for the device.

    Jacobi's method. Accuracy: rounding, some 1e-5 of the largest eigenvalue at n = 32; matrices that are far from
    diagonal need 8 sweeps for that, three leave about a hundredth.
    """
    n = H.shape[-1]
    values, Z = H.new_empty(H.shape[:-1]), torch.empty_like(H, memory_format=torch.contiguous_format)
    _jit().eigh[(len(H),)](H.contiguous(), values, Z, sweeps, n, _padded(n), PRECISION, num_warps=1 if n <= 16 else 2)
    return values, Z


def weigh(y: Tensor, c: Tensor, share: float) -> Tensor:
    """`share c_b y_b` for every row, in place: `y` (batch, n), contiguous, `c` (batch,)."""
    _jit().weigh[(-(-y.numel() // WIDE),)](y, c.contiguous(), share, y.numel(), y.shape[1], WIDE)
    return y


def rectify(s: Tensor) -> Tensor:
    """A ReLU in place, on contiguous numbers; returns its gate."""
    gate = torch.empty_like(s)
    _jit().rectify[(-(-s.numel() // WIDE),)](s, gate, s.numel(), WIDE)
    return gate


def meet(t: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """`D (t + y)` with the gate of a ReLU whose output is `x`, all of one shape."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    arguments = t.contiguous(), y.contiguous(), x.contiguous(), out, out.numel()
    _jit().meet[(-(-out.numel() // WIDE),)](*arguments, WIDE)
    return out


def cross_entropy(x: Tensor, t: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Every row's cross entropy and its derivative along `t`: (rows, classes) twice, (rows,) -> (rows,) twice.

    Up to `CLASSES` of them. NaN where a target is not a class.
    """
    rows, n = x.shape
    loss, moved = x.new_empty(rows), x.new_empty(rows)
    arguments = x.contiguous(), t.contiguous(), target.contiguous(), loss, moved, ignored, rows
    block = 1 << max(0, n - 1).bit_length()
    together = max(1, 256 // block)
    _jit().cross_entropy[(-(-rows // together),)](*arguments, n, block, together)
    return loss, moved


def gram(product: Tensor, index: Tensor, gate: Tensor) -> Tensor:
    """`gate_i product[index_i, index_j] gate_j` for every sample: (d, d), (batch, a), (batch, a) -> (batch, a, a)."""
    batch, a = index.shape
    G = gate.new_empty(batch, a, a)
    grid = (batch, -(-a // 16), -(-a // 64))
    _jit().gram[grid](product.contiguous(), index.contiguous(), gate.contiguous(), G, len(product), a, 16, 64)
    return G


def _padded(k: int) -> int:
    """Products of blocks need at least 16 columns."""
    return 16 if k <= 16 else 32


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _jit() -> Any:
    """The kernels, compiled when they are first used; Triton is imported only where there is a GPU."""
    from gradguess import _triton

    return _triton
