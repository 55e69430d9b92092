"""`W̃`: the Jacobian from a site to the outputs of the next sites, along paths that cross no other site.

- `GatedLinear`: an elementwise function, then a linear layer: `W̃ = W M` with one `W` for the whole batch (eq. 4).
- `CutGraph`: everything else. The graph is cut at every site, so `autograd.grad` sees exactly those paths.
  `PassingCutGraph` keeps no more of it than some site still waits for.
"""

from gradguess.jacobian.base import Dense, Jacobian
from gradguess.jacobian.cut_graph import SKETCH, CutGraph, PassingCutGraph
from gradguess.jacobian.gated_linear import GatedLinear

__all__ = ["SKETCH", "CutGraph", "Dense", "GatedLinear", "Jacobian", "PassingCutGraph"]
