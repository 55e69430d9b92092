"""Hugging Face: a `Trainer` whose gradients are estimated.

    trainer = ForwardGradientTrainer(model, args, train_dataset=data, method=gg.Feedback(gg.WPerp()), sites=4)
    trainer.train()

It replaces the step that adds to `.grad`, and saves what the method has learned with each checkpoint. All else is
Trainer's: data, optimiser, schedule, clipping, accumulation, autocast, logs and evaluation.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradguess as gg
from gradguess.errors import require

Trainer: Any = require("transformers", "gradguess[hf]", "ForwardGradientTrainer").Trainer

OPTIONS = set(inspect.signature(gg.ForwardGradient).parameters) - {"model", "guess"}
STATE = "gradguess.safetensors"  # in the folder of a checkpoint
IGNORED = -100  # a label that does not count


class ForwardGradientTrainer(Trainer):
    """A `transformers.Trainer` that estimates gradients by `method`.

    Several processes, one for each device, share a batch as `gg.ForwardGradient` does. FSDP, DeepSpeed and float16 are
    refused.

    Args:
        method: `gg.Feedback(...)`, `gg.Students()`, `gg.WPerp()`, or any other.
        loss_fn: `loss_fn(outputs, labels)` returns one loss per sample; the labels are a dict where the batch has
            several. Without it, the loss is that of the model's kind: next token, classes, several labels, regression.
        arguments: those of `Trainer`, and the options of `gg.ForwardGradient`. The seed is that of the
            `TrainingArguments` unless one is given.
    """

    def __init__(self, *args: Any, method: Any, loss_fn: Any = None, **arguments: Any) -> None:
        self._options = {name: arguments.pop(name) for name in OPTIONS & set(arguments)}
        super().__init__(*args, **arguments)
        self.method, self.loss_fn = method, loss_fn
        self._forward: gg.ForwardGradient | None = None
        self._loss = lambda outputs, targets: (self.loss_fn or self._summed)(outputs, targets[0]) * targets[1]
        self._check()

    def _check(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise gg.InputError("ForwardGradientTrainer: expected whole weights, found FSDP or DeepSpeed. Turn it off.")
        if self.args.fp16:
            raise gg.InputError("ForwardGradientTrainer: float16 needs scaled losses. Pass bf16=True instead of fp16.")
        if self.args.n_gpu > 1:
            raise gg.InputError(
                f"ForwardGradientTrainer: expected one device for each process, found {self.args.n_gpu}. Start with "
                "torchrun, or set CUDA_VISIBLE_DEVICES to one of them."
            )
        if self.compute_loss_func is not None:
            raise gg.InputError(
                "compute_loss_func returns one number. Pass a loss_fn that returns one loss per sample."
            )

    @property
    def estimator(self) -> gg.ForwardGradient:
        """Made at the first step, when Trainer has moved the model to its device."""
        if self._forward is None or self._forward.model is not self.model:  # `model_init` makes another one
            self._forward = gg.ForwardGradient(self.model, self.method, **{"seed": self.args.seed, **self._options})
        return self._forward

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Add the estimate to `.grad`, and return the loss as Trainer does: its part of an accumulated step."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # optimisers without a schedule ask for it
            self.optimizer.train()
        inputs = dict(self._prepare_inputs(inputs))
        labels = {name: inputs.pop(name) for name in self.label_names if name in inputs}
        if not labels:
            raise gg.InputError(f"The batch has none of the labels {self.label_names}, found {sorted(inputs)}.")
        first = next(iter(labels.values()))
        if self.loss_fn is not None:
            target, weight = labels if len(labels) > 1 else first, 1 / self.current_gradient_accumulation_steps
        elif len(labels) > 1:
            raise gg.InputError(f"Expected one kind of labels, found {sorted(labels)}. Pass a loss_fn for these.")
        else:
            target, weight = self._counted(first, num_items_in_batch)
        weights = torch.as_tensor(weight, device=first.device).expand(len(first))
        with self.compute_loss_context_manager():
            return self.estimator(self._loss, inputs, (target, weights))

    def _counted(self, labels: Tensor, items: Any) -> tuple[Tensor, Any]:
        """Labels in the place of their logits, and the weight that makes a mean over samples one over all labels."""
        if _predicts_next(self.model):
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if items is None:
            items = labels.ne(IGNORED).sum() * self.current_gradient_accumulation_steps
        elif self.args.average_tokens_across_devices:
            items = items / self.args.world_size  # those of all processes were counted
        return labels, len(labels) / items

    def _summed(self, outputs: Any, labels: Tensor) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        kind = getattr(getattr(self.model, "config", None), "problem_type", None)
        return _summed_loss(logits.float(), labels, kind, self.args.label_smoothing_factor)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = {name: value.cpu().contiguous() for name, value in self.estimator.state_dict().items()}
            _safetensors().save_file(state, Path(output_dir) / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE
        if not path.exists():
            warnings.warn(f"{checkpoint} has no {STATE}: what the method learns starts afresh.", stacklevel=2)
            return
        try:
            state = _safetensors().load_file(path)
        except require("safetensors", "hf", "A checkpoint").SafetensorError as error:
            raise gg.GradguessError(f"{path} is truncated or no file of tensors. Delete it to start afresh.") from error
        self.estimator.load_state_dict(state)


def _safetensors() -> Any:
    return require("safetensors.torch", "gradguess[hf]", "A checkpoint")


def _predicts_next(model: Any) -> bool:
    """Whether the logits at a position are for the label of the next one."""
    names = require(
        "transformers.models.auto.modeling_auto", "gradguess[hf]", "The loss"
    ).MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # below an adapter
    named = {each.__name__ for each in type(inner).__mro__} & set(names.values())
    return bool(named) or getattr(inner, "loss_type", None) == "ForCausalLM"


def _summed_loss(logits: Tensor, labels: Tensor, kind: str | None = None, smoothing: float = 0.0) -> Tensor:
    """The loss of each sample, summed over its labels; `kind` is the `problem_type` of a configuration.

    >>> import torch
    >>> _summed_loss(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [3, -100, -100]])) / torch.tensor(4.0).log()
    tensor([3., 1.])
    """
    if not labels.is_floating_point() and logits.shape[:-1] == labels.shape:
        rows, classes = logits.flatten(0, -2), labels.flatten()
        each = F.cross_entropy(rows, classes, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")
        losses = each.view_as(labels)
    elif logits.numel() != labels.numel():
        raise gg.InputError(
            f"Expected a label for each row of logits, found logits {tuple(logits.shape)} and labels "
            f"{tuple(labels.shape)} ({labels.dtype}). Pass a loss_fn for another kind of loss."
        )
    elif kind == "regression" or (kind is None and logits.shape[-1] == 1):
        losses = (logits.view_as(labels) - labels).square()
    else:
        losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses
