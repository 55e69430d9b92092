"""Matrix polynomials against the same polynomial of the singular values."""

import pytest
import torch

from gradguess.linalg import newton_schulz, polynomial
from matrices import noise


@pytest.mark.parametrize("shape", [(9, 9), (5, 12), (12, 5), (3, 6, 6), (2, 3, 4, 7), (1, 1)])
def test_newton_schulz_is_the_polynomial_on_the_singular_values(shape: tuple[int, ...]) -> None:
    a = (0.3, 1.1, -0.7, 0.2)
    A = noise(*shape)
    A = A / torch.linalg.matrix_norm(A, 2, keepdim=True)
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    for _ in range(3):
        S = a[0] * S + a[1] * S**3 + a[2] * S**5 + a[3] * S**7
    torch.testing.assert_close(newton_schulz(A, a, 3), U @ torch.diag_embed(S) @ Vh, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_polynomial_is_that_of_the_eigenvalues(count: int) -> None:
    a = (0.3, 1.1, -0.7, 0.2)[:count]
    G = noise(3, 5, 5)
    G = G @ G.mT / 5
    values, Z = torch.linalg.eigh(G)
    expected = Z @ torch.diag_embed(sum(c * values**j for j, c in enumerate(a))) @ Z.mT
    torch.testing.assert_close(polynomial(G, a), expected, rtol=0, atol=1e-9)
