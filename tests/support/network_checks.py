"""What must hold of every random network: named properties, against dense references by autograd alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import gradguess as gg
from asserts import assert_same_photograph, photograph
from gradguess.guesses import perp_ns
from gradguess.guesses.frames import Frame
from gradguess.linalg.step_polynomials import polynomial
from gradguess.methods import Guessed
from gradguess.methods.run import Plan, refreshed
from gradguess.model.find_sites import lay_out
from gradguess.model.site import Layout, Site
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import choose_pass
from gradguess.step.base import Options, State, Step
from gradguess.step.measure import Drawing, measure
from random_networks import Case
from references import no_trace, visited

SEED = 7  # of the global generators in every pass, and of the directions
DENSE = 40  # numbers of a site up to which its Jacobian is written out
Grads = dict[str, Tensor]


class Broken(AssertionError):
    """A property that does not hold."""


def close(what: str, found: Any, wanted: Any, tolerance: float = 1e-8, size: float = 1.0) -> None:
    """Equal, relative to the largest number (or `size`); dicts by key, where a missing key is zero."""
    if isinstance(wanted, dict):
        size = max([1.0, *(float(v.detach().abs().max()) for v in wanted.values() if v.numel())])
        for key in {**found, **wanted}:
            some = found.get(key, wanted.get(key))
            blank = torch.zeros_like(some)
            close(f"{what} [{key}]", found.get(key, blank), wanted.get(key, blank), tolerance, size)
        return
    if found.shape != wanted.shape:
        raise Broken(f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    if not found.numel():
        return
    found, wanted = found.detach(), wanted.detach()
    error, size = float((found - wanted).abs().max()), max(size, float(wanted.abs().max()))
    if not error <= tolerance * size:
        raise Broken(f"{what}: off by {error:.2e} of {size:.2e}")


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Nothing is left behind. `estimate` and `first_step` set the random state themselves."""
    assert_same_photograph(before | {"random": after["random"]}, after)


# --- references ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A pass with a reverse graph. `below`: site outputs; `above`: the leaves behind them, where it was cut."""

    below: Grads
    above: Grads
    outputs: Any
    losses: Tensor


def run(case: Case, sites: tuple[Site, ...], *, cut: bool) -> Run:
    """Run the model as it is, with the outputs of the sites in view, and cut there or not. Leaves no trace."""
    below: Grads = {}
    above: Grads = {}

    def keep(site: Site, s: Tensor) -> Tensor:
        below[site.name] = s if cut else s.clone()
        above[site.name] = s.detach().requires_grad_() if cut else below[site.name]
        return above[site.name].clone()

    with no_trace(case.model), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        torch.manual_seed(SEED)
        with visited(((site, site.module, site.call, site.slot) for site in sites), keep):
            outputs = case.outputs()
            losses = case.loss_fn(outputs, case.targets)
    return Run(below, above, outputs, losses)


def _grad(ends: Any, leaves: Any, seeds: Any = None, **options: Any) -> list[Tensor]:
    leaves = list(leaves)
    found = torch.autograd.grad(ends, leaves, seeds, retain_graph=True, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def trainable(model: nn.Module) -> Grads:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Reference:
    """Everything that autograd says of a case, with sites at the places of `layout`."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self.case, self.layout, self.sites = case, layout, layout.sites
        self.whole, self.cut = run(case, self.sites, cut=False), run(case, self.sites, cut=True)
        self.batch = len(self.whole.losses)
        names = list(self.whole.below)
        rows = [_grad(loss, self.whole.below.values()) for loss in self.whole.losses]
        # site -> (batch, *output): of each sample's loss with respect to the whole output
        self.sample_grads = {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}
        self.batch_dim = {name: self._batch_dim(name) for name in names}

    def _batch_dim(self, name: str) -> int | None:
        """The dimension along which a sample's loss depends on its own part alone."""
        g = self.sample_grads[name]
        dims = [dim for dim in (0, 1) if dim < g.dim() - 1 and g.shape[dim + 1] == self.batch]
        mixes = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self.case.model.modules())
        if mixes:
            return self.layout[name].batch_dim
        for dim in dims:
            moved = g.movedim(dim + 1, 1)
            others = moved[~torch.eye(self.batch, dtype=torch.bool)]
            if not others.any():
                return dim
        return None

    def parameter_grads(self) -> Grads:
        """Backpropagation."""
        own = trainable(self.case.model)
        return dict(zip(own, _grad(self.whole.losses.mean(), own.values()), strict=True))

    def site_sums(self) -> Grads:
        """d(sum of losses)/ds."""
        return {name: g.sum(0) for name, g in self.sample_grads.items()}

    def to_parameters(self, site_grads: Grads) -> Grads:
        """The vjp of estimates at the sites through the network cut there, and exact behind the last of them."""
        own = trainable(self.case.model)
        names = list(site_grads)
        ends = [self.cut.below[name] for name in names] + [self.cut.losses]
        seeds = [site_grads[name] / self.batch for name in names]
        seeds.append(torch.full_like(self.cut.losses, 1 / self.batch))
        live = [(end, seed) for end, seed in zip(ends, seeds, strict=True) if end.requires_grad]
        return dict(zip(own, _grad([e for e, _ in live], own.values(), [s for _, s in live]), strict=True))

    def chain(self, h: Grads) -> Grads:
        """One hop of the chain rule through the cut network, exact at the output."""
        ends = [self.cut.below[name] for name in h] + [self.cut.losses]
        seeds = [*h.values(), torch.ones_like(self.cut.losses)]
        live = [(end, seed) for end, seed in zip(ends, seeds, strict=True) if end.requires_grad]
        found = _grad([e for e, _ in live], self.cut.above.values(), [s for _, s in live])
        return dict(zip(self.cut.above, found, strict=True))

    def arriving(self, name: str, carried: Grads) -> Tensor:
        """The tangent that arrives at a site from directions at the sites before it."""
        s = self.whole.below[name]
        v = torch.zeros_like(s, requires_grad=True)
        pulled = _grad(s, [self.whole.below[other] for other in carried], v, create_graph=True)
        total = sum((g * y).sum() for g, y in zip(pulled, carried.values(), strict=True))
        return torch.zeros_like(s) if not getattr(total, "requires_grad", False) else _grad(total, [v])[0]

    def flat(self, site: Site, s: Tensor) -> Tensor:
        """(batch, d); (1, d) where the batch shares it."""
        dim = self.batch_dim[site.name]
        return s.reshape(1, -1) if dim is None else s.movedim(dim, 0).reshape(self.batch, -1)

    def jacobian(self, site: Site) -> Tensor:
        """`W̃` of every sample, dense, (batch, m, d): to the next sites, and to the outputs where they are reached."""
        leaf = self.cut.above[site.name]
        others = [self.cut.below[name] for name in self.cut.below if name != site.name]
        ends = [end for end in others if end.requires_grad and self._touches(end, leaf)]
        if self._touches(self.cut.losses, leaf):
            ends += [t for t in tree_leaves(self.cut.outputs) if t.is_floating_point() and t.requires_grad]
        rows = []
        for end in ends:
            for i in range(end.numel()):
                seed = torch.zeros(end.numel())
                seed[i] = 1
                rows.append(self.flat(site, _grad(end, [leaf], seed.to(end.dtype).view(end.shape))[0]))
        return torch.stack(rows, 1)  # rows that belong to other samples are zero

    @staticmethod
    def _touches(end: Tensor, leaf: Tensor) -> bool:
        if not end.requires_grad:
            return False
        return torch.autograd.grad(end.sum(), leaf, retain_graph=True, allow_unused=True)[0] is not None


# --- running the library ---------------------------------------------------------------------------------------

REFUSALS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    (
        "was changed in place after the layer had read it",
        lambda case: bool({"changed input", "in place"} & case.features),
    ),
    (r"pieces all of the model must pass", lambda case: isinstance(case.sites, int)),
    ("None of the modules", lambda case: isinstance(case.sites, list)),
    ("No module with trainable parameters", lambda case: "frozen" in case.features),
    ("does not depend on any trainable parameter", lambda case: "frozen" in case.features),
    (r"_(SpectralNorm|WeightNorm)\) has no forward-mode formula", lambda case: "parametrised" in case.features),
    ("cannot be cut", lambda case: "time first" in case.features),
    ("needs sites that follow one another in a line", lambda case: isinstance(case.method, gg.Feedback)),
)


class Refused(Exception):
    """The library refused, with an error of its own that is expected here."""


@contextmanager
def refusals(case: Case) -> Iterator[None]:
    """Errors of the library's own, where they are expected; all others break a property."""
    try:
        yield
    except gg.GradguessError as error:
        for pattern, expected in REFUSALS:
            if re.search(pattern, str(error)) and expected(case):
                raise Refused(pattern) from None
        raise Broken(f"refused without need: {error}") from error


def estimate(case: Case, method: Any = None, **options: Any) -> gg.Estimate:
    chosen = {key: value for key, value in case.options.items() if key not in ("memory", "chunk")} | options
    source = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    with refusals(case):
        return gg.estimate(
            case.model,
            method or case.method,
            case.loss_fn,
            case.inputs,
            case.targets,
            sites=case.sites,
            generator=source,
            **chosen,
        )


def first_step(case: Case, rows: slice | None = None, place: tuple[int, int] | None = None, **options: Any) -> Any:
    """Gradients of the first step of ForwardGradient, and the object; `.grad` and buffers are put back."""
    before = [(b, b.clone()) for b in case.model.buffers()]
    inputs, targets = case.inputs, case.targets
    if rows is not None:
        cut: Callable[[Tensor], Tensor] = lambda t: t[rows]  # noqa: E731
        inputs, targets = torch.utils._pytree.tree_map(cut, (inputs, targets))
    with refusals(case):
        forward = gg.ForwardGradient(case.model, case.method, sites=case.sites, seed=SEED, **(case.options | options))
        torch.manual_seed(SEED)
        forward(case.loss_fn, inputs, targets, place=place)
    grads = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    for p in case.model.parameters():
        p.grad = None
    after = [b.clone() for b in case.model.buffers()]
    for buffer, value in before:
        buffer.data.copy_(value)
    return grads, forward, after


# --- properties ------------------------------------------------------------------------------------------------


def check(case: Case) -> str:
    """Hold a case against all properties that apply. Returns "ok" or "refused: why"."""
    before = photograph(case.model)
    if not has_reverse_mode(case):
        return without_reverse_mode(case)
    try:
        _check(case)
    except Refused as why:
        return f"refused: {why}"
    finally:
        after = photograph(case.model)
    same(before, after)
    return "ok"


def has_reverse_mode(case: Case) -> bool:
    """Some in-place operations leave a network without backpropagation, and so without references."""
    try:
        run(case, (), cut=False).losses.sum().backward()
    except RuntimeError:
        return False
    finally:
        for p in case.model.parameters():
            p.grad = None
    return True


def without_reverse_mode(case: Case) -> str:
    """Refused, or an estimate by closed forms, or PyTorch's own complaint about the network."""
    try:
        estimate(case)
    except Refused as why:
        return f"refused: {why}"
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return "refused: no reverse mode"
    return "ok"


def _check(case: Case) -> None:
    untouched = photograph(case.model)
    est = estimate(case)
    same(untouched, photograph(case.model))
    task = Task(case.model, case.loss_fn, case.inputs, case.targets)
    layout = lay_out(task, case.sites) if not isinstance(case.method, gg.WeightPerturbation) else None
    if layout is None:
        weight_perturbation(case, est)
    else:
        reference = Reference(case, layout)
        batch_dims(reference)
        close("loss", est.losses, reference.whole.losses)
        if isinstance(case.method, gg.Backprop):
            backpropagation(reference, est)
        elif isinstance(case.method, gg.Feedback):
            feedback(reference, est)
        else:
            guessed(reference, est)
            if case.seed % 3 == 0:
                frames(reference, est)
    paths(case, est, layout)


def weight_perturbation(case: Case, est: gg.Estimate) -> None:
    if "by frequency" in case.features:  # what backpropagation gives such an embedding is not its gradient
        return
    reference = run(case, (), cut=False)
    own = trainable(case.model)
    rows = [_grad(loss, own.values()) for loss in reference.losses]
    g = {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(own)}
    c = sum(y.reshape(len(y), -1) @ g[n].reshape(len(rows), -1).t() for n, y in est.directions.items())
    assert isinstance(c, Tensor)
    close("directional derivative", est.jvp, c)
    mean = {n: (c.mean(1).view(-1, *[1] * (y.dim() - 1)) * y).mean(0) for n, y in est.directions.items()}
    close("estimate: parameters", est.grads, mean)


def backpropagation(reference: Reference, est: gg.Estimate) -> None:
    close("backpropagation: parameters", est.grads, reference.parameter_grads())
    close("backpropagation: sites", est.site_grads, reference.site_sums())


def batch_dims(reference: Reference) -> None:
    for site in reference.sites:
        wanted = reference.batch_dim[site.name]
        if site.batch_dim != wanted and reference.sample_grads[site.name].any():
            if not reference.layout.sliceable:
                raise Refused("which dimension is the batch cannot be seen")
            raise Broken(f"batch dimension of {site.name}: {site.batch_dim}, expected {wanted}")


def directional_derivative(
    reference: Reference, est: gg.Estimate, carried: Grads, isolate: bool, tolerance: float = 1e-8
) -> None:
    """`c_b = Σ_i <y_i, dL_b/ds_i>`, for each pass."""
    terms = torch.stack([y.flatten(1) @ reference.sample_grads[n].flatten(1).t() for n, y in carried.items()], 1)
    close("directional derivative", est.jvp, terms.flatten(0, 1) if isolate else terms.sum(1), tolerance)


def weighed(reference: Reference, site: Site, c: Tensor, y: Tensor, coupling: str) -> Tensor:
    """`c y` averaged over tangents; `c` is (tangents, batch)."""
    dim = reference.batch_dim[site.name]
    if dim is None or coupling == "batch":
        return (c.sum(1).view(-1, *[1] * (y.dim() - 1)) * y).mean(0)
    return (c.view(len(c), *[-1 if i == dim else 1 for i in range(y.dim() - 1)]) * y).mean(0)


def per_site(reference: Reference, est: gg.Estimate, names: list[str], isolate: bool) -> dict[str, Tensor]:
    """The rows of the derivative that concern each site: (tangents, batch)."""
    if not isolate:
        return dict.fromkeys(names, est.jvp)
    split = est.jvp.view(-1, len(names), reference.batch)
    return {name: split[:, i] for i, name in enumerate(names)}


def balanced_scales(reference: Reference, y: Grads, isolate: bool) -> Grads:
    """The σ of every site and tangent, from the definition: σ|y| is one site's share of what arrives from below."""
    tangents = len(next(iter(y.values())))
    scales: Grads = {name: torch.ones(tangents, dtype=torch.float64) for name in y}
    if isolate:
        return scales
    for t in range(tangents):
        carried: Grads = {}
        for name in y:
            if carried:
                size, own = reference.arriving(name, carried).norm(), y[name][t].norm()
                if size > 0 and own > 0:
                    scales[name][t] = size / (own * len(carried) ** 0.5)
            carried[name] = scales[name][t] * y[name][t]
    return scales


def scaled(y: Tensor, scale: Tensor) -> Tensor:
    return y * scale.view(-1, *[1] * (y.dim() - 1))


def guessed(reference: Reference, est: gg.Estimate) -> None:
    case, options = reference.case, reference.case.options
    isolate, coupling = options.get("isolate", False), options.get("coupling", "sample")
    if list(est.directions) != [site.name for site in reference.sites]:
        raise Broken(f"sites: {list(est.directions)}")
    y = est.directions
    scales = {name: torch.ones(len(v), dtype=torch.float64) for name, v in y.items()}
    if options.get("balance"):
        y = estimate(case, balance=False).directions
        scales = balanced_scales(reference, y, isolate)
        close("balance", est.directions, {name: scaled(v, scales[name]) for name, v in y.items()}, 1e-6)
    directional_derivative(reference, est, est.directions, isolate)
    if any((scale < 1e-9).any() for scale in scales.values()):  # what arrives is rounding alone
        return
    c = per_site(reference, est, list(y), isolate)
    wanted = {
        site.name: weighed(reference, site, c[site.name] / scales[site.name][:, None], y[site.name], coupling)
        for site in reference.sites
    }
    close("estimate: sites", est.site_grads, wanted, 1e-6 if options.get("balance") else 1e-8)
    close("estimate: parameters", est.grads, reference.to_parameters(est.site_grads))


def feedback(reference: Reference, est: gg.Estimate) -> None:
    """The first step: matrices are zero, learn once, and predict."""
    case, method, layout = reference.case, reference.case.method, reference.layout
    isolate = case.options.get("isolate", False)
    y, drawn = est.directions, [site.name for site in reference.sites if site.guessed]
    if y:
        if list(y) != drawn:
            raise Broken(f"sites that teach: {list(y)}")
        scales = balanced_scales(reference, y, isolate)
        directional_derivative(reference, est, {n: scaled(v, scales[n]) for n, v in y.items()}, isolate, 1e-6)
    close("estimate: parameters", est.grads, reference.to_parameters(est.site_grads))
    tops = {name: g for name, g in reference.site_sums().items() if not layout[name].above}
    close("feedback: exact at the top", {name: est.site_grads[name] for name in tops}, tops)
    if method.form == "corrected" and y:
        c = per_site(reference, est, drawn, isolate)
        wanted = {n: weighed(reference, layout[n], c[n] / scales[n][:, None], y[n], "sample") for n in drawn}
        close("feedback: corrected", {n: est.site_grads[n] for n in drawn}, wanted, 1e-6)
    if not (method.form == "chained" and method.bootstrap):
        _, forward, _ = first_step(case)
        h = _predictions(reference, forward.learned, est)
        if method.form == "chained":
            g = h
            for _ in range(method.sweeps):
                g = reference.chain(g | {n: v for n, v in reference.site_sums().items() if not layout[n].guessed})
            close("feedback: chained", est.site_grads, g)
        elif method.form == "direct":
            close("feedback: direct", {n: est.site_grads[n] for n in h}, h)
        if y and not isolate and case.options.get("tangents", 1) == 1 and method.fraction == 1:
            _lesson(reference, forward.learned, y, scales)
    if method.form == "chained":
        deep = gg.Feedback(method.guess, form="chained", sweeps=len(reference.sites))
        close("feedback: many sweeps", estimate(case, deep).grads, reference.parameter_grads())


def output_errors(reference: Reference) -> Tensor:
    """`e`, (batch, C): the derivative of the losses with respect to all outputs."""
    free = {id(t): t.detach().requires_grad_() for t in tree_leaves(reference.whole.outputs)}
    leaves, spec = tree_flatten(reference.whole.outputs)
    losses = reference.case.loss_fn(tree_unflatten([free[id(t)] for t in leaves], spec), reference.case.targets)
    return torch.cat([g.flatten(1) for g in _grad(losses.sum(), free.values())], 1)


def gate(reference: Reference, site: Site) -> Tensor:
    """`D`, (batch, d), where one elementwise function follows the site."""
    s = reference.cut.above[site.name].detach()
    d = site.gate_at(s)
    return torch.ones_like(reference.flat(site, s)) if d is None else d


def _predictions(reference: Reference, learned: Any, est: gg.Estimate) -> Grads:
    """`h = D B e` at every guessed site, position by position."""
    e, h = output_errors(reference), {}
    for site in reference.layout.guessed:
        B, s = learned.get(site.name, {}).get("B"), reference.cut.above[site.name]
        d = reference.flat(site, s).shape[1]
        if B is None:
            h[site.name] = torch.zeros_like(s)
            continue
        value = torch.zeros(reference.batch, d, dtype=e.dtype)
        if site.pattern.kind == "full":
            value = e @ B.t()
        else:
            positions = d // site.pattern.features
            for t in range(positions):
                error = e.view(reference.batch, positions, -1)[:, t] if site.pattern.kind == "each" else e
                places = (
                    slice(t, None, positions)
                    if site.pattern.channels_first
                    else slice(t * site.pattern.features, (t + 1) * site.pattern.features)
                )
                value[:, places] = error @ B.t()
        h[site.name] = site.unflat(value * gate(reference, site), s).detach()
    return h


def _lesson(reference: Reference, learned: Any, y: Grads, scales: Grads) -> None:
    """`B_i = μ/σ_i Σ_b |e_b|² φ_b u_bᵀ / Σ_b |e_b|²`, after one lesson from zero."""
    e = output_errors(reference)
    ends = [t for t in tree_leaves(reference.whole.outputs) if t.is_floating_point()]
    v = [torch.zeros_like(end, requires_grad=True) for end in ends]
    live = [(end, seed) for end, seed in zip(ends, v, strict=True) if end.requires_grad]
    pulled = _grad([a for a, _ in live], [reference.whole.below[n] for n in y], [b for _, b in live], create_graph=True)
    total = sum((g * scaled(y[n], scales[n])[0]).sum() for g, n in zip(pulled, y, strict=True))
    if not getattr(total, "requires_grad", False):
        return
    u = torch.cat([t.flatten(1) for t in _grad(total, v)], 1)
    found, wanted, regressors = [], [], []
    for name, direction in y.items():
        site, kind = reference.layout[name], reference.layout[name].pattern.kind
        if "B" not in learned.get(name, {}):
            return
        phi = reference.flat(site, direction[0]) * gate(reference, site)
        errors, moved = e, u
        if kind != "full":
            tokens = phi.unflatten(
                1, (site.pattern.features, -1) if site.pattern.channels_first else (-1, site.pattern.features)
            )
            tokens = tokens.mT if site.pattern.channels_first else tokens  # (batch, positions, features)
            phi = tokens.sum(1) if kind == "shared" else tokens.flatten(0, 1)
            if kind == "each":
                errors, moved = e.reshape(len(phi), -1), u.reshape(len(phi), -1)
        weight = errors.square().sum(1, keepdim=True) / e.square().sum()
        wanted.append(((phi * weight).t() @ moved / scales[name][0]).flatten())
        found.append(learned[name]["B"].flatten())
        regressors.append(phi)
    # μ = rate / (λ + K / b): λ by two power iterations, K the trace over all sites, b the effective number of samples
    power = e.reshape(min(len(phi) for phi in regressors), -1).square().sum(1)
    samples = power.sum().square() / power.square().sum()
    largest, trace = max(_largest(phi) for phi in regressors), sum(phi.square().sum() / len(phi) for phi in regressors)
    B, lesson = torch.cat(found), torch.cat(wanted)
    if lesson.norm() > 1e-9 * max(1.0, float(B.norm())):
        close("feedback: lesson", B, reference.case.method.rate / (largest + trace / samples) * lesson, 1e-6)


def _largest(phi: Tensor) -> Tensor:
    """The largest eigenvalue of `φᵀφ / b`, as far as two power iterations find it."""
    v = phi.abs().sum(0) + 1e-6
    for _ in range(2):
        v = phi.t() @ (phi @ (v / v.norm().clamp_min(1e-300))) / len(phi)
    return v.norm()


# --- frames ----------------------------------------------------------------------------------------------------


class Cubature(Noise):
    """√L e_k in the place of the k-th of L draws: second moments are exact."""

    def normal(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        count, batch, size = shape
        if count != size:  # a search
            return super().normal(shape, dtype, device)
        return (size**0.5 * torch.eye(size, dtype=dtype))[:, None].expand(size, batch, size).clone()

    def batched(self, count: int, batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.normal((count, batch, size), dtype, device)


def frames(reference: Reference, est: gg.Estimate) -> None:
    """The frame at each small site: its covariance is the method's closed form, and `E ĝ = Cov(y) g`."""
    case, layout, guess = reference.case, reference.layout, reference.case.method
    options = Options(coupling=case.options.get("coupling", "sample"))
    plan = Plan(Guessed(guess), case.sites, options, detail=True)
    task = Task(case.model, case.loss_fn, case.inputs, case.targets)
    source = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    state = refreshed(plan, task, [task], layout, source.device, State())
    buffers = [(b, b.clone()) for b in case.model.buffers()]
    mixes = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in case.model.modules())
    for site in layout.sites:
        s = reference.cut.above[site.name].detach()
        d = reference.flat(site, s).shape[1]
        if d > DENSE:
            continue
        torch.manual_seed(SEED)
        step = Step(task, layout, choose_pass(task, layout), Noise(source), options, state)
        frame = Drawing(step, guess).frame(site, s, site.gate_at(s))
        eye = torch.eye(d, dtype=s.dtype)[:, None].expand(d, frame.batch, d)
        covariance = frame.covariance_times(eye.clone()).transpose(0, 1)
        if site.guessed and not mixes:
            covariances(reference, site, guess, state.kept.get(site.name, {}), frame, covariance)
        elif not site.guessed:
            close("covariance: top", covariance, torch.eye(d, dtype=s.dtype).expand_as(covariance))
        y = torch.stack([reference.flat(site, part) for part in est.directions[site.name]])
        if frame.orthonormal:
            close("directions in the image", frame.covariance_times(y.clone()), y, 1e-6)
        for buffer, value in buffers:
            buffer.data.copy_(value)
        if not mixes:
            bias(reference, site, covariance, frame.latent, task, plan, state, source)
        for buffer, value in buffers:
            buffer.data.copy_(value)


def bias(
    reference: Reference,
    site: Site,
    covariance: Tensor,
    latent: int,
    task: Task,
    plan: Plan,
    state: State,
    source: torch.Generator,
) -> None:
    """The mean of the estimates over exact second moments of the noise is `Cov(y) g`."""
    if latent > DENSE or latent == 0:
        return
    options = Options(tangents=latent)
    torch.manual_seed(SEED)
    step = Step(task, reference.layout, choose_pass(task, reference.layout), Cubature(source), options, state)
    drawing = Drawing(step, plan.method.guess)  # type: ignore[attr-defined]
    seen = measure(drawing, lambda other: other is site)
    record = seen.records[site.name]
    assert record.y is not None
    found = seen.weigh(step, site, record.y)
    g = reference.flat(site, reference.site_sums()[site.name])
    wanted = (covariance @ g[..., None])[..., 0]
    close("bias", reference.flat(site, found), wanted, 1e-6)


def covariances(reference: Reference, site: Site, guess: Any, kept: Any, frame: Frame, covariance: Tensor) -> None:
    """`A Aᵀ` against its closed form in the dense Jacobian."""
    W = reference.jacobian(site)
    d, s = W.shape[2], reference.cut.above[site.name].detach()
    eye = torch.eye(d, dtype=W.dtype)
    if isinstance(guess, gg.ActivationPerturbation):
        return close("covariance", covariance, eye.expand_as(covariance))
    if isinstance(guess, gg.WTranspose):
        return close("covariance", covariance, W.mT @ W)
    D = site.gate_at(s)
    if D is not None and site.linear is not None:
        close("Jacobian in closed form", W[:, :, :].mT @ W, _gated_gram(site.linear.weight.detach(), D))
    for b in range(reference.batch):
        found, own = covariance[b], W[b]
        S, Vh = torch.linalg.svd(own)[1:]
        S = torch.nn.functional.pad(S, (0, max(0, d - len(S))))
        rank = int((1e-9 * S[0] < S).sum()) if S[0] > 1e-12 else 0
        if isinstance(guess, gg.WPreconditioned):
            rows = _rows_of(reference, site)
            if rows >= d:
                close("covariance", found, eye, 1e-6)
            elif rank == rows and S[rank - 1] > 1e-5 * S[0]:
                close("covariance", found, Vh[:rank].mT @ Vh[:rank], 1e-6)
        elif isinstance(guess, gg.WPerpNS):
            _newton_schulz(guess, kept, found, S, Vh)
        elif guess.end == "bottom":
            _bottom(guess, found, own, S, Vh, D)
        elif guess.solver == "shared":
            _shared(found, kept["basis"], None if D is None else D[b])
        else:
            k = min(guess.k, rank)
            apart = k == rank or S[k] < 0.8 * S[k - 1]
            unclear = ((1e-15 * S[0] < S) & (1e-5 * S[0] > S))[: guess.k].any()  # is it the rank, or rounding?
            if apart and not unclear:
                exact = guess.solver == "svd" or S[k : k + 1].sum() < 1e-9 * S[0]
                close("covariance", found, Vh[:k].mT @ Vh[:k], 1e-6 if exact else 2e-2)
    return None


def _rows_of(reference: Reference, site: Site) -> int:
    """`m`, the numbers of one sample at the next sites and the output."""
    ends = [reference.cut.below[name] for name in site.above]
    if site.reaches_output:
        ends += [t for t in tree_leaves(reference.cut.outputs) if t.is_floating_point() and t.requires_grad]
    return sum(end.numel() // reference.batch for end in ends)


def _gated_gram(weight: Tensor, D: Tensor) -> Tensor:
    gated = weight * D[:, None, :]
    return gated.mT @ gated


def _newton_schulz(guess: gg.WPerpNS, kept: Any, found: Tensor, S: Tensor, Vh: Tensor) -> None:
    scale = kept["scale"]
    if guess.threshold == "placed":
        scale = scale * (S.norm() / kept["size"]).clamp_min(0.1) ** kept["slope"]
    if S[0] * perp_ns.MARGIN > 0.99 * scale:  # a sample above the probe: its own norm is found from below
        return
    x = torch.diag(S / scale)
    for _ in range(guess.steps):
        x = x @ polynomial(x.mT @ x, tuple(kept["coefficients"].tolist()))
    close("covariance", found, Vh.mT @ x @ x @ Vh, 1e-6)


def _bottom(guess: gg.WPerp, found: Tensor, own: Tensor, S: Tensor, Vh: Tensor, D: Tensor | None) -> None:
    close("covariance: projector", found @ found, found, 1e-6)
    if guess.solver == "svd":
        k = min(guess.k, len(S))
        if k == len(S) or (S[-k] < 0.8 * S[-k - 1] and S[-k - 1] > 1e-6 * S[0]):
            close("covariance", found, Vh[-k:].mT @ Vh[-k:], 1e-6)
    elif D is not None and bool((D == 0).any()):
        close("covariance: unseen", own @ found, torch.zeros_like(own), 1e-6)


def _shared(found: Tensor, basis: Tensor, D: Tensor | None) -> None:
    """The projector on `D V`."""
    columns = basis if D is None else D[:, None] * basis
    U, S, _ = torch.linalg.svd(columns, full_matrices=False)
    if S[0] == 0:
        return close("covariance", found, torch.zeros_like(found))
    if bool(((1e-4 * S[0] > S) & (1e-12 * S[0] < S)).any()):  # the rank is a matter of rounding
        return None
    U = U[:, 1e-9 * S[0] < S]
    return close("covariance", found, U @ U.mT, 1e-6)


# --- one result, several ways ----------------------------------------------------------------------------------


def paths(case: Case, est: gg.Estimate, layout: Layout | None) -> None:
    """Store = replay = chunks = parts = the estimate."""
    before = photograph(case.model)
    stored, forward, buffers = first_step(case)
    close("estimate = first step", stored, {n: g for n, g in est.grads.items() if n in stored or g.any()})
    one_pass(case, buffers)
    same(before, photograph(case.model))
    replays(case, stored, forward)
    if layout is None:
        return
    if not _splits(case, layout):
        return
    chunked, _, _ = first_step(case, chunk=2)
    close("chunks = whole", chunked, stored, 1e-7)
    guess = case.method
    if isinstance(guess, gg.Guess) and not guess.searches:
        batch = len(est.losses)
        parts = [first_step(case, slice(a, b), (a, batch))[0] for a, b in ((0, 1), (1, batch))]
        total = {name: sum(part[name] for part in parts if name in part) for name in {**parts[0], **parts[1]}}
        close("two places = whole", total, stored, 1e-7)


def replays(case: Case, stored: Grads, forward: gg.ForwardGradient) -> None:
    try:
        replayed, again, _ = first_step(case, memory="replay")
    except Refused:
        return
    close("store = replay", replayed, stored, 1e-7)
    for name, entries in forward.learned.items():
        close("store = replay: learned", dict(again.learned[name]), dict(entries), 1e-6)


def _splits(case: Case, layout: Layout) -> bool:
    """Is the estimate of a batch that of its parts?"""
    if not layout.sliceable or layout.leaves_traces or case.options.get("balance"):
        return False
    if case.options.get("coupling") == "batch" or "by frequency" in case.features:
        return False
    if isinstance(case.method, gg.WPerp) and (case.method.end == "bottom" or case.method.solver == "svd"):
        return False  # where singular values are equal many bases are as good, and rounding picks one
    if isinstance(case.method, gg.WPerp) and case.method.solver == "subspace":
        return all(site.linear is not None for site in layout.guessed)  # see test_chunks_of_a_subspace_on_a_graph
    return not isinstance(case.method, gg.Feedback | gg.WPerpNS)


def one_pass(case: Case, found: list[Tensor]) -> None:
    """After a step buffers are what one pass makes of them."""
    before = [(b, b.clone()) for b in case.model.buffers()]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEED)
        case.losses()
    for i, (buffer, value) in enumerate(before):
        if buffer.is_floating_point():
            close("buffers: one pass", found[i], buffer.detach().clone(), 1e-9)
        buffer.data.copy_(value)
