"""A spiking network of your own: leaky units that fire, with a surrogate gradient, learning online."""

import os

import torch
from torch import Tensor, nn

import gradguess as gg

fast = bool(os.environ.get("GRADGUESS_FAST"))


class Spike(torch.autograd.Function):
    """A step forwards, a bump backwards. `setup_context` and `generate_vmap_rule` let PyTorch vectorise it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor) -> Tensor:
        return (v > 0).to(v)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grad / (1 + 5 * v.abs()) ** 2


class Spiking(nn.Module):
    """Membranes that leak, fire at one, and are pulled down where they fired. The state is (membrane, spikes)."""

    def __init__(self, inputs: int, units: int, outputs: int) -> None:
        super().__init__()
        self.enter, self.recur = nn.Linear(inputs, units), nn.Linear(units, units, bias=False)
        self.leak, self.readout = nn.Parameter(torch.full((units,), 2.0)), nn.Linear(units, outputs)

    def initial_state(self, streams: int) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(streams, len(self.leak))
        return zeros, zeros.clone()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        membrane, spikes = state
        membrane = torch.sigmoid(self.leak) * membrane + self.enter(x) + self.recur(spikes) - spikes
        spikes = Spike.apply(membrane - 1)
        return self.readout(membrane), (membrane, spikes)


torch.manual_seed(0)
for rule in (gg.online.EProp(), gg.online.WPerp(k=8)):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Spiking(1, 24, 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    online = gg.online.Online(model, rule)
    past, losses = torch.zeros(16, 3), []
    for _ in range(60 if fast else 2000):  # recall of the sign of three steps ago
        x = torch.randint(2, (16, 1), generator=generator) * 2.0 - 1
        optimiser.zero_grad()
        losses.append(online(lambda output, target: ((output - target) ** 2).mean(1), x, past[:, :1]))
        optimiser.step()
        past = torch.cat([past[:, 1:], x], 1)
    error = torch.stack(losses[-len(losses) // 5 :]).mean()
    print(f"{type(rule).__name__}: error {error:.3f}, {online.kept_bytes / 1e6:.2f} MB kept")
