"""The eigenvalues of small matrices on a CPU (`test_kernels` has those of the kernel)."""

from __future__ import annotations

import torch

from gradguess.backends import eigh, largest_eigenvalue
from matrices import noise


def test_eigh_is_that_of_lapack_whatever_the_sweeps():
    H = noise(3, 5, 5)
    H = H @ H.mT
    for sweeps in (1, 4):
        values, Z = eigh(H, sweeps)
        torch.testing.assert_close(values, torch.linalg.eigvalsh(H))
        torch.testing.assert_close(Z @ torch.diag_embed(values) @ Z.mT, H)


def test_the_largest_eigenvalue_reads_the_lower_triangle_alone():
    H = noise(3, 5, 5)
    H = H + H.mT
    spoiled = H.tril() + 7 * torch.ones_like(H).triu(1)
    torch.testing.assert_close(largest_eigenvalue(spoiled), torch.linalg.eigvalsh(H)[:, -1])
