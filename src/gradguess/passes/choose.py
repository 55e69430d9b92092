"""Which way a model is run."""

from __future__ import annotations

from gradguess.model.site import Layout
from gradguess.model.task import Task
from gradguess.passes.base import Pass
from gradguess.passes.finite_pass import FinitePass
from gradguess.passes.module_pass import ModulePass
from gradguess.passes.relu_chain import ReluChainPass


def choose_pass(task: Task, layout: Layout, *, keep: bool = True, finite: bool = False, mixes: bool = False) -> Pass:
    """The passes of a step over `task`.

    Args:
        keep: the activations of the first pass may be kept for the others.
        finite: derivatives by differences of plain passes, not by dual numbers.
        mixes: the samples of the batch depend on each other.
    """
    if finite:
        return FinitePass(task, layout, keep, mixes)
    return ReluChainPass(task, layout, keep) if ReluChainPass.fits(task, layout) else ModulePass(task, layout)
