"""Learned feedback: directional derivatives teach a predictor of the gradient instead of being spent as updates.

For every site a matrix `B` predicts the gradient from the output error `e = dL/d(outputs)`, which is known after the
forward pass, and the site's gate `D`:

    prediction    h_i = D_i B_i e

`B_i` stands for the transposed Jacobian from the site to the outputs. A tangent pass measures that Jacobian: with
directions `y_i` injected, the outputs move by `u = Σ_i J_i y_i` and the loss by `c = <u, e>`. The predictor is fitted
to what it got wrong by least mean squares (`Lesson.learn`). The estimate is one of

    direct       ĝ_i = h_i
    chained      ĝ_i = Σ_j W̃_ijᵀ h_j       over the sites j above, exact at the output: W^T with what was learned in
                                           the place of its noise
    corrected    ĝ_i = h_i + r y_i         with the residual r = c - Σ_i <y_i, h_i>

Related: feedback matrices from forward gradients (Bacho and Chu 2024, FDFA), synthetic gradients (Jaderberg et al.
2017), directional gradients with a learned predictor (Silver et al. 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess import chain
from gradguess.errors import InputError
from gradguess.guesses._base import Estimate, Guess, Method, check_count, keep
from gradguess.guesses.backprop import Backprop
from gradguess.guesses.scattered import Scattered
from gradguess.isolation import Snapshot
from gradguess.noise import Noise
from gradguess.parts import Pool
from gradguess.positions import coded
from gradguess.sites import Layout, Site, Watch
from gradguess.step import Measurement, Record, Records, Step, gate_at
from gradguess.task import Task, tensors
from gradguess.upstream import CutGraph

LEARN = ("weighted", "outputs", "loss", "momentum", "truth", "never")
Values = dict[str, Tensor]  # site name -> (batch, d)


@dataclass(frozen=True)
class Feedback(Method):
    """Learned feedback around any guess.

    Args:
        guess: draws the directions that teach, `gg.WPerp()` for instance.
        form: how predictions become the estimate: "direct", "chained" or "corrected", see the module.
        rate: step size of the predictor, relative to the largest that is stable (below 2, whatever the guess).
        every: tangents every so many steps; the others run a plain forward pass.
        fraction: part of the batch that carries tangents.
        sweeps: how often the chain rule is applied to the predictions ("chained"). Each sweep is a step towards
            backpropagation; with as many sweeps as there are sites in a row it *is* backpropagation.
        learn: what teaches: the tangent of the "outputs" (one number per output and sample), the same "weighted" by the
            samples' errors |e|² (what the estimate will be multiplied with), the tangent of the "loss" (one number per
            sample), the "truth" (backpropagated gradients, to know the ceiling of the form), or "never". "momentum" is
            the rule of FDFA: a running mean of the raw estimates `y uᵀ`, whatever is predicted already.
        bootstrap: rate at which the predictor is also drawn to the chained estimate itself ("chained").
        start: "zero", or "random" matrices; random ones that never learn are direct feedback alignment.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=3), form="direct"))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> forward.learned["0"]["B"].shape
    torch.Size([8, 3])
    """

    guess: Guess
    form: Literal["direct", "chained", "corrected"] = "chained"
    rate: float = 0.3
    every: int = 1
    fraction: float = 1.0
    sweeps: int = 1
    learn: Literal["weighted", "outputs", "loss", "momentum", "truth", "never"] = "weighted"
    bootstrap: float = 0.0
    start: Literal["zero", "random"] = "zero"

    def __post_init__(self) -> None:
        if not isinstance(self.guess, Guess):
            raise InputError(
                "Feedback(guess): expected a guess that draws directions at sites, gg.WPerp() for instance, "
                f"found {self.guess!r}."
            )
        if self.form not in ("direct", "chained", "corrected"):
            raise InputError(f"Feedback(form): expected 'direct', 'chained' or 'corrected', found {self.form!r}.")
        if self.learn not in LEARN:
            raise InputError(f"Feedback(learn): expected one of {', '.join(map(repr, LEARN))}, found {self.learn!r}.")
        if self.start not in ("zero", "random"):
            raise InputError(f"Feedback(start): expected 'zero' or 'random', found {self.start!r}.")
        if not 0 <= self.bootstrap <= 1:
            raise InputError(f"Feedback(bootstrap): expected 0 <= bootstrap <= 1, found {self.bootstrap!r}.")
        if not 0 <= self.rate < 2:
            raise InputError(f"Feedback(rate): expected 0 <= rate < 2 (from 2 on it diverges), found {self.rate!r}.")
        if not 0 < self.fraction <= 1:
            raise InputError(f"Feedback(fraction): expected 0 < fraction <= 1, found {self.fraction!r}.")
        check_count("Feedback(every)", self.every)
        check_count("Feedback(sweeps)", self.sweeps)

    def phase(self, count: int) -> str | None:
        if not self._teaches(count):
            return "plain"
        return self.guess.phase(count // self.every)

    def pools_at(self, count: int, first: bool) -> bool:
        return self._teaches(count) and self.guess.pools_at(count // self.every, first)

    def _teaches(self, count: int) -> bool:
        return self.learn not in ("never", "truth") and count % self.every == 0

    def run(self, step: Step) -> Estimate:
        teach = self._teaches(step.count)
        step.count //= self.every  # the guess counts the steps that it sees
        if step.options.memory == "replay" and not step.detail and self.learn != "truth":
            from gradguess.feedback_replay import Replay

            return Replay(self, step, teach).run()
        seen = self._measure(step) if teach and self.fraction == 1 else None
        forward = _Forward(step, seen, graph=self.needs_graph(step))
        error = OutputError(step.task, forward.outputs)
        correction: Values = {}
        if self.start == "random":
            _start_random(step, forward, error)
        if self.learn == "truth":
            truth = Backprop().run(step.again(detail=True)).site_grads
            for site in filter(predicted, step.layout.sites):
                regress(step, site, forward.gate(site), error, site.flat(truth[site.name]), self.rate)
        if seen is not None:
            correction = self._teach(step, forward, seen, error)
        elif teach:
            part = part_of(step, self.fraction)
            measured = self._measure(part)
            self._teach(part, _Forward(part, measured, graph=False), measured, OutputError(part.task, measured.outputs))
        g = self._estimate(step, forward, error, correction)
        return forward.finish(g, seen, error)

    def _measure(self, step: Step) -> Measurement:
        return step.measure(self.teacher(step), keep_outputs=True, only=predicted, balance=True)

    def teacher(self, step: Step) -> Guess:
        """The guess; where positions share a matrix, with directions that do not tie them together."""
        patterns = {site.name: site.pattern for site in step.layout.sites}
        plain = all(pattern.kind == "full" for pattern in patterns.values())
        return self.guess if plain else Scattered(self.guess, patterns)

    def needs_graph(self, step: Step) -> bool:
        """Must the chain rule go through a cut graph? Not where every piece that is used has a closed form."""
        sites = step.layout.sites
        plain = all(predicted(site) or site.is_output for site in sites)
        chain = self.form != "chained" or all(site.linear is not None for site in sites if not site.top)
        return not (step.layout.closed and plain and chain)

    def _teach(self, step: Step, forward: _Forward, seen: Measurement, error: OutputError) -> Values:
        """Fit the predictor to the measurement; what "corrected" adds to its prediction."""
        lesson = Lesson(step, self.rate, self.learn)
        directions = {name: record.y for name, record in seen.records.items() if record.y is not None}
        for p, (tangent, chosen) in enumerate(seen.passes):
            for name in directions if chosen is None else [chosen]:
                site = step.layout[name]
                scale = seen.scales[name][tangent]
                lesson.observe(p, site, directions[name][tangent], forward.gate(site), scale)
        lesson.conclude(seen, error)
        added = {}
        if self.form == "corrected":
            h = predict(step, forward, error)
            added = {name: h[name] + lesson.correction(step.layout[name], directions[name]) for name in h}
        for name, y in directions.items():
            site = step.layout[name]
            lesson.learn(site, y, forward.gate(site))
        return added

    def _estimate(self, step: Step, forward: _Forward, error: OutputError, corrected: Values) -> Values:
        chained = self.form == "chained"
        g = corrected or predict(step, forward, error, _read(step.layout) if chained else None)
        if chained:
            for _ in range(self.sweeps):
                g = forward.chain(g, error)
            if self.bootstrap:
                for site in filter(predicted, step.layout.sites):
                    regress(step, site, forward.gate(site), error, g[site.name], self.bootstrap)
        else:
            g.update(forward.exact_tops(error))
        return g


def predicted(site: Site) -> bool:
    """Sites whose gradient must be predicted: at the output it is the error itself."""
    return not site.top and site.batch_dim is not None


class OutputError:
    """`e`: the derivative of each sample's loss with respect to the model's outputs, by a vjp of the loss alone."""

    def __init__(self, task: Task, outputs: Any) -> None:
        leaves, spec = tree_flatten(outputs)
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        free = {i: leaves[i].detach().requires_grad_() for i in self.at}
        with torch.enable_grad():
            losses = task.losses(tree_unflatten([free.get(i, leaf) for i, leaf in enumerate(leaves)], spec))
            grads = torch.autograd.grad(losses.sum(), list(free.values()), allow_unused=True)
        self.losses = losses.detach()
        self.parts = [torch.zeros_like(free[i]) if g is None else g for i, g in zip(self.at, grads, strict=True)]
        self.exact = flatten_outputs(self.parts)  # (batch, C)
        self.flat = flatten_outputs([coded(part) for part in self.parts])  # the same, a large alphabet projected


def flatten_outputs(parts: list[Tensor]) -> Tensor:
    """(batch, C) from one or several output tensors."""
    flats = [part.reshape(part.shape[0], -1) for part in parts]
    return wide(flats[0] if len(flats) == 1 else torch.cat(flats, 1))


def wide(t: Tensor) -> Tensor:
    """Half precision as float32."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


# --- the predictor -------------------------------------------------------------------------------------------


def matrix(step: Step, site: Site, d: int, error: Tensor) -> Tensor:
    """`B` of a site, (d, C), or smaller where its positions share it; zero at first."""
    learned = step.learned.setdefault(site.name, {})
    shape = site.pattern.width(d), site.pattern.rows(error, d).shape[1]
    if "B" not in learned or learned["B"].shape != shape:
        learned["B"] = error.new_zeros(shape)
    return learned["B"]


def predict(step: Step, forward: _Forward, error: OutputError, only: Collection[str] | None = None) -> Values:
    """The prediction at every site that is predicted, or at some of them."""
    sites = [site for site in step.layout.sites if predicted(site) and (only is None or site.name in only)]
    return {site.name: predict_at(step, site, forward.gate(site), forward.size(site), error) for site in sites}


def _read(layout: Layout) -> set[str]:
    """The sites that lie above another: a hop of the chain rule starts from these."""
    return {name for site in layout.sites for name in site.above}


def predict_at(step: Step, site: Site, gate: Tensor | None, d: int, error: OutputError) -> Tensor:
    """`h_i = D_i B_i e`, (batch, d)."""
    pattern, e = site.pattern, error.flat
    value = pattern.unfold(pattern.rows(e, d) @ matrix(step, site, d, e).t(), len(e), d)
    return value if gate is None else value.mul_(gate)


def regress(step: Step, site: Site, gate: Tensor | None, error: OutputError, g: Tensor, rate: float) -> None:
    """Draw `B` towards the least-squares fit of the gradients `g` by `D B e` on this batch."""
    pattern, d = site.pattern, g.shape[1]
    B, e = matrix(step, site, d, error.flat), pattern.rows(error.flat, d)
    h = pattern.unfold(e @ B.t(), len(g), d)
    wrong = pattern.fold(g - h if gate is None else (g - h * gate) * gate)
    pool = step.pool
    moment = pool.sum(e.t() @ e)
    ridge = 0.1 * moment.diagonal().mean() + torch.finfo(e.dtype).tiny
    moment = moment + ridge * torch.eye(len(moment), dtype=e.dtype, device=e.device)
    if gate is not None:
        often = pool.sum(pattern.fold(gate.square()).sum(0)) / sum(pool.counts(len(e)))
        wrong = wrong / often.clamp_min(0.1)  # a unit that is mostly off sees fewer samples
    elif pattern.kind == "shared":
        wrong = wrong * pattern.features / d  # the mean over positions
    B += rate * torch.linalg.solve_ex(moment, pool.sum(e.t() @ wrong))[0].t()


def _start_random(step: Step, forward: _Forward, error: OutputError) -> None:
    """Random matrices of the scale of a layer, once."""
    for site in filter(predicted, step.layout.sites):
        if "B" not in step.learned.get(site.name, {}):
            step.learned[site.name] = {"B": random_matrix(step, site, forward.size(site), error.flat)}


def random_matrix(step: Step, site: Site, d: int, e: Tensor) -> Tensor:
    shape = site.pattern.width(d), site.pattern.rows(e, d).shape[1]
    return step.noise.normal(shape, e.dtype, e.device) / d**0.5


class Lesson:
    """One measurement, seen as a regression of the outputs' tangents `u` on the gated directions `φ_i = D_i y_i`.

    `observe` every direction of a pass, `conclude` when the outputs are known, then correct and learn site by site.
    Of the batch it keeps the residuals alone, (batch, C) per pass.
    """

    def __init__(self, step: Step, rate: float, from_: str) -> None:
        self.step, self.rate, self.from_ = step, rate, from_
        self.explained: dict[int, Tensor] = {}  # per pass: Σ_i σ_i B_iᵀ φ_i, (batch, C)
        self.traces: dict[int, Tensor] = {}  # per pass: Σ_i mean |φ_i|²
        self.largest: dict[int, Tensor] = {}  # per pass: the largest λ of its sites
        self.tangents: list[Tensor] = []  # per pass: u, (batch, C)
        self.residuals: list[Tensor] = []  # per pass: u - Σ_i σ_i B_iᵀ φ_i
        self.rows: dict[str, int] = {}  # per site: samples, or positions where each has its own error
        self.samples = self.own = 0  # the fewest of them: of all processes, and of this one

    def observe(self, p: int, site: Site, y: Tensor, gate: Tensor | None, scale: Tensor) -> None:
        """`y` was carried by pass `p`, scaled by σ."""
        learned = self.step.learned.setdefault(site.name, {})
        flat = gated(site, y, gate)
        phi = site.pattern.fold(flat)  # (rows, features)
        B = learned.get("B")
        if B is not None and B.shape[0] == phi.shape[1]:
            _add_to(self.explained, p, scale * (phi.to(B.dtype) @ B).reshape(len(flat), -1))
        rows = sum(self.step.pool.counts(len(phi)))
        self.rows[site.name] = rows
        self.samples, self.own = min((rows, len(phi)), (self.samples, self.own) if self.samples else (rows, len(phi)))
        _add_to(self.traces, p, phi.square().sum() / rows)
        largest = _largest(learned, phi, self.step.pool, rows)
        self.largest[p] = torch.maximum(self.largest[p], largest) if p in self.largest else largest

    def conclude(self, seen: Measurement, error: OutputError) -> None:
        """The outputs are known: what did the predictor not explain?"""
        self.seen, self.error = seen, error
        for p, tangents in enumerate(seen.output_tangents):
            u, explained = flatten_outputs([coded(part) for part in tangents]), self.explained.get(p)
            self.tangents.append(u)
            self.residuals.append(u if explained is None or explained.shape != u.shape else u - explained)
        self._sizes = {p: self._step_size(p) for p in self.traces}

    def correction(self, site: Site, y: Tensor) -> Tensor:
        """`r y` averaged over tangents, with `r = c - Σ_i <y_i, h_i>` of each sample."""
        e = self.error.flat
        total = [
            (self.residuals[p] * e).sum(1, keepdim=True) / scale * gated(site, y[tangent], None).to(e.dtype)
            for p, tangent, scale in self._passes(site)
        ]
        return torch.stack(total).mean(0) if len(total) > 1 else total[0]

    def learn(self, site: Site, y: Tensor, gate: Tensor | None) -> None:
        """One step of least mean squares: `B_i += μ mean_b φ_i rᵀ`.

        The step size is `μ = rate / (λ + K / b)`: λ the largest eigenvalue of the regressors' second moment, K its
        trace over all sites of a pass, b the number of samples. It is the condition under which LMS with Gaussian
        regressors stays stable in the mean square (rate < 2): for W⊥, λ = 1 and μ = rate · b / (b + K).
        """
        e = self.error.flat
        for p, tangent, scale in self._passes(site):
            flat = gated(site, y[tangent], gate).to(e.dtype)
            phi = site.pattern.fold(flat)
            B = matrix(self.step, site, flat.shape[1], e)
            if self.from_ == "momentum":
                moved = self.step.pool.sum(phi.t() @ self.tangents[p].reshape(len(phi), -1)) / self.rows[site.name]
                B.lerp_(moved / scale, self.rate / len(self._passes(site)))
                continue
            weight = 1 / self.rows[site.name] if self.from_ == "outputs" else 1 / self._total
            B += (self._sizes[p] / scale * weight) * self.step.pool.sum(phi.t() @ self._wrong(p, len(phi)))

    def _passes(self, site: Site) -> list[tuple[int, int, Tensor]]:
        """(pass, tangent, σ) of the passes that carried a site's directions."""
        scales = self.seen.scales[site.name]
        return [(p, self.seen.passes[p][0], scales[self.seen.passes[p][0]]) for p in self.seen.rows(site)]

    def _wrong(self, p: int, rows: int) -> Tensor:
        """What the predictor is fitted to, (rows, columns of B): the residual, as `from_` weighs it."""
        e, residual = self.error.flat, self.residuals[p]
        if self.from_ == "loss":
            residual = (residual * e).sum(1, keepdim=True) * e
        residual = residual.reshape(rows, -1)
        return residual * self._power(rows)[:, None] if self.from_ == "weighted" else residual

    def _power(self, rows: int) -> Tensor:
        """`|e|²` of every sample, or of every position."""
        return self.error.flat.reshape(rows, -1).square().sum(1)

    def _step_size(self, p: int) -> Tensor:
        """`μ` of `learn`."""
        pool, n, tiny = self.step.pool, self.step.options.tangents, torch.finfo(self.error.flat.dtype).tiny
        samples: Tensor | float = float(self.samples)
        if self.from_ in ("weighted", "loss"):
            power = self._power(self.own)
            self._total = pool.sum(power.sum()).clamp_min(tiny)
            samples = self._total.square() / pool.sum(power.square().sum()).clamp_min(tiny)
        trace = pool.sum(self.traces[p])
        return self.rate / (self.largest[p] + trace / (samples * n)).clamp_min(tiny) / n


def gated(site: Site, y: Tensor, gate: Tensor | None) -> Tensor:
    """`φ = D y`, (batch, d)."""
    flat = wide(site.flat(y))
    return flat if gate is None else flat * gate


def _add_to(sums: dict[int, Tensor], key: int, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


def _largest(learned: dict[str, Tensor], phi: Tensor, pool: Pool, samples: int) -> Tensor:
    """Largest eigenvalue of `φᵀφ / b`, by power iteration that goes on from step to step."""
    v = learned.get("v")
    if v is None or v.shape[0] != phi.shape[1]:
        v = pool.sum(phi.abs().sum(0)) + 1e-6
    for _ in range(2):
        v = v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(phi.dtype).tiny)
        v = pool.sum(phi.t() @ (phi @ v)) / samples
    keep(learned, "v", v)
    return torch.linalg.vector_norm(v)


# --- the pass ------------------------------------------------------------------------------------------------


class _Forward:
    """The pass whose gradient is wanted: outputs, gates, the chain rule one site up, and the way to the parameters."""

    def __init__(self, step: Step, seen: Measurement | None, graph: bool) -> None:
        self.step = step
        self.graph: CutGraph | None = None
        self.records: Records = {}
        if graph:
            self.graph = step.cut_graph()
            self.outputs = self.graph.outputs
        elif seen is not None:
            self.records, self.outputs = seen.records, seen.outputs
        else:
            self.outputs = self._plain()
        self._gates: dict[str, Tensor | None] = {}
        self._exact: dict[str, Tensor] = {}  # gradients of the parameters below the top, met on the way down

    def _plain(self) -> Any:
        if walked := self.step.walk():
            for site, x, s in walked.stops:
                gate = chain.gate(site, s, self.step.scratch, f"gate/{site.name}", walked)
                self.records[site.name] = Record(x, x._version, s, gate=gate)
            return walked.outputs

        def keep(site: Site, x: Any, s: Tensor) -> Tensor:
            self.records[site.name] = self.step.record(site, x, s)
            return s

        with self.step.one_pass(), torch.no_grad(), Watch(self.step.layout, keep):
            return self.step.task.outputs()

    def output(self, site: Site) -> Tensor:
        """`s`, in its own shape."""
        if self.graph is not None:
            return self.graph.above[site.name].detach()
        s = self.records[site.name].s
        assert s is not None
        return s

    def size(self, site: Site) -> int:
        return site.flat(self.output(site)).shape[1]

    def gate(self, site: Site) -> Tensor | None:
        """`D`, (batch, d)."""
        if self.graph is None:
            return self.records[site.name].gate
        if site.name not in self._gates:
            self._gates[site.name] = gate_at(site, self.output(site))
        return self._gates[site.name]

    def exact_tops(self, error: OutputError) -> Values:
        """The gradient at sites with nothing above, and at those that the batch shares."""
        if self.graph is None:
            return {site.name: error.exact for site in self.step.layout.sites if site.top}
        sites = [site for site in self.step.layout.sites if not predicted(site)]
        leaves = [self.graph.above[site.name] for site in sites]
        return self._pull({}, error, sites, leaves)

    def chain(self, h: Values, error: OutputError) -> Values:
        """`Σ_j W̃_ijᵀ h_j` at every site: one hop of the chain rule, exact at the output."""
        if self.graph is not None:
            sites = list(self.step.layout.sites)
            known = h | self.exact_tops(error)
            exact = () if self._exact else self.step.layout.below_tops
            return self._pull(known, error, sites, [self.graph.above[site.name] for site in sites], exact)
        g = {}
        above = dict(h)
        above.update(self.exact_tops(error))
        for site in self.step.layout.sites:
            if site.top:
                g[site.name] = above[site.name]
                continue
            assert site.linear is not None
            value = above[site.above[0]] @ site.linear.weight.detach().to(error.flat.dtype)
            gate = self.gate(site)
            g[site.name] = value if gate is None else value.mul_(gate)
        return g

    def _pull(
        self, h: Values, error: OutputError, sites: list[Site], leaves: list[Tensor], parameters: Sequence[str] = ()
    ) -> Values:
        """One cut backward pass from the predictions and the output error to the leaves, and to some parameters."""
        assert self.graph is not None
        layout = self.step.layout
        ends = [self.graph.below[name] for name in h]
        seeds = [layout[name].unflat(value, self.graph.below[name]) for name, value in h.items()]
        for end, part in zip(tensors(self.graph.outputs), error.parts, strict=True):
            if end.requires_grad:
                ends.append(end)
                seeds.append(part.to(end.dtype))
        own = [layout.members.parameters[name] for name in parameters]
        grads = torch.autograd.grad(ends, [*leaves, *own], seeds, retain_graph=True, allow_unused=True)
        for name, grad in zip(parameters, grads[len(leaves) :], strict=True):
            if grad is not None:
                self._exact[name] = grad
        return {
            site.name: site.flat(torch.zeros_like(leaf) if grad is None else grad)
            for site, leaf, grad in zip(sites, leaves, grads[: len(leaves)], strict=True)
        }

    def finish(self, g: Values, seen: Measurement | None, error: OutputError) -> Estimate:
        """From the estimates at the sites to the parameters."""
        step = self.step
        losses = error.losses if seen is None else seen.losses
        batch = len(losses)
        if self.graph is not None:
            grads = self._through_graph(g, batch)
        else:
            grads = step.pull_back(lambda site, s: self._share(site, g, batch), self.records)
        jvp = losses.new_zeros(0, batch) if seen is None else seen.jvp
        result = Estimate(losses.mean(), grads, jvp, losses=losses)
        if step.detail:
            result.site_grads = {site.name: self._shaped(site, g) for site in step.layout.sites}
            if seen is not None:
                result.directions = {n: r.y for n, r in seen.records.items() if r.y is not None}
        return result

    def _share(self, site: Site, g: Values, batch: int) -> Tensor:
        """The estimate of the mean loss's gradient; it takes the place of `g` where that is not needed any more."""
        value = self._shaped(site, g)
        ours = predicted(site) and value.is_contiguous() and not self.step.detail
        return value.div_(batch) if ours else value / batch

    def _shaped(self, site: Site, g: Values) -> Tensor:
        return site.unflat(g[site.name], self.output(site))

    def _through_graph(self, g: Values, batch: int) -> dict[str, Tensor]:
        assert self.graph is not None
        layout = self.step.layout
        known = {name: grad / batch for name, grad in self._exact.items()}
        names = [name for name in layout.reached if name not in known]
        sites = [layout[name] for name in g]
        sites = [site for site in sites if not site.top or any(name not in known for name in site.parameters)]
        ends = [self.graph.below[site.name] for site in sites]
        seeds = [site.unflat(g[site.name] / batch, end) for site, end in zip(sites, ends, strict=True)]
        if layout.tail:
            ends.append(self.graph.losses)
            seeds.append(torch.full_like(self.graph.losses, 1 / batch))
        own = [layout.members.parameters[name] for name in names]
        grads = torch.autograd.grad(ends, own, seeds, allow_unused=True) if own else ()
        return known | {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def part_of(step: Step, fraction: float) -> Step:
    """The same step on the first samples of the batch; it leaves random state and buffers as they are."""
    batch = step.batch()
    rows = max(1, round(fraction * batch))
    walked = None if step.walked is None else step.walked.first(rows)
    scratch = step.scratch.part("part")
    part = replace(step, task=step.task.rows(rows, batch), detail=False, walked=walked, scratch=scratch)
    if step.noise.rows is not None:
        start = step.noise.rows.start
        part.noise = Noise(step.noise.generator, slice(start, start + part.batch()), step.noise.total)
    if step.layout.stochastic or step.layout.mutates:
        part.continue_after(Snapshot(step.task.model))
    return part
