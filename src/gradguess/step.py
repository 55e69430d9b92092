"""One step of the engine: the passes that every method is made of.

sites -> frames (W̃) -> directions -> tangent pass (`measure`) -> estimates -> parameters (`pull_back`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradguess import chain, kernels, streams
from gradguess.errors import InputError
from gradguess.gates import mask
from gradguess.guesses._base import Frame, Guess, Identity, SiteView, apply_together
from gradguess.isolation import Snapshot, untouched
from gradguess.linalg import orthonormal_columns
from gradguess.noise import Noise, SketchNoise
from gradguess.parts import ALONE, Pool
from gradguess.pullback import parameter_gradients
from gradguess.scratch import NONE, Scratch
from gradguess.sites import Layout, LayoutChanged, Site, Watch
from gradguess.streams import beside, join, mark
from gradguess.tangent import Carried, Direction, carry, formula_kernels
from gradguess.task import Task
from gradguess.upstream import ClosedForm, CutGraph, Upstream

TOGETHER = 2048  # samples, over sites, whose directions are drawn at once
PROBE_ROWS = 32  # samples on which the basis of a site without closed form is sketched

Cache = dict[str, dict[str, Tensor]]
Cotangent = Callable[[Site, Tensor | None], Tensor]
Observe = Callable[[int, Site, Tensor, Tensor, Tensor], None]  # pass, site, output s, direction y, scale σ


@dataclass(frozen=True)
class Options:
    """How directions are measured and turned into gradients; the same for every guess."""

    tangents: int = 1
    isolate: bool = False  # one tangent per site: sites cause each other no noise
    memory: Literal["store", "replay"] = "store"
    coupling: Literal["sample", "batch"] = "sample"  # "batch": for layers that mix samples
    balance: bool = False  # scale each site's directions to the tangent that arrives from below

    def __post_init__(self) -> None:
        if not isinstance(self.tangents, int) or self.tangents < 1:
            raise InputError(f"tangents: expected a whole number of at least 1, found {self.tangents!r}.")
        if self.memory not in ("store", "replay"):
            raise InputError(f"memory: expected 'store' or 'replay', found {self.memory!r}.")
        if self.coupling not in ("sample", "batch"):
            raise InputError(f"coupling: expected 'sample' or 'batch', found {self.coupling!r}.")


@dataclass
class Record:
    """What a pass keeps of a site until the directional derivative is known."""

    x: Any
    version: int  # of x, to notice that it was changed in place
    s: Tensor | None  # the output, where the method asked for it
    y: Tensor | None = None  # (tangents, *s.shape)
    gate: Tensor | None = None  # with s: computed at once, since an in-place activation changes s
    drawn: torch.cuda.Event | None = None  # on a GPU: when y is there
    inside: bool = False  # all of y passes the gate
    held: Any = None  # on a GPU: what is in use beside the main line, whose memory is not free until `join`

    def input(self, site: Site) -> Any:
        if isinstance(self.x, Tensor) and self.x._version != self.version:
            raise InputError(
                f"The input of {site.name!r} was changed in place after the layer had read it. Write x = x + y "
                "instead of x += y, or use memory='replay'."
            )
        return self.x


Records = dict[str, Record]


@dataclass
class Measurement:
    """What the tangent passes saw. `jvp` is (passes, batch): one pass per tangent, or per tangent and site."""

    losses: Tensor
    jvp: Tensor
    records: Records
    outputs: Any
    output_tangents: list[list[Tensor]]  # per pass
    passes: list[tuple[int, str | None]]  # per pass: the tangent, and the one site it was for (None: all)
    scales: dict[str, list[Tensor]]  # per site and tangent: the σ by which the direction was scaled, if any

    def rows(self, site: Site) -> list[int]:
        """The passes that carried the directions of a site."""
        return [i for i, (_, name) in enumerate(self.passes) if name in (None, site.name)]

    def of(self, site: Site) -> Tensor:
        """The directional derivatives that concern a site, (tangents, batch): `c/σ`, so that `ĝ = (c/σ) y`."""
        rows = self.rows(site)
        c = self.jvp if len(rows) == len(self.passes) else torch.stack([self.jvp[row] for row in rows])
        return c / torch.stack(self.scales[site.name])[:, None] if site.name in self.scales else c

    def injected(self, site: Site) -> Tensor | None:
        """The directions as they were carried, `σ y`: (tangents, *s.shape)."""
        y = self.records[site.name].y
        if y is None or site.name not in self.scales:
            return y
        return y * torch.stack(self.scales[site.name]).reshape(-1, *[1] * (y.dim() - 1)).to(y.dtype)


@dataclass
class Step:
    """Everything one step may use: the batch, the layout, the noise, and the state kept between steps."""

    task: Task
    layout: Layout
    noise: Noise
    options: Options = field(default_factory=Options)
    cache: Cache = field(default_factory=dict)  # what guesses keep between steps
    learned: Cache = field(default_factory=dict)  # what feedback has learned
    count: int = 0
    detail: bool = True  # keep directions and site gradients for the caller
    pool: Pool = ALONE  # the processes that share the batch
    share: float = 1.0  # of this part in the whole batch
    whole: Task | None = None  # the batch that the task is a part of
    moments: Mapping[str, Tensor] = field(default_factory=dict)  # mean squared gate over the whole batch, (d,)
    fresh: set[str] = field(default_factory=set)  # sites whose cache is up to date
    scratch: Scratch = NONE  # memory that the next step will use again
    walked: chain.Walked | None = None  # the plain pass of a chain, if it was run already

    def __post_init__(self) -> None:
        self._passes = 0
        self._before: Snapshot | None = None
        self._graph: CutGraph | None = None

    # --- passes ----------------------------------------------------------------------------------------------

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A pass over the model. Every pass of a step sees the same dropout masks; buffers are written once."""
        first = self._passes == 0
        self._passes += 1
        touchy = self.layout.stochastic or self.layout.mutates
        if not touchy:
            yield
        elif first:
            self._before = Snapshot(self.task.model, buffers=False)
            yield
        else:
            assert self._before is not None
            now = Snapshot(self.task.model, random=False)
            self._before.restore_random()
            yield
            now.restore_buffers()

    def cut_graph(self, task: Task | None = None) -> CutGraph:
        """A pass with a reverse graph that is cut at every site. On another task it leaves no trace."""
        with self.one_pass() if task is None else self._aside(), formula_kernels(self.task.model):
            return CutGraph(task or self.task, self.layout)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A pass that does not count: the buffers are for the whole batch to write."""
        with untouched(self.task.model):
            if self._before is not None:
                self._before.restore_random()
            yield

    def prepare(self, guess: Guess) -> None:
        """Run the cut graph beforehand if the guess needs products with `W̃` that have no closed form."""
        general = [s for s in self.layout.sites if self._guessed(s) and s.linear is None]
        if guess.reads == "always" and general:
            self._graph = self.cut_graph()
        elif guess.reads == "refresh" and any(self._due(guess, site) for site in general):
            self._graph = self.cut_graph(self._probe())

    def _probe(self) -> Task:
        """The first samples of the batch, or all of it where the batch cannot be cut or its samples mix."""
        task = self.whole or self.task
        if not self.layout.sliceable or self.options.coupling == "batch":
            return task
        batch = batch_of(task)
        return task.rows(min(PROBE_ROWS, batch), batch)

    def batch(self) -> int:
        """The number of samples, read off the first input."""
        return batch_of(self.task)

    def again(self, **changes: Any) -> Step:
        """The same step with other options; its passes repeat those made so far: same masks, no buffer written."""
        twin = replace(self, **changes)
        twin._before, twin._passes = self._before, self._passes
        return twin

    def continue_after(self, before: Snapshot) -> None:
        """Treat every pass of this step as a repetition of one that started from `before`."""
        self._before, self._passes = before, 1

    # --- frames and directions -------------------------------------------------------------------------------

    @staticmethod
    def _guessed(site: Site) -> bool:
        """At the top of the network, and where the batch shares one output, directions are N(0, I)."""
        return not site.top and site.batch_dim is not None

    def _due(self, guess: Guess, site: Site) -> bool:
        if site.name in self.fresh:
            return False
        return not self.cache.get(site.name) or self.count % max(1, guess.refresh) == 0

    def frame(self, guess: Guess, site: Site, s: Tensor, gate: Tensor | None = None) -> Frame:
        """The guess's map from white noise to directions at this site, for this batch. `gate`: if known already."""
        flat = site.flat(s)
        if flat.dtype in (torch.bfloat16, torch.float16):
            flat = flat.float()
        if not self._guessed(site):
            return Identity(flat)
        self._check_cache(site, flat.shape[1])
        due = self._due(guess, site)
        with full_precision(flat.device):
            view = SiteView(
                name=site.name,
                output=flat,
                gate=site.gate(flat) if gate is None and site.gate is not None else gate,
                upstream=lambda gate: self._upstream(site, flat, gate),
                cache=self.cache.setdefault(site.name, {}),
                due=due,
                noise=self._sketch_noise(),
                binary=site.gate is mask,
                memo=self.scratch.memo(site.name),
            )
            frame = guess.frame(view)
            if due and self.pool.size > 1 and view.cache:
                self.pool.agree(list(view.cache.values()))
                frame = guess.frame(replace(view, due=False))
        self.fresh.add(site.name)
        return frame

    def _check_cache(self, site: Site, d: int) -> None:
        """A basis of another size (a longer sequence, a larger image) is of no use: find all of them again."""
        cached = self.cache.get(site.name, {})
        if any(cached[key].shape[0] != d for key in ("basis", "start") if key in cached):
            self.cache.clear()
            raise LayoutChanged

    def _upstream(self, site: Site, flat: Tensor, gate: Tensor | None) -> Upstream:
        if site.linear is not None:
            return ClosedForm(site.linear.weight.detach().to(flat.dtype), gate, self.moments.get(site.name))
        assert self._graph is not None
        return self._graph.upstream(site)

    def _sketch_noise(self) -> Noise:
        """A stream of its own: a refresh must not shift the numbers that directions are drawn from."""
        return SketchNoise(self.noise.generator.device, 0x5EED + self.count)

    def draw(self, guess: Guess, site: Site, s: Tensor) -> Tensor:
        """All directions of this step at a site: (tangents, *s.shape)."""
        held = site.gate is mask and s.dim() == 2 and s.dtype in (torch.float32, torch.float64) and self.scratch.lasting
        gate = chain.gate(site, s, self.scratch, "gate") if held else None
        frame = self.frame(guess, site, s, gate)
        with full_precision(s.device):
            y = frame.apply(self._white(site, frame, s.device))
        return torch.stack([site.unflat(part, s) for part in y]) if len(y) > 1 else site.unflat(y[0], s)[None]

    def _white(self, site: Site, frame: Frame, device: torch.device) -> Tensor:
        """White noise for all tangents of a site: (tangents, batch, latent)."""
        count = self.options.tangents
        if site.batch_dim is None:
            z = self.noise.normal((count, 1, frame.latent), frame.dtype, device)
        else:
            z = self.noise.batched(count, frame.batch, frame.latent, frame.dtype, device)
        return spread(z) if count > 1 and frame.orthonormal else z

    # --- the tangent pass ------------------------------------------------------------------------------------

    def record(self, site: Site, x: Any, s: Tensor | None, y: Tensor | None = None) -> Record:
        """Keep what `pull_back` will need: the input only where the layer's rule is a closed form."""
        x = x if self.layout.closed else None
        gate = None if s is None else gate_at(site, s)
        return Record(x, x._version if isinstance(x, Tensor) else 0, s, y, gate)

    def measure(
        self,
        guess: Guess,
        keep_outputs: bool = False,
        only: Callable[[Site], bool] = lambda site: True,
        balance: bool = False,
        watch: Observe = lambda p, site, s, y, scale: None,
    ) -> Measurement:
        """Draw directions at the sites for which `only` holds, and carry them to the losses.

        With `keep_outputs` the records hold every site's output as well. With `balance` every site's direction is
        scaled (one number for the batch) so that it weighs as much in the derivative as those of the sites below.
        `watch` sees each direction that is so carried, with its σ.
        """
        balance = balance or self.options.balance
        records: Records = {}
        scales: dict[str, list[Tensor]] = {}
        keep = self.options.memory == "store" or self.detail
        self.prepare(guess)
        seen = []
        passes = self._schedule(only)
        chained = self._walk(guess, only, keep_outputs, records) if self.chained() else None
        for p, (tangent, chosen) in enumerate(passes):
            if not keep:
                self.noise.rewind()

            def scaled(
                site: Site, y: Tensor | None, t: Tensor | None, tangent: int = tangent, chosen: str | None = chosen
            ) -> Tensor | None:
                if y is None or chosen not in (None, site.name):
                    return None
                if not balance:
                    return y[tangent]
                scale = _match(y[tangent], t, sum(len(done) > tangent for done in scales.values()), self.pool)
                scales.setdefault(site.name, []).append(scale)
                return y[tangent] * scale.to(y.dtype)

            def direction(
                site: Site, x: Any, s: Tensor, t: Tensor | None, p: int = p, i: int = tangent, scaled: Any = scaled
            ) -> Tensor | None:
                record = records.get(site.name)
                if record is None:
                    y = self.draw(guess, site, s) if only(site) else None
                    if keep:
                        records[site.name] = self.record(site, x, s if keep_outputs or self.detail else None, y)
                else:
                    y = record.y
                carried = scaled(site, y, t)
                if y is not None and carried is not None and balance:
                    watch(p, site, s, y[i], scales[site.name][-1])
                return carried

            if chained is not None:

                def known(site: Site, t: Tensor | None, scaled: Any = scaled) -> Tensor | None:
                    record = records[site.name]
                    if record.drawn is not None:
                        join(self.noise.generator.device, record.drawn)
                    return scaled(site, record.y, t)

                inside = {name for name, record in records.items() if record.inside}
                seen.append(chain.carry(self.task, *chained, known, self.scratch, inside))
                continue
            with self.one_pass():
                seen.append(self._carry(direction))
        if chained is not None:
            join(self.noise.generator.device)
            for record in records.values():
                record.held = record.drawn = None
        jvp = torch.stack([one.jvp for one in seen]) if len(seen) > 1 else seen[0].jvp[None]
        first, tangents = seen[0], [one.output_tangents for one in seen]
        return Measurement(first.losses, jvp, records, first.outputs, tangents, passes, scales)

    def _carry(self, direction: Direction) -> Carried:
        if self._rowwise():
            return chain.carry_along(self.task, self.layout, direction, self.scratch)
        return carry(self.task, self.layout, direction)

    def chained(self) -> bool:
        """Can the passes be written down in closed form, and may the plain one be kept?"""
        return self.options.memory == "store" and self._plain_chain()

    def _rowwise(self) -> bool:
        """Can a pass that keeps nothing be run layer by layer, without calling the model?"""
        return not self.detail and self._plain_chain() and chain.runs_itself(self.task, self.layout)

    def _plain_chain(self) -> bool:
        if not self.layout.chain:
            return False
        weight = self.layout.sites[0].module.weight
        plain = weight.dtype in (torch.float32, torch.float64)
        return plain and not torch.is_autocast_enabled(weight.device.type)  # type: ignore[arg-type]

    def walk(self, act: chain.Act = lambda site, x, s: None) -> chain.Walked | None:
        """The plain pass of a chain without calling the model, where that may be done and nobody looks at it."""
        if self.walked is not None:
            for stop in self.walked.stops:
                act(*stop)
        elif self.chained() and self._rowwise():
            with self.one_pass():
                self.walked = chain.walk(self.task, self.layout, self.scratch, act)
        return self.walked

    def _walk(
        self, guess: Guess, only: Callable[[Site], bool], keep_outputs: bool, records: Records
    ) -> tuple[list[tuple[Site, Tensor]], Any]:
        """A plain pass that fills the records; the directions of a few sites at a time are drawn together."""
        frames: dict[str, Frame] = {}
        white: dict[str, Tensor] = {}
        kept, device = keep_outputs or self.detail, self.noise.generator.device

        def draw() -> None:
            drawn = apply_together(list(frames.values()), list(white.values()), list(frames), self.scratch)
            for name, y in zip(frames, drawn, strict=True):
                records[name].y, records[name].drawn = y, mark(device)
                records[name].inside = frames[name].inside
                records[name].held = (frames[name], white[name]) if y.is_cuda else None
            frames.clear()
            white.clear()

        def meet(site: Site, x: Tensor, s: Tensor) -> None:
            name = site.name if kept else str(len(frames))  # gates that are not kept make room for the next
            gated = kept or only(site)
            gate = chain.gate(site, s, self.scratch, f"gate/{name}", self.walked) if gated else None
            records[site.name] = Record(x, x._version, s if kept else None, gate=gate if kept else None)
            if only(site):
                frame = frames[site.name] = self.frame(guess, site, s, gate)
                white[site.name] = self._white(site, frame, s.device)
            if s.is_cuda or sum(frame.batch for frame in frames.values()) >= TOGETHER:
                draw()

        if device.type == "cuda" and (walked := self.walk()):
            *others, top = walked.stops
            # next to each other, but not next to the products of a pass: those fill a GPU
            for line, stop in enumerate((top, *others), start=streams.DRAWS):
                with beside(device, line):
                    meet(*stop)
            return [(site, x) for site, x, _ in walked.stops], walked.outputs
        if walked := self.walk(meet):
            draw()
            return [(site, x) for site, x, _ in walked.stops], walked.outputs

        stops: list[chain.Stop] = []

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            stops.append(chain.Stop(site, x, s[0].clone()))
            meet(site, x, s)
            return s

        with self.one_pass(), torch.no_grad(), formula_kernels(self.task.model), Watch(self.layout, visit):
            outputs = self.task.outputs()
            chain.check(stops)
            draw()
        return [(stop.site, stop.x) for stop in stops], outputs

    def _schedule(self, only: Callable[[Site], bool]) -> list[tuple[int, str | None]]:
        """(tangent, the one site it is for, or None for all)."""
        tangents = range(self.options.tangents)
        if not self.options.isolate:
            return [(t, None) for t in tangents]
        return [(t, site.name) for t in tangents for site in self.layout.sites if only(site)]

    def weigh(self, site: Site, c: Tensor, y: Tensor, own: bool = False, share: float = 1.0) -> Tensor:
        """`ĝ = c y`, averaged over tangents: the estimate of each sample's own gradient at the site, times `share`.

        Where the batch shares the site's output, or samples mix, `c` is the sum over the batch. With `own`, `y` is not
        needed any more and may be overwritten.
        """
        c = c.to(y.dtype)
        alone = y.shape[0] == 1 and y.dim() == 3 and site.batch_dim == 0 and self.options.coupling == "sample"
        if alone and own and y.is_contiguous() and kernels.usable(y):
            return kernels.weigh(y[0], c[0], share)
        c = c if share == 1 else c * share
        if alone:
            return y[0].mul_(c.t()) if own else c.t() * y[0]
        shape = [1] * (y.dim() - 1)
        if site.batch_dim is None:
            c = c.sum(1)
        else:
            shape[site.batch_dim] = c.shape[1]
            if self.options.coupling == "batch":
                c = self.pool.sum(c.sum(1, keepdim=True)).expand_as(c)
        g = y.mul_(c.reshape(-1, *shape)) if own else c.reshape(-1, *shape) * y
        return g[0] if g.shape[0] == 1 else g.mean(0)

    # --- from sites to parameters ----------------------------------------------------------------------------

    def pull_back(self, cotangent: Cotangent, records: Records | None) -> dict[str, Tensor]:
        """Parameter gradients from `cotangent(site, s)`, the estimate at each site (of the batch's mean loss).

        With `records` and closed forms no further pass is needed. Otherwise the pass is replayed and each site's
        own piece of the graph is differentiated as soon as it is complete, then freed.
        """
        gradients = Gradients(self.layout)
        if records and self.layout.closed:
            with torch.no_grad():
                device, lines = self.noise.generator.device, streams.PRODUCTS
                sites = [(lines[i % len(lines)], site) for i, site in enumerate(self.layout.sites)]
                if apart := device.type == "cuda" and self._apart():  # layers need not wait for each other
                    sites.sort(key=lambda at: at[0] == 0)  # nor for the main line, which comes last
                for line, site in sites:
                    record = records[site.name]
                    with beside(device, line) if apart and line else nullcontext():
                        gradients.add_closed(site, record.input(site), cotangent(site, record.s))
                join(device)
        elif self.layout.closed:
            self.visit(lambda site, x, s: gradients.add_closed(site, x, cotangent(site, s)), self.scratch)
        else:
            self._replay_with_graph(gradients, cotangent)
        return gradients.by_name

    def _apart(self) -> bool:
        """Does every parameter belong to one site?"""
        own = [id(parameter) for site in self.layout.sites for parameter in site.module.parameters()]
        return len(set(own)) == len(own)

    def visit(self, act: Callable[[Site, Any, Tensor], Any], scratch: Scratch = NONE) -> Any:
        """A plain pass, `act(site, x, s)` at each site. With `scratch`, `x` and `s` hold until `act` returns."""

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            act(site, x, s)
            return s

        with self.one_pass(), torch.no_grad():
            if self._rowwise():
                return chain.stroll(self.task, self.layout, act, scratch)
            with formula_kernels(self.task.model), Watch(self.layout, visit):
                return self.task.outputs()

    def _replay_with_graph(self, gradients: Gradients, cotangent: Cotangent) -> None:
        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            with torch.no_grad():
                g = cotangent(site, s.detach())
            gradients.add_vjp(site.parameters, s, g)
            return s.detach()

        with (
            self.one_pass(),
            torch.enable_grad(),
            formula_kernels(self.task.model),
            Watch(self.layout, visit),
        ):
            outputs = self.task.outputs()
            if self.layout.tail:
                losses = self.task.losses(outputs)
                gradients.add_vjp(self.layout.tail, losses, torch.full_like(losses, 1 / len(losses)))


def batch_of(task: Task) -> int:
    leaves = tree_leaves(task.inputs)
    return next(int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0)


class Gradients:
    """Sums contributions to each parameter's gradient, under the model's own names."""

    def __init__(self, layout: Layout) -> None:
        self.parameters, self.name_of = layout.members.parameters, layout.members.name_of
        self.by_name: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor) -> None:
        grad = grad.to(self.parameters[name].dtype)
        self.by_name[name] = self.by_name[name] + grad if name in self.by_name else grad

    def add_closed(self, site: Site, x: Any, g: Tensor) -> None:
        dtype = next(parameter.dtype for parameter in site.module._parameters.values() if parameter is not None)
        x = x.to(dtype) if x.is_floating_point() else x
        for parameter, grad in parameter_gradients(site.module, x, g.to(dtype)):
            self.add(self.name_of[id(parameter)], grad)

    def add_vjp(self, names: tuple[str, ...], s: Tensor, g: Tensor) -> None:
        if not names:
            return
        grads = torch.autograd.grad(
            s, [self.parameters[name] for name in names], g, retain_graph=True, allow_unused=True
        )
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                self.add(name, grad)


def gate_at(site: Site, s: Tensor) -> Tensor | None:
    """`D` of a site with output `s`, (batch, d); at least float32."""
    if site.gate is None:
        return None
    flat = site.flat(s)
    return site.gate(flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast; nothing at all where there is none."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _match(y: Tensor, t: Tensor | None, sites_below: int, pool: Pool) -> Tensor:
    """The σ that makes `σ y` as long as one site's share of the tangent `t` that arrives from below.

    Derivatives shrink or grow from layer to layer. Without this, the sites nearest to the loss drown the others: a
    site's estimate has relative variance `Σ_j |g_j|² / |g_i|²`; when all weigh the same it is the number of sites.
    σ depends on the noise of the sites below alone, so the estimate stays as unbiased as it was.
    """
    if t is None or sites_below == 0:
        return y.new_ones((), dtype=torch.promote_types(y.dtype, torch.float32))
    wide = torch.promote_types(y.dtype, torch.float32)
    own, arriving = pool.norm(y, wide), pool.norm(t, wide)
    good = (own > 0) & (arriving > 0)
    return torch.where(good, arriving / (torch.where(good, own, 1.0) * sites_below**0.5), 1.0)


def spread(z: Tensor) -> Tensor:
    """Replace independent draws (n, batch, k) by orthonormal ones scaled by √k: never worse, same covariance.

    More than k draws come in blocks of k.
    """
    k = z.shape[-1]
    blocks = [orthonormal_columns(block.permute(1, 2, 0)).permute(2, 0, 1) for block in z.split(k)]
    return torch.cat(blocks) * k**0.5
