"""A small character transformer: one loss per sequence, the mean over its characters."""

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor

import gradguess as gg
from gradguess_lab.data import Shape
from gradguess_lab.networks import build

fast = bool(os.environ.get("GRADGUESS_FAST"))
torch.manual_seed(0)
text = open(__file__).read() * 4  # noqa: SIM115, PTH123 (it learns its own source; any text will do)
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(c) for c in text])
length = 32


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(codes) - length - 1, (size,))
    windows = torch.stack([codes[i : i + length + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def per_sequence(outputs: Tensor, targets: Tensor) -> Tensor:
    """(batch, characters, alphabet) -> (batch,)"""
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


shape = Shape("text", (length,), len(alphabet))
model = build("charformer", shape, 32, 2, True, "gelu", torch.Generator().manual_seed(0))
forward = gg.ForwardGradient(model, gg.Feedback(gg.WPerp(), form="chained", rate=0.1))
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(10 if fast else 600):
    optimiser.zero_grad()
    loss = forward(per_sequence, *batch_of(32))
    optimiser.step()
    if step % 100 == 0:
        print(f"step {step:4}  {loss / math.log(2):.2f} bits per character")
print(f"at the end {loss / math.log(2):.2f} bits per character; guessing blindly {math.log2(len(alphabet)):.2f}")
