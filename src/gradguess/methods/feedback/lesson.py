"""What feedback learns: a matrix `B` for every site, and how one measurement changes it, by a learning rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from gradguess.guesses.factored import dense
from gradguess.guesses.frames import Frame
from gradguess.layers.positions import Pattern, project_words
from gradguess.model.hooks import Visit
from gradguess.model.site import Site, at_least_float32
from gradguess.step.base import Kept
from gradguess.step.measure import Drawing, measure
from gradguess.step.parts import Pool
from gradguess.step.pull_back import OutputError, flatten_outputs

RIDGE = 0.1  # of the mean diagonal entry of the errors' second moment, in `regress`
LEAST = 0.1  # a gate that is open more rarely than this counts as open this often, in `regress`

Start = Callable[[Site, tuple[int, int], Tensor], Tensor]  # (site, shape of B, a tensor like it) -> the first B


class Predictor:
    """The matrices as they are while a step runs. The state they came from is not written.

    Attributes:
        entries: site name -> "B", the matrix (d, C), or smaller where positions share it, and "v", the direction in
            which the regressors are largest.
        start: gives a matrix that is not there yet.
    """

    def __init__(self, learned: Kept, pool: Pool, start: Start) -> None:
        self.entries = {site: dict(entries) for site, entries in learned.items()}
        self.pool, self.start = pool, start

    def at(self, site: Site) -> dict[str, Tensor]:
        return self.entries.setdefault(site.name, {})

    def matrix(self, site: Site, d: int, e: Tensor) -> Tensor:
        """`B` of a site with `d` numbers, for errors like `e`."""
        entries = self.at(site)
        shape = site.pattern.width(d), site.pattern.rows(e, d).shape[1]
        if "B" not in entries or entries["B"].shape != shape:
            entries["B"] = self.start(site, shape, e)
        elif entries["B"].dtype != e.dtype:  # the model has become another dtype
            entries["B"] = entries["B"].to(e.dtype)
        return entries["B"]

    def predict(self, site: Site, gate: Tensor | None, d: int, error: OutputError) -> Tensor:
        """`h_i = D_i B_i e`, (batch, d)."""
        pattern, e = site.pattern, error.flat
        value = pattern.unfold(pattern.rows(e, d) @ self.matrix(site, d, e).t(), len(e), d)
        return value if gate is None else value.mul_(gate)

    def regress(self, site: Site, gate: Tensor | None, error: OutputError, g: Tensor, rate: float) -> None:
        """Draw `B` towards the least-squares fit of the gradients `g` by `D B e` on this batch."""
        pattern, d, pool = site.pattern, g.shape[1], self.pool
        B, e = self.matrix(site, d, error.flat), pattern.rows(error.flat, d)
        h = pattern.unfold(e @ B.t(), len(g), d)
        wrong = pattern.fold(g - h if gate is None else (g - h * gate) * gate)
        moment = pool.sum(e.t() @ e)
        ridge = RIDGE * moment.diagonal().mean() + torch.finfo(e.dtype).tiny
        moment = moment + ridge * torch.eye(len(moment), dtype=e.dtype, device=e.device)
        if gate is not None:
            often = pool.sum(pattern.fold(gate.square()).sum(0)) / sum(pool.counts(len(e)))
            wrong = wrong / often.clamp_min(LEAST)  # a unit that is mostly off sees fewer samples
        elif pattern.kind == "shared":
            wrong = wrong * pattern.features / d  # the mean over positions
        self.at(site)["B"] = B + rate * torch.linalg.solve_ex(moment, pool.sum(e.t() @ wrong))[0].t()


class Lesson:
    """A regression of the outputs' tangents `u` on the gated directions `φ_i = D_i y_i`.

    A tangent pass is measured when a lesson is made, which keeps the residuals alone of the batch, (batch, C) per
    pass. `conclude` it when the error is known; then correct and learn site by site.

    Args:
        rate: step size, relative to the largest that is stable.
        cut: sees every site of the pass, which records a reverse graph then.

    Attributes:
        seen: the measurement.
    """

    def __init__(
        self, predictor: Predictor, rule: LearningRule, rate: float, drawing: Drawing, cut: Visit | None = None
    ) -> None:
        self.predictor, self.pool = predictor, predictor.pool
        self.rule, self.rate, self.drawing = rule, rate, drawing
        self.explained: dict[int, Tensor] = {}  # per pass: Σ_i σ_i B_iᵀ φ_i, (batch, C)
        self.traces: dict[int, Tensor] = {}  # per pass: Σ_i mean |φ_i|²
        self.largest: dict[int, Tensor] = {}  # per pass: the largest λ of its sites
        self.tangents: list[Tensor] = []  # per pass: u, (batch, C)
        self.residuals: list[Tensor] = []  # per pass: u - Σ_i σ_i B_iᵀ φ_i
        self.sizes: dict[int, Tensor] = {}  # per pass: the step size μ
        self.rows: dict[str, int] = {}  # per site: samples, or positions where each has its own error
        self.fewest = self.own = 0  # the fewest of them: of all processes, and of this one
        every = lambda site: site.guessed  # noqa: E731
        self.seen = measure(drawing, every, balance=True, keep_gates=True, cut=cut, watch=self._observe)

    def directions(self, site: Site, s: Tensor, gate: Tensor | None) -> Tensor:
        """Those of a site, as they were kept or drawn again: (tangents, *shape of the output)."""
        seen = self.seen.records.get(site.name)
        return dense(self.drawing.directions(site, s, gate) if seen is None or seen.y is None else seen.y)

    def _observe(self, p: int, site: Site, y: Tensor, gate: Tensor | None, scale: Tensor) -> None:
        """`y` was carried by pass `p`, scaled by σ."""
        entries = self.predictor.at(site)
        flat = gated(site, y, gate)
        phi = site.pattern.fold(flat)  # (rows, features)
        B = entries.get("B")
        if B is not None and B.shape[0] == phi.shape[1]:
            wide = torch.promote_types(phi.dtype, B.dtype)
            _add_to(self.explained, p, scale * (phi.to(wide) @ B.to(wide)).reshape(len(flat), -1))
        rows = self.rows[site.name] = sum(self.pool.counts(len(phi)))
        self.fewest, self.own = min((rows, len(phi)), (self.fewest, self.own) if self.fewest else (rows, len(phi)))
        _add_to(self.traces, p, phi.square().sum() / rows)
        largest = self._largest(site, phi, rows)
        self.largest[p] = torch.maximum(self.largest[p], largest) if p in self.largest else largest

    def conclude(self, error: OutputError) -> None:
        """Computes the residuals, which the predictor did not explain, and the step sizes."""
        self.error = error
        for p, tangents in enumerate(self.seen.output_tangents):
            parts = [project_words(part) for part in tangents]
            u, explained = flatten_outputs(parts, len(error.losses)), self.explained.get(p)
            self.tangents.append(u)
            self.residuals.append(u if explained is None or explained.shape != u.shape else u - explained.to(u.dtype))
        self.sizes = {p: self._step_size(p) for p in self.traces}

    def correction(self, site: Site, y: Tensor) -> Tensor:
        """`r y` averaged over tangents, with `r = c - Σ_i <y_i, h_i>` of each sample."""
        e = self.error.flat
        total = [
            (self.residuals[p] * e).sum(1, keepdim=True) / scale * gated(site, y[tangent], None).to(e.dtype)
            for p, tangent, scale in self._passes(site)
        ]
        return torch.stack(total).mean(0) if len(total) > 1 else total[0]

    def learn(self, site: Site, y: Tensor, gate: Tensor | None) -> None:
        """Changes `B` of a site as the rule says."""
        e = self.error.flat
        for p, tangent, scale in self._passes(site):
            flat = gated(site, y[tangent], gate).to(e.dtype)
            B = self.predictor.matrix(site, flat.shape[1], e)
            self.predictor.at(site)["B"] = self.rule.update(self, site, p, site.pattern.fold(flat), scale, B)

    def power(self, rows: int) -> Tensor:
        """`|e|²` of every sample, or of every position."""
        return self.error.flat.reshape(rows, -1).square().sum(1)

    @cached_property
    def total(self) -> Tensor:
        """The sum of `|e|²` over the whole batch."""
        return self.pool.sum(self.power(self.own).sum()).clamp_min(torch.finfo(self.error.flat.dtype).tiny)

    def _passes(self, site: Site) -> list[tuple[int, int, Tensor]]:
        """(pass, tangent, σ) of the passes that carried a site's directions."""
        scales = self.seen.scales[site.name]
        return [(p, self.seen.passes[p][0], scales[self.seen.passes[p][0]]) for p in self.seen.rows(site)]

    def _step_size(self, p: int) -> Tensor:
        """`μ`, see `Weighted`."""
        trace, tiny = self.pool.sum(self.traces[p]), torch.finfo(self.error.flat.dtype).tiny
        count = self.drawing.step.options.tangents
        bound = self.largest[p] + trace / (self.rule.samples(self) * count)
        return self.rate / bound.clamp_min(tiny) / count

    def _largest(self, site: Site, phi: Tensor, samples: int) -> Tensor:
        """Largest eigenvalue of `φᵀφ / b`, by power iteration that goes on from step to step."""
        entries = self.predictor.at(site)
        v = entries.get("v")
        if v is None or v.shape[0] != phi.shape[1]:
            v = self.pool.sum(phi.abs().sum(0)) + 1e-6
        v = v.to(phi.dtype)
        for _ in range(2):
            v = v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(phi.dtype).tiny)
            v = self.pool.sum(phi.t() @ (phi @ v)) / samples
        entries["v"] = v
        return torch.linalg.vector_norm(v)


def gated(site: Site, y: Tensor, gate: Tensor | None) -> Tensor:
    """`φ = D y`, (batch, d)."""
    flat = at_least_float32(site.flat(y))
    return flat if gate is None else flat * gate


def _add_to(sums: dict[int, Tensor], key: int, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


class LearningRule(ABC):
    """How the residual of a lesson changes the matrices. One object serves all lessons; it keeps nothing."""

    @abstractmethod
    def samples(self, lesson: Lesson) -> Tensor | float:
        """How many samples the lesson is worth; the step size depends on it."""

    @abstractmethod
    def update(self, lesson: Lesson, site: Site, p: int, phi: Tensor, scale: Tensor, B: Tensor) -> Tensor:
        """The new `B` of a site from the regressors `phi` (rows, width of B) that pass `p` carried, scaled by σ."""


class Weighted(LearningRule):
    """Least mean squares, `B_i += μ Σ_b w_b φ_i rᵀ`. The weight of a sample is the share of its squared error |e|² in
    that of the batch, since its prediction is multiplied by its error.

    The step size is `μ = rate / (λ + K / b)`: λ the largest eigenvalue of the regressors' second moment, K its
    trace over all sites of a pass, b the number of samples. It is the condition under which LMS with Gaussian
    regressors stays stable in the mean square (rate < 2): for W⊥, λ = 1 and μ = rate · b / (b + K).
    """

    def samples(self, lesson: Lesson) -> Tensor | float:
        power = lesson.power(lesson.own)
        tiny = torch.finfo(power.dtype).tiny
        return lesson.total.square() / lesson.pool.sum(power.square().sum()).clamp_min(tiny)

    def update(self, lesson: Lesson, site: Site, p: int, phi: Tensor, scale: Tensor, B: Tensor) -> Tensor:
        wrong = self.wrong(lesson, lesson.residuals[p], len(phi))
        return B + (lesson.sizes[p] / scale * self.weight(lesson, site)) * lesson.pool.sum(phi.t() @ wrong)

    def wrong(self, lesson: Lesson, residual: Tensor, rows: int) -> Tensor:
        """The residual (batch, C) of each row times its |e|²: (rows, columns of B)."""
        return residual.reshape(rows, -1) * lesson.power(rows)[:, None]

    def weight(self, lesson: Lesson, site: Site) -> Tensor | float:
        """What the sum over rows is multiplied with."""
        return 1 / lesson.total


WEIGHTED = Weighted()


class _Signed(Frame):
    """The directions of a frame, with a random sign at every token, so that tokens are uncorrelated."""

    def __init__(self, frame: Frame, pattern: Pattern, d: int) -> None:
        self.frame, self.pattern, self.d = frame, pattern, d
        self.batch, self.dtype = frame.batch, frame.dtype
        self.latent = frame.latent + d // pattern.features

    def apply(self, z: Tensor) -> Tensor:
        y, pattern = self.frame.apply(z[..., : self.frame.latent]), self.pattern
        signs = torch.where(z[..., self.frame.latent :] < 0, -1.0, 1.0).to(y.dtype)  # (..., batch, positions)
        return (y.unflatten(-1, (-1, pattern.features)) * signs.unsqueeze(-1)).flatten(-2)

    def adjoint(self, v: Tensor) -> Tensor:
        raise NotImplementedError


class Scattered(Drawing):
    """Draws so that the directions at different tokens of a site are uncorrelated, for sites that share `B`.

    Not for the pixels of a convolution: there it taught worse (see the docs, "Sites with positions").
    """

    def frame(self, site: Site, s: Tensor, gate: Tensor | None) -> Frame:
        frame = super().frame(site, s, gate)
        if not site.guessed or site.pattern.kind == "full" or site.pattern.channels_first:
            return frame
        return _Signed(frame, site.pattern, site.flat(s).shape[1])
