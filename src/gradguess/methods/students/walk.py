"""The pieces of a model, met from below: each is differentiated as soon as the gradient at its upper end is known.

direct     that is the signal `h_i` of the student there: a piece is run, differentiated and freed before the next
chained    that is `h_{i+1}`, pulled back through the piece above: a piece waits for the next one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradguess.methods.output_error import pull
from gradguess.methods.students.bank import Bank, Student
from gradguess.methods.students.rules import RULES, Known
from gradguess.model.site import Site
from gradguess.step.pull_back import Gradients

Held = list[Tensor]  # one gradient, until somebody takes it out; none where it is not wanted


@dataclass(eq=False)
class Cut:
    """A cut that was met: its output with the graph of the piece below, and the leaf from which the graph goes on."""

    site: Site
    s: Tensor
    leaf: Tensor
    below: Cut | None
    student: Student | None = None


class Walk:
    """One pass over the pieces.

    Attributes:
        keep: the pieces are kept until `settle`, since a signal or a rule waits for the model's outputs.
        site_grads: the gradient that each cut was given.
    """

    def __init__(
        self, bank: Bank, cuts: dict[str, Site], *, chained: bool, learn: Sequence[str], known: Known, keep: bool
    ) -> None:
        self.bank, self.step, self.cuts, self.known, self.keep = bank, bank.step, cuts, known, keep
        self.chained, self.learn = chained, tuple(learn)
        self.linked = chained or "chain" in learn  # do gradients go down over a cut?
        self.gradients = Gradients(self.step)
        self.site_grads: dict[str, Tensor] = {}
        self.kept: list[Cut] = []
        self.last: Cut | None = None
        self.top: tuple[str, Tensor] | None = None  # the model's output, where its gradient is wanted

    def visit(self, site: Site, x: Any, s: Tensor) -> Tensor:
        """Called at each site of a pass with a reverse graph."""
        if site.name not in self.cuts:
            if not self.step.detail:
                return s
            self.top = site.name, s.clone()
            return self.top[1].clone()  # what follows may change its input in place
        leaf = s.detach().requires_grad_(self.linked)
        cut = self.last = Cut(site, s, leaf, self.last if self.linked else None)
        if self.keep:
            self.kept.append(cut)
        else:
            self.meet(cut)
        return leaf.clone() if self.linked or self.keep else leaf  # what follows may change its input in place

    def settle(self, losses: Tensor) -> None:
        """The pass has ended: its pieces get what they wait for, the top one the gradient of the loss itself."""
        for cut in self.kept:
            self.meet(cut)
        self.kept.clear()
        top, last = self.step.layout.sites[-1], self.last if self.linked else None
        names = self.step.layout.tail if top.name in self.cuts else (*top.parameters, *self.step.layout.tail)
        if self.top is not None:
            self.site_grads[self.top[0]] = pull([losses], [self.top[1]], retain_graph=True)[0]
        delivered = self._pull_piece(losses, [torch.ones_like(losses)], names, last)
        if last is not None and delivered and self.chained:
            self._finish(last, delivered)

    def meet(self, cut: Cut) -> None:
        held = [self._signal(cut)]
        if not self.chained:
            self._finish(cut, held)
        elif cut.below is not None:
            held = pull([cut.s], [cut.below.leaf], [held.pop()], retain_graph=True)
            self._finish(cut.below, held)

    def _signal(self, cut: Cut) -> Tensor:
        """`h` of the student of a cut, which learns at once unless it waits for the piece above."""
        student = self.bank.student(cut.site, cut.s, twice=not {"chain", "tangents"}.isdisjoint(self.learn))
        own = self.known.error is None and self.learn == ("loss",)  # the signal is what the student learns from
        end = student.losses if self.known.error is None else student.p
        leaves = [student.s, student.weights] if own else [student.s]
        seeds = None if self.known.error is None else [self.known.error]
        found = pull([end], leaves, seeds, create_graph="chain" in self.learn, retain_graph=not own)
        student.h = found[0]
        if own:
            self.bank.add(cut.site, found[1] * student.share)
        elif "chain" in self.learn:
            cut.student = student
        else:
            self._teach(student)
        return student.h.detach()

    def _teach(self, student: Student) -> None:
        if self.learn:
            with torch.enable_grad():
                total = torch.stack([RULES[rule](student, self.known) for rule in self.learn]).sum()
            self.bank.add(student.site, pull([total], [student.weights])[0])

    def _finish(self, cut: Cut, held: Held) -> None:
        """The piece below a cut, from the gradient at the cut."""
        if self.step.detail:
            self.site_grads[cut.site.name] = held[0]
        self._pull_piece(cut.s, held, cut.site.parameters, cut.below)
        cut.s, cut.below = cut.leaf, None  # the graph is not needed any more

    def _pull_piece(self, end: Tensor, held: Held, names: Sequence[str], below: Cut | None) -> Held:
        """Gradients of a piece's parameters, and that at the cut below it, where it is wanted."""
        own = [self.gradients.parameters[name] for name in names]
        leaves = [*own, below.leaf] if below is not None else own
        if not leaves:
            return []
        found = pull_once(end, leaves, held)
        for name, grad in zip(names, found, strict=False):
            self.gradients.add(name, grad)
        if below is None:
            return []
        delivered = found[-1] * len(end)
        if below.student is not None:
            below.student.delivered = delivered
            self._teach(below.student)
            below.student = None
        return [delivered]


def pull_once(end: Tensor, leaves: Sequence[Tensor], held: Held) -> list[Tensor]:
    """A vjp of the mean over the batch. The gradient is taken out of `held`, and freed with what follows from it.

    PyTorch holds the gradient that a call of it starts from until the call ends. That one is a zero here, which takes
    no memory; the hook puts the other in its place. It is on a view, so that hooks of the model's own come after it.
    """
    if not end.requires_grad:
        return pull([end], leaves)
    with torch.enable_grad():
        end = end.view_as(end)
    hook = end.register_hook(lambda _: (held.pop() / len(end)).to(end.dtype))
    try:
        return pull([end], leaves, [end.new_zeros(()).expand_as(end)])
    finally:
        hook.remove()
