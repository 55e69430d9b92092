"""MeanFlow: a small diffusion transformer learns digits and draws them in one step, by a loss with a derivative."""

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradguess as gg


class Block(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by the time `c`, as in a DiT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        scale, shift, gate, scale2, shift2, gate2 = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """`u(z, r, t)`: the mean velocity between the times `r` and `t` of tokens `z`, (batch, positions, features)."""

    def __init__(self, features: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(features, width), nn.Linear(width, features)
        self.place = nn.Parameter(0.1 * torch.randn(positions, width))
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        waves = torch.arange(1, 17, device=z.device) * 0.5
        phases = torch.cat([t[:, None] * waves, (t - r)[:, None] * waves], 1)
        c = self.time(torch.cat([phases.sin(), phases.cos()], 1))
        x = self.stem(z) + self.place
        for block in self.blocks:
            x = block(x, c)
        return self.head(self.norm(x))


def meanflow(model: nn.Module, x: Tensor, noise: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """The loss: `u = v - (t - r) du/dt`, whose right side is a constant, along `z = (1 - t) x + t noise`."""
    v, at = noise - x, t[:, None, None]
    z = (1 - at) * x + at * noise
    u, du = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    error = (u - (v - (t - r)[:, None, None] * du).detach()).square().mean((1, 2))
    return (error / (error.detach() + 1e-2)).mean()  # as much of every sample, however hard


def batch(images: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, noise, and times `r ≤ t`, equal for half of the samples."""
    x = images[torch.randint(len(images), (size,))]
    r, t = torch.rand(2, size).sort(0).values
    return x, torch.randn_like(x), torch.where(torch.rand(size) < 0.5, t, r), t


def main() -> None:
    from gradguess_lab.data import load

    fast = bool(os.environ.get("GRADGUESS_FAST"))
    torch.manual_seed(0)
    digits = load("digits").x_train.view(-1, 8, 8)  # a row of pixels is a token
    digits = (digits - digits.mean()) / digits.std()
    model = DiT(features=8, positions=8, width=64, depth=2 if fast else 3, heads=4)

    sample, gradients = batch(digits, 64), []
    for context in (gg.forward_mode(track_tangent_grad=False), sdpa_kernel(SDPBackend.MATH)):
        with context:
            gradients.append(torch.autograd.grad(meanflow(model, *sample), list(model.parameters())))
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))
    print(f"gradients are those of PyTorch's math backend: {same}")

    optimiser, start = torch.optim.AdamW(model.parameters(), lr=2e-3), time.perf_counter()
    for _ in range(20 if fast else 350):
        optimiser.zero_grad()
        with gg.forward_mode(track_tangent_grad=False):
            loss = meanflow(model, *batch(digits, 64))
        loss.backward()
        optimiser.step()
    print(f"loss {loss:.3f} after {time.perf_counter() - start:.0f} s")

    noise, one = torch.randn(500, 8, 8), torch.ones(500)
    with torch.no_grad():
        drawn = noise - model(noise, 0 * one, one)  # one step, from noise to images
    for name, images in {"noise": noise, "drawn": drawn, "digits": digits[:500]}.items():
        nearest = torch.cdist(images.flatten(1), digits[500:].flatten(1)).min(1).values.mean()
        print(f"{name:6} {nearest:.2f} from the nearest digit")
    for row in drawn[:4].transpose(0, 1):
        print("  ".join("".join(" .:*#"[int(p)] for p in (2 * (image + 0.8)).clamp(0, 4)) for image in row))


if __name__ == "__main__":
    main()
