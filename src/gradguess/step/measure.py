"""The tangent passes: directions are drawn at the sites and carried to the losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradguess.backends.policy import full_precision
from gradguess.guesses.base import Guess, SiteView, StaleBasis, still_fitting
from gradguess.guesses.factored import Factored, dense
from gradguess.guesses.frames import Frame, Identity, Separable
from gradguess.jacobian import CutGraph, GatedLinear, Jacobian
from gradguess.layers.elementwise import mask
from gradguess.linalg import orthonormal_columns
from gradguess.model.hooks import Visit
from gradguess.model.site import LayoutChanged, Site, at_least_float32
from gradguess.noise import SketchNoise
from gradguess.passes import Carried
from gradguess.step.base import Step
from gradguess.step.parts import Pool

SEED = 0x5EED  # searches have noise of their own: they must not shift the numbers that directions are drawn from
Watch = Callable[[int, Site, Tensor, Tensor | None, Tensor], None]  # pass, site, direction y, gate, scale σ


class Drawing:
    """Draws the directions of one guess for one step: the guess's frame, applied to white noise.

    Where the guess reads Jacobians that have no closed form, a cut graph of the batch is made first.
    """

    def __init__(self, step: Step, guess: Guess) -> None:
        self.step, self.guess = step, guess
        self.noise = SketchNoise(step.noise.generator.device, SEED + step.state.count)
        self.graph: CutGraph | None = None
        if guess.reads == "frame" and any(site.linear is None for site in step.layout.guessed):
            self.graph = step.passes.cut()

    def reads_gate(self, site: Site) -> bool:
        """Whether `directions` looks at the site's gate."""
        return self.guess.reads_gate(site.pattern)

    def frame(self, site: Site, s: Tensor, gate: Tensor | None) -> Frame:
        """The guess's map from white noise to directions at this site; `gate` is `site.gate_at(s)`."""
        flat = at_least_float32(site.flat(s))
        if not site.guessed:
            return Identity(flat)
        kept = still_fitting(self.step.state.kept.get(site.name, {}), flat.shape[1], flat.dtype)
        if kept is None:
            raise StaleBasis
        if site.linear is not None and site.linear.in_features != flat.shape[1]:  # inputs with another dimension
            raise LayoutChanged
        jacobian = partial(jacobian_at, site, flat, gate, self.graph)
        view = SiteView(site.name, flat, gate, site.gate is mask, kept, self.noise, jacobian, site.pattern)
        return self.guess.frame(view)

    def directions(self, site: Site, s: Tensor, gate: Tensor | None) -> Tensor | Factored:
        """All directions of this step at a site, `y = A z` with white noise `z`: (tangents, *s.shape)."""
        count, noise = self.step.options.tangents, self.step.noise
        with full_precision(s.device):
            frame = self.frame(site, s, gate)
            if site.batch_dim is None:
                z = noise.normal((count, 1, frame.latent), frame.dtype, s.device)
            else:
                z = noise.batched(count, frame.batch, frame.latent, frame.dtype, s.device)
            z = spread(z) if count > 1 and frame.orthonormal else z
            if isinstance(frame, Separable):
                return Factored(site, frame, z, s)
            y = frame.apply(z)
            if site.batch_dim == 0:
                return (y if s.dim() == 2 else y.reshape(-1, *s.shape)).to(s.dtype)
            return torch.stack([site.unflat(part, s) for part in y])


def jacobian_at(
    site: Site, flat: Tensor, gate: Tensor | None, graph: CutGraph | None, moment: Tensor | None = None
) -> Jacobian:
    """`W̃` above a site: in closed form, or through a cut graph. `moment` as in `GatedLinear`."""
    if site.linear is not None:
        return GatedLinear(site.linear.weight.detach().to(flat.dtype), gate, moment)
    assert graph is not None
    return graph.jacobian(site)


def spread(z: Tensor) -> Tensor:
    """Orthonormal draws scaled by √k in the place of independent ones (n, batch, k): never worse, same covariance.

    More than k draws come in blocks of k.
    """
    k = z.shape[-1]
    blocks = [orthonormal_columns(block.permute(1, 2, 0)).permute(2, 0, 1).contiguous() for block in z.split(k)]
    return torch.cat(blocks) * k**0.5


@dataclass
class Record:
    """What a pass keeps of a site until the directional derivative is known."""

    x: Any  # the input of the layer, where its parameter gradient has a closed form
    version: int  # of x, to notice that it was changed in place
    gate: Tensor | None  # where the method asked for it; computed at once, since an in-place activation changes s
    y: Tensor | Factored | None  # (tangents, *s.shape)
    piece: GradientEdge | None  # the graph of s, where it was recorded and the closed form is missing


Records = dict[str, Record]


@dataclass
class Measurement:
    """What the tangent passes saw.

    Attributes:
        jvp: (passes, batch): one pass per tangent, or per tangent and site.
        passes: the tangent of each, and the one site that it was for (None: all).
        scales: per site and tangent the σ by which the direction was scaled, if any.
        tail: the losses with the graph above the last sites, where the passes recorded graphs.
    """

    losses: Tensor
    jvp: Tensor
    outputs: Any
    output_tangents: list[list[Tensor]]  # per pass
    passes: list[tuple[int, str | None]]
    records: Records = field(default_factory=dict)
    scales: dict[str, list[Tensor]] = field(default_factory=dict)
    tail: Tensor | None = None

    def rows(self, site: Site) -> list[int]:
        """The passes that carried the directions of a site."""
        return [i for i, (_, name) in enumerate(self.passes) if name in (None, site.name)]

    def of(self, site: Site) -> Tensor:
        """The directional derivatives that concern a site, (tangents, batch): `c/σ`, so that `ĝ = (c/σ) y`."""
        rows = self.rows(site)
        c = self.jvp if len(rows) == len(self.passes) else torch.stack([self.jvp[row] for row in rows])
        return c / torch.stack(self.scales[site.name])[:, None] if site.name in self.scales else c

    def weigh(self, step: Step, site: Site, y: Tensor | Factored, share: float = 1.0) -> Tensor | Factored:
        """`ĝ = c y`, averaged over tangents: the estimate of each sample's own gradient at the site, times `share`.

        Where the batch shares the site's output, or samples mix, `c` is the sum over the batch. Where nobody asked for
        details, `y`, (tangents, *shape of the output), is not needed any more and is overwritten.
        """
        c = self.of(site)
        if site.batch_dim is None:
            c = c.sum(1, keepdim=True)
        elif step.options.coupling == "batch":
            c = step.pool.sum(c.sum(1, keepdim=True)).expand_as(c)
        c = c if share == 1 else c * share  # after the sum: processes may differ in their shares
        if isinstance(y, Factored):
            return y.weighed(c)
        shape = [1] * (y.dim() - 1)
        shape[site.batch_dim or 0] = c.shape[1]
        c = c.to(y.dtype).reshape(-1, *shape)
        g = c * y if step.detail else y.mul_(c)
        return g[0] if g.shape[0] == 1 else g.mean(0)

    def injected(self, site: Site) -> Tensor | None:
        """The directions as they were carried, `σ y`: (tangents, *s.shape)."""
        y = dense(self.records[site.name].y)
        if y is None or site.name not in self.scales:
            return y
        return y * torch.stack(self.scales[site.name]).reshape(-1, *[1] * (y.dim() - 1)).to(y.dtype)


def measure(
    drawing: Drawing,
    only: Callable[[Site], bool] = lambda site: True,
    *,
    balance: bool = False,
    keep_gates: bool = False,
    keep_pieces: bool = False,
    cut: Visit | None = None,
    watch: Watch | None = None,
) -> Measurement:
    """Draw directions at the sites for which `only` holds, and carry them to the losses.

    With `keep_gates` the records hold every site's gate as well. With `keep_pieces` the first pass records the graph of
    the pieces whose gradients have no closed form, if it can. With `cut`, which sees every site, the last pass records
    all of it, since a later one would write to the buffers that the graph has saved. With `balance` every site's
    direction is scaled (one number for the batch) so that it weighs as much in the derivative as
    those of the sites below; `watch` sees each direction that is so carried, with its σ.
    """
    step, keeps = drawing.step, drawing.step.keeps
    recorded = keep_pieces and keeps and step.layout.needs_graph and step.passes.records_graphs
    keep_inputs = cut is None and (recorded or not step.layout.needs_graph)  # else the model is run again
    records: Records = {}
    scales: dict[str, list[Tensor]] = {}
    latest: Tensor | None = None  # the gate of the site that was drawn from last
    edge: GradientEdge | None = None  # of the site that is drawn from next

    def note(site: Site, x: Any, s: Tensor) -> Tensor:
        """Keep the graph of a site's output, not the output itself."""
        nonlocal edge
        edge = get_gradient_edge(s) if s.requires_grad and site.gradient is None else None
        return s.detach()

    def draw(tangent: int, chosen: str | None, site: Site, x: Any, s: Tensor) -> Tensor | Factored | None:
        """The direction that this pass carries; all directions of a site are drawn when it is first met."""
        nonlocal latest
        known = records.get(site.name)
        if known is not None:
            y, latest = known.y, known.gate
        else:
            wanted = only(site)
            reads = keep_gates or (wanted and drawing.reads_gate(site))
            latest = gate = site.gate_at(s) if reads else None
            y = drawing.directions(site, s, gate) if wanted else None
            if keeps:
                x = x if keep_inputs and site.gradient is not None else None
                if isinstance(y, Factored) and y.folds and x is not None:
                    y.inputs, x = y.fold(x), None
                version = x._version if isinstance(x, Tensor) else 0
                records[site.name] = Record(x, version, gate if keep_gates else None, y, edge)
        return None if y is None or chosen not in (None, site.name) else y[tangent]

    def scaled(number: int, tangent: int, site: Site, y: Tensor, t: Tensor | None) -> Tensor:
        """`σ y`, see `_match`."""
        below = sum(len(done) > tangent for done in scales.values())
        scale = _match(y, t, below, step.pool)
        scales.setdefault(site.name, []).append(scale)
        if watch is not None:
            watch(number, site, y, records[site.name].gate if keeps else latest, scale)
        return y * scale.to(y.dtype)

    names: list[str | None] = [site.name for site in step.layout.sites if only(site)]
    each = (names if step.options.isolate else []) or [None]
    passes = [(tangent, name) for tangent in range(step.options.tangents) for name in each]
    recorder, graph = (note if recorded else None, 0) if cut is None else (cut, len(passes) - 1)
    seen: list[Carried] = []
    for number, (tangent, chosen) in enumerate(passes):
        if not keeps:
            step.noise.rewind()
        scale = partial(scaled, number, tangent) if balance or step.options.balance else None
        seen.append(step.passes.tangent(partial(draw, tangent, chosen), scale, recorder if number == graph else None))
    jvp = torch.stack([one.jvp for one in seen]) if len(seen) > 1 else seen[0].jvp[None]
    tangents, start = [one.output_tangents for one in seen], seen[0]
    return Measurement(start.losses, jvp, start.outputs, tangents, passes, records, scales, seen[graph].tail)


def _match(y: Tensor, t: Tensor | None, sites_below: int, pool: Pool) -> Tensor:
    """The σ that makes `σ y` as long as one site's share of the tangent `t` that arrives from below.

    Derivatives shrink or grow from layer to layer. Without this, the sites nearest to the loss drown the others: a
    site's estimate has relative variance `Σ_j |g_j|² / |g_i|²`; when all weigh the same it is the number of sites.
    σ depends on the noise of the sites below alone, so the estimate stays as unbiased as it was.
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    if t is None or sites_below == 0:
        return y.new_ones((), dtype=wide)
    own, arriving = pool.norm(y, wide), pool.norm(t, wide)
    good = (own > 0) & (arriving > 0)
    return torch.where(good, arriving / (torch.where(good, own, 1.0) * sites_below**0.5), 1.0)
