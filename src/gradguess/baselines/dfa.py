"""Direct feedback alignment (Nøkland 2016)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gradguess.errors import check_count
from gradguess.guesses import ActivationPerturbation
from gradguess.methods.base import Draws, Estimate, Method
from gradguess.methods.feedback import Feedback
from gradguess.methods.feedback.lesson import Start
from gradguess.model.site import Site
from gradguess.step.base import State, Step


def random_start(seed: int) -> Start:
    """Feedback matrices `N(0, 1/d)`; each seed and site has numbers of its own, the same in every process."""

    def start(site: Site, shape: tuple[int, int], like: Tensor) -> Tensor:
        source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {site.name}".encode()))
        return torch.randn(shape, generator=source, dtype=torch.float64).to(like.device, like.dtype) / shape[0] ** 0.5

    return start


@dataclass(frozen=True)
class _Untaught(Feedback):
    """Feedback that starts at random and never learns."""

    seed: int = 0

    def draws(self, count: int) -> Draws | None:
        return None

    def start(self) -> Start:
        return random_start(self.seed)


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
