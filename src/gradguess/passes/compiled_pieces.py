"""Passes that are cut at every site, as compiled pieces: for models whose sites lie in a line."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradguess.backends.policy import full_precision
from gradguess.backends.trace_pieces import pieces_of
from gradguess.backends.tracing import trace
from gradguess.model.hooks import Visit
from gradguess.model.site import Layout, Members, Site
from gradguess.model.task import Task
from gradguess.passes.functional_pass import FunctionalPass
from gradguess.passes.module_pass import ModulePass

LARGE = 2**20  # numbers at a site: below that kernels are so short that fusing them gains little


class CompiledPieces:
    """The pieces of a model between neighbouring sites, each a compiled function with a compiled reverse graph.

    A piece is a function of parameters, buffers, inputs and the output of the site below. Pieces that do the same on
    other weights, such as the blocks of a transformer, are compiled once.
    """

    @staticmethod
    def fit(task: Task, layout: Layout) -> bool:
        """Do the sites lie in a line, does a pass leave no trace, and are there numbers enough to gain from it?"""
        largest = max((math.prod(site.shape) for site in layout.sites), default=0)
        return layout.in_a_line and not layout.leaves_traces and largest * task.batch >= LARGE

    def __init__(self, task: Task, layout: Layout) -> None:
        outputs: list[Tensor] = []
        ModulePass(task, layout).aside().plain(lambda site, x, s: outputs.append(s))
        given, self._spec = tree_flatten((_own(task, layout), task.inputs, outputs))
        self._constants = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in given]
        given = [leaf for leaf in given if isinstance(leaf, Tensor)]
        self._example = task, layout
        self._pieces = pieces_of(trace(self._ends, given), given)
        del self._example  # its batch is not needed any more

    def _ends(self, *given: Tensor) -> list[Tensor]:
        """The output of every site, from those of the sites below as they are given."""
        rest = iter(given)
        leaves = [next(rest) if leaf is Tensor else leaf for leaf in self._constants]
        own, inputs, outputs = tree_unflatten(leaves, self._spec)
        starts, ends = iter(outputs), list[Tensor]()

        def visit(site: Site, x: Any, s: Tensor) -> Tensor:
            ends.append(s)
            start: Tensor = next(starts).detach().requires_grad_()
            return start.clone()

        task, layout = self._example
        with _reparametrize_module(task.model, own, tie_weights=True):
            there = replace(layout, members=Members(task.model))
            FunctionalPass(replace(task, inputs=inputs), there).graph(visit)
        return ends

    def run(self, task: Task, layout: Layout, visit: Visit) -> None:
        """A pass in which `visit` sees every site, and its output with the graph of the piece below it."""
        given, _ = tree_flatten((_own(task, layout), task.inputs))
        tensors: list[Tensor] = [leaf for leaf in given if isinstance(leaf, Tensor)]
        start: Tensor | None = None
        with torch.enable_grad():
            for site, piece in zip(layout.sites, self._pieces, strict=True):
                with full_precision(tensors[0].device):  # its casts are in it already
                    s = piece(tensors, start)
                start = visit(site, None, s)


def _own(task: Task, layout: Layout) -> dict[str, Tensor]:
    own = (*layout.members.parameters.items(), *task.model.named_buffers())
    return {name: tensor.detach() for name, tensor in own}


class PiecewisePass(ModulePass):
    """Passes that leave no trace; those with a reverse graph run compiled pieces, up to the last site."""

    def __init__(self, task: Task, layout: Layout, pieces: CompiledPieces) -> None:
        super().__init__(task, layout)
        self._pieces = pieces

    def graph(
        self, visit: Visit | None = None, *, fused: bool = False, twice: bool = False, last: bool = False
    ) -> tuple[Any, Any]:
        assert visit is not None
        assert not twice  # PyTorch does not compile the graph of a gradient
        self._pieces.run(self.task, self.layout, visit)
        return None, None
