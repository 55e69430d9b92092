"""Passes over any `nn.Module`, by calling it. Everything else sees a model through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradguess.backends.cuda_graphs import recording
from gradguess.errors import InputError
from gradguess.guesses.factored import Factored, dense
from gradguess.jacobian import CutGraph
from gradguess.layers.table import TangentRules
from gradguess.model.cut_pass import leaves_below
from gradguess.model.hooks import Snapshot, Visit, site_hooks
from gradguess.model.site import Layout, LayoutChanged, Site
from gradguess.model.task import Task, tensors
from gradguess.passes.forward_mode import (
    dual_pass,
    forget_tangents,
    formula_kernels,
    lost_tangent,
    named_failures,
    unpack_dual,
)

Observe = Callable[[Site, Any, Tensor], Any]  # (site, input x, output s)
Draw = Callable[[Site, Any, Tensor], Tensor | Factored | None]  # (site, input x, output s) -> direction y, or None
Scale = Callable[[Site, Tensor, Tensor | None], Tensor]  # (site, y, tangent that arrives from below) -> what is added
LOSS = "the loss"  # where a tangent must arrive, besides the sites


@dataclass(frozen=True)
class Carried:
    """What arrives at the end of a tangent pass."""

    losses: Tensor  # (batch,)
    jvp: Tensor  # (batch,): the directional derivative c_b = Σ_i <y_i, g_i> of each sample's own loss
    outputs: Any  # of the model, without tangents
    output_tangents: list[Tensor]  # of the floating-point tensors among the outputs
    tail: Tensor | None = None  # the losses with the graph above the last sites, where graphs were recorded


class Pass:
    """The passes of one step over one batch: they call the model, with hooks at its sites.

    All of them see the same dropout masks, and buffers are written once, as under `loss.backward()`. Passes `aside`
    leave no trace in random state and buffers, and start from the random state at the time of construction.

    Attributes:
        records_graphs: whether a tangent pass can record the graph of every piece.
        before: random state and buffers before the first pass, which notes them where nobody else has. While a CUDA
            graph is recorded they cannot be read, and there is one pass.
    """

    def __init__(self, task: Task, layout: Layout, *, aside: bool = False) -> None:
        self.task, self.layout, self._aside = task, layout, aside
        self.records_graphs = not layout.checkpoints
        self.before = Snapshot(task.model, buffers=False) if aside and layout.leaves_traces else None
        self._ran = aside

    def plain(self, observe: Observe) -> Any:
        """A pass without gradients; `observe` sees every site. Returns the outputs."""

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            observe(site, x, s)
            return s

        with self._one_pass(), torch.no_grad(), formula_kernels(self.task.model), TangentRules(always=True):
            return self._run(visit)  # by the kernels of a tangent pass, so that both see the same numbers

    def _injecting(self, draw: Draw, scale: Scale | None, expected: set[str], cut: Visit | None) -> Visit:
        """Adds the direction of each site to the tangent that arrives there, and notes where one must arrive."""
        one = len(tensors(self.layout.outputs)) == 1  # of several outputs some may have their tangents already
        line = _Line() if cut is not None and self.layout.in_a_line and one else None

        def inject(site: Site, x: Any, s: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():  # no rules of tangents are needed here
                primal, tangent = fwAD.unpack_dual(s)
                if cut is not None:
                    below, primal = primal, cut(site, x, primal)
                    if line is not None:
                        primal = line.forget(site, below, primal)
                    s = primal if tangent is None else fwAD.make_dual(primal, tangent)
                with torch.no_grad():
                    moved = add(site, x, primal.detach(), tangent)
                return s if moved is None else fwAD.make_dual(primal, moved)

        def add(site: Site, x: Any, s: Tensor, tangent: Tensor | None) -> Tensor | None:
            if isinstance(x, Tensor):
                x = x.detach()  # not the primal view: that would keep the tangent alive
            if tangent is None and site.name in expected:
                raise lost_tangent(repr(site.name))
            y = draw(site, x, s)
            if tangent is not None or y is not None:
                expected.update(site.above, [LOSS] if site.reaches_output else [])
            if y is None:
                return None
            if scale is not None:
                y = scale(site, dense(y), tangent)
            if isinstance(y, Factored):
                return y.dense() if tangent is None else y.added_to(tangent)
            # the dual number owns its tangent: an in-place activation writes to it, and y may be kept
            return y.clone() if tangent is None else y + tangent

        return inject

    def tangent(self, draw: Draw, scale: Scale | None = None, cut: Visit | None = None) -> Carried:
        """A pass that carries directions to the losses.

        `draw` is called once for every site, in call order. Its direction is added to the tangent that arrives from
        below, after `scale` has seen both. Where an earlier tangent pass was kept, `draw` sees None in place of `s`.
        `cut` sees every site, its output with a reverse graph that starts at the sites below it, and returns what takes
        the place of the output; only where the pass `records_graphs`.
        """
        graph = cut is not None
        with self._one_pass(), named_failures(self.task), dual_pass(self.task.model, graph=graph):
            expected: set[str] = set()
            outputs = self._run(self._injecting(draw, scale, expected, cut))
            losses = self.task.losses(outputs)
            if LOSS in expected and fwAD.unpack_dual(losses).tangent is None:
                raise lost_tangent(LOSS)
            losses, jvp = unpack_dual(losses)
            tangents = [unpack_dual(out)[1] for out in tensors(outputs)]
            outputs = tree_map_only(Tensor, lambda t: unpack_dual(t)[0].detach(), outputs)
            return Carried(losses.detach(), jvp.detach(), outputs, tangents, losses if graph else None)

    def parameter_tangent(self, directions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A tangent pass with directions on the parameters: (losses, derivatives), both (batch,)."""
        with self._one_pass(), named_failures(self.task), dual_pass(self.task.model):
            own = self.layout.members.parameters
            duals = {name: fwAD.make_dual(own[name].detach(), y) for name, y in directions.items()}
            primal, tangent = fwAD.unpack_dual(self.task.losses(self._run(None, duals)))
            if tangent is None:
                raise InputError(
                    "The loss does not depend on any trainable parameter: its directional derivative is missing. "
                    "Is part of the model run under torch.inference_mode() or detached?"
                )
            return primal, tangent

    def graph(self, visit: Visit | None = None, *, fused: bool = False, twice: bool = False) -> tuple[Any, Tensor]:
        """A pass with a reverse graph; what `visit` returns takes the place of a site's output.

        Returns outputs and losses. With `fused`, kernels that cannot carry a tangent may be used. With `twice`, the
        graph of its gradients is needed as well: attention then holds all pairs of positions.
        """
        all_pairs = twice or self.layout.stochastic  # fused attention draws other masks of dropout
        kernels = nullcontext() if fused else formula_kernels(self.task.model, attention=all_pairs)
        rules = nullcontext() if fused or all_pairs else TangentRules(always=True)  # the numbers of a tangent pass
        with self._one_pass(), torch.enable_grad(), kernels, rules:
            outputs = self._run(visit)
            return outputs, self.task.losses(outputs)

    def moved(self, visit: Visit | None, parameters: Mapping[str, Tensor] | None = None, *, first: bool = False) -> Any:
        """A plain pass in which what `visit` returns takes the place of a site's output. Returns the outputs.

        It uses the model's own kernels: nothing is differentiated. All but the `first` run in inference mode, and leave
        tensors that no graph can hold.
        """
        kernels = formula_kernels(self.task.model) if self.layout.stochastic else nullcontext()  # the same masks
        with self._one_pass(), torch.no_grad() if first else torch.inference_mode(), kernels:
            return self._run(visit, parameters)

    def aside(self, task: Task | None = None) -> Pass:
        """Passes over this batch, or over another, that leave no trace."""
        return Pass(task or self.task, self.layout, aside=True)

    def cut(self, *, twice: bool = True) -> CutGraph:
        """A pass with a reverse graph that is cut at every site; `twice` as in `graph`, for products `W̃ v`."""
        graph = CutGraph(self.layout)
        return graph.end(*self.graph(graph.visit, twice=twice))

    def _run(self, visit: Visit | None, parameters: Mapping[str, Tensor] | None = None) -> Any:
        with nullcontext() if visit is None else site_hooks(self.layout, visit):
            return self.task.outputs(parameters)

    @contextmanager
    def _one_pass(self) -> Iterator[None]:
        """The first pass writes buffers; the others start where it did and leave buffers as it left them."""
        if not self.layout.leaves_traces:
            yield
        elif not self._ran:
            self._ran = True
            if self.before is None and not recording():
                self.before = Snapshot(self.task.model, buffers=self.layout.mutates)
            yield
        else:
            assert self.before is not None
            now = Snapshot(self.task.model, random=self._aside)
            self.before.restore()  # buffers too: the weight under spectral norm depends on them
            try:
                yield
            finally:
                now.restore()


class _Line:
    """The sites of a recorded pass that reach one another in a line. What lies below one is not needed above it."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}  # id of a leaf from which a piece starts -> what holds that leaf
        self.last = set[int]()

    def forget(self, site: Site, below: Tensor, above: Tensor) -> Tensor:
        """Lets all tangents go where a piece ends. Returns what the next one starts from, `above` as a rule; a pass
        that is no line is refused.
        """
        if not self.known.keys() & leaves_below(below) <= self.last:
            raise LayoutChanged
        forget_tangents()
        if site.top:  # no piece starts here
            return above
        if not above.requires_grad:
            above = above.requires_grad_().clone()  # what follows may change its input in place
        self.last = leaves_below(above)
        self.known.update(dict.fromkeys(self.last, above.grad_fn))  # the node, since the copy takes memory
        return above
