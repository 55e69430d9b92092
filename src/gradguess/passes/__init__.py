"""How the model is run. Everything else sees a model through the passes of this package."""

from gradguess.model.site import Layout
from gradguess.model.task import Task
from gradguess.passes.finite_pass import FinitePass
from gradguess.passes.model_pass import Carried, Draw, Pass, Scale

__all__ = ["Carried", "Draw", "Pass", "Scale", "choose_pass"]


def choose_pass(task: Task, layout: Layout, *, keep: bool = True, finite: bool = False, mixes: bool = False) -> Pass:
    """The passes of a step over `task`: by dual numbers, or with `finite` by differences of plain passes.

    `keep` and `mixes` are those of `FinitePass`.
    """
    return FinitePass(task, layout, keep, mixes) if finite else Pass(task, layout)
