"""Hugging Face's Trainer and `ForwardGradientTrainer` on one small GPT-2: the loss over the steps, and the time.

    python benchmarks/trainer.py --out results/bridges
    python benchmarks/trainer.py --steps 4 --only trainer --only backprop

Four layers of 64, 64 characters of the data set `shakespeare`, batch 8, AdamW at 3e-3 with a cosine schedule,
gradients clipped at 1, dropout 0.1. All start from the same weights and see the same batches, on one core; no rate was
searched for. `last` is the mean loss of the last 20 steps, `gap` the largest difference from the losses of the first,
which is Trainer, and `step_ms` the time of the processor.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

import gradguess as gg
from gradguess.errors import require
from gradguess.integrations.huggingface import ForwardGradientTrainer
from gradguess_lab.bench.run import keep, make_record
from gradguess_lab.data import load
from gradguess_lab.datasets import CHARACTERS

PIECES = 4
WAYS: dict[str, dict[str, Any]] = {
    "trainer": {},
    "backprop": {"method": gg.Backprop()},
    "feedback, pieces": {"method": gg.Feedback(gg.WPerp(), form="chained", rate=0.1), "sites": PIECES},
    "students, pieces": {"method": gg.Students(), "sites": PIECES},
    "feedback": {"method": gg.Feedback(gg.WPerp(), form="chained", rate=0.1)},
    "wperp": {"method": gg.WPerp()},
    "mezo": {"method": gg.baselines.MeZO()},
}


def network() -> nn.Module:
    transformers = require("transformers", "hf", "This benchmark")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=len(CHARACTERS), n_layer=PIECES, n_embd=64, n_head=4, n_positions=64,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)


def train(options: dict[str, Any], steps: int, data: list[dict[str, Any]]) -> dict[str, Any]:
    transformers = require("transformers", "hf", "This benchmark")
    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            out, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3, lr_scheduler_type="cosine",
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        kind = ForwardGradientTrainer if options else transformers.Trainer
        trainer = kind(network(), arguments, train_dataset=data, **options)
        trainer.remove_callback(transformers.PrinterCallback)
        start = time.process_time()
        trainer.train()
    seconds = time.process_time() - start
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"losses": losses, "last": sum(losses[-20:]) / len(losses[-20:]), "step_ms": 1e3 * seconds / steps}


def main(steps: int = 200, only: list[str] | None = None, out: Path | None = None) -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]
    text = load("shakespeare").x_train.long().flatten()
    sequences = text[: len(text) // 64 * 64].view(-1, 64)[:4000]
    data = [{"input_ids": row, "labels": row} for row in sequences]
    for way in only or WAYS:
        rows.append({"way": way, "steps": steps, **train(WAYS[way], steps, data)})
        print(f"{way:20} last {rows[-1]['last']:.4f}  {rows[-1]['step_ms']:.1f} ms", flush=True)
    for row in rows:
        pairs = zip(row["losses"], rows[0]["losses"], strict=False)
        row["gap"] = max(abs(a - b) for a, b in pairs)
    keep(make_record("trainer", rows, "cpu", load_before), out, "trainer")


if __name__ == "__main__":
    typer.run(main)
