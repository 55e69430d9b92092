"""`W̃`: the Jacobian from a site to the outputs of the next sites, along paths that cross no other site.

One matrix per sample, `m × d`, seen only through its products. Vectors carry the batch in their second to last
dimension: (..., batch, m) above, (..., batch, d) at the site.

- `ClosedForm`: elementwise function, then a linear layer: `W̃ = W M` with one `W` for the whole batch (eq. 4).
- `CutGraph`: everything else. The graph is cut at every site, so `autograd.grad` sees exactly those paths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradguess.linalg import orthonormal_columns, top_right_singular_vectors
from gradguess.noise import Noise
from gradguess.sites import Site, Watch
from gradguess.task import tensors

if TYPE_CHECKING:
    from gradguess.sites import Layout
    from gradguess.task import Task

WARM = 3  # subspace iterations that bring a basis up to date
SKETCH = 8  # random vectors per probe sample when a basis is sketched


class Upstream(ABC):
    """The Jacobian above one site."""

    m: int
    d: int

    @abstractmethod
    def vjp(self, eps: Tensor) -> Tensor:
        """`W̃ᵀ ε`: (..., batch, m) -> (..., batch, d)."""

    @abstractmethod
    def jvp(self, v: Tensor) -> Tensor:
        """`W̃ v`: (..., batch, d) -> (..., batch, m)."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Every sample's `W̃`, dense: (batch, m, d). For references and small layers."""

    def gram(self, X: Tensor) -> Tensor:
        """`W̃ᵀ W̃ X` for every sample: (p, batch, d) -> (p, batch, d)."""
        return self.vjp(self.jvp(X))

    def gram_columns(self, X: Tensor) -> Tensor:
        """The same for columns: (batch, d, p) -> (batch, d, p)."""
        return self.gram(X.permute(2, 0, 1)).permute(1, 2, 0)

    @abstractmethod
    def shared_basis(self, k: int, noise: Noise, warm: Tensor | None = None) -> Tensor:
        """Top-k right singular vectors of the batch as a whole, (d, k)."""


class ClosedForm(Upstream):
    """`W̃_b = W diag(gate_b)`."""

    def __init__(self, weight: Tensor, gate: Tensor | None, moment: Tensor | None = None) -> None:
        self.weight = weight  # (m, d)
        self.gate = gate  # (batch, d)
        self.moment = moment  # mean of gate² where the batch is larger than `gate`, (d,)
        self.m, self.d = weight.shape

    def vjp(self, eps: Tensor) -> Tensor:
        y = eps @ self.weight
        return y if self.gate is None else y.mul_(self.gate)

    def jvp(self, v: Tensor) -> Tensor:
        return (v if self.gate is None else v * self.gate) @ self.weight.t()

    def gram(self, X: Tensor) -> Tensor:
        if self.m < self.d:
            return super().gram(X)
        if self.gate is None:
            return X @ self.product
        return ((X * self.gate) @ self.product).mul_(self.gate)

    @cached_property
    def product(self) -> Tensor:
        """`WᵀW`, (d, d), shared by the batch: per sample only the gate changes."""
        return self.weight.t() @ self.weight

    def of_batch(self) -> Tensor:
        """`W diag(mean gate²)^½`, (m, d): one matrix for the batch as a whole."""
        if self.gate is None:
            return self.weight
        moment = self.gate.square().mean(0) if self.moment is None else self.moment
        return self.weight * moment.sqrt()

    def matrix(self) -> Tensor:
        if self.gate is None:
            return self.weight[None]
        return self.weight * self.gate[:, None, :]

    def shared_basis(self, k: int, noise: Noise, warm: Tensor | None = None) -> Tensor:
        weight = self.of_batch()
        if k == self.m < self.d:
            return orthonormal_columns(weight.t())  # the whole row space
        stale = warm is None or warm.shape[1] != k
        if stale or (2 * k > min(self.m, self.d) and not _capturing(weight)):  # iteration loses weak directions
            return top_right_singular_vectors(weight, k)
        for _ in range(WARM):  # only the span matters, so no Rayleigh–Ritz; nothing here waits for the device
            warm = orthonormal_columns(weight.t() @ (weight @ warm))  # type: ignore[operator]
        assert warm is not None
        return warm


class Dense(Upstream):
    """One matrix per sample, written out: (batch, m, d)."""

    def __init__(self, W: Tensor) -> None:
        self.W = W
        _, self.m, self.d = W.shape

    def vjp(self, eps: Tensor) -> Tensor:
        return (self.W.mT @ eps[..., None])[..., 0]

    def jvp(self, v: Tensor) -> Tensor:
        return (self.W @ v[..., None])[..., 0]

    def matrix(self) -> Tensor:
        return self.W

    def shared_basis(self, k: int, noise: Noise, warm: Tensor | None = None) -> Tensor:
        return top_right_singular_vectors(self.W.flatten(0, 1), k)


def _capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


class CutGraph:
    """One pass with a reverse graph that is cut at every site."""

    def __init__(self, task: Task, layout: Layout) -> None:
        self.layout = layout
        self.below: dict[str, Tensor] = {}  # s with the graph that leads to it
        self.above: dict[str, Tensor] = {}  # the leaf from which the graph goes on
        self._sketch: dict[str, Tensor] = {}

        def cut(site: Site, x: Any, s: Tensor) -> Tensor:
            leaf = s.detach().requires_grad_()
            self.below[site.name], self.above[site.name] = s, leaf
            return leaf.clone()

        with torch.enable_grad(), Watch(layout, cut):
            self.outputs = task.outputs()
            self.losses = task.losses(self.outputs)
        self.ends = [out for out in tensors(self.outputs) if out.requires_grad]

    def upstream(self, site: Site) -> GraphProducts:
        return GraphProducts(self, site)

    def sketch(self, site: Site, count: int, noise: Noise) -> Tensor:
        """Rows `W̃ᵀ ε` for every sample of the pass, `count` each: (rows, d). One cut backward serves all sites."""
        if not self._sketch:
            self._sketch = self._sketch_all(count, noise)
        return self._sketch[site.name]

    def _sketch_all(self, count: int, noise: Noise) -> dict[str, Tensor]:
        sites = [site for site in self.layout.sites if not site.top and site.batch_dim is not None]
        ends = [self.below[name] for name in self.below]
        if any(site.reaches_output for site in sites):
            ends = ends + self.ends
        leaves = [self.above[site.name] for site in sites]
        rows: dict[str, list[Tensor]] = {site.name: [] for site in sites}
        for _ in range(count):
            eps = [noise.normal(end.shape, end.dtype, end.device) for end in ends]
            grads = torch.autograd.grad(ends, leaves, eps, retain_graph=True)
            for site, grad in zip(sites, grads, strict=True):
                rows[site.name].append(_at_least_float32(site.flat(grad)))
        return {name: torch.cat(parts) for name, parts in rows.items()}


def _at_least_float32(t: Tensor) -> Tensor:
    """Factorisations have no half precision."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


class GraphProducts(Upstream):
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
            return _at_least_float32(self._pull(eps.to(self.leaf.dtype)))
        return torch.stack([self.vjp(part) for part in eps])

    def jvp(self, v: Tensor) -> Tensor:
        if v.dim() > 2:
            return torch.stack([self.jvp(part) for part in v])
        if self._linear is None:  # W̃ᵀ ε is linear in ε: its own transpose is W̃
            with torch.enable_grad():
                eps = torch.zeros(
                    self.batch, self.m, dtype=self.leaf.dtype, device=self.leaf.device, requires_grad=True
                )
                self._linear = eps, self._pull(eps, create_graph=True)
        eps, pulled = self._linear
        (out,) = torch.autograd.grad(pulled, eps, v.to(pulled.dtype), retain_graph=True)
        return _at_least_float32(out)

    def matrix(self) -> Tensor:
        rows = torch.eye(self.m, dtype=self.leaf.dtype, device=self.leaf.device)
        return torch.stack([self.vjp(row.expand(self.batch, -1)) for row in rows], dim=1)

    def shared_basis(self, k: int, noise: Noise, warm: Tensor | None = None) -> Tensor:
        count = max(SKETCH, -(-2 * k // self.batch))
        return top_right_singular_vectors(self.graph.sketch(self.site, count, noise), k)
