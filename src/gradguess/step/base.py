"""What a step is given: batch, passes, noise, options and state, none of which is written; and where gradients go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from gradguess.errors import check_choice, check_count
from gradguess.model.site import Layout
from gradguess.model.task import Task
from gradguess.noise import Noise
from gradguess.passes import Pass
from gradguess.step.parts import ALONE, Pool

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
        """Whether derivatives are differences of plain passes."""
        return self.derivative == "finite"


@dataclass(frozen=True)
class State:
    """What lives from step to step. A step returns a new one and never writes to the old one."""

    kept: Kept = field(default_factory=dict)  # what guesses keep between two searches
    learned: Kept = field(default_factory=dict)  # what feedback or students have learned
    count: int = 0  # steps that were made


class NotFiniteError(Exception):
    """A loss or a derivative is not finite. It was noticed before a gradient was made."""

    def __init__(self, losses: Tensor, jvp: Tensor) -> None:
        self.losses, self.jvp = losses, jvp


class Sums:
    """Sums of gradients, by the name of the parameter.

    Attributes:
        by_name: the sums.
        checks: losses and derivatives must be finite before a gradient is added.
        added: how many gradients were added.
    """

    checks = False

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.added = 0

    def begin(self, losses: Tensor, jvp: Tensor) -> None:
        """Told of losses and derivatives before the gradients that follow from them are added."""
        if self.checks and not (torch.isfinite(losses).all() & torch.isfinite(jvp).all()):
            raise NotFiniteError(losses, jvp)

    def add(self, name: str, grad: Tensor) -> None:
        self.by_name[name] = self.by_name[name] + grad if name in self.by_name else grad
        self.added += 1


class Written(Sums):
    """The same in `.grad`: nothing is kept here.

    Args:
        parameters: by name.
        checks: as above. Gradients that are not finite are noticed as well, once they are written.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], checks: bool) -> None:
        super().__init__()
        self.parameters, self.checks = parameters, checks
        self._taken: set[int] = set()  # two parameters may have got one tensor: x + (a + b)
        self._finite: dict[torch.device, Tensor] = {}

    @property
    def finite(self) -> bool:
        """Whether all gradients were numbers."""
        return all(map(bool, self._finite.values()))

    def add(self, name: str, grad: Tensor) -> None:
        parameter, grad = self.parameters[name], grad.detach()
        values = grad._values() if grad.is_sparse else grad
        if self.checks and values.numel():
            largest = torch.linalg.vector_norm(values, torch.inf)  # one number: nothing of the gradient's size is made
            self._finite[grad.device] = largest.isfinite() & self._finite.get(grad.device, True)
        if grad.is_sparse:  # of nn.Embedding(sparse=True)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        elif parameter.grad is None and grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(grad)  # fused optimisers need one layout
        elif parameter.grad is None:
            parameter.grad = grad.clone() if grad.data_ptr() in self._taken else grad
            self._taken.add(grad.data_ptr())
        else:
            parameter.grad += grad
        self.added += 1


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
    last: bool = True  # no other part of the batch follows
    into: Sums | None = None  # takes the gradients as they are made; None: the estimate holds them

    @property
    def keeps(self) -> bool:
        """Whether what the tangent pass saw is kept until the derivative is known."""
        return self.detail or self.options.memory == "store"

    def begin(self, losses: Tensor, jvp: Tensor) -> None:
        """Called when losses and derivatives are known, before the first gradient is made."""
        if self.into is not None:
            self.into.begin(losses, jvp)
