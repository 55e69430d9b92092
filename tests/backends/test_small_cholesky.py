"""Small factorisations side by side, against LAPACK on one after the other."""

from __future__ import annotations

import pytest
import torch

from gradguess.backends import small_cholesky
from gradguess.backends.cholesky import semidefinite_cholesky, triangular_apply


def gram(count: int = 37, k: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    Y = torch.randn(count, 20, k, generator=generator, dtype=torch.float64)
    if k > 4 and count > 5:
        Y[3, :, 4] = Y[3, :, 1]  # one dependent column
        Y[5] = 0
    return Y.mT @ Y


def packed(C: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.tril_indices(C.shape[-1], C.shape[-1])
    return C[:, rows, columns].t().contiguous()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("draws", [None, 2])
@pytest.mark.parametrize(("count", "k"), [(37, 6), (37, 1), (1, 6), (2, 3), (16, 16)])
def test_as_lapack_does(transpose, draws, count, k):
    C = gram(count, k)
    z = torch.randn(*(() if draws is None else (draws,)), *C.shape[:2], dtype=C.dtype)
    L, alive = semidefinite_cholesky(C)
    expected = triangular_apply(L, z * alive) if not transpose else triangular_apply(L, z, transpose=False) * alive
    found = small_cholesky.solve(*small_cholesky.cholesky(packed(C)), z.movedim(-1, 0), transpose)
    torch.testing.assert_close(found.movedim(0, -1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_does_not_depend_on_its_neighbours(dtype):
    C = packed(gram(count=129, k=10).to(dtype))
    z = torch.randn(10, 129, dtype=dtype)
    R, inverse = small_cholesky.cholesky(C)
    x = small_cholesky.solve(R, inverse, z)
    for rows in (slice(0, 13), slice(5, 37), slice(4, 5), slice(126, 129), slice(1, 128), slice(7, 9)):
        part, part_inverse = small_cholesky.cholesky(C[:, rows].contiguous())
        assert torch.equal(part_inverse, inverse[:, rows])
        assert torch.equal(part.permute(2, 0, 1).triu(), R[..., rows].permute(2, 0, 1).triu())
        assert torch.equal(small_cholesky.solve(part, part_inverse, z[:, rows]), x[:, rows])


def test_numbers_that_are_not_finite_stay_in_their_matrix():
    C = packed(gram())
    spoiled = C.clone()
    spoiled[2, 4] = float("nan")
    spoiled[0, 9] = float("inf")
    z = torch.randn(6, 37, dtype=C.dtype)
    whole, found = (small_cholesky.solve(*small_cholesky.cholesky(matrix), z) for matrix in (C, spoiled))
    others = [i for i in range(37) if i not in (4, 9)]
    assert torch.equal(whole[:, others], found[:, others])
