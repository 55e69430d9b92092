"""Hugging Face's Trainer and `ForwardGradientTrainer` on one small GPT-2: the loss over the steps, and the time.

    python benchmarks/trainer.py --out results/bridges
    python benchmarks/trainer.py --steps 4 --only trainer backprop

Four layers of 64, 64 characters of the data set `shakespeare`, batch 8, AdamW at 3e-3 with a cosine schedule,
gradients clipped at 1, dropout 0.1. All start from the same weights and see the same batches, on one core; no rate was
searched for. `last` is the mean loss of the last 20 steps, `gap` the largest difference from Trainer's losses, and
`step_ms` the time of the processor.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=list(WAYS), help="ways to train, by name")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]
    text = load("shakespeare").x_train.long().flatten()
    sequences = text[: len(text) // 64 * 64].view(-1, 64)[:4000]
    data = [{"input_ids": row, "labels": row} for row in sequences]
    for way in options.only:
        rows.append({"way": way, "steps": options.steps, **train(WAYS[way], options.steps, data)})
        print(f"{way:20} last {rows[-1]['last']:.4f}  {rows[-1]['step_ms']:.1f} ms", flush=True)
    plain = next((row["losses"] for row in rows if row["way"] == "trainer"), [])
    for row in rows:
        row["gap"] = max((abs(a - b) for a, b in zip(row["losses"], plain, strict=False)), default=None)
    keep(make_record("trainer", rows, "cpu", load_before), options.out, "trainer")


if __name__ == "__main__":
    main()
