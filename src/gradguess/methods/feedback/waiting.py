"""Chained feedback in a pass that keeps nothing: sites that wait for the predictions above them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradguess.methods.feedback.forward import down
from gradguess.model.site import Site
from gradguess.step.measure import Record, record
from gradguess.step.pieces import pull
from gradguess.step.pull_back import input_of

if TYPE_CHECKING:
    from gradguess.methods.feedback.replay import Replay


class ClosedChain:
    """`ĝ_i = D_i W_{i+1}ᵀ … h`: at every site the prediction goes down to the one that waits `sweeps` below."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.waiting: dict[str, tuple[Site, Record]] = {}  # by the name of the site above

    def observe(self, site: Site, x: Any, s: Tensor) -> None:
        seen = record(site, x, s, site.gate_at(s))
        if site.top:
            value = self.replay.error.exact
            self._finish(site, seen, value)
        else:
            value = self.replay.learn_and_predict(site, s, seen.gate)
        self._go_down(site, value)
        if not site.top:
            self.waiting[site.above[0]] = site, seen

    def _go_down(self, site: Site, value: Tensor) -> None:
        """From the output all that wait are reached; from a prediction the last of them."""
        name, hop = site.name, 0
        while name in self.waiting:
            (low, seen), hop = self.waiting[name], hop + 1
            value = down(low, value, seen.gate)
            if site.top or hop == self.replay.method.sweeps:
                del self.waiting[name]
                self._finish(low, seen, value)
            name = low.name

    def _finish(self, site: Site, seen: Record, g: Tensor) -> None:
        replay = self.replay
        assert seen.s is not None
        replay.gradients.add_site(site, input_of(seen, site), None, site.unflat(g, seen.s) / replay.batch)
        if replay.method.bootstrap and site.guessed:
            replay.predictor.regress(site, seen.gate, replay.error, g, replay.method.bootstrap)


@dataclass
class _Piece:
    """A site that waits: its output with the graph of the piece below it, and the leaf from which the graph goes on."""

    site: Site
    s: Tensor
    leaf: Tensor
    gate: Tensor | None


class GraphChain:
    """`ClosedChain` by vjps of the pieces between the sites."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.waiting: list[_Piece] = []  # from the lowest to the one that was met last

    def visit(self, site: Site, x: Any, s: Tensor) -> Tensor:
        low = s.detach()
        gate = site.gate_at(low)
        if not site.top:
            with torch.no_grad():
                h = self.replay.learn_and_predict(site, low, gate)
            self._go_down(site.unflat(h, s), s)
        leaf = low.requires_grad_()
        self.waiting.append(_Piece(site, s, leaf, gate))
        return leaf.clone()

    def end(self, outputs: Any) -> None:
        """The error is exact at the top; from there all that wait are reached."""
        (g,) = self.replay.error.pull(outputs, [self.waiting[-1].leaf])
        while True:
            done = self.waiting.pop()
            self._finish(done, g)
            if not self.waiting:
                return
            g = _one_down(g, done.s, self.waiting[-1])

    def _go_down(self, value: Tensor, s: Tensor) -> None:
        """From a prediction at `s` to the site that waits `sweeps` below, if there is one."""
        if len(self.waiting) < self.replay.method.sweeps:
            return
        for piece in reversed(self.waiting):
            value, s = _one_down(value, s, piece), piece.s
        self._finish(self.waiting.pop(0), value)

    def _finish(self, done: _Piece, g: Tensor) -> None:
        replay, site = self.replay, done.site
        replay.gradients.add_vjp(site.parameters, done.s, g / replay.batch)
        if replay.method.bootstrap and site.guessed:
            with torch.no_grad():
                replay.predictor.regress(site, done.gate, replay.error, site.flat(g), replay.method.bootstrap)


def _one_down(value: Tensor, s: Tensor, below: _Piece) -> Tensor:
    return pull([s], [below.leaf], [value], retain_graph=True)[0]
