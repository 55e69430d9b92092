"""The networks of the common-network experiment: trained by each guess in turn, and by backpropagation.

The authors' `compute_layer_metrics` measures several guesses on one network. Their history continues stored networks
with a fresh AdamW, and adds biases in one file and not in another. A setting is a way of training (`TRAINED`), a use of
biases (`BIASES`) and a number of epochs (`EPOCHS`; the second 300 start with a fresh AdamW). All networks of one number
of epochs are trained at once, as stacks of matrices, by the law of `gg.estimate`; `common_measures` measures them.

`python -m gradguess_lab.common_network OUT` writes `networks-BIASES-EPOCHS.npz`, and trains nothing that is there.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from gradguess_lab.data import Dataset, Shape, load
from gradguess_lab.environment import describe
from gradguess_lab.models import MODELS
from gradguess_lab.scripts import prepare_model

TRAINED = ("wt", "wperp", "wperp-bottom", "reduced", "backprop")  # reduced: W⊥-bottom as the scripts have it
BIASES = ("none", "gate", "added")  # gate: trained, not added, and seen by the guess alone, as in the scripts
EPOCHS = (300, 600)
SEEDS = 10
K, BATCH, LAYERS = 10, 512, 4
BLOCK = 2 * K  # rows that follow each sample's top K
ROUNDS, FIRST_ROUNDS = 3, 20  # of two products each, in a step and in the first epoch
REFRESH = 50  # steps between two draws of the shared rows of W⊥-bottom
NAMES = [f"{kind}{layer}" for kind in ("weight", "bias") for layer in range(LAYERS)]


@dataclass(frozen=True)
class Member:
    """One network of a stack."""

    trained: str
    biases: str
    seed: int

    def network(self) -> nn.Sequential:
        """The fresh network, with the weights of the stored runs of this seed."""
        generator = torch.Generator().manual_seed(self.seed)
        net = MODELS["mlp"](Shape("signal", (40,), 10), 128, LAYERS - 1, self.biases == "added", "relu", generator)
        return prepare_model("mask" if self.biases == "gate" else "", net)  # type: ignore[return-value]


def linears(net: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in net if isinstance(layer, nn.Linear)]


def bias_of(layer: nn.Linear) -> Tensor:
    """The bias of a layer, zero where it has none."""
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()


class Stack:
    """Networks side by side: weights (networks, outputs, inputs); `members` are sorted by how they are trained."""

    def __init__(self, members: list[Member], data: Dataset, seed: int = 0) -> None:
        self.members, self.data, device, dtype = members, data, data.x_train.device, data.x_train.dtype
        layers = [linears(member.network()) for member in members]
        self.weights = [
            torch.stack([one[i].weight for one in layers]).detach().to(device, dtype) for i in range(LAYERS)
        ]
        self.biases = [torch.stack([bias_of(one[i]) for one in layers]).to(device, dtype) for i in range(LAYERS)]
        self.added, self.gated = (
            torch.tensor([member.biases == name for member in members], device=device).to(dtype)[:, None, None]
            for name in ("added", "gate")
        )
        self.parts: dict[str, slice] = {}
        for name in TRAINED:
            places = [i for i, member in enumerate(members) if member.trained == name]
            if places:
                self.parts[name] = slice(places[0], places[-1] + 1)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.blocks: dict[int, Tensor] = {}  # layer -> (networks, samples, BLOCK, d), near each sample's top rows
        self.shared: dict[tuple[str, int], Tensor] = {}  # W⊥-bottom -> (networks, K, d)
        self.steps, self.cold = 0, True

    def normal(self, *shape: int) -> Tensor:
        w = self.weights[0]
        return torch.randn(shape, generator=self.generator, device=w.device, dtype=w.dtype)

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs of each layer, from `x` (networks, batch, inputs)."""
        inputs, outputs = [x], []
        for W, b in zip(self.weights, self.biases, strict=True):
            outputs.append(torch.baddbmm(self.added * b[:, None], inputs[-1], W.mT))
            inputs.append(outputs[-1].relu())
        return inputs[:-1], outputs

    def directions(self, outputs: list[Tensor], places: Tensor) -> list[Tensor]:
        """One direction for each output of each sample; zero at hidden layers whose gradient is exact."""
        found = [torch.zeros_like(s) for s in outputs[:-1]]
        for layer, y in enumerate(found):
            gate = self.gate(layer, outputs)
            for name, part in self.parts.items():
                if name == "wt":
                    above = self.weights[layer + 1][part]
                    y[part] = gate[part] * (self.normal(*gate[part].shape[:2], above.shape[1]) @ above)
                elif name != "backprop":
                    rows, projector = self.frame(name, layer, gate[part], places[part])
                    z = self.normal(*rows.shape[:2], 1, rows.shape[2])
                    y[part] = ((z if projector is None else z @ projector) @ rows)[:, :, 0]
        return [*found, self.normal(*outputs[-1].shape)]

    def gate(self, layer: int, outputs: list[Tensor]) -> Tensor:
        """The units that the guess takes for open, as zero and one."""
        return (outputs[layer] + self.gated * self.biases[layer][:, None] > 0).to(outputs[layer].dtype)

    def frame(self, name: str, layer: int, gate: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None]:
        """Orthonormal rows `A` (networks, batch, r, d) and a projector `P` or None: the direction is `z P A`."""
        above = self.weights[layer + 1][self.parts[name]]
        if name == "wperp-bottom" or (name == "reduced" and above.shape[1] > K):
            if self.steps % REFRESH == 0 or (name, layer) not in self.shared:
                self.shared[name, layer] = self.normal(len(gate), K, gate.shape[2])
            return orthonormal((1 - gate)[:, :, None] * self.shared[name, layer][:, None]), None
        if above.shape[1] <= K:  # the whole row space
            return orthonormal(gate[:, :, None] * above[:, None]), None
        return self.follow(layer, gate, above, places)

    def follow(self, layer: int, gate: Tensor, above: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Rows near each sample's own strongest `BLOCK`, and the projector on the top `K` among them."""
        gram, seat = above.mT @ above, torch.arange(len(gate), device=gate.device)[:, None]

        def times(rows: Tensor) -> Tensor:
            return (rows.flatten(1, 2) @ gram).view_as(rows) * gate[:, :, None]

        shape = (len(gate), len(self.data.x_train), BLOCK, gate.shape[2])
        if layer not in self.blocks:
            self.blocks[layer] = gate.new_zeros(shape)
        rows = self.normal(*places.shape, *shape[2:]) if self.cold else self.blocks[layer][seat, places]
        rows = rows * gate[:, :, None]
        for _ in range(FIRST_ROUNDS if self.cold else ROUNDS):
            rows = orthonormal(times(times(rows)))
        self.blocks[layer][seat, places] = rows
        return rows, leading(times(rows) @ rows.mT, K)

    def cotangents(
        self, outputs: list[Tensor], directions: list[Tensor], targets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The derivative of each sample's loss along its directions, and the gradient of the mean loss at each layer.

        The gradient is `c y / batch`, or exact for the networks that backpropagation trains.
        """
        error = outputs[-1].softmax(-1) - nn.functional.one_hot(targets, outputs[-1].shape[-1])
        tangent, masks = directions[0], [(s > 0).to(s.dtype) for s in outputs[:-1]]
        for mask, W, y in zip(masks, self.weights[1:], directions[1:], strict=True):
            tangent = (tangent * mask) @ W.mT + y
        c = (error * tangent).sum(-1)
        found = [c[:, :, None] * y / targets.shape[1] for y in directions]
        if part := self.parts.get("backprop"):
            g = error[part] / targets.shape[1]
            for layer in reversed(range(LAYERS)):
                found[layer][part] = g
                if layer:
                    g = (g @ self.weights[layer][part]) * masks[layer - 1][part]
        return c, found

    def step(self, places: Tensor, optimiser: torch.optim.Optimizer) -> None:
        """One step of each network, on its own samples: `places` (networks, batch)."""
        inputs, outputs = self.forward(self.data.x_train[places])
        _, found = self.cotangents(outputs, self.directions(outputs, places), self.data.y_train[places])
        learns = (self.added + self.gated)[:, 0]
        for W, b, x, g in zip(self.weights, self.biases, inputs, found, strict=True):
            W.grad, b.grad = g.mT @ x, learns * g.sum(1)
        optimiser.step()
        self.steps += 1

    def accuracy(self, x: Tensor, y: Tensor) -> list[float]:
        _, outputs = self.forward(x.expand(len(self.members), -1, -1))
        return (outputs[-1].argmax(-1) == y).double().mean(1).tolist()

    def follow_errors(self, places: Tensor, samples: int = 32) -> list[list[float]]:
        """Of layers 1 and 2: ‖P − P*‖₂ at the median and the 90 % quantile, P* each sample's exact projector."""
        part, found = self.parts["wperp"], []
        _, outputs = self.forward(self.data.x_train[places])
        for layer in range(LAYERS - 2):
            gate = self.gate(layer, outputs)[part]
            found_rows = self.follow(layer, gate, self.weights[layer + 1][part], places[part])
            rows, P = (one[:, :samples].double().cpu() for one in found_rows)
            matrices = (self.weights[layer + 1][part][:, None] * gate[:, :samples, None]).double().cpu()
            V = torch.linalg.eigh(matrices.mT @ matrices)[1][..., -K:]
            errors = torch.linalg.matrix_norm(rows.mT @ P @ P @ rows - V @ V.mT, 2).flatten()
            found.append([round(errors.quantile(q).item(), 5) for q in (0.5, 0.9)])
        return found


def orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows of the same span (..., r, d), by a Cholesky factor in float64; zero rows stay near zero."""
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    wide = rows.double()
    gram = wide @ wide.mT
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky_ex(gram + 1e-13 * eye)[0]
    return torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False).to(rows.dtype) @ rows


def leading(H: Tensor, k: int, iterations: int = 30) -> Tensor:
    """The projector on the top `k` eigenvectors of small symmetric matrices (..., n, n), without `eigh`.

    Canonical purification (Palser and Manolopoulos 1998): polynomials of `H` that keep the trace at `k`.
    """
    n, eye = H.shape[-1], torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)

    def trace(A: Tensor) -> Tensor:
        return A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]

    diagonal = H.diagonal(dim1=-2, dim2=-1)
    radius = H.abs().sum(-1) - diagonal.abs()
    least, most = ((diagonal - radius).amin(-1)[..., None, None], (diagonal + radius).amax(-1)[..., None, None])
    mean = trace(H) / n
    slope = torch.minimum(k / (mean - least).clamp_min(1e-30), (n - k) / (most - mean).clamp_min(1e-30))
    P = slope / n * (H - mean * eye) + k / n * eye
    for _ in range(iterations):
        P2 = P @ P
        P3 = P2 @ P
        left = trace(P - P2)
        c = torch.where(left > 1e-5, trace(P2 - P3) / left.clamp_min(1e-5), 0.5).clamp(0.01, 0.99)
        low = ((1 - 2 * c) * P + (1 + c) * P2 - P3) / (1 - c)
        P = torch.where(c <= 0.5, low, ((1 + c) * P2 - P3) / c)
    return (P + P.mT) / 2


def train(
    out: Path,
    done: Annotated[Path | None, typer.Option(help="A folder of networks that are not trained again.")] = None,
    biases: str = ",".join(BIASES),
    seeds: int = SEEDS,
    steps: Annotated[int, typer.Option(help="Stop after so many steps of each number of epochs; 0: never.")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop as soon as it is clear that this will not do.")] = 9.0,
    device: str = "cuda",
) -> None:
    """Train the networks that neither folder has."""
    data, start = load("mnist1d").to(device, torch.float32), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    folders = [out, done or out]
    for before, epochs in zip((0, *EPOCHS[:-1]), EPOCHS, strict=True):
        missing = [name for name in biases.split(",") if not find(folders, name, epochs)]
        if not missing:
            continue
        members = [Member(*one) for one in itertools.product(TRAINED, missing, range(seeds))]
        stack = Stack(members, data, seed=epochs)
        if before:
            restore(stack, {name: read(folders, name, before) for name in missing})
        optimiser = torch.optim.AdamW([*stack.weights, *stack.biases], 1e-4, weight_decay=0.01, fused=True)
        shuffles = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
        begun = clock = time.perf_counter()
        first = True
        for epoch in range(epochs):
            orders = [torch.randperm(len(data.x_train), generator=one) for one in shuffles]
            if epoch < before or stack.steps == steps > 0:
                continue
            for places in torch.stack([orders[member.seed] for member in members]).to(device).split(BATCH, 1):
                stack.step(places, optimiser)
                if stack.steps == steps:
                    break
            stack.cold = False
            now = epoch + 1 - before
            if now in (1, 5) or now % 25 == 0:
                finite = all(bool(W.isfinite().all()) for W in stack.weights)  # waits for the device
                left = 0.0 if first else (time.perf_counter() - clock) / (now - 1) * (epochs - epoch - 1)
                if first:
                    clock, first = time.perf_counter(), False  # the first epoch is slower than others
                spent = time.perf_counter() - start
                say(out, epochs=epochs, epoch=epoch + 1, seconds=round(spent, 1), left=round(left, 1), finite=finite)
                if spent + left > 60 * minutes:
                    raise typer.Exit(1)
        seconds = round(time.perf_counter() - begun, 1)
        errors = stack.follow_errors(places)
        say(out, epochs=epochs, seconds=seconds, projector_errors=errors, environment=describe(device))
        for name in missing:
            write(out / file_of(name, epochs), stack, name, places)
        del stack  # its blocks are large


def say(out: Path, **line: Any) -> None:
    print(json.dumps(line), flush=True)
    with (out / "progress.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def file_of(biases: str, epochs: int) -> str:
    return f"networks-{biases}-{epochs}.npz"


def write(path: Path, stack: Stack, biases: str, places: Tensor) -> None:
    chosen = [i for i, member in enumerate(stack.members) if member.biases == biases]
    arrays = {name: W[chosen].cpu().numpy() for name, W in zip(NAMES, stack.weights + stack.biases, strict=True)}
    for split in ("train", "test"):
        scores = stack.accuracy(getattr(stack.data, f"x_{split}"), getattr(stack.data, f"y_{split}"))
        arrays[f"{split}_accuracy"] = np.array(scores)[chosen]
    arrays["trained"] = np.array([stack.members[i].trained for i in chosen])
    arrays["seed"] = np.array([stack.members[i].seed for i in chosen])
    np.savez_compressed(path, places=places[chosen].cpu().numpy().astype("int16"), **arrays)  # type: ignore[arg-type]


def find(folders: list[Path], biases: str, epochs: int) -> Path | None:
    paths = (folder / file_of(biases, epochs) for folder in folders)
    return next((path for path in paths if path.exists()), None)


def read(folders: list[Path], biases: str, epochs: int) -> dict[str, np.ndarray]:
    path = find(folders, biases, epochs)
    assert path is not None
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def restore(stack: Stack, stored: dict[str, dict[str, np.ndarray]]) -> None:
    """Give each network of the stack its stored weights."""
    for i, member in enumerate(stack.members):
        arrays = stored[member.biases]
        row = int(np.flatnonzero((arrays["trained"] == member.trained) & (arrays["seed"] == member.seed))[0])
        for name, W in zip(NAMES, stack.weights + stack.biases, strict=True):
            W[i] = torch.from_numpy(arrays[name][row])


if __name__ == "__main__":
    typer.run(train)
