"""Local losses: a small head at every cut, whose loss trains the piece below the cut, and the head itself."""

from __future__ import annotations

from abc import abstractmethod
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
Head = Mapping[str, Tensor]  # the parameters of a head by name


@dataclass(frozen=True)
class LocalLoss(Method):
    """What methods with a loss at every cut share; `start` and `loss` say which loss.

    Args:
        lr: learning rate of the heads (Adam).
    """

    lr: float = 1e-3

    one_pass = True

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InputError(f"{type(self).__name__}(lr): expected a positive number, found {self.lr!r}.")

    @abstractmethod
    def start(self, site: Site, s: Tensor, outputs: Outputs) -> Head:
        """A new head at a cut with the output `s`, for a model with these outputs."""

    @abstractmethod
    def loss(self, step: Step, site: Site, s: Tensor, head: Head, outputs: Outputs) -> Tensor:
        """The sum over the batch of the local loss."""

    def run(self, step: Step) -> tuple[Estimate, State]:
        outputs = Outputs(step.layout)
        learned = {name: dict(entries) for name, entries in step.state.learned.items()}

        def signal(piece: Piece) -> Tensor:
            site, s = piece.site, piece.leaf.detach().requires_grad_()
            if site.name not in learned:
                learned[site.name] = _with_moments(self.start(site, s.detach(), outputs))
            entries = learned[site.name]
            head = {name: entries[name].detach().requires_grad_() for name in entries if "." not in name}
            with torch.enable_grad():
                total = self.loss(step, site, s, head, outputs)
            h, *grads = torch.autograd.grad(total, [s, *head.values()])
            for name, grad in zip(head, grads, strict=True):
                key, part = f"{name}.gradient", grad * (step.share / len(site.flat(s)))
                entries[key] = entries[key] + part if key in entries else part  # the parts of a batch add up
            return h

        estimate = in_pieces(step, signal)
        for entries in learned.values() if step.last else ():
            _update(step, entries, self.lr)
        return estimate, replace(step.state, learned=learned)


def in_pieces(step: Step, signal: Callable[[Piece], Tensor | None]) -> Estimate:
    """The parameters below each cut from its signal; those above the last cut exactly."""
    own = replace(step, into=None)  # the losses are known when the pass has ended
    through = [site for site in step.layout.sites if not (site.guessed or (step.detail and site.top))]
    pieces = Pieces(own, step.layout.guessed, signal, through=through)
    _, losses = step.passes.graph(pieces.visit, fused=True, last=not step.detail)
    pieces.settle(losses)
    losses, none = losses.detach(), losses.new_zeros(0, len(losses))
    return Estimate(losses.mean(), pieces.gradients.by_name, none, site_grads=pieces.site_grads, losses=losses)


def features(site: Site, s: Tensor) -> Tensor:
    """What a head sees: the cut as it is, or where a ReLU follows what passes it; half precision as float32."""
    s = at_least_float32(s)
    s = torch.relu(s) if site.gate is mask else s
    return s.movedim(site.batch_dim, 0) if site.batch_dim else s


def summary(site: Site, s: Tensor) -> Tensor:
    """(rows, numbers): an image averaged over blocks of pixels, tokens one by one or averaged, vectors as they are."""
    s = features(site, s)
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


def linear_head(site: Site, s: Tensor, outputs: Outputs) -> dict[str, Tensor]:
    """A linear layer from the summary of a cut to the model's outputs, at zero."""
    rows = summary(site, s)
    size = outputs.shape[-1] if site.pattern.kind == "each" else prod(outputs.shape)
    return {"W": rows.new_zeros(size, rows.shape[1]), "b": rows.new_zeros(size)}


def predicted(step: Step, site: Site, s: Tensor, head: Head, outputs: Outputs) -> Tensor:
    """The task's own losses, one per sample, of the outputs that the linear head gives."""
    p = F.linear(summary(site, s), head["W"], head["b"])
    batch = len(site.flat(s))
    shape = (-1, p.shape[1]) if site.pattern.kind == "each" else outputs.shape
    return step.task.losses(outputs.wrap(p.view(batch, *shape)))


def _with_moments(head: Head) -> dict[str, Tensor]:
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
