"""Direct feedback alignment with matrices that forward gradients teach (Bacho and Chu 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradguess.errors import InputError
from gradguess.guesses import ActivationPerturbation
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.feedback import Feedback
from gradguess.methods.feedback.lesson import LearningRule, Lesson
from gradguess.model.site import Site
from gradguess.step.base import State, Step


class Momentum(LearningRule):
    """`B` is a running mean of the raw estimates `φ uᵀ`, whatever is predicted already."""

    def samples(self, lesson: Lesson) -> float:
        return float(lesson.fewest)

    def update(self, lesson: Lesson, site: Site, p: int, phi: Tensor, scale: Tensor, B: Tensor) -> Tensor:
        u = lesson.tangents[p].reshape(len(phi), -1)
        raw = lesson.pool.sum(phi.t() @ u) / lesson.rows[site.name] / scale
        return B.lerp(raw.to(B.dtype), lesson.rate / len(lesson.seen.rows(site)))


class _Taught(Feedback):
    rule = Momentum()


@dataclass(frozen=True)
class FDFA(Method):
    """DFA whose matrices follow the mean Jacobian of the outputs, as noise on the activations shows it.

    Definition: every step draws `y_i ~ N(0, I)` at each site and carries all of them to the outputs, whose tangent is
    `u`; then `B_i ← (1 - α) B_i + α mean_b D_i y_i uᵀ` and `ĝ_i = D_i B_i e`. `B` starts at zero. The raw estimate has
    the mean `D_i² J_iᵀ`, `J_i` the Jacobian of the outputs above the gate, averaged over the batch: as unbiased as the
    paper's, which draws above the gate, up to how often a unit is open. Bias of `ĝ`: what differs from sample to sample
    in `J_i`, and what has changed in `1/α` steps. The directions are balanced, as in `gg.Feedback`: same mean, less
    noise than published. Memory and time: those of a tangent pass. Bacho and Chu, "Low-Variance Forward Gradients using
    Direct Feedback Alignment and Momentum", Neural Networks 2024, arXiv 2212.07282.

    Args:
        momentum: `α`, above 0 and at most 1.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.baselines.FDFA())
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> bool(forward.learned["0"]["B"].any())
    True
    """

    momentum: float = 0.01

    apart = True

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise InputError(f"FDFA(momentum): expected 0 < momentum <= 1, found {self.momentum!r}.")

    def draws(self, count: int) -> Draws | None:
        return Draws(ActivationPerturbation(), count)

    def run(self, step: Step) -> tuple[Estimate, State]:
        return _Taught(ActivationPerturbation(), form="direct", rate=self.momentum).run(step)
