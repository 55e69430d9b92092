"""Passes that are cut at every site, as compiled pieces: for models whose sites lie in a line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradguess.backends.trace_pieces import pieces_of
from gradguess.backends.tracing import Form, tensors_of, trace
from gradguess.model.assumptions import Members
from gradguess.model.hooks import Visit
from gradguess.model.site import Layout, Site
from gradguess.model.task import Task, with_tensors
from gradguess.passes.functional_pass import FunctionalPass
from gradguess.passes.module_pass import ModulePass

LARGE = 2**20  # numbers at a site: below that kernels are so short that fusing them gains little


class CompiledPieces:
    """The pieces of a model between neighbouring sites, each a compiled function with a compiled vjp.

    A piece is a function of parameters, buffers, inputs and the output of the site below. Pieces that do the same on
    other weights, such as the blocks of a transformer, are compiled once.
    """

    @staticmethod
    def fit(task: Task, layout: Layout) -> bool:
        """Do the sites lie in a line, does a pass leave no trace, and are there numbers enough to gain from it?"""
        simple = layout.sliceable and layout.in_a_line and not layout.leaves_traces
        return simple and layout.largest(task) * task.batch >= LARGE

    def __init__(self, task: Task, layout: Layout) -> None:
        outputs: list[Tensor] = []
        ModulePass(task, layout).aside().plain(lambda site, x, s: outputs.append(s.detach().contiguous()))
        vectors = [torch.zeros_like(s) for s in outputs]
        nest = _own(task, layout), task.inputs, outputs, vectors
        self._form, given = Form(nest), tensors_of(nest)
        self._example = task, layout
        self._pieces = pieces_of(trace(self._function, given), given, len(outputs))
        del self._example  # its batch is not needed any more

    def _function(self, *given: Tensor) -> list[Tensor]:
        """The output of every site, and a vector at each pulled back to the one below, which is given."""
        task, layout = self._example
        own, inputs, outputs, vectors = self._form.filled(given)
        starts, values, pulled = list[Tensor](), list[Tensor](), list[Tensor]()

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            number = len(starts)
            with torch._C.DisableTorchFunction():  # the rules of the pass end here
                if starts:
                    pulled.extend(torch.autograd.grad(s, starts[-1:], vectors[number]))
                values.append(s.detach())  # without the graph of its piece
                starts.append(outputs[number].detach().requires_grad_())
                return starts[-1].clone()

        with with_tensors(task.model, own):
            there = replace(layout, members=Members(task.model))
            FunctionalPass(replace(task, inputs=inputs), there).graph(visit)
        return values + pulled

    def run(self, task: Task, layout: Layout, visit: Visit) -> None:
        """A pass in which `visit` sees every site, and its output with the graph of the piece below it."""
        given = tensors_of((_own(task, layout), task.inputs))
        start: Tensor | None = None
        with torch.enable_grad():
            for site, piece in zip(layout.sites, self._pieces, strict=True):
                start = visit(site, None, piece(given, start))


def _own(task: Task, layout: Layout) -> dict[str, Tensor]:
    own = (*layout.members.parameters.items(), *layout.members.buffers().items())
    return {name: tensor.detach() for name, tensor in own}


class PiecewisePass(ModulePass):
    """A pass that leaves no trace: its reverse graph is that of compiled pieces, and ends at the last site."""

    def __init__(self, task: Task, layout: Layout, pieces: CompiledPieces) -> None:
        super().__init__(task, layout)
        self._pieces = pieces

    def graph(
        self, visit: Visit | None = None, *, fused: bool = False, twice: bool = False, last: bool = False
    ) -> tuple[Any, Any]:
        assert visit is not None
        assert not twice
        self._pieces.run(self.task, self.layout, visit)
        return None, None
