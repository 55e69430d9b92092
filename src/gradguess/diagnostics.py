"""How good a guess is: bias, variance, covariance, cosine, and the spectrum of the Jacobian above, per site.

With `g_b` the gradient of the *mean* loss at sample `b`'s output (it carries 1/B) and `ĝ_b = c_b y_b` its estimate:

    bias               ‖ mean_b (Cov(y_b) - I) g_b ‖₂
    variance           ‖ mean_b E (g_b - ĝ_b)^∘2 - (mean_b (Cov(y_b) - I) g_b)^∘2 ‖₂
    covariance norm    mean_b ‖Cov(y_b) - I‖_F / d
    overlap            mean_b ‖V_k V_kᵀ g_b‖ / ‖g_b‖ over k, with V_k the top-k right singular vectors of W̃_b

The paper replaces the expectation in the variance by one draw per sample. Here it is exact: `c` and `y` are jointly
Gaussian, so that, element by element,

    E ĝ   = Cov(y) g
    E ĝ^2 = diag Cov(y) · E c² + 2 (Cov(y) g)^2,      E c² = Σ_j g_jᵀ Cov(y_j) g_j over ALL sites j.

Methods that draw no directions at sites (backpropagation, learned feedback) have no covariance. Their bias and variance
come from `draws` estimates, corrected for the noise of so few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradguess.covariance import distance, explicit, variances
from gradguess.errors import InputError
from gradguess.estimate import ForwardGradient, _check_finite, _check_guess, _layout
from gradguess.guesses import Backprop, Estimate, Guess, Method, WeightPerturbation
from gradguess.guesses._base import Frame, check_count
from gradguess.isolation import untouched
from gradguess.noise import Noise
from gradguess.sites import Layout, Site, Sites, Watch
from gradguess.step import Options, Step
from gradguess.tangent import carry
from gradguess.task import LossFn, Task
from gradguess.upstream import ClosedForm, CutGraph, Upstream

PROBE = 32  # samples whose Jacobian is decomposed
DENSE = 1 << 21  # numbers in the largest Jacobian (of one sample) that is decomposed
WORK = PROBE * 512**3  # multiplications in all decompositions of a site; fewer samples above it

Values = dict[str, Tensor]  # site name -> (batch, d)


@dataclass(frozen=True)
class SiteReport:
    """One site (one parameter, for weight perturbation). See the module for the definitions.

    Attributes:
        d: numbers per sample at the site.
        bias, variance: as in the paper, with the gradient of the mean loss.
        covariance_norm: `‖Cov(y) - I‖_F / d`, averaged over the batch; None for a method without a covariance.
        cosine: between one estimate and the true gradient, over the whole batch at once (saturated samples have a
            gradient of zero); 0 if either is zero.
        mean_cosine: the same for the estimate's expectation.
        gradient_norm: `‖d(mean loss)/ds‖_F` over the whole batch.
        rank: numerical rank of `W̃`, averaged over the probe samples.
        singular_values: of `W̃`, d of them with zeros at the end, averaged over the probe samples.
        overlap: `overlap[k - 1]` is the part of the true gradient's norm that lies in the top-k right singular vectors
            of `W̃`, averaged over the probe samples with a gradient; beyond the rank the curve is flat.

    `rank`, `singular_values` and `overlap` are None where `W̃` is not defined (nothing above the site, or an output that
    the batch shares), where it is too large to decompose (above 2²¹ entries per sample), and with `curve=False`.
    """

    d: int
    bias: float
    variance: float
    covariance_norm: float | None
    cosine: float
    mean_cosine: float
    gradient_norm: float
    rank: float | None = None
    singular_values: tuple[float, ...] | None = None
    overlap: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Report(Mapping[str, SiteReport]):
    """A `SiteReport` for every site, by name, in the order of the forward pass."""

    sites: dict[str, SiteReport]

    def __getitem__(self, name: str) -> SiteReport:
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Numbers, lists and None alone, for JSON."""
        return {
            name: {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(site).items()}
            for name, site in self.items()
        }

    def table(self) -> str:
        """All numbers but the curves, as plain text."""
        columns = [f.name for f in fields(SiteReport) if f.name not in ("singular_values", "overlap")]
        rows = [["site", *(name.replace("_", " ") for name in columns)]]
        rows += [[name, *(_shown(getattr(site, key)) for key in columns)] for name, site in self.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        return "\n".join("  ".join(cells) for cells in lines)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def diagnose(
    model: nn.Module,
    guess: Method,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    generator: torch.Generator | None = None,
    *,
    sites: Sites = "auto",
    draws: int = 32,
    curve: bool = True,
    isolate: bool = False,
    coupling: Literal["sample", "batch"] = "sample",
    forward: ForwardGradient | None = None,
) -> Report:
    """Bias, variance and more of one step of `guess` with one tangent, at every site. Writes nothing, holds no state.

    Args:
        model, guess, loss_fn, inputs, targets, generator, sites, isolate, coupling: as in `estimate`; `cosine` is
            that of the estimate which `estimate` returns for the same generator.
        draws: random vectors or estimates where there is no closed form: for methods that draw no directions at
            sites, for W^T above a large layer that is not linear, and for outputs that the batch shares.
        curve: decompose the Jacobian above each site, for rank, singular values and overlap.
        forward: take over what this one has cached and learned (bases, feedback matrices): the report is then of the
            step that it would make next.

    Returns:
        a mapping from site name to `SiteReport`; from parameter name for weight perturbation, which has no sites.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> report = gg.diagnose(model, gg.WPerp(k=2), torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> report["2"].bias, len(report["0"].overlap)  # nothing above the last layer: white noise, no bias
    (0.0, 8)
    """
    _check_guess(guess)
    check_count("draws", draws, least=2)
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    task = Task(model, loss_fn, inputs, targets)
    options = Options(isolate=isolate, coupling=coupling)
    with untouched(model), torch.no_grad():
        bench = _Bench(guess, task, _layout(guess, task, sites), Noise(generator), options, draws, forward)
        if isinstance(guess, WeightPerturbation):
            return Report(bench.by_parameter())
        if not guess.uses_sites:
            raise InputError(f"{guess!r} has neither sites nor a known covariance: there is nothing to diagnose.")
        found = bench.by_frames() if isinstance(guess, Guess) else bench.by_draws()
        return Report({name: replace(site, **bench.spectrum(name)) for name, site in found.items()} if curve else found)


class _Bench:
    """The true gradient of one batch, and what is needed to hold estimates against it.

    Inside, gradients are those of each sample's own loss; `_summary` divides by the batch.
    """

    def __init__(
        self,
        guess: Method,
        task: Task,
        layout: Layout,
        noise: Noise,
        options: Options,
        draws: int,
        forward: ForwardGradient | None,
    ) -> None:
        self.guess, self.task, self.layout, self.noise = guess, task, layout, noise
        self.options, self.draws, self.forward = options, draws, forward
        self.step = self._step()
        self.estimate = self._estimate(self.step)
        assert self.estimate.losses is not None
        self.batch = len(self.estimate.losses)
        with torch.enable_grad():
            self.truth = Backprop().run(self.step)
        self.g = self._at_sites(self.truth)
        self.s = self._outputs()

    def _step(self) -> Step:
        """A step from where `forward` stands, on a copy of what it remembers."""
        cache = {} if self.forward is None else self.forward.cache
        copy = {site: {key: value.clone() for key, value in entries.items()} for site, entries in cache.items()}
        count = 0 if self.forward is None else self.forward.steps
        return Step(self.task, self.layout, self.noise, options=self.options, cache=copy, count=count)

    def _estimate(self, step: Step) -> Estimate:
        found = self.guess.run(step)
        _check_finite(found, "this batch")
        return found

    def _at_sites(self, estimate: Estimate) -> Values:
        return {site.name: site.flat(estimate.site_grads[site.name]).double() for site in self.layout.sites}

    def _outputs(self) -> Values:
        found: Values = {}

        def watch(site: Site, x: Any, s: Tensor) -> Tensor:
            found[site.name] = s.clone()  # what follows may change it in place
            return s

        if self.layout.sites:
            with self.step.one_pass(), Watch(self.layout, watch):
                self.task.outputs()
        return found

    # --- guesses: closed forms -------------------------------------------------------------------------------

    def by_frames(self) -> dict[str, SiteReport]:
        """Moments from each site's frame."""
        assert isinstance(self.guess, Guess)
        estimate = self._at_sites(self.estimate)
        frames = {site.name: self._frame(site) for site in self.layout.sites}
        expected = {name: _covariance_times(frame, self.g[name]) for name, frame in frames.items()}
        energy = self._energies({name: (self.g[name] * expected[name]).sum(-1) for name in frames})
        reports = {}
        for name, frame in frames.items():
            g, mean, s = self.g[name], expected[name], self._flat(self.layout[name])
            diagonal = variances(frame, s, self.noise, self.draws).double()
            square = diagonal * energy[name][:, None] + 2 * mean.square()
            error = g.square() - 2 * g * mean + square  # E (g - ĝ)²
            bias = (mean - g).mean(0)
            norm = distance(frame, s, self.noise, self.draws).mean().item() / g.shape[1]
            variance = error.mean(0) - bias.square()
            reports[name] = _summary(g, estimate[name], mean, bias.norm().item(), variance, norm, self.batch)
        return reports

    def _flat(self, site: Site) -> Tensor:
        flat = site.flat(self.s[site.name])
        return flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat

    def _frame(self, site: Site) -> Frame:
        assert isinstance(self.guess, Guess)
        return explicit(self.step.frame(self.guess, site, self.s[site.name]), self._flat(site))

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

        def direction(site: Site, x: Any, s: Tensor, tangent: Tensor | None) -> Tensor | None:
            return self.noise.normal(s.shape, s.dtype, s.device) if site.batch_dim is None else None

        squares = []
        for _ in range(self.draws):
            with self.step.one_pass():
                squares.append(carry(self.task, self.layout, direction).jvp.double().square())
        return torch.stack(squares).mean(0)

    # --- other methods: draws ------------------------------------------------------------------------------

    def by_draws(self) -> dict[str, SiteReport]:
        """Moments from several estimates; two are enough to see that a method is deterministic."""
        first = self._at_sites(self.estimate)
        totals = {name: _Errors(g) for name, g in self.g.items()}
        drawn = first
        for draw in range(self.draws):
            for name, values in drawn.items():
                totals[name].add(values)
            if draw + 1 == self.draws:
                break
            drawn = self._at_sites(self._estimate(self._step()))
            if draw == 0 and all(torch.equal(drawn[name], value) for name, value in first.items()):
                break
        reports = {}
        for name, g in self.g.items():
            mean, bias, variance = totals[name].moments()
            reports[name] = _summary(g, first[name], mean, bias, variance, None, self.batch)
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
            reports[name] = _summary(g, estimate, g, 0.0, (diagonal * energy + g.square())[0], norm, 1)
        return reports

    # --- the Jacobian above ----------------------------------------------------------------------------------

    def spectrum(self, name: str) -> dict[str, Any]:
        """Rank, singular values and overlap from a dense decomposition for a few samples."""
        site = self.layout[name]
        if site.top or site.batch_dim is None:
            return {}
        W, rows = self._probe_upstream(site)
        size = W.m * W.d
        if size > DENSE or size * len(rows) > PROBE * DENSE:
            return {}
        count = min(PROBE, max(1, WORK // (size * min(W.m, W.d))))
        matrices = W.matrix().expand(len(rows), -1, -1)
        chosen = torch.isin(rows, self.probe[:count])
        return _spectrum(matrices[chosen], self.g[name][rows[chosen]])

    @cached_property
    def probe(self) -> Tensor:
        """The first samples that have a gradient at every site with something above, then those that lack some."""
        silent = [
            (self.g[site.name] == 0).all(1) for site in self.layout.sites if site.batch_dim is not None and site.above
        ]
        return torch.argsort(torch.stack(silent).sum(0), stable=True)[:PROBE]

    def _probe_upstream(self, site: Site) -> tuple[Upstream, Tensor]:
        """`W̃` on the probe samples, and which samples of the batch its rows are."""
        if site.linear is not None:
            s = self._flat(site)[self.probe]
            gate = None if site.gate is None else site.gate(s)
            return ClosedForm(site.linear.weight.detach().to(s.dtype), gate), self.probe
        graph, rows = self._probe_graph
        return graph.upstream(site), rows

    @cached_property
    def _probe_graph(self) -> tuple[CutGraph, Tensor]:
        """A cut graph of the probe samples; of the whole batch where a part of it would behave otherwise."""
        apart = self.layout.sliceable and not self.layout.stochastic and not self.layout.mutates
        if not apart or self.options.coupling == "batch":
            return self.step.cut_graph(), torch.arange(self.batch, device=self.probe.device)
        return self.step.cut_graph(_pick(self.task, self.probe, self.batch)), self.probe


class _Errors:
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


def _covariance_times(frame: Frame, g: Tensor) -> Tensor:
    """`Cov(y) g`, with a power of two taken out, so that small gradients survive the frame's precision."""
    scale = torch.ldexp(torch.ones_like(g[0, 0]), torch.frexp(g.abs().amax()).exponent)
    return frame.covariance_times((g / scale).to(frame.dtype)).double() * scale


def _summary(
    g: Tensor, estimate: Tensor, mean: Tensor, bias: float, variance: Tensor, norm: float | None, batch: int
) -> SiteReport:
    """From the gradient of each sample's own loss to that of the mean loss."""
    return SiteReport(
        d=g.shape[1],
        bias=bias / batch,
        variance=variance.norm().item() / batch**2,
        covariance_norm=norm,
        cosine=_cosine(estimate, g),
        mean_cosine=_cosine(mean, g),
        gradient_norm=g.norm().item() / batch,
    )


def _cosine(a: Tensor, b: Tensor) -> float:
    lengths = (a.norm() * b.norm()).item()
    return (a * b).sum().item() / lengths if lengths else 0.0


def _spectrum(W: Tensor, g: Tensor) -> dict[str, Any]:
    """`W` (n, m, d) and the gradients `g` (n, d) of the same samples."""
    n, m, d = W.shape
    values, curves = g.new_zeros(n, d), g.new_zeros(n, d)
    ranks = g.new_zeros(n)
    for i in range(n):
        alive = (W[i] != 0).any(0)  # closed units have singular value zero: half of them under a ReLU
        _, S, Vh = torch.linalg.svd(W[i][:, alive], full_matrices=False)
        if len(S) == 0:
            continue
        real = S / S[0] > max(m, d) * torch.finfo(W.dtype).eps
        ranks[i], values[i, : len(S)] = real.sum(), S.double()
        inside = ((Vh.double() @ g[i, alive]) * real).square().cumsum(0)  # ‖V_k V_kᵀ g‖²
        curves[i] = inside[-1]
        curves[i, : len(S)] = inside
    lengths = g.square().sum(1)
    seen = lengths > 0
    overlap = (curves[seen] / lengths[seen, None]).clamp_max(1).sqrt().mean(0).tolist() if seen.any() else None
    return {
        "rank": ranks.mean().item(),
        "singular_values": tuple(values.mean(0).tolist()),
        "overlap": None if overlap is None else tuple(overlap),
    }


def _pick(task: Task, rows: Tensor, batch: int) -> Task:
    """The same task on some of its samples."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch:
            return leaf[rows.to(leaf.device)]
        return leaf

    return replace(task, inputs=tree_map(pick, task.inputs), targets=tree_map(pick, task.targets))
