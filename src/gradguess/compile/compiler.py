"""A step as one compiled graph: traced once for each kind of step and each shape of batch, then run without Python.

The trace follows the very code that an uncompiled step runs. What a step depends on enters the graph: parameters,
buffers, batch, the keys of its noise, random numbers and state. What it makes leaves it: losses, derivatives,
gradients, buffers and state. The result is that of an uncompiled step up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradguess.backends.policy import full_precision
from gradguess.backends.random import RandomState
from gradguess.compile.randomness import Drawn, KeyedNoise
from gradguess.compile.signature import Signatures
from gradguess.compile.trace import NotTraceable, trace
from gradguess.errors import reason_of, warn
from gradguess.layers.positions import PROJECTIONS
from gradguess.methods.base import Estimate, Method
from gradguess.model.site import Members
from gradguess.model.task import with_tensors
from gradguess.passes import Pass
from gradguess.passes.forward_mode import formula_kernels
from gradguess.step.base import State, Step

MOST = 64  # kinds of steps that are told apart
Result = tuple[Estimate, State]
Graph = Callable[..., Sequence[Tensor]]
# no compiler on this machine, a compiler that gives up, or an interface of PyTorch that has another form
_FAILURES = (RuntimeError, OSError, ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError)


class Compiler:
    """Runs steps as compiled graphs. The first step of each kind runs by itself."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, bool] = {}  # whether it draws noise
        self._graphs: dict[Hashable, _CompiledStep] = {}
        self._signatures = Signatures()
        self.refused = False

    def __call__(self, method: Method, step: Step) -> Result:
        kind = method.kind(step.state.count)
        kind = "step" if kind == "refresh" else kind  # the search is done by now
        if kind is None or self.refused:
            return method.run(step)
        if reason := _obstacle(step):
            self._refuse(reason)
            return method.run(step)
        try:
            options = step.detail, step.share, step.last, step.options
            key = kind, options, self._signatures.of_step(step.task, step.layout, step.state.kept, step.state.learned)
            if key in self._seen and key not in self._graphs:
                self._graphs[key] = _CompiledStep(method, step, self._seen[key])
        except NotTraceable as reason:
            result = method.run(step)  # an error of the model or of the loss comes again, and is the caller's
            self._refuse(f"This model cannot be compiled: {reason}")
            return result
        if key in self._graphs:
            return self._graphs[key](step)
        if len(self._seen) == MOST:
            last = self._signatures.changed
            known = f"{last} was the last to change" if last else "their batches, or what is frozen, differ"
            self._refuse(f"{MOST} steps were each of another kind: {known}.")
            return method.run(step)
        result = method.run(step)
        self._seen[key] = step.noise.drawn  # of a step that did not fail
        return result

    def _refuse(self, why: str) -> None:
        self.refused = True
        self._seen.clear()
        self._graphs.clear()
        warn(f"compile=True has no effect. {why} Steps run uncompiled, with the same result.")


def _obstacle(step: Step) -> str | None:
    """What about the way in which a step is made keeps it from being a graph."""
    if step.pool.size > 1:
        return "Processes share the batch: they talk to each other in the middle of a step."
    if not step.keeps:
        return "memory='replay' runs the model twice to keep nothing: a graph keeps what it needs."
    if step.options.finite:
        return "derivative='finite' is for models that PyTorch cannot differentiate, nor trace."
    return None


class _CompiledStep:
    """One kind of step on one shape of batch."""

    def __init__(self, method: Method, step: Step, noise: bool) -> None:
        self._noise, drawn = noise, Drawn()
        before = RandomState.everywhere()
        try:
            leaves, spec = tree_flatten(self._inputs(step))
            given = _tensors(leaves)

            def function(*tensors: Tensor) -> list[Tensor]:
                rest = iter(tensors)
                filled = tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
                found, self._out = tree_flatten(_followed(method, step, drawn, filled))
                return found

            traced = trace(function, given, PROJECTIONS, drawn.values)
            if before.drew_outside():
                raise NotTraceable("it draws random numbers from Python or NumPy, which a graph would hold as they are")
            self._graph, self._draw = compiled(traced, [*given, *drawn.values]), drawn.again
            drawn.values.clear()
        finally:  # the step itself draws the same
            before.restore()

    def __call__(self, step: Step) -> Result:
        with torch.no_grad(), full_precision(step.noise.generator.device):
            found = self._graph(*_tensors(self._inputs(step)), *self._draw())
        loss, losses, jvp, directions, site_grads, grads, buffers, kept, learned = tree_unflatten(
            list(found), self._out
        )
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
            step.noise.keys() if self._noise else [],
            step.state.kept,
            step.state.learned,
        )


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def _followed(method: Method, step: Step, drawn: Drawn, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a step makes of the tensors that it reads, `inputs` in the order of `_inputs`."""
    parameters, buffers, batch, keys, kept, learned = inputs
    model, own = step.task.model, step.layout.members.parameters
    parameters = {name: p.detach().requires_grad_(own[name].requires_grad) for name, p in parameters.items()}
    buffers = {name: b.clone() for name, b in buffers.items()}
    with torch.no_grad(), with_tensors(model, parameters | buffers):
        task = replace(step.task, inputs=batch[0], targets=batch[1])
        layout = replace(step.layout, members=Members(model))
        changed = replace(
            step,
            task=task,
            layout=layout,
            passes=Pass(task, layout),
            noise=KeyedNoise(step.noise, keys),
            state=State(kept, learned, step.state.count),
        )
        with drawn, formula_kernels(model, attention=False):
            e, state = method.run(changed)
        written = dict(model.named_buffers())
    return e.loss, e.losses, e.jvp, e.directions, e.site_grads, e.grads, written, state.kept, state.learned


def compiled(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> Graph:
    """The graph as fused kernels. Its casts are in it already; it is run once, so that nothing is left for later."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # the compiler lays out anew, and not all of it can be viewed
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    try:
        from torch import _inductor  # it brings sympy. `torch.compile` would trace the graph again, and check it
        from torch._inductor import config
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        shapes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # without it nothing is cached
        device = arguments[0].device
        channels = config.patch(
            layout_optimization=device.type != "cpu"
        )  # there turning them takes longer than it gains
        with torch.no_grad(), full_precision(device), channels, warnings.catch_warnings(), _tiles_or_not():
            warnings.simplefilter("ignore")  # the compiler's own
            fused: Graph = _inductor.compile(graph, [shapes.from_tensor(t, static_shapes=True) for t in arguments])
            fused(*arguments)
    except _FAILURES as error:
        raise NotTraceable(f"TorchInductor: {reason_of(error)}") from error
    return fused


@contextmanager
def _tiles_or_not() -> Iterator[None]:
    """PyTorch 2.11 raises `CantSplit` without its arguments where a kernel must be tiled in another way."""
    from torch._inductor.codegen.simd import CantSplit  # here, since it brings sympy

    own, CantSplit.__init__.__defaults__ = CantSplit.__init__.__defaults__, (None, None)
    try:
        yield
    finally:
        CantSplit.__init__.__defaults__ = own
