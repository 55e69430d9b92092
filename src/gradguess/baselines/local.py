"""Local losses: a small head at every cut, whose loss trains the piece below the cut, and the head itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gradguess.baselines.pieces import run_pieces
from gradguess.errors import InputError
from gradguess.layers.elementwise import mask
from gradguess.methods.adam import adam
from gradguess.methods.base import Estimate, Method
from gradguess.model.site import Site, at_least_float32
from gradguess.model.task import tensors
from gradguess.step.base import State, Step

POOLED = 2048  # numbers that a head sees of an image, at most
Head = Mapping[str, Tensor]  # the parameters of a head by name


@dataclass(frozen=True)
class LocalLoss(Method):
    """What methods with a loss at every cut share; `start` and `loss` say which loss.

    Args:
        lr: learning rate of the heads (Adam).
    """

    lr: float = 1e-3

    one_pass = True  # but for the first step, which makes the heads

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InputError(f"{type(self).__name__}(lr): expected a positive number, found {self.lr!r}.")

    @abstractmethod
    def start(self, site: Site, s: Tensor, outputs: Tensor) -> Head:
        """A new head at a cut with the output `s`, for a model with these outputs."""

    @abstractmethod
    def loss(self, step: Step, site: Site, s: Tensor, head: Head) -> Tensor:
        """The sum over the batch of the local loss."""

    def check(self, step: Step) -> None:
        """Refuse what this loss cannot be computed for."""

    def run(self, step: Step) -> tuple[Estimate, State]:
        self.check(step)
        learned = {name: dict(entries) for name, entries in step.state.learned.items()}
        missing = [site for site in step.layout.guessed if site.name not in learned]
        outputs = _outputs(step) if missing else None

        def at_site(site: Site, s: Tensor) -> Tensor:
            if site.name not in learned:
                assert outputs is not None
                learned[site.name] = _fresh(self.start(site, s, outputs))
            entries = learned[site.name]
            head = {name: entries[name].detach().requires_grad_() for name in entries if "." not in name}
            with torch.enable_grad():
                leaf = s.detach().requires_grad_()
                total = self.loss(step, site, leaf, head)
            h, *grads = torch.autograd.grad(total, [leaf, *head.values()])
            means = {name: _pooled(step, g / len(site.flat(s))) for name, g in zip(head, grads, strict=True)}
            learned[site.name] = _adam(entries, means, self.lr)
            return h

        return run_pieces(step, at_site), replace(step.state, learned=learned)


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


def linear_head(site: Site, s: Tensor, outputs: Tensor) -> dict[str, Tensor]:
    """A linear layer from the summary of a cut to the model's outputs, at zero."""
    rows = summary(site, s)
    size = outputs.shape[-1] if site.pattern.kind == "each" else outputs[0].numel()
    return {"W": rows.new_zeros(size, rows.shape[1]), "b": rows.new_zeros(size)}


def predicted(step: Step, site: Site, s: Tensor, head: Head) -> Tensor:
    """The task's own losses, one per sample, of what the linear head says."""
    said = F.linear(summary(site, s), head["W"], head["b"])
    batch = len(site.flat(s))
    if site.pattern.kind == "each":
        said = said.view(batch, -1, said.shape[1])
    return step.task.losses(said)


def _outputs(step: Step) -> Tensor:
    """The outputs of the model, from a pass that leaves no trace."""
    found = tensors(step.passes.aside().plain(lambda site, x, s: None))
    if len(found) != 1:
        raise InputError(f"Local losses need a model that returns one tensor, found {len(found)} of them.")
    return found[0]


def _fresh(head: Head) -> dict[str, Tensor]:
    """The head with Adam's state at zero: `.count`, and the two moments of each parameter."""
    entries = dict(head)
    for name, value in head.items():
        entries |= {f"{name}.mean": torch.zeros_like(value), f"{name}.square": torch.zeros_like(value)}
    return entries | {".count": next(iter(head.values())).new_zeros(())}


def _adam(entries: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
    """The entries after one step of Adam."""
    new = {**entries, ".count": entries[".count"] + 1}
    for name, g in grads.items():
        weights, mean, square = (entries[name + part] for part in ("", ".mean", ".square"))
        found = adam(weights, mean, square, new[".count"], g, lr)
        new |= zip((name, f"{name}.mean", f"{name}.square"), found, strict=True)
    return new


def _pooled(step: Step, mean: Tensor) -> Tensor:
    """The mean over the samples of all processes, from that over one's own."""
    if step.pool.size == 1:
        return mean
    return step.pool.sum(mean * step.share) / step.pool.sum(mean.new_full((), step.share))
