"""What a step is given: batch, passes, noise, options and state. Nothing of it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gradguess.errors import check_choice, check_count
from gradguess.model.site import Layout
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import Pass
from gradguess.step.gradients import Sums
from gradguess.step.processes import ALONE, Pool

Kept = Mapping[str, Mapping[str, Tensor]]  # site name -> name -> tensor


@dataclass(frozen=True)
class Options:
    """How directions are measured and turned into gradients; the same for every guess.

    Attributes:
        tangents: the number of directions at each site in one step.
        isolate: use one tangent per site, so that sites cause each other no noise.
        memory: keep what a pass saw ("store"), or run the pass again ("replay").
        coupling: "sample", or "batch" for layers that mix the samples of a batch.
        balance: scale each site's directions to the tangent that arrives from below, so that no site's noise drowns
            the others.
        derivative: directional derivatives by "dual" numbers, or by "finite" differences of plain passes.
        top: at the model's output "guess", as elsewhere, or take the derivative of the loss, which is "exact".
    """

    tangents: int = 1
    isolate: bool = False
    memory: Literal["store", "replay"] = "store"
    coupling: Literal["sample", "batch"] = "sample"
    balance: bool = False
    derivative: Literal["dual", "finite"] = "dual"
    top: Literal["guess", "exact"] = "guess"

    def __post_init__(self) -> None:
        check_count("tangents", self.tangents)
        check_choice("memory", self.memory, ("store", "replay"))
        check_choice("coupling", self.coupling, ("sample", "batch"))
        check_choice("derivative", self.derivative, ("dual", "finite"))
        check_choice("top", self.top, ("guess", "exact"))

    @property
    def finite(self) -> bool:
        """Are derivatives differences of plain passes?"""
        return self.derivative == "finite"


@dataclass(frozen=True)
class State:
    """What lives from step to step. A step returns a new one and never writes to the old one."""

    kept: Kept = field(default_factory=dict)  # what guesses keep between two searches
    learned: Kept = field(default_factory=dict)  # what feedback or students have learned
    count: int = 0  # steps that were made


@dataclass(frozen=True)
class Step:
    """Everything one step may use."""

    task: Task
    layout: Layout
    passes: Pass
    noise: Noise
    options: Options
    state: State
    detail: bool = True  # keep directions and site gradients for the caller
    pool: Pool = ALONE  # adds up what the parts of a batch measured
    share: float = 1.0  # of this part in the whole batch
    last: bool = True  # does no other part of the batch follow?
    into: Sums | None = None  # takes the gradients as they are made; None: the estimate holds them

    @property
    def keeps(self) -> bool:
        """Is what the tangent pass saw kept until the derivative is known?"""
        return self.detail or self.options.memory == "store"

    def begin(self, losses: Tensor, jvp: Tensor) -> None:
        """Called when losses and derivatives are known, before the first gradient is made."""
        if self.into is not None:
            self.into.begin(losses, jvp)
