"""Which way a model is run."""

from __future__ import annotations

from gradguess.model.site import Layout
from gradguess.model.task import Task
from gradguess.passes.base import Pass
from gradguess.passes.module_pass import ModulePass
from gradguess.passes.relu_chain import ReluChainPass


def choose_pass(task: Task, layout: Layout, *, keep: bool = True) -> Pass:
    """The passes of a step over `task`; with `keep`, the activations of the first one may be kept for the others."""
    return ReluChainPass(task, layout, keep) if ReluChainPass.fits(task, layout, keep) else ModulePass(task, layout)
