"""The one interface through which a model is run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradguess.jacobian import CutGraph
from gradguess.model.hooks import Visit
from gradguess.model.site import Layout, Site
from gradguess.model.task import Task

Observe = Callable[[Site, Any, Tensor], Any]  # (site, input x, output s)
Draw = Callable[[Site, Any, Tensor], Tensor | None]  # (site, input x, output s) -> direction y, or None
Piece = Callable[[Site, Tensor], None]  # (site, output s with the graph of its own piece)
Scale = Callable[[Site, Tensor, Tensor | None], Tensor]  # (site, y, tangent that arrives from below) -> what is added


@dataclass(frozen=True)
class Carried:
    """What arrives at the end of a tangent pass."""

    losses: Tensor  # (batch,)
    jvp: Tensor  # (batch,): the directional derivative c_b = Σ_i <y_i, g_i> of each sample's own loss
    outputs: Any  # of the model, without tangents
    output_tangents: list[Tensor]  # of the floating-point tensors among the outputs
    tail: Tensor | None = None  # the losses with the graph above the last sites, where pieces were asked for


class Pass(ABC):
    """The passes of one step over one batch.

    All of them see the same dropout masks, and buffers are written once, as under `loss.backward()`.
    """

    task: Task
    layout: Layout
    gives_pieces = False  # can a tangent pass record the graph of every piece?

    @abstractmethod
    def plain(self, observe: Observe) -> Any:
        """A pass without gradients; `observe` sees every site. Returns the outputs."""

    @abstractmethod
    def tangent(self, draw: Draw, scale: Scale | None = None, piece: Piece | None = None) -> Carried:
        """A pass that carries directions to the losses.

        `draw` is called once for every site, in call order. Its direction is added to the tangent that arrives from
        below, after `scale` has seen both. Where an earlier tangent pass was kept, `draw` sees None in place of `s`.
        `piece` sees the output of every site with a reverse graph that starts at the sites below it; only where the
        pass `gives_pieces`.
        """

    @abstractmethod
    def parameter_tangent(self, directions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A tangent pass with directions on the parameters: (losses, derivatives), both (batch,)."""

    @abstractmethod
    def graph(
        self, visit: Visit | None = None, *, fused: bool = False, twice: bool = False, last: bool = False
    ) -> tuple[Any, Tensor]:
        """A pass with a reverse graph; what `visit` returns takes the place of a site's output.

        Returns outputs and losses. With `fused`, kernels that cannot carry a tangent may be used. With `twice`, the
        graph of its gradients is needed as well: attention then holds all pairs of positions. With `last`, no other
        pass follows in this step, so nothing is noted for it to start from: not where details are asked for, which
        others may compare with passes of their own.
        """

    @abstractmethod
    def aside(self, task: Task | None = None) -> Pass:
        """Passes over this batch, or over another, that leave no trace in random state and buffers."""

    def cut(self, *, twice: bool = True) -> CutGraph:
        """A pass with a reverse graph that is cut at every site; `twice` as in `graph`, for products `W̃ v`."""
        return CutGraph(self.layout, partial(self.graph, twice=twice))
