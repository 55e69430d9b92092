"""Learned feedback: directional derivatives teach a predictor of the gradient instead of being spent as updates.

For every site a matrix `B` predicts the gradient from the output error `e = dL/d(outputs)`, which is known after the
forward pass, and the site's gate `D`:

    prediction    h_i = D_i B_i e

`B_i` stands for the transposed Jacobian from the site to the outputs. A tangent pass measures that Jacobian: with
directions `y_i` injected, the outputs move by `u = Σ_i J_i y_i` and the loss by `c = <u, e>`. The predictor is fitted to
what it got wrong by least mean squares (`_learn`). The estimate is one of

    direct       ĝ_i = h_i
    chained      ĝ_i = Σ_j W̃_ijᵀ h_j       over the sites j above, exact at the output: W^T with what was learned in
                                           the place of its noise
    corrected    ĝ_i = h_i + r y_i         with the residual r = c - Σ_i <y_i, h_i>

Related: feedback matrices from forward gradients (Bacho and Chu 2024, FDFA), synthetic gradients (Jaderberg et al.
2017), directional gradients with a learned predictor (Silver et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.errors import InputError
from gradguess.guesses._base import Estimate, Guess, Method, check_count
from gradguess.guesses.backprop import Backprop
from gradguess.isolation import Snapshot
from gradguess.sites import Site, Watch
from gradguess.step import Measurement, Record, Records, Step
from gradguess.task import Task, tensors
from gradguess.upstream import CutGraph

if TYPE_CHECKING:
    from gradguess.step import Cache

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
            samples' errors, the tangent of the "loss" (one number per sample), the "truth" (backpropagated gradients,
            to know the ceiling of the form), or "never".
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
    learn: Literal["outputs", "weighted", "loss", "truth", "never"] = "outputs"
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
        if self.learn not in ("outputs", "weighted", "loss", "truth", "never"):
            raise InputError(
                f"Feedback(learn): expected 'outputs', 'weighted', 'loss', 'truth' or 'never', found {self.learn!r}."
            )
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

    def _teaches(self, count: int) -> bool:
        return self.learn not in ("never", "truth") and count % self.every == 0

    def run(self, step: Step) -> Estimate:
        teach = self._teaches(step.count)
        step.count //= self.every  # the guess counts the steps that it sees
        seen = self._measure(step) if teach and self.fraction == 1 else None
        forward = _Forward(step, seen, graph=self._needs_graph(step))
        error = OutputError(step.task, forward.outputs)
        correction: Values = {}
        if self.start == "random":
            _start_random(step, forward, error)
        if self.learn == "truth":
            truth = Backprop().run(replace(step, detail=True)).site_grads
            for site in filter(predicted, step.layout.sites):
                regress(step, forward, error, site, site.flat(truth[site.name]), self.rate)
        if seen is not None:
            correction = self._teach(step, forward, seen, error)
        elif teach:
            part = _part_of(step, self.fraction)
            measured = self._measure(part)
            self._teach(part, _Forward(part, measured, graph=False), measured, OutputError(part.task, measured.outputs))
        g = self._estimate(step, forward, error, correction)
        return forward.finish(g, seen)

    def _measure(self, step: Step) -> Measurement:
        return step.measure(self.guess, keep_outputs=True, only=predicted, balance=True)

    def _needs_graph(self, step: Step) -> bool:
        """Must the chain rule go through a cut graph? Not where every piece that is used has a closed form."""
        sites = step.layout.sites
        plain = all(predicted(site) or site.is_output for site in sites)
        chain = self.form != "chained" or all(site.linear is not None for site in sites if not site.top)
        return not (step.layout.closed and plain and chain)

    def _teach(self, step: Step, forward: _Forward, seen: Measurement, error: OutputError) -> Values:
        """Fit the predictor to the measurement; what "corrected" adds to its prediction."""
        lesson = Lesson(step, forward, seen, error)
        added = {}
        if self.form == "corrected":
            h = predict(step, forward, error)
            added = {name: h[name] + lesson.correction(name) for name in h}
        lesson.learn(self.rate, self.learn)
        return added

    def _estimate(self, step: Step, forward: _Forward, error: OutputError, corrected: Values) -> Values:
        g = corrected or predict(step, forward, error)
        if self.form == "chained":
            for _ in range(self.sweeps):
                g = forward.chain(g, error)
            if self.bootstrap:
                for site in filter(predicted, step.layout.sites):
                    regress(step, forward, error, site, g[site.name], self.bootstrap)
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
        self.flat = flatten_outputs(self.parts)  # (batch, C)


def flatten_outputs(parts: list[Tensor]) -> Tensor:
    """(batch, C) from one or several output tensors."""
    flats = [part.reshape(part.shape[0], -1) for part in parts]
    flat = flats[0] if len(flats) == 1 else torch.cat(flats, 1)
    return flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat


# --- the predictor -------------------------------------------------------------------------------------------


def matrix(step: Step, site: Site, d: int, error: Tensor) -> Tensor:
    """`B` of a site, (d, C); zero at first."""
    learned = step.learned.setdefault(site.name, {})
    if "B" not in learned or learned["B"].shape != (d, error.shape[1]):
        learned["B"] = error.new_zeros(d, error.shape[1])
    return learned["B"]


def predict(step: Step, forward: _Forward, error: OutputError) -> Values:
    """`h_i = D_i B_i e` at every site that is predicted."""
    h = {}
    for site in step.layout.sites:
        if predicted(site):
            value = error.flat @ matrix(step, site, forward.size(site), error.flat).t()
            gate = forward.gate(site)
            h[site.name] = value if gate is None else value.mul_(gate)
    return h


def regress(step: Step, forward: _Forward, error: OutputError, site: Site, g: Tensor, rate: float) -> None:
    """Draw `B` towards the least-squares fit of the gradients `g` by `D B e` on this batch."""
    e = error.flat
    B = matrix(step, site, g.shape[1], e)
    gate = forward.gate(site)
    h = e @ B.t()
    wrong = g - (h if gate is None else h * gate)
    moment = e.t() @ e
    ridge = 0.1 * moment.diagonal().mean() + torch.finfo(e.dtype).tiny
    moment = moment + ridge * torch.eye(len(moment), dtype=e.dtype, device=e.device)
    if gate is not None:
        wrong = wrong * gate / gate.square().mean(0).clamp_min(0.1)  # a unit that is mostly off sees fewer samples
    B += rate * torch.linalg.solve_ex(moment, e.t() @ wrong)[0].t()


def _start_random(step: Step, forward: _Forward, error: OutputError) -> None:
    """Random matrices of the scale of a layer, once."""
    for site in filter(predicted, step.layout.sites):
        if "B" not in step.learned.get(site.name, {}):
            d, e = forward.size(site), error.flat
            B = step.noise.normal((d, e.shape[1]), e.dtype, e.device) / d**0.5
            step.learned[site.name] = {"B": B}


class Lesson:
    """One measurement, seen as a regression of the outputs' tangents `u` on the gated directions `φ_i = D_i y_i`."""

    def __init__(self, step: Step, forward: _Forward, seen: Measurement, error: OutputError) -> None:
        self.step, self.seen, self.error = step, seen, error
        self.sites = [site for site in step.layout.sites if predicted(site)]
        self.gates = {site.name: forward.gate(site) for site in self.sites}
        self.residuals = [self._residual(p) for p in range(len(seen.passes))]  # u - Σ_i B_iᵀ φ_i, (batch, C)

    def _phi(self, site: Site, tangent: int) -> Tensor:
        y = self._y(site, tangent)
        gate = self.gates[site.name]
        return y if gate is None else y * gate

    def _y(self, site: Site, tangent: int) -> Tensor:
        y = self.seen.records[site.name].y
        assert y is not None
        return site.flat(y[tangent]).to(self.error.flat.dtype)

    def _in_pass(self, p: int) -> list[Site]:
        name = self.seen.passes[p][1]
        return [site for site in self.sites if name in (None, site.name)]

    def _residual(self, p: int) -> Tensor:
        u = flatten_outputs(self.seen.output_tangents[p])
        for site in self._in_pass(p):
            phi = self._phi(site, self.seen.passes[p][0])
            u = u - self._scale(site, p) * (phi @ matrix(self.step, site, phi.shape[1], self.error.flat))
        return u

    def _scale(self, site: Site, p: int) -> Tensor:
        """σ of the direction that a pass carried."""
        return self.seen.scales[site.name][self.seen.passes[p][0]]

    def correction(self, name: str) -> Tensor:
        """`r y` averaged over tangents, with `r = c - Σ_i <y_i, h_i>` of each sample."""
        site = self.step.layout[name]
        passes = [p for p in range(len(self.seen.passes)) if site in self._in_pass(p)]
        e = self.error.flat
        total = [
            (self.residuals[p] * e).sum(1, keepdim=True) / self._scale(site, p) * self._y(site, self.seen.passes[p][0])
            for p in passes
        ]
        return torch.stack(total).mean(0) if len(total) > 1 else total[0]

    def learn(self, rate: float, from_: str) -> None:
        """One step of least mean squares: `B_i += μ mean_b φ_i rᵀ`.

        The step size is `μ = rate / (λ + K / b)`: λ the largest eigenvalue of the regressors' second moment, K its
        trace over all sites of a pass, b the number of samples. It is the condition under which LMS with Gaussian regressors
        stays stable in the mean square (rate < 2): for W⊥, λ = 1 and μ = rate · b / (b + K).
        """
        e = self.error.flat
        power = e.square().sum(1)
        total = power.sum().clamp_min(torch.finfo(e.dtype).tiny)
        for p, residual in enumerate(self.residuals):
            sites = self._in_pass(p)
            phis = [self._phi(site, self.seen.passes[p][0]) for site in sites]
            samples: Tensor | float = float(len(e))
            weights = 1 / samples
            if from_ == "weighted":
                residual = residual * power[:, None]
                samples = total.square() / power.square().sum().clamp_min(torch.finfo(e.dtype).tiny)
                weights = 1 / total
            elif from_ == "loss":
                residual = (residual * e).sum(1, keepdim=True) * e
                samples = total.square() / power.square().sum().clamp_min(torch.finfo(e.dtype).tiny)
                weights = 1 / total
            trace = sum(phi.square().sum() for phi in phis) / len(e)
            largest = torch.stack([self._largest(site, phi) for site, phi in zip(sites, phis, strict=True)]).max()
            n = self.step.options.tangents
            mu = rate / (largest + trace / (samples * n)).clamp_min(torch.finfo(e.dtype).tiny) / n
            for site, phi in zip(sites, phis, strict=True):
                B = matrix(self.step, site, phi.shape[1], e)
                B += (mu * weights / self._scale(site, p)) * (phi.t() @ residual)

    def _largest(self, site: Site, phi: Tensor) -> Tensor:
        """Largest eigenvalue of `φᵀφ / b`, by power iteration that goes on from step to step."""
        learned = self.step.learned[site.name]
        v = learned.get("v")
        if v is None or v.shape[0] != phi.shape[1]:
            v = phi.abs().sum(0) + 1e-6
        for _ in range(2):
            v = v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(phi.dtype).tiny)
            v = phi.t() @ (phi @ v) / len(phi)
        if learned.get("v") is None or learned["v"].shape != v.shape:
            learned["v"] = v
        else:
            learned["v"].copy_(v)
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

    def _plain(self) -> Any:
        def keep(site: Site, x: Any, s: Tensor) -> Tensor:
            self.records[site.name] = self.step.record(x, s)
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
        if site.name not in self._gates:
            s = site.flat(self.output(site))
            s = s.float() if s.dtype in (torch.bfloat16, torch.float16) else s
            self._gates[site.name] = None if site.gate is None else site.gate(s)
        return self._gates[site.name]

    def exact_tops(self, error: OutputError) -> Values:
        """The gradient at sites with nothing above, and at those that the batch shares."""
        if self.graph is None:
            return {site.name: error.flat for site in self.step.layout.sites if site.top}
        sites = [site for site in self.step.layout.sites if not predicted(site)]
        leaves = [self.graph.above[site.name] for site in sites]
        return self._pull({}, error, sites, leaves)

    def chain(self, h: Values, error: OutputError) -> Values:
        """`Σ_j W̃_ijᵀ h_j` at every site: one hop of the chain rule, exact at the output."""
        if self.graph is not None:
            sites = list(self.step.layout.sites)
            return self._pull(h, error, sites, [self.graph.above[site.name] for site in sites])
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

    def _pull(self, h: Values, error: OutputError, sites: list[Site], leaves: list[Tensor]) -> Values:
        """One cut backward pass from the predictions and the output error to the leaves."""
        assert self.graph is not None
        layout = self.step.layout
        ends = [self.graph.below[name] for name in h]
        seeds = [layout[name].unflat(value, self.graph.below[name]) for name, value in h.items()]
        for end, part in zip(tensors(self.graph.outputs), error.parts, strict=True):
            if end.requires_grad:
                ends.append(end)
                seeds.append(part.to(end.dtype))
        grads = torch.autograd.grad(ends, leaves, seeds, retain_graph=True, allow_unused=True)
        return {
            site.name: site.flat(torch.zeros_like(leaf) if grad is None else grad)
            for site, leaf, grad in zip(sites, leaves, grads, strict=True)
        }

    def finish(self, g: Values, seen: Measurement | None) -> Estimate:
        """From the estimates at the sites to the parameters."""
        step = self.step
        losses = step.task.losses(self.outputs).detach() if seen is None else seen.losses
        batch = len(losses)
        if self.graph is not None:
            grads = self._through_graph(g, batch)
        else:
            grads = step.pull_back(lambda site, s: self._shaped(site, g) / batch, self.records)
        jvp = losses.new_zeros(0, batch) if seen is None else seen.jvp
        result = Estimate(losses.mean(), grads, jvp, losses=losses)
        if step.detail:
            result.site_grads = {site.name: self._shaped(site, g) for site in step.layout.sites}
            if seen is not None:
                result.directions = {n: r.y for n, r in seen.records.items() if r.y is not None}
        return result

    def _shaped(self, site: Site, g: Values) -> Tensor:
        return site.unflat(g[site.name], self.output(site))

    def _through_graph(self, g: Values, batch: int) -> dict[str, Tensor]:
        assert self.graph is not None
        layout = self.step.layout
        names = list(layout.reached)
        own = dict(self.step.task.model.named_parameters())
        ends = [self.graph.below[name] for name in g]
        seeds = [layout[name].unflat(value / batch, self.graph.below[name]) for name, value in g.items()]
        if layout.tail:
            ends.append(self.graph.losses)
            seeds.append(torch.full_like(self.graph.losses, 1 / batch))
        grads = torch.autograd.grad(ends, [own[name] for name in names], seeds, allow_unused=True)
        return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def _part_of(step: Step, fraction: float) -> Step:
    """The same step on the first samples of the batch; it leaves random state and buffers as they are."""
    batch = step.batch()
    part = replace(step, task=step.task.rows(max(1, round(fraction * batch)), batch), detail=False)
    part.continue_after(Snapshot(step.task.model))
    return part
