"""One batch with its true gradient, and the estimates of a method compared with it.

The covariance `Cov(y) = A Aᵀ` of a guess has a closed form where its kind of frame has one; no `batch × d × d` array is
built. Where a frame is known only by products that are too many to make, the diagonal and the squared distance from the
identity are unbiased estimates from `draws` random vectors, with a relative error of about `√(2 / draws)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradguess.diagnose.report import SiteReport, cosine
from gradguess.guesses.base import Guess
from gradguess.guesses.frames import Frame, Identity, Matrix, Transposed
from gradguess.jacobian import CutGraph, Dense, GatedLinear, Jacobian
from gradguess.methods import Backprop, Estimate
from gradguess.methods.guessed import not_guessed
from gradguess.methods.run import Plan, find_layout, refreshed
from gradguess.model.site import Site, at_least_float32
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import choose_pass
from gradguess.step.base import State, Step
from gradguess.step.measure import Drawing, jacobian_at

PROBE = 32  # samples whose Jacobian is decomposed
DENSE = 1 << 21  # numbers in the largest Jacobian (of one sample) that is decomposed
CHUNK = 1 << 24  # numbers in a temporary array
COLUMNS = 256  # products with a general Jacobian that are still worth an exact answer
WORK = PROBE * 512**3  # multiplications in all decompositions of a site; fewer samples above it

Values = dict[str, Tensor]  # site name -> (batch, d)


class Comparison:
    """The true gradient of one batch, and what is needed to compare estimates with it.

    Inside, gradients are those of each sample's own loss; `summary` divides by the batch.
    """

    def __init__(self, plan: Plan, task: Task, noise: Noise, state: State, draws: int) -> None:
        self.plan, self.task, self.noise, self.draws = plan, task, noise, draws
        self.options = plan.options
        self.layout = find_layout(plan, task)
        self.state = refreshed(plan, task, [task], self.layout, noise.generator.device, state)
        self.step = self._step()
        self.estimate = self._estimate(self.step)
        self.batch = len(self.estimate.losses)
        with torch.enable_grad():
            self.truth, _ = Backprop().run(self.step)
        self.g = self._at_sites(self.truth)
        self.s: Values = {}
        if self.layout.sites:  # clones: what follows may change an output in place
            self.step.passes.plain(lambda site, x, s: self.s.update({site.name: s.clone()}))

    def _step(self) -> Step:
        passes = choose_pass(self.task, self.layout)
        return Step(self.task, self.layout, passes, self.noise, self.options, self.state)

    def _estimate(self, step: Step) -> Estimate:
        found, _ = self.plan.method.run(step)
        found.check_finite("this batch")
        return found

    def _at_sites(self, estimate: Estimate) -> Values:
        return {site.name: site.flat(estimate.site_grads[site.name]).double() for site in self.layout.sites}

    # --- guesses: closed forms -------------------------------------------------------------------------------

    def by_frames(self, guess: Guess) -> dict[str, SiteReport]:
        """Moments from each site's frame."""
        drawing, known, reports = Drawing(self.step, guess), not_guessed(self.layout, self.options), {}
        frames: dict[str, Frame] = {}
        for site in self.layout.sites:
            if site.name not in known:
                s = self.s[site.name]
                frames[site.name] = explicit(drawing.frame(site, s, site.gate_at(s)), self._flat(site))
        expected = {name: covariance_times(frame, self.g[name]) for name, frame in frames.items()}
        energy = self._energies({name: (self.g[name] * expected[name]).sum(-1) for name in frames})
        for name, estimate in self._at_sites(self.estimate).items():
            g = self.g[name]
            if name in known:
                reports[name] = summary(g, estimate, g, 0.0, torch.zeros_like(g[0]), None, self.batch)
                continue
            mean = expected[name]
            diagonal, distance = covariance(frames[name], self._flat(self.layout[name]), self.noise, self.draws)
            square = diagonal.double() * energy[name][:, None] + 2 * mean.square()
            error = g.square() - 2 * g * mean + square  # E (g - ĝ)²
            bias = (mean - g).mean(0)
            norm, variance = distance.mean().item() / g.shape[1], error.mean(0) - bias.square()
            reports[name] = summary(g, estimate, mean, bias.norm().item(), variance, norm, self.batch)
        return reports

    def _flat(self, site: Site) -> Tensor:
        return at_least_float32(site.flat(self.s[site.name]))

    def _energies(self, own: Values) -> Values:
        """`E c²` for the `c` that weighs each site's directions, from each site's own `gᵀ Cov(y) g`."""
        shared = {site.name for site in self.layout.sites if site.batch_dim is None}
        alone = self.options.isolate
        from_shared = self._shared_energy() if shared and not alone and self.options.coupling == "sample" else 0.0

        def energy(name: str) -> Tensor:
            counted = [name] if alone else list(own)
            if name in shared or self.options.coupling == "batch":  # c is summed over the batch
                return torch.stack([own[other].sum() for other in counted]).sum().expand_as(own[name])
            return torch.stack([own[other] for other in counted if other not in shared]).sum(0) + from_shared

        return {name: energy(name) for name in own}

    def _shared_energy(self) -> Tensor:
        """`Σ |g|²` per sample over the outputs that the batch shares: from `draws` tangents, unbiased, (batch,)."""

        def draw(site: Site, x: Any, s: Tensor) -> Tensor | None:
            return self.noise.normal(s.shape, s.dtype, s.device) if site.batch_dim is None else None

        return torch.stack([self.step.passes.tangent(draw).jvp.double().square() for _ in range(self.draws)]).mean(0)

    # --- other methods: draws ------------------------------------------------------------------------------

    def by_draws(self) -> dict[str, SiteReport]:
        """Moments from several estimates; two are enough to see that a method is deterministic."""
        first = drawn = self._at_sites(self.estimate)
        totals = {name: Errors(g) for name, g in self.g.items()}
        for draw in range(self.draws):
            if draw:
                drawn = self._at_sites(self._estimate(self._step()))
            if draw == 1 and all(torch.equal(drawn[name], value) for name, value in first.items()):
                break
            for name, values in drawn.items():
                totals[name].add(values)
        reports = {}
        for name, g in self.g.items():
            mean, bias, variance = totals[name].moments()
            reports[name] = summary(g, first[name], mean, bias, variance, None, self.batch)
        return reports

    # --- weight perturbation ---------------------------------------------------------------------------------

    def by_parameter(self) -> dict[str, SiteReport]:
        """Directions are N(0, I) on the parameters, one for the whole batch: the closed form with a batch of one."""
        gradients = {name: grad.double().reshape(1, -1) for name, grad in self.truth.grads.items()}
        energy = sum(g.square().sum() for g in gradients.values())
        reports = {}
        for name, g in gradients.items():
            y = self.estimate.directions[name][0]
            estimate = self.estimate.grads[name].double().reshape(1, -1)
            diagonal = (y != 0).double().reshape(1, -1)  # an embedding's padding row is not perturbed
            norm = (1 - diagonal).sum().sqrt().item() / g.shape[1]
            reports[name] = summary(g, estimate, g, 0.0, (diagonal * energy + g.square())[0], norm, 1)
        return reports

    # --- the Jacobian above ----------------------------------------------------------------------------------

    def spectrum(self, name: str) -> dict[str, Any]:
        """Rank, singular values and overlap from a dense decomposition for a few samples."""
        site = self.layout[name]
        if not site.guessed:
            return {}
        W, rows = self._probe_jacobian(site)
        size = W.m * W.d
        if size > DENSE or size * len(rows) > PROBE * DENSE:
            return {}
        count = min(PROBE, max(1, WORK // (size * min(W.m, W.d))))
        matrices = W.matrix().expand(len(rows), -1, -1)
        chosen = torch.isin(rows, self.probe[:count])
        return decompose(matrices[chosen], self.g[name][rows[chosen]])

    @cached_property
    def probe(self) -> Tensor:
        """The first samples whose gradient is nonzero at every guessed site, then the others."""
        silent = [(self.g[site.name] == 0).all(1) for site in self.layout.guessed]
        return torch.argsort(torch.stack(silent).sum(0), stable=True)[:PROBE]

    def _probe_jacobian(self, site: Site) -> tuple[Jacobian, Tensor]:
        """`W̃` on the probe samples, and which samples of the batch its rows are."""
        if site.linear is not None:
            s = self._flat(site)[self.probe]
            return jacobian_at(site, s, None if site.gate is None else site.gate(s), None), self.probe
        graph, rows = self._probe_graph
        return graph.jacobian(site), rows

    @cached_property
    def _probe_graph(self) -> tuple[CutGraph, Tensor]:
        """A cut graph of the probe samples; of the whole batch where a part of it would behave otherwise."""
        apart = self.layout.sliceable and not self.layout.leaves_traces
        if not apart or self.options.coupling == "batch":
            return self.step.passes.cut(), torch.arange(self.batch, device=self.probe.device)
        picked = self.task.part(self.probe, self.batch)
        return self.step.passes.aside(picked).cut(), self.probe


class Errors:
    """Running moments of `ĝ - g` over several estimates."""

    def __init__(self, g: Tensor) -> None:
        self.g = g  # (batch, d)
        self.total = torch.zeros_like(g)
        self.square = torch.zeros_like(g[0])
        self.means: list[Tensor] = []

    def add(self, estimate: Tensor) -> None:
        error = estimate - self.g
        self.total += error
        self.square += error.square().mean(0)
        self.means.append(error.mean(0))

    def moments(self) -> tuple[Tensor, float, Tensor]:
        """Mean estimate (batch, d), bias, variance (d,). The noise of the average is taken off its square."""
        means, count = torch.stack(self.means), len(self.means)
        noise = means.var(0) / count if count > 1 else 0.0
        squared_bias = means.mean(0).square() - noise
        bias = squared_bias.sum().clamp_min(0).sqrt().item()
        return self.g + self.total / count, bias, self.square / count - squared_bias


def covariance_times(frame: Frame, g: Tensor) -> Tensor:
    """`Cov(y) g`, with a power of two taken out, so that small gradients survive the frame's precision."""
    scale = torch.ldexp(torch.ones_like(g[0, 0]), torch.frexp(g.abs().amax()).exponent)
    return frame.covariance_times((g / scale).to(frame.dtype)).double() * scale


def summary(
    g: Tensor, estimate: Tensor, mean: Tensor, bias: float, variance: Tensor, norm: float | None, batch: int
) -> SiteReport:
    """From the gradient of each sample's own loss to that of the mean loss."""
    return SiteReport(
        d=g.shape[1],
        bias=bias / batch,
        variance=variance.norm().item() / batch**2,
        covariance_norm=norm,
        cosine=cosine([(estimate, g)]),
        mean_cosine=cosine([(mean, g)]),
        gradient_norm=g.norm().item() / batch,
    )


def decompose(W: Tensor, g: Tensor) -> dict[str, Any]:
    """Rank, singular values and overlap of `W` (n, m, d) with the gradients `g` (n, d) of the same samples."""
    n, m, d = W.shape
    values, squares, ranks = g.new_zeros(n, d), g.new_zeros(n, d), g.new_zeros(n)
    for i in range(n):
        alive = (W[i] != 0).any(0)  # closed units have singular value zero: half of them under a ReLU
        _, S, Vh = torch.linalg.svd(W[i][:, alive], full_matrices=False)
        real = max(m, d) * torch.finfo(W.dtype).eps * S[:1] < S
        ranks[i], values[i, : len(S)] = real.sum(), S.double()
        squares[i, : len(S)] = ((Vh.double() @ g[i, alive]) * real).square()
    lengths = g.square().sum(1)
    seen = lengths > 0
    parts = (squares.cumsum(1)[seen] / lengths[seen, None]).clamp_max(1).sqrt()  # ‖V_k V_kᵀ g‖ / ‖g‖
    return {
        "rank": ranks.mean().item(),
        "singular_values": tuple(values.mean(0).tolist()),
        "overlap": tuple(parts.mean(0).tolist()) if seen.any() else None,
    }


# --- the covariance; `s` is the output of the site as (batch, d), like the directions ----------------------


def explicit(frame: Frame, s: Tensor) -> Frame:
    """The same frame, as a dense matrix where it is known by products alone and these are few."""
    closed = isinstance(frame, Identity) or (isinstance(frame, Transposed) and isinstance(frame.W, Dense | GatedLinear))
    if closed or frame.orthonormal or frame.latent > COLUMNS or frame.latent * s.numel() > CHUNK:
        return frame
    return Matrix(torch.cat(list(_columns(frame, s))).movedim(0, 1))


def _columns(frame: Frame, s: Tensor) -> Iterator[Tensor]:
    """The columns of every sample's `A`, a few at a time: (n, batch, d)."""
    eye = torch.eye(frame.latent, dtype=s.dtype, device=s.device)
    for rows in eye.split(max(1, CHUNK // (len(s) * max(s.shape[1], frame.latent)))):
        yield frame.apply(rows[:, None].expand(-1, len(s), -1))


def covariance(frame: Frame, s: Tensor, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
    """`diag Cov(y)`, (batch, d), and `‖Cov(y) - I‖_F`, (batch,)."""
    d = s.shape[1]
    if isinstance(frame, Identity):
        return torch.ones_like(s), s.new_zeros(len(s))
    if isinstance(frame, Matrix):
        m = frame.P.shape[-2]  # ‖PᵀP - I_d‖² = ‖PPᵀ - I_m‖² + d - m: the smaller product, for a few samples at a time
        eye = torch.eye(min(m, d), dtype=s.dtype, device=s.device)
        parts = frame.P.split(max(1, CHUNK // eye.numel()))
        squares = [((P @ P.mT if m < d else P.mT @ P) - eye).square().sum((-2, -1)) for P in parts]
        return frame.P.square().sum(-2), (torch.cat(squares) + max(d - m, 0)).sqrt()
    if isinstance(frame, Transposed) and isinstance(frame.W, GatedLinear):
        # Cov = D G D with one G = WᵀW for the batch: Σ_jk (D_j G_jk D_k - δ_jk)², its diagonal apart
        gram = frame.W.weight.double().mT @ frame.W.weight.double()
        q = torch.ones_like(s).double() if frame.W.gate is None else frame.W.gate.square().double()
        diagonal = q * gram.diagonal()
        others = ((q @ gram.fill_diagonal_(0).square()) * q).sum(-1)
        return diagonal, ((diagonal - 1).square().sum(-1) + others).sqrt()
    if frame.orthonormal:  # a projector: √(d - rank)
        diagonal = sum((part.square().sum(0) for part in _columns(frame, s)), start=torch.zeros_like(s))
        return diagonal, (d - diagonal.sum(-1).round()).clamp_min(0).sqrt()
    white = lambda size: noise.normal((len(s), size), s.dtype, s.device)  # noqa: E731
    diagonal = sum((frame.apply(white(frame.latent)).square() for _ in range(draws)), start=torch.zeros_like(s)) / draws
    drawn = (white(d) for _ in range(draws))
    total = sum(((frame.covariance_times(v) - v).square().sum(-1) for v in drawn), start=s.new_zeros(len(s)))
    return diagonal, (total / draws).sqrt()
