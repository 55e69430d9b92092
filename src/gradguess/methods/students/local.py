"""The gradient of a local loss as the direction of a forward gradient (Fournier et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradguess.guesses.frames import Frame
from gradguess.methods.base import Estimate, Method
from gradguess.methods.guessed import estimate_from
from gradguess.methods.students.student import Bank, Built, Make
from gradguess.methods.students.students import check_cut, check_students
from gradguess.model.site import Site, at_least_float32
from gradguess.step.base import State, Step
from gradguess.step.measure import Drawing
from gradguess.step.pull_back import OutputError, pull


@dataclass(frozen=True)
class LocalGuess(Method):
    """Directions `y_i = ± h_i / |h_i|`, with `h_i` the gradient of the loss of a student at the site.

    The sign is independent for every site and sample: without that the sites' derivatives would not separate. The
    estimate is `c y`, with `c` measured by the tangent pass. Covariance: the projector on `h_i`. So the mean of the
    estimate is the true gradient's projection on `h_i`. Where a site is the model's output, `h_i` is the gradient of
    the loss itself, and the estimate is exact in the mean. The students learn from their own loss, as those of
    `gg.Students`.

    Args:
        make: `make(shape, outputs)` returns the student for a site, as in `gg.Students`.
        lr: the learning rate of the students.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> est = gg.estimate(model, gg.LocalGuess(), torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> est.directions["0"].square().sum(-1).allclose(torch.ones(1, 5))
    True
    """

    make: Make | None = None
    lr: float = 1e-3
    _built: Built = field(default_factory=dict, init=False, repr=False, compare=False)  # what `make` returned

    apart = True

    def __post_init__(self) -> None:
        check_students("LocalGuess", self.make, self.lr)

    def run(self, step: Step) -> tuple[Estimate, State]:
        bank = Bank(step, self.make, self.lr, self._built)
        for site in step.layout.sites:
            if not site.is_output:
                check_cut("LocalGuess", site)
        result = estimate_from(_LocalDrawing(step, bank))
        return result, replace(step.state, learned=bank.close())


class _LocalDrawing(Drawing):
    """Draws along the gradients of the students' losses. A student learns when its site is met first."""

    def __init__(self, step: Step, bank: Bank) -> None:
        self.step, self.bank, self.met = step, bank, set[str]()

    def frame(self, site: Site, s: Tensor, gate: Tensor | None) -> Frame:
        return _Ray(at_least_float32(site.flat(self._gradient(site, s))))

    def _gradient(self, site: Site, s: Tensor) -> Tensor:
        """`h`, the gradient of each sample's local loss."""
        if site.is_output:
            return OutputError(self.step.task, self.bank.outputs.wrap(s)).parts[0]
        student = self.bank.student(site, s)
        h, grad = pull([student.losses], [student.s, student.weights])
        if site.name not in self.met:
            self.bank.add(site, grad * student.share)
        self.met.add(site.name)
        return h


class _Ray(Frame):
    """`± u` with `u = h / |h|`: zero where `h` is."""

    latent = 1

    def __init__(self, h: Tensor) -> None:
        size = torch.linalg.vector_norm(h, dim=1, keepdim=True)
        self.u = h / torch.where(size > 0, size, 1.0)
        self.batch, self.dtype = len(h), h.dtype

    def apply(self, z: Tensor) -> Tensor:
        return torch.where(z < 0, -self.u, self.u)

    def adjoint(self, v: Tensor) -> Tensor:
        return (v * self.u).sum(-1, keepdim=True)
