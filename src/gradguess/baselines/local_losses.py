"""Methods with a loss at every cut (`LocalLinear`, `PredSim`), and the control with none (`Frozen`).

A small head at each cut has a loss that trains the piece below the cut, and the head itself. Nothing is sent back from
piece to piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from gradguess.errors import InputError
from gradguess.layers.elementwise import mask
from gradguess.methods.base import Estimate, Method
from gradguess.methods.students.student import Outputs, adam
from gradguess.model.site import Site, at_least_float32
from gradguess.step.base import State, Step
from gradguess.step.pull_back import Piece, Pieces

POOLED = 2048  # numbers that a head sees of an image, at most
Head = dict[str, Tensor]  # the parameters of a head by name


@dataclass(frozen=True)
class Frozen(Method):
    """The exact gradient above the last cut, and none below it.

    A method that trains pieces must do better than this, or the pieces below have learned nothing. Parameters below
    the cut get no gradient at all, so that an optimiser leaves them alone. Use it with `sites=n`. Memory and time: a
    pass, and the reverse pass of the last piece.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.baselines.Frozen(), sites=2)
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> model[0].weight.grad is None, model[2].weight.grad is None
    (True, False)
    """

    one_pass = True

    def run(self, step: Step) -> tuple[Estimate, State]:
        return _in_pieces(step, lambda piece: None), step.state


@dataclass(frozen=True)
class LocalLinear(Method):
    """A linear head at every cut; its loss trains the piece below.

    Definition: `ĝ_i = ∇_s loss(W_i φ(s_i) + b_i, t)`, exact above the last cut; `φ` is the ReLU that follows the cut,
    if one does. The head learns from the same loss by Adam, and starts at zero. Of an image it sees at most 2048
    averages, of tokens each, or their mean. Bias: all that the pieces above would do with `s_i`. Variance none. Memory:
    one piece at a time. Time: a pass and the reverse pass of each piece, with no wait for the pieces above. Heads and
    the state of Adam are `learned[site]`. Gong, Li and Abdulla, "Mono-Forward: Backpropagation-Free Algorithm for
    Efficient Neural Network Training Harnessing Local Errors", 2025, arXiv 2501.09238; Nøkland and Eidnes, "Training
    Neural Networks with Local Error Signals", ICML 2019, arXiv 1901.06656.

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

    lr: float = 1e-3

    one_pass = True

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InputError(f"{type(self).__name__}(lr): expected a positive number, found {self.lr!r}.")

    def head(self, site: Site, s: Tensor, outputs: Outputs) -> Head:
        """A new head at a cut with the output `s`, for a model with these outputs."""
        rows = _summary(site, s)
        size = outputs.shape[-1] if site.pattern.kind == "each" else prod(outputs.shape)
        return {"W": rows.new_zeros(size, rows.shape[1]), "b": rows.new_zeros(size)}

    def loss(self, step: Step, site: Site, s: Tensor, head: Head, outputs: Outputs) -> Tensor:
        """The sum over the batch of the loss at a cut: the task's own, of the outputs that the head predicts."""
        p = F.linear(_summary(site, s), head["W"], head["b"])
        shape = (-1, p.shape[1]) if site.pattern.kind == "each" else outputs.shape
        return step.task.losses(outputs.wrap(p.view(len(site.flat(s)), *shape))).sum()

    def run(self, step: Step) -> tuple[Estimate, State]:
        outputs = Outputs(step.layout)
        learned = {name: dict(entries) for name, entries in step.state.learned.items()}

        def signal(piece: Piece) -> Tensor:
            site, s = piece.site, piece.leaf.detach().requires_grad_()
            if site.name not in learned:
                learned[site.name] = _with_moments(self.head(site, s.detach(), outputs))
            entries = learned[site.name]
            head = {name: entries[name].detach().requires_grad_() for name in entries if "." not in name}
            with torch.enable_grad():
                total = self.loss(step, site, s, head, outputs)
            h, *grads = torch.autograd.grad(total, [s, *head.values()])
            for name, grad in zip(head, grads, strict=True):
                key, part = f"{name}.gradient", grad * (step.share / len(site.flat(s)))
                entries[key] = entries[key] + part if key in entries else part  # the parts of a batch add up
            return h

        estimate = _in_pieces(step, signal)
        for entries in learned.values() if step.last else ():
            _update(step, entries, self.lr)
        return estimate, replace(step.state, learned=learned)


@dataclass(frozen=True)
class PredSim(LocalLinear):
    """A linear head, and a second one whose features should be as alike as the classes of the samples are.

    Definition: the loss at a cut is `(1 - β) pred + β sim`. `pred` is that of `LocalLinear`. `sim` is the mean squared
    difference of two matrices of cosines between the samples of the batch: of a learned 3 × 3 convolution (for vectors
    a linear map) of `φ(s)`, of which each channel's standard deviation over positions is taken, and of the classes.
    Both are centred in each sample. Exact above the last cut. Bias, memory and time as `LocalLinear`, and a matrix of
    batch × batch. Samples are compared with each other, so a batch cannot be cut: `chunk` and processes are refused.
    Nøkland and Eidnes, "Training Neural Networks with Local Error Signals", ICML 2019, arXiv 1901.06656.

    Args:
        lr: learning rate of the heads.
        beta: `β`, from 0 to 1.

    >>> import torch, gradguess as gg
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> forward = gg.ForwardGradient(model, gg.baselines.PredSim(), sites=2)
    >>> x, t = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = forward(torch.nn.CrossEntropyLoss(reduction="none"), x, t)
    >>> forward.learned["0"]["S"].shape
    torch.Size([8, 8])
    """

    beta: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise InputError(f"PredSim(beta): expected 0 <= beta <= 1, found {self.beta!r}.")

    def head(self, site: Site, s: Tensor, outputs: Outputs) -> Head:
        x = _channels_first(site, s)
        channels, moves = x.shape[1], x.dim() == 4 or (x.dim() == 3 and site.pattern.channels_first)
        taps = (3,) * (x.dim() - 2 if moves else 0)  # a convolution of images and signals, a linear map elsewhere
        source = torch.Generator().manual_seed(zlib.crc32(site.name.encode()))
        bound = (channels * 3 ** len(taps)) ** -0.5  # PyTorch's default
        S = torch.empty(channels, channels, *taps, dtype=torch.float64).uniform_(-bound, bound, generator=source)
        return super().head(site, s, outputs) | {"S": S.to(x.device, x.dtype)}

    def loss(self, step: Step, site: Site, s: Tensor, head: Head, outputs: Outputs) -> Tensor:
        t = step.task.targets
        if not isinstance(t, Tensor) or t.dim() != 1 or t.is_floating_point():
            found = f"shape {tuple(t.shape)}, {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
            raise InputError(
                f"PredSim compares the classes of samples: expected targets of whole numbers, shape (batch,), found "
                f"{found}. Use gg.baselines.LocalLinear()."
            )
        if step.share != 1:
            raise InputError(
                "PredSim compares all samples of a batch: it cannot be cut by chunk or shared by processes. Use "
                "gg.baselines.LocalLinear()."
            )
        x = _channels_first(site, s)
        classes = (t[:, None] == torch.arange(len(head["b"]), device=x.device)).to(x.dtype)
        sim = F.mse_loss(_cosines(_compared(x, head["S"])), _cosines(classes))
        return (1 - self.beta) * super().loss(step, site, s, head, outputs) + self.beta * len(x) * sim


def _in_pieces(step: Step, signal: Callable[[Piece], Tensor | None]) -> Estimate:
    """The gradients of the parameters below each cut from its signal; of those above the last cut exactly."""
    through = [site for site in step.layout.sites if not (site.guessed or (step.detail and site.top))]
    # the losses are known when the pass has ended: gradients cannot be written before
    pieces = Pieces(replace(step, into=None), step.layout.guessed, signal, through=through)
    _, losses = step.passes.graph(pieces.visit, fused=True)
    pieces.settle(losses)
    losses, none = losses.detach(), losses.new_zeros(0, len(losses))
    return Estimate(losses.mean(), pieces.gradients.by_name, none, site_grads=pieces.site_grads, losses=losses)


def _features(site: Site, s: Tensor) -> Tensor:
    """The output of a cut as a head sees it: samples first, through the ReLU that follows the cut if one does."""
    s = at_least_float32(s)
    s = torch.relu(s) if site.gate is mask else s
    return s.movedim(site.batch_dim, 0) if site.batch_dim else s


def _channels_first(site: Site, s: Tensor) -> Tensor:
    x = _features(site, s)
    return x.mT if x.dim() == 3 and not site.pattern.channels_first else x


def _summary(site: Site, s: Tensor) -> Tensor:
    """(rows, numbers): an image averaged over blocks of pixels, tokens one by one or averaged, vectors as they are."""
    s = _features(site, s)
    if site.pattern.kind == "each":
        return s.flatten(0, 1)
    if s.dim() == 4:
        side = min(s.shape[2], s.shape[3], max(1, int((POOLED / s.shape[1]) ** 0.5)))
        return F.adaptive_avg_pool2d(s, side).flatten(1)
    if s.dim() == 3 and not site.pattern.channels_first:
        return s.mean(1)
    if s.dim() == 3:
        return F.adaptive_avg_pool1d(s, min(s.shape[2], max(1, POOLED // s.shape[1]))).flatten(1)
    return s.flatten(1)


def _compared(x: Tensor, S: Tensor) -> Tensor:
    """(batch, channels): the features of the samples that are compared."""
    if S.dim() > 2:
        x = (F.conv2d if S.dim() == 4 else F.conv1d)(x, S, padding=1)
    else:
        x = F.linear(x.movedim(1, -1), S).movedim(-1, 1)
    return x.flatten(2).std(2) if x.dim() > 2 and x[0, 0].numel() > 1 else x.flatten(1)


def _cosines(x: Tensor) -> Tensor:
    """(batch, batch): the cosine between any two rows, each without its mean."""
    x = F.normalize(x - x.mean(1, keepdim=True), dim=1, eps=1e-8)
    return x @ x.t()


def _with_moments(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head with Adam's state at zero: `.count`, and the two moments of each parameter."""
    zeros = {f"{name}.{moment}": torch.zeros_like(p) for name, p in head.items() for moment in ("mean", "square")}
    return {**head, **zeros, ".count": next(iter(head.values())).new_zeros(())}


def _update(step: Step, entries: dict[str, Tensor], lr: float) -> None:
    """A step of Adam with the gradients of all parts of the batch, which are taken out."""
    names = [name.removesuffix(".gradient") for name in entries if name.endswith(".gradient")]
    if names:
        entries[".count"] = entries[".count"] + 1
    for name in names:
        keys = name, f"{name}.mean", f"{name}.square"
        weights, mean, square = (entries[key] for key in keys)
        grad = step.pool.sum(entries.pop(f"{name}.gradient"))
        entries |= zip(keys, adam(weights, mean, square, entries[".count"], grad, lr), strict=True)
