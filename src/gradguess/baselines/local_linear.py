"""Local losses with linear heads (Mono-Forward 2025; the loss "pred" of Nøkland and Eidnes 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradguess.baselines.local import Head, LocalLoss, linear_head, predicted
from gradguess.methods.students.student import Outputs
from gradguess.model.site import Site
from gradguess.step.base import Step


@dataclass(frozen=True)
class LocalLinear(LocalLoss):
    """A linear head at every cut; its loss trains the piece below.

    Definition: `ĝ_i = ∇_s loss(W_i φ(s_i) + b_i, t)`, exact above the last cut; `φ` is the ReLU that follows the cut,
    if one does. The head learns from the same loss by Adam, and starts at zero. Of an image it sees at most 2048
    averages, of tokens each, or their mean. Bias: all that the pieces above would do with `s_i`. Variance none. Memory:
    one piece at a time. Time: a pass and the reverse pass of each piece, with no wait for the pieces above. Nothing is
    sent back from piece to piece. Heads and the state of Adam are `learned[site]`. Gong, Li and Abdulla, "Mono-Forward:
    Backpropagation-Free Algorithm for Efficient Neural Network Training Harnessing Local Errors", 2025, arXiv
    2501.09238; Nøkland and Eidnes, "Training Neural Networks with Local Error Signals", ICML 2019, arXiv 1901.06656.

    Args:
        lr: learning rate of the heads.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.baselines.LocalLinear(), sites=2)
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> forward.learned["0"]["W"].shape
    torch.Size([3, 8])
    """

    def start(self, site: Site, s: Tensor, outputs: Outputs) -> Head:
        return linear_head(site, s, outputs)

    def loss(self, step: Step, site: Site, s: Tensor, head: Head, outputs: Outputs) -> Tensor:
        return predicted(step, site, s, head, outputs).sum()
