"""The tangent passes: directions are drawn at the sites and carried to the losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradguess.model.site import Site
from gradguess.step.base import Step
from gradguess.step.draw import Drawing
from gradguess.step.processes import Pool

Watch = Callable[[int, Site, Tensor, Tensor | None, Tensor], None]  # pass, site, direction y, gate, scale σ


@dataclass
class Record:
    """What a pass keeps of a site until the directional derivative is known."""

    x: Any  # the input of the layer, where its parameter gradient has a closed form
    version: int  # of x, to notice that it was changed in place
    s: Tensor | None  # the output, where the method asked for it
    gate: Tensor | None = None  # with s; computed at once, since an in-place activation changes s
    y: Tensor | None = None  # (tangents, *s.shape)
    piece: GradientEdge | None = None  # the graph of s, where it was recorded and the closed form is missing


Records = dict[str, Record]


def record(site: Site, x: Any, s: Tensor | None, gate: Tensor | None = None, y: Tensor | None = None) -> Record:
    """Keep what `pull_back` will need: the input only where gradients have a closed form."""
    x = x if site.gradient is not None else None
    return Record(x, x._version if isinstance(x, Tensor) else 0, s, gate, y)


@dataclass
class Measurement:
    """What the tangent passes saw. `jvp` is (passes, batch): one pass per tangent, or per tangent and site."""

    losses: Tensor
    jvp: Tensor
    records: Records
    outputs: Any
    output_tangents: list[list[Tensor]]  # per pass
    passes: list[tuple[int, str | None]]  # per pass: the tangent, and the one site it was for (None: all)
    scales: dict[str, list[Tensor]]  # per site and tangent: the σ by which the direction was scaled, if any
    tail: Tensor | None  # the losses with the graph above the last sites, where the pass recorded graphs

    def rows(self, site: Site) -> list[int]:
        """The passes that carried the directions of a site."""
        return [i for i, (_, name) in enumerate(self.passes) if name in (None, site.name)]

    def of(self, site: Site) -> Tensor:
        """The directional derivatives that concern a site, (tangents, batch): `c/σ`, so that `ĝ = (c/σ) y`."""
        rows = self.rows(site)
        c = self.jvp if len(rows) == len(self.passes) else torch.stack([self.jvp[row] for row in rows])
        return c / torch.stack(self.scales[site.name])[:, None] if site.name in self.scales else c

    def weigh(self, step: Step, site: Site, y: Tensor, share: float = 1.0) -> Tensor:
        """`ĝ = c y`, averaged over tangents: the estimate of each sample's own gradient at the site, times `share`.

        Where the batch shares the site's output, or samples mix, `c` is the sum over the batch. Where nobody asked for
        details, `y`, (tangents, *shape of the output), is not needed any more and is overwritten.
        """
        c, own = self.of(site).to(y.dtype), not step.detail
        shape = [1] * (y.dim() - 1)
        if site.batch_dim is None:
            c = c.sum(1)
        else:
            shape[site.batch_dim] = c.shape[1]
            if step.options.coupling == "batch":
                c = step.pool.sum(c.sum(1, keepdim=True)).expand_as(c)
        c = c if share == 1 else c * share  # after the sum: processes may have shares of different size
        g = y.mul_(c.reshape(-1, *shape)) if own else c.reshape(-1, *shape) * y
        return g[0] if g.shape[0] == 1 else g.mean(0)

    def injected(self, site: Site) -> Tensor | None:
        """The directions as they were carried, `σ y`: (tangents, *s.shape)."""
        y = self.records[site.name].y
        if y is None or site.name not in self.scales:
            return y
        return y * torch.stack(self.scales[site.name]).reshape(-1, *[1] * (y.dim() - 1)).to(y.dtype)


def measure(
    drawing: Drawing,
    only: Callable[[Site], bool] = lambda site: True,
    *,
    balance: bool = False,
    keep_outputs: bool = False,
    keep_pieces: bool = False,
    watch: Watch | None = None,
) -> Measurement:
    """Draw directions at the sites for which `only` holds, and carry them to the losses.

    With `keep_outputs` the records hold every site's output and gate as well. With `keep_pieces` the first pass records
    the graph of the pieces whose gradients have no closed form, if it can. With `balance` every site's direction is
    scaled (one number for the batch) so that it weighs as much in the derivative as those of the sites below; `watch`
    sees each direction that is so carried, with its σ.
    """
    step = drawing.step
    passes = _schedule(step, only)
    recorded = keep_pieces and step.keeps and step.layout.needs_graph and step.passes.gives_pieces
    keep_inputs = recorded or not step.layout.needs_graph  # else `pull_back` runs the model again, and sees them then
    meter = _Meter(drawing, only, keep_inputs, keep_outputs or step.detail, watch)
    balance = balance or step.options.balance
    seen = []
    for number, (tangent, chosen) in enumerate(passes):
        if not step.keeps:
            step.noise.rewind()
        draw = partial(meter.draw, tangent, chosen)
        scale = partial(meter.scale, number, tangent) if balance else None
        seen.append(step.passes.tangent(draw, scale, meter.piece if recorded and number == 0 else None))
    jvp = torch.stack([one.jvp for one in seen]) if len(seen) > 1 else seen[0].jvp[None]
    first, tangents = seen[0], [one.output_tangents for one in seen]
    return Measurement(first.losses, jvp, meter.records, first.outputs, tangents, passes, meter.scales, first.tail)


def _schedule(step: Step, only: Callable[[Site], bool]) -> list[tuple[int, str | None]]:
    """(tangent, the one site it is for, or None for all)."""
    tangents, names = range(step.options.tangents), [site.name for site in step.layout.sites if only(site)]
    if not step.options.isolate or not names:
        return [(t, None) for t in tangents]
    return [(t, name) for t in tangents for name in names]


class _Meter:
    """Draws, scales and records at every site of the tangent passes."""

    def __init__(
        self,
        drawing: Drawing,
        only: Callable[[Site], bool],
        keep_inputs: bool,
        keep_outputs: bool,
        watch: Watch | None,
    ) -> None:
        self.drawing, self.step, self.keeps = drawing, drawing.step, drawing.step.keeps
        self.only, self.keep_inputs, self.keep_outputs, self.watch = only, keep_inputs, keep_outputs, watch
        self.edge: GradientEdge | None = None  # of the site that is drawn from next
        self.records: Records = {}
        self.scales: dict[str, list[Tensor]] = {}
        self.gate: Tensor | None = None  # of the site that was drawn from last

    def piece(self, site: Site, s: Tensor) -> None:
        """Keep the graph of a site's output, not the output itself."""
        self.edge = get_gradient_edge(s) if s.requires_grad and site.gradient is None else None

    def draw(self, tangent: int, chosen: str | None, site: Site, x: Any, s: Tensor) -> Tensor | None:
        """The direction that this pass carries; all directions of a site are drawn when it is first met."""
        known = self.records.get(site.name)
        if known is not None:
            y, self.gate = known.y, known.gate
        else:
            wanted = self.only(site)
            self.gate = gate = site.gate_at(s) if site.gate is not None and (wanted or self.keep_outputs) else None
            y = self.drawing.directions(site, s, gate) if wanted else None
            if self.keeps:
                s_kept, gate_kept = (s, gate) if self.keep_outputs else (None, None)
                self.records[site.name] = record(site, x if self.keep_inputs else None, s_kept, gate_kept, y)
                self.records[site.name].piece = self.edge
        return None if y is None or chosen not in (None, site.name) else y[tangent]

    def scale(self, number: int, tangent: int, site: Site, y: Tensor, t: Tensor | None) -> Tensor:
        """`σ y`, see `_match`."""
        below = sum(len(done) > tangent for done in self.scales.values())
        scale = _match(y, t, below, self.step.pool)
        self.scales.setdefault(site.name, []).append(scale)
        if self.watch is not None:
            self.watch(number, site, y, self.gate, scale)
        return y * scale.to(y.dtype)


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
