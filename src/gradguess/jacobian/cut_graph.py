"""The Jacobian above a site of any model, by products with a reverse graph that is cut at every site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradguess.jacobian.base import Jacobian
from gradguess.model.autograd_graph import AutogradGraph
from gradguess.model.hooks import Visit
from gradguess.model.site import Layout, LayoutChanged, Site, at_least_float32
from gradguess.model.task import tensors
from gradguess.noise import Noise

SKETCH = 8  # random vectors per sample when a basis is sketched

Run = Callable[[Visit], tuple[Any, Tensor]]  # a pass with a reverse graph: (outputs, losses)


class CutGraph:
    """One pass with a reverse graph that is cut at every site.

    Attributes:
        below: site name -> `s` with the graph that leads to it.
        above: site name -> the leaf from which the graph goes on.
        outputs, losses: of the pass.
        ends: the outputs' tensors that the graph reaches.
        vectors: how many random vectors are pulled back for each sample where a basis is sketched, at least.
    """

    def __init__(self, layout: Layout, run: Run, vectors: int = SKETCH) -> None:
        self.layout, self.vectors = layout, vectors
        self.below: dict[str, Tensor] = {}
        self.above: dict[str, Tensor] = {}
        self._sketch: dict[str, Tensor] = {}
        self.outputs, self.losses = run(self._cut)
        self.ends = [out for out in tensors(self.outputs) if out.requires_grad]

    def _cut(self, site: Site, x: Any, s: Tensor) -> Tensor:
        leaf = s.detach().requires_grad_()
        self.below[site.name], self.above[site.name] = s, leaf
        self._met_site(site, s)
        return leaf.clone()  # after what a site does here, which may need much memory itself

    def _met_site(self, site: Site, s: Tensor) -> None:
        """What else is done where the pass meets a site."""

    def jacobian(self, site: Site) -> GraphJacobian:
        """The Jacobian above a site."""
        return GraphJacobian(self, site)

    def sketch(self, site: Site, count: int, noise: Noise) -> Tensor:
        """Rows `W̃ᵀ ε` for every sample of the pass, at least `count` each: (rows, d)."""
        known = self._sketch.get(site.name)
        if known is None or len(known) < count * len(site.flat(self.above[site.name])):
            self._sketch = self._sketched(self._beside(site), count, noise)
        return at_least_float32(self._sketch[site.name])

    def _beside(self, site: Site) -> Sequence[Site]:
        """The sites that are sketched together, by one reverse pass for each vector."""
        return [site]

    def _sketched(self, sites: Sequence[Site], count: int, noise: Noise) -> dict[str, Tensor]:
        ends = [self.below[name] for name in dict.fromkeys(name for site in sites for name in site.above)]
        if any(site.reaches_output for site in sites):
            ends = ends + self.ends
        leaves = [self.above[site.name] for site in sites]
        rows = {}
        for site, leaf in zip(sites, leaves, strict=True):
            batch, d = site.flat(leaf).shape
            rows[site.name] = leaf.new_empty(count, batch, d)
        for number in range(count):
            eps = [noise.normal(end.shape, end.dtype, end.device) for end in ends]
            grads = torch.autograd.grad(ends, leaves, eps, retain_graph=True)
            for site, grad in zip(sites, grads, strict=True):
                rows[site.name][number] = site.flat(grad)
        return {name: found.flatten(0, 1) for name, found in rows.items()}


class PassingCutGraph(CutGraph):
    """A cut graph that is let go of on the way: only the pieces are alive that some site still waits for.

    A pass that is wired in another way than the layout says raises `LayoutChanged`.

    Args:
        sites: of these, `settle(graph, met)` sees each as soon as the pass has met all that lies next above it.
    """

    def __init__(
        self,
        layout: Layout,
        run: Run,
        sites: Sequence[Site],
        settle: Callable[[CutGraph, list[Site]], None],
        vectors: int = SKETCH,
    ) -> None:
        self._settle, self._waiting = settle, list(sites)
        self._together: Sequence[Site] = ()  # the sites that are settled now
        self._names: dict[int, str] = {}  # id of a leaf -> its site; that of a leaf that is gone may come again
        self._met = set[str]()
        super().__init__(layout, run, vectors)
        self._let_go(ended=True)

    def _met_site(self, site: Site, s: Tensor) -> None:
        below = {other.name for other in self.layout.sites if site.name in other.above}
        if {self._names[leaf] for leaf in AutogradGraph.leaves(s) if leaf in self._names} != below:
            raise LayoutChanged
        self._names[id(self.above[site.name])] = site.name
        self._met.add(site.name)
        self._let_go()

    def _beside(self, site: Site) -> Sequence[Site]:
        return self._together

    def _let_go(self, ended: bool = False) -> None:
        """Settle the sites that wait for nothing any more, and drop what no other waits for."""
        self._drop()
        ready = [site for site in self._waiting if self._met.issuperset((site.name, *site.above))]
        self._together = [site for site in ready if ended or not site.reaches_output]
        if self._together:
            with torch._C.DisableTorchFunction(), torch.no_grad():  # the rules of the pass end here
                self._settle(self, self._together)
            self._sketch = {}
            self._waiting = [site for site in self._waiting if site not in self._together]
            self._drop()

    def _drop(self) -> None:
        starts, ends = {site.name for site in self._waiting}, {name for site in self._waiting for name in site.above}
        self.above = {name: leaf for name, leaf in self.above.items() if name in starts}
        self.below = {name: s for name, s in self.below.items() if name in ends}


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
        pieces = eps.split(self.sizes, dim=-1)
        shaped = [
            self.targets[i].unflat(piece, end) if i < len(self.targets) else piece.reshape(end.shape)
            for i, (piece, end) in enumerate(zip(pieces, self.ends, strict=True))
        ]
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
                eps = torch.zeros(
                    self.batch, self.m, dtype=self.leaf.dtype, device=self.leaf.device, requires_grad=True
                )
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
