"""The Jacobian above a site of any model, by products with a reverse graph that is cut at every site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor

from gradguess.jacobian.base import Jacobian
from gradguess.model.cut_pass import leaves_below
from gradguess.model.site import Layout, LayoutChanged, Site, at_least_float32
from gradguess.model.task import tensors
from gradguess.noise import Noise

SKETCH = 8  # random vectors per sample when a basis is sketched

Settle = Callable[["CutGraph", list[Site]], None]


class CutGraph:
    """A reverse graph that is cut at every site of a pass: `visit` is called at each site, `end` with what came out.

    With `settle`, the graph is freed on the way: only the pieces are alive that one of `sites` still waits for. A pass
    that is wired in another way than the layout says then raises `LayoutChanged`.

    Args:
        layout: the sites.
        vectors: how many random vectors are pulled back for each sample where a basis is sketched, at least.
        sites: those that `settle` is to see.
        settle: called with the graph and those of `sites` above which the pass has just met all that lies next.

    Attributes:
        below: site name -> `s` with the graph that leads to it.
        above: site name -> the leaf from which the graph goes on.
        outputs, losses: of the pass.
        ends: the outputs' tensors that the graph reaches.
    """

    outputs: Any
    losses: Tensor
    ends: list[Tensor]

    def __init__(
        self,
        layout: Layout,
        *,
        vectors: int = SKETCH,
        sites: Sequence[Site] = (),
        settle: Settle | None = None,
    ) -> None:
        self.layout, self.vectors, self._settle = layout, vectors, settle
        self.below: dict[str, Tensor] = {}
        self.above: dict[str, Tensor] = {}
        self._waiting, self._settling = list(sites), list[Site]()
        self._met = set[str]()
        self._names: dict[int, str] = {}  # id of a leaf -> its site; that of a leaf that is gone may come again
        self._sketch: dict[str, Tensor] = {}

    def end(self, outputs: Any, losses: Tensor) -> Self:
        """The pass has ended."""
        self.outputs, self.losses = outputs, losses
        self.ends = [out for out in tensors(outputs) if out.requires_grad]
        if self._settle is not None:
            self._settle_and_free(self._settle, ended=True)
        return self

    def jacobian(self, site: Site) -> GraphJacobian:
        """The Jacobian above a site."""
        return GraphJacobian(self, site)

    def visit(self, site: Site, x: Any, s: Tensor) -> Tensor:
        """Cut at a site; what is returned takes the place of `s`, and may be changed in place."""
        leaf = s.detach().requires_grad_()
        self.below[site.name], self.above[site.name] = s, leaf
        if self._settle is not None:
            below = {other.name for other in self.layout.sites if site.name in other.above}
            if {self._names[leaf] for leaf in leaves_below(s) if leaf in self._names} != below:
                raise LayoutChanged
            self._names[id(leaf)] = site.name
            self._met.add(site.name)
            self._settle_and_free(self._settle)
        return leaf.clone()  # after what is settled here, which may need much memory itself

    def _settle_and_free(self, settle: Settle, *, ended: bool = False) -> None:
        """Settle the sites that wait for nothing any more, and free what no other waits for."""
        self._free()
        ready = [site for site in self._waiting if self._met.issuperset((site.name, *site.above))]
        self._settling = [site for site in ready if ended or not site.reaches_output]
        if self._settling:
            with torch._C.DisableTorchFunction(), torch.no_grad():  # the rules of the pass end here
                settle(self, self._settling)
            self._sketch = {}
            self._waiting = [site for site in self._waiting if site not in self._settling]
            self._free()

    def _free(self) -> None:
        starts, ends = {site.name for site in self._waiting}, {name for site in self._waiting for name in site.above}
        self.above = {name: leaf for name, leaf in self.above.items() if name in starts}
        self.below = {name: s for name, s in self.below.items() if name in ends}

    def sketch(self, site: Site, count: int, noise: Noise) -> Tensor:
        """Rows `W̃ᵀ ε` for every sample of the pass, at least `count` each: (rows, d).

        Sites that are settled together are sketched together, by one reverse pass for each vector.
        """
        known = self._sketch.get(site.name)
        if known is None or len(known) < count * len(site.flat(self.above[site.name])):
            self._sketch = self._sketched(self._settling or [site], count, noise)
        return at_least_float32(self._sketch[site.name])

    def _sketched(self, sites: Sequence[Site], count: int, noise: Noise) -> dict[str, Tensor]:
        ends = [self.below[name] for name in dict.fromkeys(name for site in sites for name in site.above)]
        if any(site.reaches_output for site in sites):
            ends = ends + self.ends
        leaves = [self.above[site.name] for site in sites]
        rows = [leaf.new_empty(count, *site.flat(leaf).shape) for site, leaf in zip(sites, leaves, strict=True)]
        for number in range(count):
            eps = [noise.normal(end.shape, end.dtype, end.device) for end in ends]
            grads = torch.autograd.grad(ends, leaves, eps, retain_graph=True)
            for site, grad, into in zip(sites, grads, rows, strict=True):
                into[number] = site.flat(grad)
        return {site.name: found.flatten(0, 1) for site, found in zip(sites, rows, strict=True)}


class GraphJacobian(Jacobian):
    """`W̃` of one site through a cut graph, over its whole frontier (and the output, where it reaches that)."""

    def __init__(self, graph: CutGraph, site: Site) -> None:
        self.graph, self.site = graph, site
        self.leaf = graph.above[site.name]
        self.targets = [graph.layout[name] for name in site.above]
        self.ends = [graph.below[name] for name in site.above]
        if site.reaches_output:
            self.ends += graph.ends
        self.batch, self.d = site.flat(self.leaf).shape
        self.sizes = [end.numel() // self.batch for end in self.ends]
        self.m = sum(self.sizes)
        self._linear: tuple[Tensor, Tensor] | None = None

    def _pull(self, eps: Tensor, create_graph: bool = False) -> Tensor:
        pieces = zip_longest(eps.split(self.sizes, dim=-1), self.ends, self.targets)  # outputs have no target
        shaped = [piece.reshape(end.shape) if to is None else to.unflat(piece, end) for piece, end, to in pieces]
        (grad,) = torch.autograd.grad(self.ends, self.leaf, shaped, retain_graph=True, create_graph=create_graph)
        return self.site.flat(grad)

    def vjp(self, eps: Tensor) -> Tensor:
        if eps.dim() == 2:
            return at_least_float32(self._pull(eps.to(self.leaf.dtype)))
        return torch.stack([self.vjp(part) for part in eps])

    def jvp(self, v: Tensor) -> Tensor:
        if v.dim() > 2:
            return torch.stack([self.jvp(part) for part in v])
        if self._linear is None:  # W̃ᵀ ε is linear in ε, so a vjp of it multiplies by W̃
            with torch.enable_grad():
                eps = self.leaf.new_zeros(self.batch, self.m, requires_grad=True)
                self._linear = eps, self._pull(eps, create_graph=True)
        eps, pulled = self._linear
        (out,) = torch.autograd.grad(pulled, eps, v.to(pulled.dtype), retain_graph=True)
        return at_least_float32(out)

    def matrix(self) -> Tensor:
        rows = torch.eye(self.m, dtype=self.leaf.dtype, device=self.leaf.device)
        return torch.stack([self.vjp(row.expand(self.batch, -1)) for row in rows], dim=1)

    def of_batch(self, k: int, noise: Noise) -> Tensor:
        """Rows of `W̃ᵀ` by random vectors."""
        return self.graph.sketch(self.site, max(self.graph.vectors, -(-2 * k // self.batch)), noise)
