"""Eigenvalues, also where a routine does not converge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradguess.backends import sure_eigh
from matrices import noise


def fails_in_float32(real):
    """`real`, which does not converge in float32."""

    def routine(H: Tensor):
        if H.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: (Batch element 3): The algorithm failed to converge")
        return real(H)

    return routine


def test_an_eigensolver_that_does_not_converge_is_replaced(monkeypatch):
    A = noise(3, 5, 5).float()
    H = A @ A.mT
    expected = torch.linalg.eigvalsh(H)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32(torch.linalg.eigh))
    values, Z = sure_eigh(H)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(Z @ torch.diag_embed(values) @ Z.mT, H)
    with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
        sure_eigh(H * torch.nan)


def test_the_lower_triangle_alone_is_read():
    H = noise(3, 5, 5)
    H = H + H.mT
    spoiled = H.tril() + 7 * torch.ones_like(H).triu(1)
    torch.testing.assert_close(sure_eigh(spoiled)[0], torch.linalg.eigvalsh(H))
