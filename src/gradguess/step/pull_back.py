"""From estimates at the sites to gradients of the parameters: the local chain rule of each layer or piece."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from gradguess.errors import InputError
from gradguess.guesses.factored import Factored, dense
from gradguess.layers.positions import project_words
from gradguess.model.site import Site, at_least_float32
from gradguess.model.task import Task, check_differentiable, tensors
from gradguess.step.base import Step, Sums
from gradguess.step.measure import Record, Records

HeldGradient = list[Tensor]  # one gradient, until somebody takes it out, so that it is freed there
Cotangent = Callable[[Site, Tensor | None], Tensor | Factored]  # (site, s if no direction was kept) -> estimate there


def pull_back(step: Step, cotangent: Cotangent, records: Records, tail: Tensor | None = None) -> dict[str, Tensor]:
    """Parameter gradients from `cotangent(site, s)`, the estimate at each site (of the batch's mean loss).

    A site is served by the closed form of its layer; where that has none, its own piece of the graph is differentiated.
    What both need is in `records`, where the pass that made them recorded `tail` too or no graph is needed. Otherwise
    the model is run again, and each site is served as soon as it is met. What went to `step.into` is not returned.
    """
    gradients = Gradients(step)
    if records and (tail is not None or not step.layout.needs_graph):
        with torch.no_grad():
            for site in step.layout.sites:
                record = records[site.name]
                piece, record.piece = record.piece, None  # freed with its graph
                if site.parameters:
                    gradients.add_site(site, input_of(record, site), piece, cotangent(site, None))
    else:

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            with torch.no_grad():
                gradients.add_site(site, x, s, cotangent(site, s.detach()))
            return s.detach()

        if step.layout.needs_graph:
            tail = step.passes.graph(visit)[1]
        else:
            step.passes.plain(visit)
    if tail is not None:
        gradients.add_tail(tail)
    return gradients.by_name


def input_of(record: Record, site: Site) -> Any:
    """The input of a layer, as the layer read it."""
    if isinstance(record.x, Tensor) and record.x._version != record.version:
        raise InputError(
            f"The input of {site.name!r} was changed in place after the layer had read it. Write x = x + y "
            "instead of x += y, or use memory='replay'."
        )
    return record.x


class Gradients:
    """Takes contributions to each parameter's gradient, under the model's own names.

    Attributes:
        by_name: their sums; nothing where they went to `step.into`.
    """

    def __init__(self, step: Step) -> None:
        self.layout, own = step.layout, Sums()
        self.parameters, self.name_of = step.layout.members.parameters, step.layout.members.name_of
        self._sums, self._share = (own, 1.0) if step.into is None else (step.into, step.share)
        self.by_name = own.by_name

    def add(self, name: str, grad: Tensor) -> None:
        grad = grad.to(self.parameters[name].dtype)
        self._sums.add(name, grad if self._share == 1 else grad * self._share)

    def add_site(self, site: Site, x: Any, s: Tensor | GradientEdge | None, g: Tensor | Factored) -> None:
        """By the closed form of the site's layer, from its input `x` and the cotangent `g` of its output; where it has
        none, by a vjp of the graph below `s`.
        """
        if site.gradient is not None:
            grads = g.gradients(x) if isinstance(g, Factored) else site.gradient.of(site.module, x, g)
            for name, grad in grads.items():
                self.add(self.name_of[id(getattr(site.module, name))], grad)
        elif s is not None:
            self.add_vjp(site.parameters, s, dense(g))

    def add_vjp(self, names: tuple[str, ...], s: Tensor | GradientEdge, g: Tensor) -> None:
        """By a vjp of the graph below `s`."""
        if not names:
            return
        parameters = [self.parameters[name] for name in names]
        grads = torch.autograd.grad(s, parameters, g, retain_graph=True, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                self.add(name, grad)

    def add_tail(self, losses: Tensor) -> None:
        """Exact gradients of the parameters between the last sites and the loss."""
        if self.layout.tail:
            self.add_vjp(self.layout.tail, losses, torch.full_like(losses, 1 / len(losses)))


@dataclass(eq=False)
class Piece:
    """What lies between a site and the sites below it.

    Attributes:
        s: the site's output, with the graph of the piece.
        leaf: the same output, from which the graph goes on.
        number: of pieces below.
        below: the piece next below, where gradients go down to it.
        gate: for a signal, which may note it here.
        done: the piece was differentiated, or has no gradient.
    """

    site: Site
    s: Tensor
    leaf: Tensor
    number: int
    below: Piece | None
    gate: Tensor | None = None
    done: bool = False


class Pieces:
    """The gradients of a model whose pass is cut at its sites.

    `signal(piece)` is the gradient of each sample's loss at a site as a method knows it, or None where there is none.
    With `lag=0` the piece below the site is differentiated with it. With `lag=n` the signal is first pulled back
    through n pieces, and the piece below these is differentiated. What no signal reaches gets the gradient of the loss
    itself when the pass has ended.

    Args:
        asked: the sites that have a signal.
        through: sites at which the graph is not cut.
        lag: above 0, the sites must follow one another in a line, unless signals wait.
        finished: it sees each piece with the gradient that the piece was differentiated with.
        delivered: it sees each piece with the gradient that the piece above brings to its upper end, in a line.
        waits: signals are asked for when the pass has ended.

    Attributes:
        gradients: of the parameters, of the batch's mean loss.
        site_grads: each sample's own gradient at every site, where details are asked for.
    """

    def __init__(
        self,
        step: Step,
        asked: Collection[Site],
        signal: Callable[[Piece], Tensor | None],
        *,
        through: Collection[Site] = (),
        lag: int = 0,
        finished: Callable[[Piece, Tensor], None] | None = None,
        delivered: Callable[[Piece, Tensor], None] | None = None,
        waits: bool = False,
    ) -> None:
        self.step, self.asked, self.signal, self.through = step, set(asked), signal, set(through)
        self.lag, self.finished, self.delivered, self.waits = lag, finished, delivered, waits
        self.linked = (lag > 0 and step.layout.in_a_line) or delivered is not None  # gradients go down over a cut
        self.gradients = Gradients(step)
        self.site_grads: dict[str, Tensor] = {}
        self._kept: list[Piece] = []  # their signals are not asked for yet
        self._ends: list[Piece] = []  # the loss itself is pulled back to them
        self._passed = [name for site in through for name in site.parameters]
        names = [*step.layout.tail, *(name for site in step.layout.sites for name in site.parameters)]
        self._shared = len(set(names)) < len(names) or not step.layout.in_a_line  # pieces may share some of the graph

    def visit(self, site: Site, x: Any, s: Tensor) -> Tensor:
        """Ends a piece at a site of a pass, and goes as far as its signal allows; returns what the graph goes on
        from.
        """
        if self.step.detail:
            self.site_grads[site.name] = torch.zeros_like(s)  # unless another is known
        if site in self.through:
            return s
        below = self._ends[0] if self.linked and self._ends else None
        exact = site not in self.asked
        leaf = s.detach().requires_grad_(self.linked or exact or self.waits)
        piece = Piece(site, s, leaf, 0 if below is None else below.number + 1, below)
        if self.linked:
            self._ends = [piece]
        elif exact:
            self._ends.append(piece)
        if self.waits:
            self._kept.append(piece)
        elif not exact:
            self._ask(piece)
        return leaf.clone() if leaf.requires_grad else leaf  # what follows may change its input in place

    def settle(self, losses: Tensor) -> None:
        """The pass has ended: its pieces get what they wait for."""
        if self.lag and not self.step.layout.in_a_line:
            self._sweep(losses)
        for piece in self._kept:
            if piece.site in self.asked:
                self._ask(piece)
        self._kept.clear()
        ends, self._ends = self._ends, []
        found = self._differentiate(losses, [torch.ones_like(losses)], len(losses), self.step.layout.tail, ends)
        for piece, held in zip(ends, found, strict=True):
            if self._awaited(piece, held):
                self._finish(piece, held, len(losses))

    def _sweep(self, losses: Tensor) -> None:
        """Over branches all signals are pulled back at once, as often as they lag."""
        pieces, self._kept, self._ends = self._kept, [], []
        leaves = [piece.leaf for piece in pieces]
        g = pull([losses], leaves, retain_graph=True)
        for number, one in enumerate(pieces):
            if one.site in self.asked and (h := self.signal(one)) is not None:
                g[number] = h
        for _ in range(self.lag):
            g = pull([*(one.s for one in pieces), losses], leaves, [*g, torch.ones_like(losses)], retain_graph=True)
        for piece, value in zip(pieces, g, strict=True):
            self._finish(piece, [value], len(losses))

    def _ask(self, piece: Piece) -> None:
        h = self.signal(piece)
        if h is None or piece.number < self.lag:
            piece.done = h is None
            return
        held = [h]
        del h
        for _ in range(self.lag):
            assert piece.below is not None
            held, piece = pull([piece.s], [piece.below.leaf], [held.pop()], retain_graph=True), piece.below
        self._finish(piece, held, len(piece.site.flat(piece.leaf)))

    def _awaited(self, piece: Piece, held: HeldGradient) -> bool:
        """Takes the gradient that what lies above brings to the upper end of a piece. Returns whether the piece waited
        for it.
        """
        if self.delivered is not None:
            self.delivered(piece, held[0])
        return not piece.done

    def _finish(self, piece: Piece, held: HeldGradient, batch: int) -> None:
        """The piece below a site, from the gradient at the site; then those below it that wait for theirs."""
        while True:
            site, s, below = piece.site, piece.s, piece.below
            if self.step.detail:
                self.site_grads[site.name] = held[0].to(s.dtype)
            if self.finished is not None:
                self.finished(piece, held[0])
            piece.s, piece.below, piece.done = piece.leaf, None, True  # its graph is freed
            wanted = [] if below is None or (below.done and self.delivered is None) else [below]
            found = self._differentiate(s, held, batch, site.parameters, wanted)
            if not wanted or not self._awaited(wanted[0], found[0]):
                return
            piece, held = wanted[0], found[0]

    def _differentiate(
        self, end: Tensor, held: HeldGradient, batch: int, names: Sequence[str], pieces: Sequence[Piece]
    ) -> list[HeldGradient]:
        """Adds the gradients of these parameters, and returns those at the upper ends of `pieces`.

        PyTorch holds the gradient that a call of it starts from until the call ends. That one is a zero here, which
        takes no memory; the hook puts the other in its place. It is on a view, so that hooks of the model's own come
        after it.
        """
        names = (*names, *self._passed)
        leaves = [*(self.gradients.parameters[name] for name in names), *(piece.leaf for piece in pieces)]
        if not leaves:
            return []
        if not end.requires_grad:
            return [[torch.zeros_like(piece.leaf)] for piece in pieces]
        with torch.enable_grad():
            end = end.view_as(end)
        hook = end.register_hook(lambda _: (held.pop() / batch).to(end.dtype))
        try:
            zero = end.new_zeros(()).expand_as(end)
            found = torch.autograd.grad(end, leaves, zero, retain_graph=self._shared, allow_unused=True)
        finally:
            hook.remove()
        for name, grad in zip(names, found, strict=False):
            if grad is not None:
                self.gradients.add(name, grad)
        rest = zip(pieces, found[len(names) :], strict=True)
        return [[torch.zeros_like(piece.leaf) if grad is None else grad * batch] for piece, grad in rest]


def pull(
    ends: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor] | None = None, **graph: bool
) -> list[Tensor]:
    """A vjp; zero where no path leads. Seeds that are not given are ones."""
    given = map(torch.ones_like, ends) if seeds is None else seeds
    pairs = [(end, seed.to(end.dtype)) for end, seed in zip(ends, given, strict=True) if end.requires_grad]
    if not pairs or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    with torch.set_grad_enabled(graph.get("create_graph", False)):
        tops, vectors = zip(*pairs, strict=True)
        return list(torch.autograd.grad(tops, leaves, vectors, materialize_grads=True, **graph))


class OutputError:
    """`e`, the derivative of each sample's loss with respect to the model's outputs, by a vjp of the loss alone.

    Attributes:
        losses: (batch,).
        parts: one tensor for each floating-point tensor among the outputs.
        exact: all of it as (batch, C).
        flat: the same with a large alphabet projected, as the predictor sees it.
    """

    def __init__(self, task: Task, outputs: Any) -> None:
        free = tree_map_only(Tensor, _freed, outputs)
        with torch.enable_grad():
            losses = task.losses(free)
        check_differentiable(losses)
        self.losses, self.parts = losses.detach(), pull([losses], tensors(free))

    @cached_property
    def exact(self) -> Tensor:
        return flatten_outputs(self.parts, len(self.losses))

    @cached_property
    def flat(self) -> Tensor:
        return flatten_outputs([project_words(part) for part in self.parts], len(self.losses))


def _freed(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def flatten_outputs(parts: list[Tensor], batch: int) -> Tensor:
    """(batch, C) from one or several output tensors. Of several those count that have one row per sample: memories of
    a transformer, say, have positions first.
    """
    rows = [part for part in parts if part.dim() == 0 or len(part) == batch]
    parts = rows or parts
    if any(part.dim() == 0 for part in parts):
        raise InputError(
            "Feedback expects outputs with one row per sample, found a scalar among them. Is it a loss of the model's "
            "own? Then leave the labels out of the inputs."
        )
    flats = [part.reshape(part.shape[0], -1) for part in parts]
    return at_least_float32(flats[0] if len(flats) == 1 else torch.cat(flats, 1))
