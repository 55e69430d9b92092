"""A guess of your own: subclass `Guess`, return a frame, a linear map from white noise to directions."""

from dataclasses import dataclass

import torch
from torch import nn

import gradguess as gg
from gradguess.guesses import Frame, Guess, SiteView
from gradguess.guesses._base import GatedBasis


@dataclass(frozen=True)
class RandomSubspace(Guess):
    """Directions in a random subspace of `k` dimensions, inside the gate. Bias like W⊥'s, but blind to the weights."""

    k: int = 10
    reads = "never"  # it does not look at the Jacobian above

    def frame(self, view: SiteView) -> Frame:
        batch, d = view.output.shape
        if "basis" not in view.cache:  # kept from step to step, and saved with the state
            noise = view.noise.normal((d, min(self.k, d)), view.output.dtype, view.output.device)
            view.cache["basis"] = torch.linalg.qr(noise).Q
        return GatedBasis(view.cache["basis"], view.gate, batch)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
inputs, targets = torch.randn(256, 40), torch.randint(10, (256,))
loss_fn = nn.CrossEntropyLoss(reduction="none")
for guess in (RandomSubspace(), gg.WPerp(k=10)):
    report = gg.diagnose(model, guess, loss_fn, inputs, targets, generator=torch.Generator().manual_seed(0))
    site = report["0"]
    print(f"{type(guess).__name__:15} bias {site.bias:.2e}  variance {site.variance:.2e}  cosine {site.cosine:+.3f}")
