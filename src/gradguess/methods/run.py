"""A step as a function: (model, batch, noise, state) -> (estimate, state).

The batch may be split into chunks and shared by processes, and the sites may have to be found again on the way; the
methods know nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from gradguess.backends.cuda_graphs import recording
from gradguess.errors import GradguessError, InputError, warn
from gradguess.guesses.base import StaleBasis
from gradguess.methods.base import Estimate, Method
from gradguess.model.find_sites import PROBE, bare_layout, lay_out
from gradguess.model.hooks import Snapshot
from gradguess.model.site import Layout, LayoutChanged, Site, Sites, at_least_float32
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import choose_pass
from gradguess.step.base import NotFiniteError, Options, State, Step, Sums
from gradguess.step.parts import ALONE, Part, Pool, add_up, first_rows, first_samples, samples, split
from gradguess.step.refresh import Search

Runner = Callable[[Method, Step], tuple[Estimate, State]]


def as_it_is(method: Method, step: Step) -> tuple[Estimate, State]:
    """The runner that does not compile."""
    return method.run(step)


@dataclass(frozen=True)
class Plan:
    """How steps are made; the same for all of them.

    Attributes:
        runner: runs a method's step, as it is or compiled.
        sketching: of the searches' noise, seeded by each; None: each makes one.
    """

    method: Method
    sites: Sites
    options: Options
    detail: bool = False
    chunk: int | None = None
    pool: Pool = ALONE
    runner: Runner = as_it_is
    sketching: torch.Generator | None = None


def find_layout(plan: Plan, task: Task, *, full_batch: bool = False) -> Layout:
    """The sites of the task's model, or an empty layout for methods that need none."""
    if not plan.method.uses_sites:
        return bare_layout(task)
    return lay_out(task, plan.sites, full_batch=full_batch, beyond_graph=plan.options.finite)


def run_step(
    plan: Plan,
    task: Task,
    layout: Layout,
    generator: torch.Generator,
    state: State,
    place: tuple[int, int] | None = None,
    into: Sums | None = None,
) -> tuple[Estimate, State, Layout]:
    """One step. Neither `state` nor `layout` is written: what they are afterwards is returned.

    Args:
        layout: the sites as they were found last; they are found anew where the model makes other calls.
        place: (number of the first sample, number of all) in the batch that processes share.
        into: takes the gradients as they are made, with memory="replay" and in one process. The estimate then holds
            none. Several parts of a batch are summed first where `into` checks them: the last may not be finite.
    """
    parts = split(task, layout, plan.chunk, plan.pool, place)
    start = Noise(generator)
    results: list[Estimate] = []
    sums = Sums()  # of the parts that are done
    if plan.options.memory != "replay" or plan.pool.size > 1:
        into = None
    elif into is not None and into.checks and len(parts) > 1:
        into = sums
    runs = _Runs(plan, task, parts, generator.device, into, layout, state)
    try:
        for part in parts:
            result = runs.settle(part, start if part.rows is None else start.at(part.rows.start))
            results.append(result)
            for name in list(result.grads) if part.rows is not None else ():
                grad = result.grads.pop(name)  # taken from it: it need not hold them
                sums.add(name, grad if result.pooled else grad * part.share)
    except Exception:
        start.undo()  # a step that fails is as if it had not been
        raise
    whole = results[0] if parts[0].rows is None else _combined(results, sums.by_name, plan.pool)
    return whole, replace(runs.state, count=state.count + 1), runs.layout


@dataclass
class _Runs:
    """A step on its way through the parts of the batch: the layout and the state as they are by now."""

    plan: Plan
    task: Task
    parts: Sequence[Part]
    device: torch.device
    into: Sums | None
    layout: Layout
    state: State
    refreshed: bool = False

    @property
    def added(self) -> int:
        """How many gradients were added where they stay."""
        return 0 if self.into is None else self.into.added

    def settle(self, part: Part, noise: Noise) -> Estimate:
        """The estimate of a part. Where the model makes other calls than the layout has, its sites are found again:
        first on a few samples, then on all of them.
        """
        before = Snapshot(part.task.model) if self.layout.leaves_traces and not recording() else None
        state, refreshed, added = self.state, self.refreshed, self.added
        found_anew = 0
        while True:
            try:
                return self.estimate(part, noise, before)
            except CheckpointError:  # it saw more tensors beside tangents than when it ran again
                if self.layout.checkpoints or self.added > added:
                    raise
                checkpoints, changed = True, False
            except LayoutChanged as found:  # control flow that depends on the data, or inputs of another size
                advice = "Make its control flow depend on its inputs and on PyTorch's random numbers alone"
                if self.added > added:
                    raise InputError(
                        "The model called other modules when memory='replay' ran it again on the same batch, after "
                        f"the first gradients had been added: call zero_grad(). {advice}, or use memory='store'."
                    ) from None
                if found_anew == 2:
                    raise InputError(
                        f"The model called other modules each time it ran on the same batch. {advice}."
                    ) from None
                if isinstance(found, StaleBasis):
                    state, refreshed = replace(state, kept={}), False
                checkpoints, changed = self.layout.checkpoints, True
            noise.rewind()
            if before is not None:
                before.restore()
            self.state, self.refreshed, layout = state, refreshed, self.layout
            if changed:  # the sites are those of a pass that starts where the step does
                layout = find_layout(self.plan, part.task, full_batch=found_anew == 1)
                found_anew += 1
            self.layout = replace(layout, checkpoints=checkpoints)

    def estimate(self, part: Part, noise: Noise, before: Snapshot | None) -> Estimate:
        """The estimate of a part, with the layout as it is; bases are searched for before the first."""
        plan, task, layout = self.plan, part.task, self.layout
        keep = plan.detail or plan.options.memory == "store"
        choose = partial(choose_pass, layout=layout, finite=plan.options.finite, mixes=plan.options.coupling == "batch")
        passes = choose(task, keep=keep)
        passes.before = before
        tasks = [each.task for each in self.parts]
        try:
            self.state = refreshed(plan, self.task, tasks, layout, self.device, self.state, missing_only=self.refreshed)
            self.refreshed = True
            place = part.share, part is self.parts[-1], self.into
            step = Step(task, layout, passes, noise, plan.options, self.state, plan.detail, plan.pool, *place)
            result, self.state = plan.runner(plan.method, step)
            return result
        except NotFiniteError as found:
            return Estimate(found.losses.mean(), {}, found.jvp, losses=found.losses)
        except torch.linalg.LinAlgError:  # a factorisation that failed on NaN gives an estimate that says so
            along = {name: torch.ones_like(p) for name, p in layout.members.parameters.items() if p.requires_grad}
            every = [choose(each).aside().parameter_tangent(along) for each in tasks]
            if torch.isfinite(torch.cat([torch.cat(found) for found in every])).all():
                raise
            losses, jvp = next(found for found, each in zip(every, tasks, strict=True) if each is task)
            rows = plan.options.tangents * (len(layout.sites) if plan.options.isolate else 1)
            return Estimate(losses.mean(), {}, jvp.expand(rows, -1), losses=losses)


def refreshed(
    plan: Plan,
    task: Task,
    parts: Sequence[Task],
    layout: Layout,
    device: torch.device,
    state: State,
    *,
    missing_only: bool = False,
) -> State:
    """Let the guess search where it is time to, on the samples that will carry its directions.

    Args:
        task: this process's whole batch.
        parts: the parts of it, one after the other.
        device: of the noise.
        missing_only: search at sites for which nothing is kept, and at no others.
    """
    drawn = plan.method.draws(state.count)
    if drawn is None:
        return state
    if drawn.fraction < 1 and samples(task, layout) != task.batch:
        raise InputError("fraction: the batch is not the first dimension of the inputs, so it cannot be cut.")
    search = Search(
        drawn.guess,
        drawn.count,
        layout,
        state.kept,
        parts=[first_rows(part, drawn.fraction) for part in parts],
        probe=lambda: first_samples(task, layout, plan.pool, drawn.guess.rows),
        mixes=plan.options.coupling == "batch",
        source=plan.sketching or device,
        pool=plan.pool,
    )
    return replace(state, kept=search.run(missing_only=missing_only))


def _combined(results: list[Estimate], grads: dict[str, Tensor], pool: Pool) -> Estimate:
    """The estimate of the whole batch from those of its parts, and the sum of their gradients."""
    losses = torch.cat([result.losses for result in results])
    jvp = torch.cat([result.jvp for result in results if len(result.jvp)] or [results[0].jvp], 1)
    whole = Estimate(losses.mean(), grads, jvp, losses=losses)
    if results[0].pooled:
        whole.all_finite = torch.stack([result.all_finite for result in results if result.all_finite is not None]).all()
    elif pool.size > 1:
        fine = torch.isfinite(losses).all() & torch.isfinite(jvp).all()
        whole.grads, whole.all_finite = add_up(pool, grads, fine)
    return whole


def warn_of_mixing(plan: Plan, task: Task, layout: Layout) -> bool:
    """Warn where samples mix (a tangent on the activations of one moves the losses of others) and the method takes them
    to be apart. Returns whether it warned.

    It takes one tangent pass over a few samples, over all where these cannot be cut, and leaves no trace.
    """
    if not plan.method.apart or plan.options.coupling == "batch":
        return False
    probe = task.part(slice(PROBE), task.batch) if layout.sliceable else task
    source, met = torch.Generator().manual_seed(0), list[str]()

    def draw(site: Site, x: object, s: Tensor) -> Tensor | None:
        if site.batch_dim is None:
            return None
        y = torch.zeros_like(s)
        one = y.select(site.batch_dim, _middle(s.shape[site.batch_dim]))
        one.copy_(torch.randn(one.shape, generator=source))
        return y

    def arrive(site: Site, y: Tensor, t: Tensor | None) -> Tensor:
        if t is not None and _others(site.flat(t)):
            met.append(site.name)
        return y

    try:
        passes = choose_pass(probe, layout, finite=plan.options.finite, mixes=True).aside()
        jvp = passes.tangent(draw, arrive).jvp
    except (LayoutChanged, GradguessError):  # the step itself meets this as well, and deals with it
        return False
    others = _others(jvp[:, None])
    if others:
        where = f"at {met[0]!r}" if met else "in the loss or right below it"
        warn(
            f"Samples mix: the loss of sample {others[0]} moves with the activations of sample {_middle(len(jvp))}, "
            f"which reach it {where}. The estimate leaves out what passes from a sample to the losses of others: a "
            "bias, which gg.diagnose does not see in a guess. Pass coupling='batch' to take it in, with more noise. Or "
            "keep samples apart: model.eval() or another norm for batch norm, batch_first=True for recurrent layers "
            "and attention that see (batch, time)."
        )
    return bool(others)


def _middle(count: int) -> int:
    """The sample that is moved. It has others on either side, which a recurrence over the batch tells apart."""
    return (count - 1) // 2


def _others(rows: Tensor) -> list[int]:
    """The samples besides the middle one whose rows, (samples, numbers), are not zero up to rounding."""
    size, own = torch.linalg.vector_norm(at_least_float32(rows), dim=1), _middle(len(rows))
    moved = size > torch.finfo(rows.dtype).eps ** 0.5 * size[own]
    return [i for i in moved.nonzero().flatten().tolist() if i != own]
