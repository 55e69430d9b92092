"""Direct feedback alignment: with fixed random matrices (`DFA`), and with matrices that are taught (`FDFA`)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import InputError, check_count
from gradguess.guesses import ActivationPerturbation
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.feedback import Feedback
from gradguess.methods.feedback.lesson import LearningRule, Lesson
from gradguess.model.site import Site
from gradguess.step.base import State, Step


def random_start(seed: int, site: Site, shape: tuple[int, int], like: Tensor) -> Tensor:
    """A feedback matrix `N(0, 1/d)`; each seed and site has numbers of its own, the same in every process."""
    source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {site.name}".encode()))
    return torch.randn(shape, generator=source, dtype=torch.float64).to(like.device, like.dtype) / shape[0] ** 0.5


@dataclass(frozen=True)
class _Untaught(Feedback):
    """Feedback that starts at random and never learns."""

    seed: int = 0

    def draws(self, count: int) -> Draws | None:
        return None

    def start(self, site: Site, shape: tuple[int, int], like: Tensor) -> Tensor:
        return random_start(self.seed, site, shape, like)


@dataclass(frozen=True)
class DFA(Method):
    """A fixed random matrix takes the output error straight to every site, through the site's gate.

    Definition: `ĝ_i = D_i B_i e` with `B_i ~ N(0, 1/d)`, drawn once; exact at the output. Bias: whatever the forward
    weights do not align with `B_i`. Variance none. Memory: activations as under backpropagation, one input a layer with
    `memory="replay"`. Time: a plain pass and one product a layer; layers do not wait for each other. The matrices are
    `learned[site]["B"]`. Nøkland, "Direct Feedback Alignment Provides Learning in Deep Neural Networks", NeurIPS 2016,
    arXiv 1609.01596.

    Args:
        seed: of the matrices.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.baselines.DFA())
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> forward.learned["0"]["B"].shape
    torch.Size([8, 3])
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_count("DFA(seed)", self.seed, least=0)

    def run(self, step: Step) -> tuple[Estimate, State]:
        return _Untaught(ActivationPerturbation(), form="direct", seed=self.seed).run(step)


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
