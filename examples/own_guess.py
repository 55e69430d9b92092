"""A guess of your own: subclass `Guess` and return a frame, which is a linear map from white noise to directions."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.guesses import Frame, GatedBasis, Guess, SiteView


@dataclass(frozen=True)
class RandomSubspace(Guess):
    """Directions in a random subspace of `k` dimensions, inside the gate. Bias like W⊥'s, but blind to the weights."""

    k: int = 10
    refresh: int = 50  # steps between two searches
    reads = "never"  # it does not look at the Jacobian above
    searches = True

    def search(self, view: SiteView) -> dict[str, Tensor]:
        """A new basis; it is kept until the next search, and saved with the state."""
        d = view.output.shape[1]
        noise = view.noise.normal((d, min(self.k, d)), view.output.dtype, view.output.device)
        return {"basis": torch.linalg.qr(noise).Q}

    def frame(self, view: SiteView) -> Frame:
        return GatedBasis(view.kept["basis"], view.gate, len(view.output))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
inputs, targets = torch.randn(256, 40), torch.randint(10, (256,))
loss_fn = nn.CrossEntropyLoss(reduction="none")
for guess in (RandomSubspace(), gg.WPerp(k=10)):
    report = gg.diagnose(model, guess, loss_fn, inputs, targets, generator=torch.Generator().manual_seed(0))
    site = report["0"]
    print(f"{type(guess).__name__:15} bias {site.bias:.2e}  variance {site.variance:.2e}  cosine {site.cosine:+.3f}")
