"""How one feedback matrix serves the positions of a site."""

from __future__ import annotations

import torch

from gradguess.layers import positions
from gradguess.layers.positions import WORDS, project_words


def test_the_projection_of_an_alphabet_is_the_same_whatever_batch_comes_first():
    """Two processes, or a run and its continuation, may meet batches of other sizes first."""
    part = torch.randn(5, 2 * WORDS)
    seen = []
    for first in (1, 5):
        positions._projection.cache_clear()
        project_words(part[:first])
        seen.append(project_words(part))
    assert torch.equal(*seen)
    others = [project_words(torch.eye(WORDS + more))[0] for more in (1, 2)]
    assert not torch.equal(*others)  # each size has its own


def test_a_large_alphabet_is_projected_and_keeps_inner_products():
    a, b = torch.randn(1, 3000), torch.randn(1, 3000)
    assert project_words(torch.ones(2, WORDS)).shape == (2, WORDS)
    assert project_words(a).shape == (1, WORDS)
    assert abs(float((project_words(a) * project_words(a)).sum() / (a * a).sum()) - 1) < 0.3
    assert abs(float((project_words(a) * project_words(b)).sum() / a.norm() / b.norm())) < 0.3
