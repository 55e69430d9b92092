"""`ForwardGradientTrainer` against the plain `Trainer`, with the real packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradguess as gg
from models import generator

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
bridge = pytest.importorskip("gradguess.integrations.huggingface")
Trainer, Bridge = transformers.Trainer, bridge.ForwardGradientTrainer

SIZES = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
FEEDBACK = gg.Feedback(gg.WPerp(k=5), rate=0.1)


def gpt2(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, **SIZES, **drop)
    return transformers.GPT2LMHeadModel(config)


def bert(kind: str, labels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, num_labels=labels, **sizes)
    return getattr(transformers, f"BertFor{kind}")(config)


def counting(samples: int = 40, length: int = 10) -> list[dict[str, Tensor]]:
    """Sequences that count upwards; a part of some is ignored."""
    tokens = (torch.randint(30, (samples, 1), generator=generator(1)) + torch.arange(length)) % 30
    labels = tokens.clone()
    labels[::3, 6:] = -100
    return [{"input_ids": x, "labels": t} for x, t in zip(tokens, labels, strict=True)]


def labelled(shape: tuple[int, ...], classes: int | None) -> list[dict[str, Tensor]]:
    """Random sequences with labels of a shape: of so many classes, or numbers 0 and 1."""
    tokens = torch.randint(30, (40, 8), generator=generator(1))
    labels = torch.randint(classes or 2, (40, *shape), generator=generator(2))
    return [{"input_ids": x, "labels": t if classes else t.float()} for x, t in zip(tokens, labels, strict=True)]


def arguments(out: Path, steps: int, **more: Any) -> Any:
    fixed = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    chosen = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, **more}
    return transformers.TrainingArguments(str(out), max_steps=steps, **fixed | chosen)


def losses(trainer: Any, resume: str | None = None) -> list[float]:
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 3},  # the last step of an epoch has two parts
        {"bf16": True, "max_grad_norm": 0.1},
        {"label_smoothing_factor": 0.2},
    ],
    ids=["plain", "accumulated", "bfloat16", "smoothed"],
)
def test_backprop_is_the_plain_trainer(tmp_path: Path, more: dict[str, Any]):
    """Dropout included: the bridge draws no random number of PyTorch's own."""
    args = arguments(tmp_path, 8, **more)
    ours = losses(Bridge(gpt2(0.1), args, train_dataset=counting(), method=gg.Backprop()))
    assert ours == pytest.approx(losses(Trainer(gpt2(0.1), args, train_dataset=counting())), rel=1e-4)
    assert ours[-1] < ours[0]
    if "bf16" in more:
        whole = arguments(tmp_path, 8, **more | {"bf16": False})
        assert ours != losses(Bridge(gpt2(0.1), whole, train_dataset=counting(), method=gg.Backprop()))


@pytest.mark.parametrize(
    ("kind", "data", "labels"),
    [
        ("SequenceClassification", labelled((), 3), 3),
        ("TokenClassification", labelled((8,), 3), 3),
        ("MaskedLM", labelled((8,), 30), 3),
        ("SequenceClassification", labelled((3,), None), 3),  # several labels
        ("SequenceClassification", labelled((), None), 1),  # regression
    ],
    ids=["classes", "tokens", "masked", "several", "regression"],
)
def test_losses_are_those_of_the_model(tmp_path: Path, kind: str, data: Any, labels: int):
    args = arguments(tmp_path, 4)
    ours = losses(Bridge(bert(kind, labels), args, train_dataset=data, method=gg.Backprop()))
    assert ours == pytest.approx(losses(Trainer(bert(kind, labels), args, train_dataset=data)), rel=1e-4)


def test_the_estimate_is_that_of_the_estimator(tmp_path: Path):
    """One step of the bridge, and the same by hand."""
    model, data = gpt2(), counting()[:8]
    trainer = Bridge(model, arguments(tmp_path, 1, seed=5), train_dataset=data, method=gg.WPerp(k=3), tangents=2)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    items = batch["labels"].ne(-100).sum()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(model, batch, items)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    def by_hand(outputs: Any, labels: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none")
        return 8 * each.sum(1) / items

    forward = gg.ForwardGradient(model, gg.WPerp(k=3), tangents=2, seed=5)
    assert loss == pytest.approx(float(forward(by_hand, {"input_ids": batch["input_ids"]}, batch["labels"])))
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()})


def test_a_run_is_resumed_with_what_was_learned(tmp_path: Path):
    more = {"save_strategy": "steps", "save_steps": 6, "lr_scheduler_type": "constant"}
    whole = losses(Bridge(gpt2(), arguments(tmp_path / "a", 10, **more), train_dataset=counting(), method=FEEDBACK))
    checkpoint = tmp_path / "a" / "checkpoint-6"
    stored = pytest.importorskip("safetensors.torch").load_file(checkpoint / bridge.STATE)
    assert any(name.startswith("learned/") for name in stored)
    trainer = Bridge(gpt2(), arguments(tmp_path / "b", 10, **more), train_dataset=counting(), method=FEEDBACK)
    assert losses(trainer, str(checkpoint)) == pytest.approx(whole, rel=1e-6)
    assert trainer.estimator.steps == 10


def test_a_checkpoint_of_the_plain_trainer_starts_afresh(tmp_path: Path):
    more = {"save_strategy": "steps", "save_steps": 2}
    Trainer(gpt2(), arguments(tmp_path, 2, **more), train_dataset=counting()).train()
    trainer = Bridge(gpt2(), arguments(tmp_path, 3, **more), train_dataset=counting(), method=FEEDBACK)
    with pytest.warns(UserWarning, match="starts afresh"):
        losses(trainer, str(tmp_path / "checkpoint-2"))
    assert trainer.estimator.steps == 1
    (tmp_path / "checkpoint-2" / bridge.STATE).write_bytes(b"half of a file")
    with pytest.raises(gg.GradguessError, match="is truncated"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


PROGRAM = """
import gc, json, sys
from pathlib import Path
import torch
sys.path[:0] = sys.argv[1:4]
from test_trainer import FEEDBACK, Bridge, arguments, counting, gpt2, losses
args = arguments(Path(sys.argv[4]), 4, per_device_train_batch_size=4, gradient_accumulation_steps=2)
trainer = Bridge(gpt2(), args, train_dataset=counting(), method=FEEDBACK)
found = losses(trainer)
if trainer.is_world_process_zero():
    Path(sys.argv[4], "losses.json").write_text(json.dumps(found))
del trainer  # it holds the group, whose threads must end before Python does: else they abort it
torch.distributed.destroy_process_group()
gc.collect()
"""


@pytest.mark.slow
def test_processes_share_a_batch(tmp_path: Path):
    """Two processes with half of each batch have the losses of one."""
    more = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    alone = losses(Bridge(gpt2(), arguments(tmp_path, 4, **more), train_dataset=counting(), method=FEEDBACK))
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    tests = Path(__file__).parent
    paths = [str(Path(gg.__file__).parents[1]), str(tests), str(tests / "support"), str(tmp_path)]
    command = [*launcher, str(tmp_path / "program.py"), *paths]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(alone, rel=1e-5)


def test_a_loss_of_several_labels(tmp_path: Path):
    """Questions are answered by a start and an end; the plain Trainer averages the two losses."""

    def both(outputs: Any, labels: dict[str, Tensor]) -> Tensor:
        ends = (outputs.start_logits, labels["start_positions"]), (outputs.end_logits, labels["end_positions"])
        return sum(nn.functional.cross_entropy(*end, reduction="none") for end in ends) / 2

    data = [{"input_ids": row["input_ids"], "start_positions": 2, "end_positions": 5} for row in counting()]
    args, method = arguments(tmp_path, 4), gg.Backprop()
    ours = losses(Bridge(bert("QuestionAnswering", 2), args, train_dataset=data, method=method, loss_fn=both))
    assert ours == pytest.approx(losses(Trainer(bert("QuestionAnswering", 2), args, train_dataset=data)), rel=1e-4)


def test_only_adapters_are_trained(tmp_path: Path):
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(gpt2(), lora)

    args = arguments(tmp_path, 30)
    exact = losses(Bridge(adapted(), args, train_dataset=counting(), method=gg.Backprop()))
    assert exact == pytest.approx(losses(Trainer(adapted(), args, train_dataset=counting())), rel=1e-4)
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = losses(Bridge(model, args, train_dataset=counting(), method=FEEDBACK))
    assert sum(found[-5:]) < sum(found[:5])
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_refusals(tmp_path: Path):
    args, data, wrong = arguments(tmp_path, 1), counting(), labelled((5,), None)
    with pytest.raises(gg.InputError, match="one loss per sample"):
        Bridge(gpt2(), args, train_dataset=data, method=FEEDBACK, compute_loss_func=lambda *_, **__: 0)
    with pytest.raises(gg.InputError, match="none of the labels"):
        Bridge(gpt2(), args, train_dataset=[{"input_ids": data[0]["input_ids"]}] * 8, method=FEEDBACK).train()
    with pytest.raises(gg.InputError, match=r"logits \(8, 3\) and labels \(8, 5\)"):
        Bridge(bert("SequenceClassification"), args, train_dataset=wrong, method=FEEDBACK).train()
    both = [{"input_ids": row["input_ids"], "start_positions": 0, "end_positions": 1} for row in data]
    with pytest.raises(gg.InputError, match=r"found \['end_positions', 'start_positions'\]. Pass a loss_fn"):
        Bridge(bert("QuestionAnswering", 2), args, train_dataset=both, method=FEEDBACK).train()
    args.fp16 = True
    with pytest.raises(gg.InputError, match="bf16=True"):
        Bridge(gpt2(), args, train_dataset=data, method=FEEDBACK)
