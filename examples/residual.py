"""A residual network: sites are found at the stem and at the layer that feeds each addition."""

import os

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess_lab.data import load

fast = bool(os.environ.get("GRADGUESS_FAST"))
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


data = load("mnist1d")
model = nn.Sequential(nn.Linear(40, 64), *(Block(64) for _ in range(6)), nn.LayerNorm(64), nn.Linear(64, 10))
loss_fn = nn.CrossEntropyLoss(reduction="none")

# where gradients are guessed; sites="leaf" would take every layer, sites=["0", "9"] those two
est = gg.estimate(model, gg.WPerp(), loss_fn, data.x_train[:32], data.y_train[:32])
print("sites:", ", ".join(est.directions))

forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(), form="chained", rate=0.1))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2 if fast else 20):
    for batch in torch.randperm(len(data.x_train)).split(128):
        optimiser.zero_grad()
        loss = forward(loss_fn, data.x_train[batch], data.y_train[batch])
        optimiser.step()
with torch.no_grad():
    print(f"loss {loss:.3f}, test accuracy {(model(data.x_test).argmax(1) == data.y_test).float().mean():.3f}")
