"""What a guess keeps between steps, found anew every `refresh` steps: a function of its own, before the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradguess.backends.policy import full_precision, kept_dtype
from gradguess.guesses.base import SIZED, Guess, SiteView, still_fitting
from gradguess.jacobian import SKETCH, CutGraph, Jacobian
from gradguess.layers.elementwise import mask
from gradguess.model.site import Layout, LayoutChanged, Site, at_least_float32
from gradguess.model.task import Task
from gradguess.noise import SketchNoise
from gradguess.passes import choose_pass
from gradguess.step.base import Kept
from gradguess.step.measure import SEED, jacobian_at
from gradguess.step.parts import Pool

PROBE_ROWS = 32  # samples that a search sees; at most `guess.rows` where a basis has no closed form and is sketched
FEW = 2**18  # numbers at a site: as long as there are no more, a sketch sees more than 32 samples
MANY = 2**22  # where 32 samples would have more, it sees fewer
Found = dict[str, dict[str, Tensor]]  # site name -> name -> tensor


def sketch_seed(count: int) -> int:
    """The seed of the search in step `count`."""
    return SEED + count


@dataclass(frozen=True)
class Search:
    """A search for what a guess keeps.

    Attributes:
        guess, count: the guess, and the number of steps that it has drawn before.
        layout: the sites.
        kept: what was found before.
        parts: the parts of this process's batch, one after the other.
        probe: gives the batch whose first samples are sketched on; with several processes, those of all of them.
        mixes: samples are not independent of each other, so that a batch must not be cut.
        source: of the noise.
        pool: the processes that share the batch.
    """

    guess: Guess
    count: int
    layout: Layout
    kept: Kept
    parts: Sequence[Task]
    probe: Callable[[], Task]
    mixes: bool
    source: torch.Generator | torch.device
    pool: Pool

    def run(self, *, missing_only: bool = False) -> Kept:
        """What is kept from now on."""
        now = self.count % self.guess.refresh == 0 and not missing_only
        due = [s for s in self.layout.guessed if now or s.name not in self.kept] if self.guess.searches else []
        if not due:
            return self.kept
        found = self._below_linear([site for site in due if site.linear is not None])
        found |= self._below_others([site for site in due if site.linear is None])
        for site in due:
            self.pool.agree(list(found[site.name].values()))
        return {**self.kept, **found}

    def _noise(self) -> SketchNoise:
        """Noise with the seed of this search, from its beginning."""
        return SketchNoise(self.source, sketch_seed(self.count))

    def _view(
        self, site: Site, s: Tensor, gate: Tensor | None, jacobian: Callable[[], Jacobian], noise: SketchNoise
    ) -> SiteView:
        """What a search sees of a site with outputs `s`, (samples, d)."""
        warm = still_fitting(self.kept.get(site.name, {}), s.shape[1], s.dtype) or {}
        return SiteView(site.name, s, gate, site.gate is mask, warm, noise, jacobian, site.pattern)

    def _found(self, views: Sequence[SiteView]) -> Found:
        with ExitStack() as stack:
            for device in {view.output.device for view in views}:
                stack.enter_context(full_precision(device))
            found = self.guess.search_all(views)
        # Row by row in memory: products with another order round differently, and a checkpoint would change it.
        return {
            view.name: {k: v.to(kept_dtype(v) if k in SIZED else v.dtype).contiguous() for k, v in values.items()}
            for view, values in zip(views, found, strict=True)
        }

    def _below_linear(self, sites: list[Site]) -> Found:
        """Sites below a linear layer: the mean of the gate's square over the whole batch, and a few samples.

        A batch in one part is searched on as the pass meets its sites, so that nothing of them is kept.
        """
        samples: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        rows: dict[str, int] = {}
        found: Found = {}
        alone = len(self.parts) == 1 and self.pool.size == 1

        def observe(site: Site, x: Any, s: Tensor) -> None:
            if site not in sites:
                return
            flat = at_least_float32(site.flat(s))
            assert site.linear is not None
            if site.linear.in_features != flat.shape[1]:  # inputs with another dimension
                raise LayoutChanged
            squares = None if site.gate is None else site.gate(flat).square().sum(0)
            if alone:
                find(site, flat[:PROBE_ROWS], None if squares is None else squares / len(flat))
                return
            samples.setdefault(site.name, flat[:PROBE_ROWS].clone())
            rows[site.name] = rows.get(site.name, 0) + len(flat)
            if squares is not None:
                sums[site.name] = sums[site.name] + squares if site.name in sums else squares

        def find(site: Site, flat: Tensor, moment: Tensor | None) -> None:
            with torch._C.DisableTorchFunction():  # the rules of the pass end here
                gate = None if site.gate is None else site.gate(flat)
                jacobian = partial(jacobian_at, site, flat, gate, None, moment)
                found.update(self._found([self._view(site, flat, gate, jacobian, self._noise())]))

        for part in self.parts if sites else ():
            choose_pass(part, self.layout, keep=False).aside().plain(observe)
        if sums:
            means = self.pool.sum(torch.cat(list(sums.values()))) / sum(self.pool.counts(rows[sites[0].name]))
            sums = dict(zip(sums, means.split([len(v) for v in sums.values()]), strict=True))
        for name, flat in samples.items():
            find(self.layout[name], flat, sums.get(name))
        return found

    def _below_others(self, sites: list[Site]) -> Found:
        """All other sites: through a cut graph of a few samples, the same however the batch is split."""
        if not sites:
            return {}
        task, vectors, noise, found = self.probe(), SKETCH, self._noise(), Found()
        if self.layout.sliceable and not self.mixes:
            rows, vectors = sketched_samples(task.batch, self.layout.largest(task), self.guess.rows)
            task = task.part(slice(rows), task.batch)

        def settle(graph: CutGraph, met: list[Site]) -> None:
            views = []
            for site in met:
                s = graph.above[site.name].detach()
                flat, jacobian = at_least_float32(site.flat(s)), partial(graph.jacobian, site)
                views.append(self._view(site, flat, site.gate_at(s), jacobian, noise))
            found.update(self._found(views))

        graph = CutGraph(self.layout, vectors=vectors, sites=sites, settle=settle)
        graph.end(*choose_pass(task, self.layout).aside().graph(graph.visit, twice=self.guess.multiplies))
        return found


def sketched_samples(batch: int, size: int, wanted: int = 256) -> tuple[int, int]:
    """On how many samples with `size` numbers at a site a basis is sketched, and by how many random vectors each.

    They make `wanted` rows, fewer where the batch is small. Where samples are small it is many samples by few vectors,
    which are fewer passes; where they are large, few by many, which is less memory.

    >>> sketched_samples(512, 100), sketched_samples(64, 100), sketched_samples(512, 2**20), sketched_samples(4, 100)
    ((256, 1), (64, 4), (4, 64), (4, 8))
    >>> sketched_samples(128, 3136)
    (83, 4)
    """
    most = max(FEW // max(1, size), min(PROBE_ROWS, MANY // max(1, size)), 1)
    rows = min(batch, wanted, most)
    return rows, -(-wanted * min(PROBE_ROWS, batch) // (PROBE_ROWS * rows))
