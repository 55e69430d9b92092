"""The factor that is written out for a compiler, against the one by LAPACK."""

import pytest
import torch

from gradguess.backends import unrolled_cholesky
from gradguess.backends.cholesky import semidefinite_cholesky, triangular_apply
from matrices import F64, noise


@pytest.mark.parametrize("k", [1, 2, 5, 10])
@pytest.mark.parametrize("rank", [10, 3, 0])
def test_factors_and_solutions(k, rank):
    """Also of matrices that are singular, or zero: dropped columns give zeros."""
    Y = noise(6, 12, rank) @ noise(6, rank, k, seed=1) if rank < k else noise(6, 12, k)
    Y[0, :, 0] = 0  # one matrix with an empty first column
    C = Y.mT @ Y
    rows, columns = torch.tril_indices(k, k)
    L, inverse = unrolled_cholesky.cholesky(list(C[:, rows, columns].t()))
    expected, alive = semidefinite_cholesky(C)
    assert torch.equal(torch.stack(inverse, -1) > 0, alive)
    for i in range(k):
        for j in range(i + 1):
            wanted = torch.where(alive[:, j], expected[:, i, j], 0.0)
            torch.testing.assert_close(L[i][j], wanted, rtol=1e-8, atol=1e-8)
    z = noise(3, 6, k, seed=2)
    for transpose in (True, False):
        found = unrolled_cholesky.solve(L, inverse, z, transpose)
        wanted = triangular_apply(expected, z * alive if transpose else z, transpose=transpose) * alive
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)
    assert found.dtype == F64
