"""A step as one compiled graph: traced once for each kind of step and each shape of batch, then run without Python.

The trace follows the very code that an uncompiled step runs. What a step depends on enters the graph: parameters,
buffers, batch, white noise, random numbers and state. What it makes leaves it: losses, derivatives, gradients, buffers
and state. The noise is drawn outside, from the same generators and in the same order, so that the result is that of an
uncompiled step up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.backends.inductor import compiled
from gradguess.backends.policy import full_precision
from gradguess.backends.tracing import Form, Graph, NotTraceable, tensors_of, trace
from gradguess.methods.base import Estimate, Method
from gradguess.methods.signature import Signatures
from gradguess.model.assumptions import Members
from gradguess.model.side_effects import Snapshot
from gradguess.model.task import with_tensors
from gradguess.noise import Noise
from gradguess.passes import Pass
from gradguess.passes.forward_mode import formula_kernels
from gradguess.passes.randomness import Given, Watched
from gradguess.step.base import State, Step

MOST = 64  # kinds of steps that are told apart
Result = tuple[Estimate, State]
Drawn = tuple[str, tuple[Any, ...]]  # which method of `Noise` was called, and with what


class Compiler:
    """Runs steps as compiled graphs. The first step of each kind runs by itself, and shows what it draws."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Draws] = {}
        self._graphs: dict[Hashable, _CompiledStep] = {}
        self._signatures = Signatures()
        self.refused = False

    def __call__(self, method: Method, step: Step) -> Result:
        kind = method.kind(step.state.count)
        kind = "step" if kind == "refresh" else kind  # the search is done by now
        if kind is None or self.refused or not self._applies(step):
            return method.run(step)
        try:
            options = step.detail, step.share, step.last, step.options
            key = kind, options, self._signatures.of_step(step.task, step.layout, step.state.kept, step.state.learned)
        except NotTraceable as reason:
            self._refuse(f"{reason}")
            return method.run(step)
        if key not in self._seen:
            if len(self._seen) == MOST:
                last = self._signatures.changed
                known = f"{last} was the last to change" if last else "their batches, or what is frozen, differ"
                self._refuse(f"{MOST} steps were each of another kind: {known}.")
                return method.run(step)
            draws = _Draws()
            with draws.masks:
                result = method.run(replace(step, noise=_WatchedNoise(step.noise, draws)))
            self._seen[key] = draws  # of a step that did not fail
            if draws.masks.refused:
                self._refuse(f"The model draws random numbers by {draws.masks.refused}.")
            return result
        if key not in self._graphs:
            try:
                self._graphs[key] = _CompiledStep(method, step, self._seen[key])
            except NotTraceable as reason:
                result = method.run(step)  # an error of the model or of the loss comes again, and is the caller's
                self._refuse(f"This model cannot be compiled: {reason}")
                return result
        return self._graphs[key](step)

    def _applies(self, step: Step) -> bool:
        if step.pool.size > 1:
            self._refuse("Processes share the batch: they talk to each other in the middle of a step.")
        elif not step.keeps:
            self._refuse("memory='replay' runs the model twice to keep nothing: a graph keeps what it needs.")
        elif step.options.finite:
            self._refuse("derivative='finite' is for models that PyTorch cannot differentiate, nor trace.")
        return not self.refused

    def _refuse(self, why: str) -> None:
        self.refused = True
        self._seen.clear()
        self._graphs.clear()
        warnings.warn(f"compile=True has no effect. {why} Steps run uncompiled, with the same result.", stacklevel=6)


class _Draws:
    """What a step draws: white noise, and what the model itself draws, such as masks of dropout."""

    def __init__(self) -> None:
        self.noise: list[Drawn] = []
        self.position = 0
        self.masks = Watched()


class _WatchedNoise(Noise):
    """Noise that notes each draw. After a rewind the same draws come again, and are noted once."""

    def __init__(self, noise: Noise, draws: _Draws) -> None:
        self.source, self.draws, self.generator = noise, draws, noise.generator

    def rewind(self) -> None:
        self.source.rewind()
        self.draws.position = 0

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._note("normal", tuple(shape), dtype, device)

    def batched(self, count: int, batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._note("batched", count, batch, size, dtype, device)

    def _note(self, name: str, *how: Any) -> Tensor:
        if self.draws.position == len(self.draws.noise):
            self.draws.noise.append((name, how))
        self.draws.position += 1
        found: Tensor = getattr(self.source, name)(*how)
        return found


class _GivenNoise(Noise):
    """The draws of a step, as tensors that were drawn before."""

    def __init__(self, values: Sequence[Tensor], noise: Noise) -> None:
        self.values, self.position, self.generator = values, 0, noise.generator

    def rewind(self) -> None:
        self.position = 0

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._next()

    def batched(self, count: int, batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._next()

    def _next(self) -> Tensor:
        if self.position == len(self.values):
            raise NotTraceable("it draws another number of directions at each step")
        self.position += 1
        return self.values[self.position - 1].clone()  # a step may write to its directions


class _CompiledStep:
    """One kind of step on one shape of batch."""

    def __init__(self, method: Method, step: Step, draws: _Draws) -> None:
        self.method, self.draws = method, draws
        self.example = step
        before = Snapshot(step.task.model)
        try:
            inputs = self._inputs(step)
            self.form, given = Form(inputs), tensors_of(inputs)
            traced = trace(self._function, given)
            if before.drew_outside():
                raise NotTraceable("it draws random numbers from Python or NumPy, which a graph would hold as they are")
            self.graph: Graph = compiled(traced, given)
        finally:  # a trace leaves no trace
            before.restore()
            step.noise.rewind()
            del self.example  # its batch is not needed any more

    def __call__(self, step: Step) -> Result:
        given = tensors_of(self._inputs(step))
        with torch.no_grad(), full_precision(step.noise.generator.device):
            found = self.graph(*given)
        loss, losses, jvp, directions, site_grads, grads, buffers, kept, learned = tree_unflatten(list(found), self.out)
        for name, buffer in step.layout.members.buffers().items():
            if name in buffers:
                buffer.copy_(buffers[name])
        estimate = Estimate(loss, grads, jvp, directions, site_grads, losses=losses)
        return estimate, State(kept, learned, step.state.count)

    def _inputs(self, step: Step) -> tuple[Any, ...]:
        """All that a step reads, in the order of the graph's arguments."""
        return (
            {name: p.detach() for name, p in step.layout.members.parameters.items()},
            {name: b.detach() for name, b in step.layout.members.buffers().items()},
            (step.task.inputs, step.task.targets),
            [getattr(step.noise, name)(*how) for name, how in self.draws.noise],
            self.draws.masks.again(),
            step.state.kept,
            step.state.learned,
        )

    def _function(self, *given: Tensor) -> list[Tensor]:
        """The step, with every tensor that it reads as an argument."""
        step = self.example
        parameters, buffers, (inputs, targets), noise, masks, kept, learned = self.form.filled(given)
        model = step.task.model
        free = step.layout.members.parameters
        parameters = {name: p.detach().requires_grad_(free[name].requires_grad) for name, p in parameters.items()}
        buffers = {name: b.clone() for name, b in buffers.items()}
        with torch.no_grad(), with_tensors(model, parameters | buffers):
            task = replace(step.task, inputs=inputs, targets=targets)
            layout = replace(step.layout, members=Members(model))
            with Given(masks), formula_kernels(model, attention=False):
                estimate, state = self.method.run(
                    replace(
                        step,
                        task=task,
                        layout=layout,
                        passes=Pass(task, layout),
                        noise=_GivenNoise(noise, step.noise),
                        state=State(kept, learned, step.state.count),
                    )
                )
            written = dict(model.named_buffers())
        e = estimate
        made = (e.loss, e.losses, e.jvp, e.directions, e.site_grads, e.grads, written, state.kept, state.learned)
        found, self.out = tree_flatten(made)
        return found
