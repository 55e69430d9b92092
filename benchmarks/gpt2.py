"""A network of the shape of GPT-2 small learns a text: loss, time of a step and peak memory of each way to train it.

    python benchmarks/gpt2.py --device cuda --out results/bench
    python benchmarks/gpt2.py --small --steps 4

Hugging Face's class as it is, 12 layers of 768, 1024 positions, batch 8, bfloat16 by autocast, without dropout, random
weights. The text is that of the data set `shakespeare`, its 8192 most frequent words and signs. Each way starts from
the same weights and sees the same batches. The time of a step is the median of the last half of its steps, refreshes
and lessons included by the mean over whole periods; the peak is that of the last half, above nothing: weights,
gradients and the optimiser's state are part of it. Captured steps are CUDA graphs, draws and update included; they need
what the step that was recorded needed. Rows are written as they end, and what is written is not run again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.backends.cuda_graphs import Recording, on_side_stream
from gradguess.captured_step import WARM_UP
from gradguess.errors import require
from gradguess_lab.bench.run import keep, kind_of, make_record
from gradguess_lab.data import load
from gradguess_lab.datasets import CHARACTERS
from gradguess_lab.files import read_json
from gradguess_lab.loss import per_sample_loss

VOCABULARY = 8192
SHAPES = {  # layers, width, heads, positions, batch
    False: (12, 768, 12, 1024, 8),
    True: (2, 32, 2, 64, 4),
}


def ways(small: bool = False) -> dict[str, dict[str, Any]]:
    """Name -> options of `ForwardGradient`, or of backpropagation where there is no method, and `captured`."""
    layers, *_, batch = SHAPES[small]
    pieces = layers  # one block each
    wperp, feedback = gg.WPerp(), gg.Feedback(gg.WPerp(), form="chained", every=4, fraction=0.25)
    exact = {"method": wperp, "sites": pieces, "top": "exact"}
    replay, fused = {**exact, "memory": "replay"}, {"compile": True, "captured": True}
    return {
        "backprop": {},
        "backprop, in halves": {"chunk": batch // 2},
        "backprop, compiled": {"compile": True},
        "backprop, compiled, captured": {"compile": True, "captured": True},
        "wperp": {"method": wperp},
        "wperp, compiled": {"method": wperp, "compile": True},
        "wperp, replay": {"method": wperp, "memory": "replay"},
        "wperp, pieces": {"method": wperp, "sites": pieces},
        "wperp, pieces, exact top": exact,
        "wperp, pieces, exact top, compiled": {**exact, "compile": True},
        "wperp, pieces, exact top, compiled, captured": {**exact, **fused},
        "wperp, pieces, exact top, replay": replay,
        "wperp, pieces, exact top, replay, in halves": {**replay, "chunk": batch // 2},
        "wperp, pieces, exact top, replay, in quarters": {**replay, "chunk": batch // 4},
        "feedback, pieces": {"method": feedback, "sites": pieces},
        "feedback, pieces, compiled": {"method": feedback, "sites": pieces, "compile": True},
        "feedback, pieces, compiled, captured": {"method": feedback, "sites": pieces, **fused},
    }


def words() -> Tensor:
    """The text as numbers below `VOCABULARY`; 0 stands for what is rare."""
    text = "".join(CHARACTERS[i] for i in load("shakespeare").x_train.flatten().tolist())
    signs = re.findall(r" ?[A-Za-z']+|\s|.", text)
    number = {sign: i + 1 for i, (sign, _) in enumerate(Counter(signs).most_common(VOCABULARY - 1))}
    return torch.tensor([number.get(sign, 0) for sign in signs])


class Logits(nn.Module):
    """The network as a function of tokens alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens, use_cache=False).logits
        return logits


def network(small: bool, device: str) -> nn.Module:
    transformers = require("transformers", "hf", "This benchmark")
    layers, width, heads, positions, _ = SHAPES[small]
    with torch.random.fork_rng(["cuda"] if device == "cuda" else []):
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_layer=layers, n_embd=width, n_head=heads, n_positions=positions,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return Logits(transformers.GPT2LMHeadModel(config)).to(device)


def batches(text: Tensor, small: bool, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    positions, batch = SHAPES[small][3:]
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(positions)
    while True:
        places = torch.randint(len(text) - positions, (batch, 1), generator=generator) + offsets
        yield text[places].to(device), text[places + 1].to(device)


Step = Callable[[Tensor, Tensor], Tensor]


def make_step(model: nn.Module, options: dict[str, Any], lr: float) -> Step:
    """A function that makes a training step and returns the mean loss."""
    captured = options.pop("captured", False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=captured)
    if captured and "method" in options:
        return gg.CapturedStep(gg.ForwardGradient(model, options.pop("method"), **options), optimiser, per_sample_loss)
    differentiate = gradients(model, options)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = differentiate(x, y)
        optimiser.step()
        return loss

    return replayed(step) if captured else step


def gradients(model: nn.Module, options: dict[str, Any]) -> Step:
    """A function that adds to `.grad` and returns the mean loss."""
    if "method" in options:
        forward = gg.ForwardGradient(model, options.pop("method"), **options)
        return lambda x, y: forward(per_sample_loss, x, y)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return per_sample_loss(model(x), y).mean()

    compiled, chunk = torch.compile(loss_of) if "compile" in options else loss_of, options.get("chunk")

    def backprop(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for part in zip(x.split(chunk or len(x)), y.split(chunk or len(y)), strict=True):
            loss = compiled(*part) * (len(part[0]) / len(x))
            loss.backward()
            total += loss.detach()
        return total

    return backprop


def replayed(step: Step) -> Step:
    """A step as a CUDA graph, after some that run by themselves."""
    count = itertools.count()
    given: list[Tensor] = []
    recordings: list[Recording[Tensor]] = []

    def run(x: Tensor, y: Tensor) -> Tensor:
        if next(count) < WARM_UP:
            return on_side_stream(lambda: step(x, y))
        if not recordings:
            given.extend((x.clone(), y.clone()))
            recordings.append(Recording(lambda: step(*given)))
        for held, new in zip(given, (x, y), strict=True):
            held.copy_(new)
        return recordings[0].replay()

    return run


def train(options: dict[str, Any], steps: int, small: bool, device: str, text: Tensor, lr: float) -> dict[str, Any]:
    model = network(small, device)
    captured, cuda = options.get("captured", False), device == "cuda"
    advance = make_step(model, options, lr)
    wait = torch.cuda.synchronize if cuda else lambda: None
    losses, seconds = [], []
    for step, (x, y) in zip(range(steps), batches(text, small, device), strict=False):
        if cuda and step == steps // 2:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, cache_enabled=not captured):
            loss = advance(x, y)
        wait()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    late = seconds[steps // 2 :]
    return {
        "lr": lr,
        "steps": steps,
        "losses": losses,
        "step_ms": 1e3 * sum(late) / len(late),
        "median_ms": 1e3 * sorted(late)[len(late) // 2],
        "start_s": sum(seconds[: steps // 2]) - len(late) * sorted(late)[len(late) // 2],
        "peak_mb": torch.cuda.max_memory_allocated() / 2**20 if cuda and not captured else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--only", nargs="*", help="ways to train, by name; all that the device can")
    parser.add_argument("--small", action="store_true", help="a small network, to see that it runs")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    name = f"gpt2-{kind_of(options.device)}.json"
    stored = options.out is not None and (options.out / name).exists()
    rows = read_json(options.out / name, "benchmark")["rows"] if stored else []
    known, text = ways(options.small), words()
    for way in options.only or [way for way in known if options.device == "cuda" or "captured" not in known[way]]:
        if any(row["way"] == way and row["steps"] == options.steps for row in rows):
            continue
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                row = train(dict(known[way]), options.steps, options.small, options.device, text, options.lr)
            row["notes"] = sorted({str(w.message) for w in said if "compile=True" in str(w.message)})
        except (RuntimeError, gg.GradguessError) as error:
            row = {"steps": options.steps, "failed": f"{type(error).__name__}: {error}"[:400]}
        rows.append({"way": way, **row})
        shown = {
            key: row[key] for key in ("step_ms", "median_ms", "start_s", "peak_mb", "notes", "failed") if key in row
        }
        print(way, shown, [round(loss, 3) for loss in row.get("losses", [])[:: max(1, options.steps // 5)]], flush=True)
        keep(make_record("gpt2", rows, options.device, 0.0), options.out, name.removesuffix(".json"))
        torch.compiler.reset()
        gc.collect()  # graphs and what they hold
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
