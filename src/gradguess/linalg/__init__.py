"""Bases, triangular factors and matrix polynomials: pure functions on tensors, batched.

Everything here is deterministic given its arguments, writes to none of them, and keeps their dtype and
device. Dependent, zero and missing directions never raise and never give NaN: they come back as zero
columns, so that a caller who draws `V z` draws from the directions that exist.

A function that waits for the device (an eigenvalue routine does) says so; the others can be captured in a
CUDA graph.

This package imports `gradguess.backends` and `gradguess.errors` alone. The coefficients of W⊥-NS are in
`linalg.step_polynomials`.
"""

from gradguess.linalg.factors import gram_root, orthonormal_columns, solve_columns, sure_eigh
from gradguess.linalg.subspaces import (
    batched_top_subspace,
    followed_bases,
    is_full,
    largest_eigenvalue,
    top_eigenvalues,
    top_right_singular_vectors,
)

__all__ = [
    "batched_top_subspace",
    "followed_bases",
    "gram_root",
    "is_full",
    "largest_eigenvalue",
    "orthonormal_columns",
    "solve_columns",
    "sure_eigh",
    "top_eigenvalues",
    "top_right_singular_vectors",
]
