"""A plain loop over a live generator: a network learns to recall what it saw some steps ago, and never stops."""

import os
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import gradguess as gg

fast = bool(os.environ.get("GRADGUESS_FAST"))
DELAY, STREAMS = 6, 16


def live() -> Iterator[tuple[Tensor, Tensor]]:
    """Random signs, and the sign of DELAY steps ago: it could be a sensor, a market, a log."""
    generator = torch.Generator().manual_seed(0)
    past = deque([torch.zeros(STREAMS, 1)] * DELAY, maxlen=DELAY)
    while True:
        x = torch.randint(2, (STREAMS, 1), generator=generator) * 2.0 - 1
        yield x, past[0]
        past.append(x)


torch.manual_seed(0)
model = gg.online.Recurrent(nn.RNNCell(1, 32), nn.Linear(32, 1))
nn.init.orthogonal_(model.cells[0].weight_hh, 0.9)
optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
online = gg.online.Online(model, gg.online.WPerp(k=8))  # a quarter of the influence matrix


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean(1)


for step, (x, target) in enumerate(live(), 1):
    optimiser.zero_grad()
    loss = online(squared, x, target)  # one step of every stream, with credit for the past
    optimiser.step()
    if step % (100 if fast else 500) == 0:
        print(f"step {step}: error {loss:.4f}, {online.kept_bytes / 1e6:.2f} MB kept")
    if step == (200 if fast else 3000):
        break
