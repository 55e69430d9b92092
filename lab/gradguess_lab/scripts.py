"""What the authors' scripts do and the paper does not say, each as a change of its own.

The scripts are public (GitHub: danielwang0452/backpropfreeASC, commit 7114bb0). `TrainConfig.script` names the changes:

- "mask": every layer has a bias that is trained but not added. The guess alone sees it, in the gate `W x + b > 0`.
- "bottom": W⊥-bottom takes the last k rows of a reduced SVD. Below a layer of k rows these are the top k.
- "floor": W⊥-NS takes σ_1 and σ_k from sample 0 alone, and the set for σ_k/σ_1 rounded down.

Three more differences are of measuring alone, and are in the record of every run: diagnostics on the last batch of an
epoch, accuracy as a mean over batches before the last epoch, and the squared overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gradguess.guesses.frames import Frame
from gradguess.jacobian import GatedLinear, Jacobian
from gradguess.layers import linear
from gradguess.layers.table import add
from gradguess.linalg.step_polynomials import nearest
from gradguess_lab.config import script_names


class HiddenBias(nn.Linear):
    """A linear layer with a bias that it does not add, and that has the gradient as if it did."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + (self.bias - self.bias.detach())


add(replace(linear.LINEAR, modules=(HiddenBias,)))


def prepare_model(script: str, model: nn.Module) -> nn.Module:
    """The network of the scripts: with "mask", each layer has a bias that its output does not show."""
    if "mask" in script_names(script):
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.__class__ = HiddenBias
                layer.bias = nn.Parameter(layer.weight.new_zeros(layer.out_features))
    return model


def scripted(script: str, guess: Any, model: nn.Module) -> Any:
    """The method with the changes that `script` names, as far as they concern it."""
    names = script_names(script)
    if "bottom" in names and isinstance(guess, gg.WPerp) and guess.end == "bottom":
        guess = ReducedBottom(k=guess.k, solver=guess.solver, refresh=guess.refresh, end="bottom")
    if "floor" in names and isinstance(guess, gg.WPerpNS):
        guess = FlooredNS(k=guess.k, steps=guess.steps, refresh=guess.refresh, threshold="nearest")
    if "mask" in names and isinstance(guess, gg.Guess) and not isinstance(guess, gg.ActivationPerturbation):
        biases = {name: layer.bias for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        guess = Masked(guess, biases)
    return guess


@dataclass(frozen=True)
class ReducedBottom(gg.WPerp):
    """W⊥-bottom by `Vh[-k:]` of a reduced SVD, which has no more rows than the layer above has outputs."""

    def frame(self, view: gg.guesses.SiteView) -> Frame:
        if view.W.m <= self.k:
            return gg.WPerp(k=self.k, solver="subspace", refresh=self.refresh).frame(view)
        return super().frame(view)


@dataclass(frozen=True)
class FlooredNS(gg.WPerpNS):
    """W⊥-NS with the singular values of sample 0 for all samples.

    The scripts divide every sample by the norm of sample 0. Here one with a larger norm is divided by its own: beyond 1
    the polynomials diverge, and so does the run.
    """

    def search(self, view: gg.guesses.SiteView) -> dict[str, Tensor]:
        values = self._singular_values(view)[0].clamp_min(1e-12)
        ratio = float(values[-2] / values[0])
        found = nearest(max(math.floor(10 * ratio), 1) / 10).coefficients
        return {"scale": values[0], "coefficients": torch.tensor(found, dtype=values.dtype, device=values.device)}


@dataclass(frozen=True)
class Masked(gg.Guess):
    """`inner` as it would guess if the units opened at `W x + b > 0`."""

    inner: gg.Guess
    biases: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name in ("reads", "searches", "steady", "refresh"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def search(self, view: gg.guesses.SiteView) -> dict[str, Tensor]:
        return self.inner.search(self._seen(view))

    def frame(self, view: gg.guesses.SiteView) -> Frame:
        return self.inner.frame(self._seen(view))

    def _seen(self, view: gg.guesses.SiteView) -> gg.guesses.SiteView:
        if view.gate is None:
            return view
        gate = (view.output + self.biases[view.name].detach() > 0).to(view.output.dtype)

        def jacobian() -> Jacobian:
            W = view.W
            assert isinstance(W, GatedLinear)
            return GatedLinear(W.weight, gate, W.moment)

        return replace(view, gate=gate, jacobian=jacobian)
