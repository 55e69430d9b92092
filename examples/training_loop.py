"""A plain PyTorch training loop; the one changed line writes .grad without a backward pass."""

import os

import torch
from torch import nn

import gradguess as gg
from gradguess_lab.data import load

fast = bool(os.environ.get("GRADGUESS_FAST"))
torch.manual_seed(0)
data = load("mnist1d")  # 4000 signals of 40 numbers, ten classes
model = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss(reduction="none")

forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(k=10)))
for _ in range(3 if fast else 60):
    for batch in torch.randperm(len(data.x_train)).split(512):
        optimiser.zero_grad()
        loss = forward(loss_fn, data.x_train[batch], data.y_train[batch])  # instead of loss.backward()
        optimiser.step()

with torch.no_grad():
    accuracy = (model(data.x_test).argmax(1) == data.y_test).float().mean()
print(f"loss {loss:.3f}, test accuracy {accuracy:.3f}")
