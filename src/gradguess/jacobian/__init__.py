"""`W̃`: the Jacobian from a site to the outputs of the next sites, along paths that cross no other site.

`GatedLinear` is its closed form below a linear layer. Everywhere else `CutGraph` gives its products: the graph of a
pass is cut at every site, so `autograd.grad` sees exactly those paths.
"""

from gradguess.jacobian.base import Dense, GatedLinear, Jacobian
from gradguess.jacobian.cut_graph import SKETCH, CutGraph

__all__ = ["SKETCH", "CutGraph", "Dense", "GatedLinear", "Jacobian"]
