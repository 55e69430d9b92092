"""Learned feedback with activation memory that does not grow with depth (`memory="replay"`).

The first pass keeps nothing of a layer: what the predictor explains of the outputs' tangents is summed as the
directions are carried (`Lesson.observe`). Then the residual and the error `e` are known, and a second pass meets each
site again with the same direction: there the site learns, predicts, and pulls its estimate back to its parameters.

    direct, corrected    any model: the estimate at a site needs that site alone
    chained              wherever sites follow one another in a line (layers in a row, `sites=n`): the last `sweeps`
                         sites wait for the predictions above them, with the pieces of the graph between. Where a site
                         reaches several others (branches) it would need a graph of all layers: refused
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradguess.errors import InputError
from gradguess.feedback import (
    Feedback,
    Lesson,
    OutputError,
    part_of,
    predict_at,
    predicted,
    random_matrix,
    regress,
)
from gradguess.guesses._base import Estimate
from gradguess.noise import Noise
from gradguess.scratch import NONE, Scratch
from gradguess.sites import Site, Watch
from gradguess.step import Gradients, Measurement, Record, Step, gate_at
from gradguess.tangent import formula_kernels
from gradguess.task import tensors

if TYPE_CHECKING:
    from gradguess.sites import Layout, Visit


class Replay:
    """One step of `Feedback` in two passes."""

    def __init__(self, method: Feedback, step: Step, teach: bool) -> None:
        self.method, self.step = method, step
        self.closed = not method.needs_graph(step)
        if method.form == "chained" and not self.closed and not _in_a_line(step.layout):
            raise InputError(
                "Feedback(form='chained') with memory='replay' needs sites that follow one another in a line, and this "
                "model has sites that reach several others: it would have to keep every layer. Cut the model into "
                "pieces (sites=4 for instance), or use memory='store' or form='direct'."
            )
        self.teach = teach
        self.lesson: Lesson | None = None
        self.gradients = Gradients(step.layout)

    def run(self) -> Estimate:
        step, method = self.step, self.method
        end = self._start_random() if method.start == "random" else None
        seen = None
        if self.teach and method.fraction == 1:
            self.lesson, seen = self._measure(step)
        outputs = self._plain() if seen is None else seen.outputs
        self.error = OutputError(step.task, outputs)
        losses = step.task.losses(outputs).detach() if seen is None else seen.losses
        if self.lesson is not None and seen is not None:
            self.lesson.conclude(seen, self.error)
            step.noise.rewind()
        elif self.teach:
            self._teach_part()
        self.batch = len(losses)
        self._second_pass()
        if end is not None:
            step.noise.generator.set_state(end)
        jvp = losses.new_zeros(0, self.batch) if seen is None else seen.jvp
        return Estimate(losses.mean(), self.gradients.by_name, jvp, losses=losses)

    # --- the first pass --------------------------------------------------------------------------------------

    def _measure(self, step: Step) -> tuple[Lesson, Measurement]:
        lesson = Lesson(step, self.method.rate, self.method.learn)

        def watch(p: int, site: Site, s: Tensor, y: Tensor, scale: Tensor) -> None:
            lesson.observe(p, site, y, gate_at(site, s), scale)

        return lesson, step.measure(self.method.teacher(step), only=predicted, balance=True, watch=watch)

    def _plain(
        self, visit: Visit = lambda site, x, s: s, step: Step | None = None, scratch: Scratch | None = None
    ) -> Any:
        step = step or self.step
        return step.visit(visit, step.scratch if scratch is None else scratch)

    def _teach_part(self) -> None:
        """A lesson from part of the batch, in two passes of its own."""
        part = part_of(self.step, self.method.fraction)
        part.noise = Noise(part.noise.generator, part.noise.rows, part.noise.total)
        lesson, seen = self._measure(part)
        lesson.conclude(seen, OutputError(part.task, seen.outputs))
        part.noise.rewind()

        def learn(site: Site, x: Any, s: Tensor) -> Tensor:
            if predicted(site):
                lesson.learn(site, part.draw(self.method.teacher(part), site, s), gate_at(site, s))
            return s

        self._plain(learn, part)

    def _start_random(self) -> Tensor | None:
        """Draw the first matrices after the directions, as a stored step does; the generator's state after it."""
        step = self.step
        missing = [s for s in step.layout.sites if predicted(s) and "B" not in step.learned.get(s.name, {})]
        if not missing:
            return None
        sizes: dict[str, int] = {}

        def size(site: Site, x: Any, s: Tensor) -> Tensor:
            sizes[site.name] = site.flat(s).shape[1]
            if self.teach and self.method.fraction == 1 and predicted(site):
                step.draw(self.method.teacher(step), site, s)
            return s

        if self.teach and self.method.fraction == 1:
            step.prepare(self.method.teacher(step))
        e = OutputError(step.task, self._plain(size)).flat
        for site in missing:
            step.learned[site.name] = {"B": random_matrix(step, site, sizes[site.name], e)}
        end = step.noise.generator.get_state()
        if self.teach and self.method.fraction < 1:
            return None  # the lesson goes on from here
        step.noise.rewind()
        return end

    # --- the second pass -------------------------------------------------------------------------------------

    def _second_pass(self) -> None:
        if self.method.form == "chained" and self.closed:
            chain = _Chain(self)
            self._plain(chain.visit, scratch=NONE)  # sites wait for those above, with their inputs
        elif self.method.form == "chained":
            pieces = _GraphChain(self)
            self._with_graph(pieces.visit, pieces.end)
        elif self.closed:
            self._plain(self._visit)
        else:
            self._each_alone()

    def learn_and_predict(self, site: Site, s: Tensor, gate: Tensor | None) -> Tensor:
        """`h`, with what "corrected" adds."""
        d = site.flat(s).shape[1]
        if self.lesson is None:
            return predict_at(self.step, site, gate, d, self.error)
        y = self.step.draw(self.method.teacher(self.step), site, s)
        if self.method.form != "corrected":
            self.lesson.learn(site, y, gate)
            return predict_at(self.step, site, gate, d, self.error)
        h = predict_at(self.step, site, gate, d, self.error) + self.lesson.correction(site, y)
        self.lesson.learn(site, y, gate)
        return h

    def _visit(self, site: Site, x: Any, s: Tensor) -> Tensor:
        g = self.learn_and_predict(site, s, gate_at(site, s)) if predicted(site) else self.error.exact
        self.gradients.add_closed(site, x, site.unflat(g, s) / self.batch)
        return s

    def _each_alone(self) -> None:
        """Each site's own piece of the graph is differentiated as soon as it is complete, then freed."""
        exact: list[tuple[Site, Tensor, Tensor]] = []

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            if not predicted(site):  # its gradient follows from the error, when the pass has ended
                leaf = s.detach().requires_grad_()
                exact.append((site, s, leaf))
                return leaf.clone()
            with torch.no_grad():
                g = self.learn_and_predict(site, s.detach(), gate_at(site, s.detach()))
            self.gradients.add_vjp(site.parameters, s, site.unflat(g / self.batch, s))
            return s.detach()

        def end(outputs: Any) -> None:
            grads = self.from_error(outputs, [leaf for _, _, leaf in exact])
            for (site, s, _), grad in zip(exact, grads, strict=True):
                self.gradients.add_vjp(site.parameters, s, grad / self.batch)

        self._with_graph(visit, end)

    def _with_graph(self, visit: Visit, end: Callable[[Any], None]) -> None:
        """A pass with a reverse graph; `end(outputs)` when it is over."""
        step = self.step
        with step.one_pass(), torch.enable_grad(), formula_kernels(step.task.model), Watch(step.layout, visit):
            outputs = step.task.outputs()
            losses = step.task.losses(outputs)
        end(outputs)
        if step.layout.tail:
            self.gradients.add_vjp(step.layout.tail, losses, torch.full_like(losses, 1 / self.batch))

    def from_error(self, outputs: Any, leaves: list[Tensor]) -> list[Tensor]:
        """The exact gradients at leaves from which the graph goes on to the outputs alone."""
        pairs = [(o, e) for o, e in zip(tensors(outputs), self.error.parts, strict=True) if o.requires_grad]
        if not leaves or not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves]
        ends, seeds = [o for o, _ in pairs], [e.to(o.dtype) for o, e in pairs]
        return _vjp(ends, leaves, seeds)


def _vjp(ends: list[Tensor], leaves: list[Tensor], seeds: list[Tensor]) -> list[Tensor]:
    """Zero where no path leads."""
    grads = torch.autograd.grad(ends, leaves, seeds, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


@dataclass
class _Waiting:
    """A site whose estimate needs predictions from above."""

    site: Site
    record: Record


class _Chain:
    """`ĝ_i = D_i W_{i+1}ᵀ … h`: at every site the prediction goes down to the one that waits `sweeps` below."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.waiting: dict[str, _Waiting] = {}  # by the name of the site above

    def visit(self, site: Site, x: Any, s: Tensor) -> Tensor:
        record = self.replay.step.record(site, x, s)
        if site.top:
            value = self.replay.error.exact
            self._finish(_Waiting(site, record), value)
        else:
            value = self.replay.learn_and_predict(site, s, record.gate)
        self._go_down(site, value)
        if not site.top:
            self.waiting[site.above[0]] = _Waiting(site, record)
        return s

    def _go_down(self, site: Site, value: Tensor) -> None:
        """From the output all that wait are reached; from a prediction the last of them."""
        name, hop = site.name, 0
        while name in self.waiting:
            low, hop = self.waiting[name], hop + 1
            assert low.site.linear is not None
            value = value @ low.site.linear.weight.detach().to(value.dtype)
            value = value if low.record.gate is None else value.mul_(low.record.gate)
            if site.top or hop == self.replay.method.sweeps:
                del self.waiting[name]
                self._finish(low, value)
            name = low.site.name

    def _finish(self, done: _Waiting, g: Tensor) -> None:
        replay, site = self.replay, done.site
        assert done.record.s is not None
        replay.gradients.add_closed(site, done.record.input(site), site.unflat(g, done.record.s) / replay.batch)
        if replay.method.bootstrap and predicted(site):
            regress(replay.step, site, done.record.gate, replay.error, g, replay.method.bootstrap)


def _in_a_line(layout: Layout) -> bool:
    """Does every site reach the next one alone, and the last the loss?"""
    return all(predicted(site) for site in layout.sites[:-1]) and all(
        site.above == (above.name,) and not site.reaches_output for site, above in pairwise(layout.sites)
    )


@dataclass
class _Piece:
    """A site that waits: its output with the graph of the piece below it, and the leaf from which the graph goes on."""

    site: Site
    s: Tensor
    leaf: Tensor
    gate: Tensor | None


class _GraphChain:
    """`_Chain` by vjps of the pieces between the sites."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.waiting: list[_Piece] = []  # from the lowest to the one that was met last

    def visit(self, site: Site, x: Any, s: Tensor) -> Tensor:
        low = s.detach()
        gate = gate_at(site, low)
        if not site.top:
            with torch.no_grad():
                h = self.replay.learn_and_predict(site, low, gate)
            self._go_down(site.unflat(h, s), s)
        leaf = low.requires_grad_()
        self.waiting.append(_Piece(site, s, leaf, gate))
        return leaf.clone()

    def end(self, outputs: Any) -> None:
        """The error is exact at the top; from there all that wait are reached."""
        (g,) = self.replay.from_error(outputs, [self.waiting[-1].leaf])
        while True:
            done = self.waiting.pop()
            self._finish(done, g)
            if not self.waiting:
                return
            g = self._one_down(g, done.s, self.waiting[-1])

    def _go_down(self, value: Tensor, s: Tensor) -> None:
        """From a prediction at `s` to the site that waits `sweeps` below, if there is one."""
        if len(self.waiting) < self.replay.method.sweeps:
            return
        for piece in reversed(self.waiting):
            value, s = self._one_down(value, s, piece), piece.s
        self._finish(self.waiting.pop(0), value)

    @staticmethod
    def _one_down(value: Tensor, s: Tensor, below: _Piece) -> Tensor:
        return _vjp([s], [below.leaf], [value.to(s.dtype)])[0]

    def _finish(self, done: _Piece, g: Tensor) -> None:
        replay, site = self.replay, done.site
        replay.gradients.add_vjp(site.parameters, done.s, g / replay.batch)
        if replay.method.bootstrap and predicted(site):
            with torch.no_grad():
                regress(replay.step, site, done.gate, replay.error, site.flat(g), replay.method.bootstrap)
