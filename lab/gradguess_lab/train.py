"""One training loop for every method, resumable at any epoch and bit-equal after any kill.

Compiled runs are equal up to rounding: in each process the first step of each kind runs uncompiled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradguess as gg
from gradguess.errors import GradguessError, NonFiniteError
from gradguess_lab import checkpoint, environment, interrupts
from gradguess_lab.compiled_backprop import CompiledBackprop
from gradguess_lab.config import TrainConfig, differences, misfit
from gradguess_lab.data import Dataset, load
from gradguess_lab.files import exclusive, read_json, write_atomic, write_json
from gradguess_lab.inspection import inspect_epoch
from gradguess_lab.loss import batch_accuracy, evaluate, smoothed_loss
from gradguess_lab.methods import guess_for
from gradguess_lab.networks import build
from gradguess_lab.recipe import as_weights, build_optimiser, check_augment, draw_moves, moved, set_rate
from gradguess_lab.scripts import prepare_model, scripted
from gradguess_lab.watch import watch_for
from gradguess_lab.world import ONE, World, world

Row = dict[str, Any]
FIRST = 3  # so many losses say whether a run that is started again is the same (`check`)
EVALUATED = (  # what the history of a result holds of an epoch
    *("epoch", "train_loss", "test_loss", "train_accuracy", "test_accuracy", "train_bits", "test_bits", "seconds"),
)


def train(
    config: TrainConfig,
    out: Path | None = None,
    on_epoch: Callable[[Row], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Row:
    """Run `config` and return its result record (see `result`).

    With `out`, the run lives in that directory: a finished one is read back, an interrupted one goes on from its last
    epoch, one of another configuration is refused. Without, nothing is written. `on_epoch` sees each row of the log,
    `say` gets a line where it goes wrong. Under torchrun the processes share each batch, and rank 0 alone writes.
    """
    with world(config.device) as ranks, contextlib.ExitStack() as held:

        def take() -> Row | None:
            if out is None:
                return None
            held.enter_context(exclusive(out))
            return claim(out, config)

        return ranks.from_first(take) or _Run(config, out, ranks).go(on_epoch, say)


def claim(directory: Path, config: TrainConfig) -> Row | None:
    """Make `directory` the home of `config`, or refuse if it is another's. The result, if the run is finished."""
    path, result = directory / "config.json", directory / "result.json"
    if not path.exists():
        if (directory / checkpoint.FILE).exists():
            raise GradguessError(f"{directory} holds {checkpoint.FILE} but no config.json; choose another --out.")
        write_json(path, config.as_dict())
    if found := differences(config, read_json(path, "configuration")):
        raise GradguessError(
            f"{directory} belongs to another configuration ({'; '.join(found)}). Choose another --out."
        )
    record: Row | None = read_json(result, "result") if result.exists() else None
    if record and (why := misfit(record, config)):
        raise GradguessError(f"result {result} {why}.")
    return record


def build_model(config: TrainConfig, data: Dataset) -> nn.Module:
    """The network of `config`, drawn on the CPU so that every device starts from the same weights."""
    generator = torch.Generator().manual_seed(config.seed)
    of = (config.width, config.depth, config.bias, config.activation)
    model = build(config.model, data.shape, *of, generator)
    model = prepare_model(config.script, model).to(config.device, getattr(torch, config.dtype))
    return model.to(memory_format=torch.channels_last) if config.channels_last else model  # type: ignore[call-overload]


def build_method(config: TrainConfig, model: nn.Module) -> Any:
    """The method of `config`, for this network."""
    return scripted(config.script, guess_for(config), model)


def build_forward(config: TrainConfig, model: nn.Module) -> gg.ForwardGradient:
    """What estimates the gradients of `config`."""
    differentiates = config.method == "backprop"  # it is compiled as anyone would, so that comparisons are fair
    forward = gg.ForwardGradient(
        model,
        CompiledBackprop() if config.compile and differentiates else build_method(config, model),
        tangents=config.tangents,
        memory=config.memory,
        sites=int(config.sites) if config.sites.isdecimal() else config.sites,
        seed=config.seed,
        isolate=config.isolate,
        balance=config.balance,
        top=config.top,
        compile=config.compile and not differentiates,
        derivative=config.derivative,
    )
    forward.mixes = config.model == "resnet18"  # known: its batch norm is measured with the default, coupling="sample"
    return forward


def autocast(config: TrainConfig) -> torch.autocast:
    """The precision in which the network of `config` computes."""
    return torch.autocast(torch.device(config.device).type, torch.bfloat16, enabled=config.autocast)


class _Run:
    """The state of a run: all that a checkpoint must hold, and nothing else that changes."""

    def __init__(self, config: TrainConfig, directory: Path | None, ranks: World = ONE) -> None:
        self.config, self.ranks = config, ranks
        self.directory = directory if ranks.rank == 0 else None
        environment.check_device(config.device)
        environment.source()  # now: the code may change while the run goes on
        torch.set_float32_matmul_precision(config.matmul)
        if config.compile:
            torch.compiler.reset()  # what earlier runs of this process compiled counts against a limit
        data = load(config.data).first(config.samples).held_out(config.holdout)
        self.data = data.to(config.device, getattr(torch, config.dtype))
        if config.augment:
            check_augment(self.data.shape)
        ranks.check_batches(len(self.data.x_train), config.batch)
        self.place: tuple[int, int] | None = None  # where this rank's samples lie in the batch
        self.model = build_model(config, self.data)
        self.guess = build_method(config, self.model)
        self.forward = build_forward(config, self.model)
        self.loss, self.optimiser = smoothed_loss(config.smoothing), build_optimiser(config, self.model)
        self.step: Callable[[Tensor, Tensor], Tensor] = self.plain_step
        if config.device.startswith("cuda") and config.memory == "store" and ranks.size == 1:
            self.step = gg.CapturedStep(self.forward, self.optimiser, self.loss)
        self.shuffle = torch.Generator().manual_seed(config.seed)
        self.rows: list[Row] = []
        self.peak_mb = 0.0

    def go(self, on_epoch: Callable[[Row], None] | None, say: Callable[[str], None]) -> Row:
        self.resume()
        watch, memory = watch_for(self.config, self.data.y_train), environment.PeakMemory(self.config.device)
        for row in self.rows:  # those before an interruption are not spoken of again
            watch(row)
        with interrupts.asked_between_steps():
            while len(self.rows) < self.config.epochs:
                try:
                    self.rows.append(row := self.run_epoch())
                except NonFiniteError:
                    say(f"diverged: a loss or a derivative became NaN or infinite. {watch.remedy}")
                    raise
                self.peak_mb = max(self.peak_mb, memory.megabytes())
                self.save()
                if line := watch(row):
                    say(line)
                if on_epoch and self.ranks.rank == 0:
                    on_epoch(row)
        return self.ranks.from_first(self.finish)

    def finish(self) -> Row:
        record = result(self.config, self.rows, self.peak_mb)
        if self.directory:
            write_json(self.directory / "result.json", record)
        return record

    def run_epoch(self) -> Row:
        """All steps of one epoch, then what is measured after it."""
        total = torch.zeros((), dtype=torch.float64, device=self.data.x_train.device)
        epoch, speaks, samples = len(self.rows) + 1, self.ranks.rank == 0, len(self.data.x_train)
        found, first = self.before(epoch) if speaks else {}, list[Tensor]()
        start = time.perf_counter()
        for loss, count in self.steps():
            total += loss * count
            if epoch == 1 and len(first) < FIRST:
                first.append(loss.clone())
        loss_sum = self.ranks.total(total.item())  # waits for the device, so the clock is right
        seconds = time.perf_counter() - start
        step_ms = 1e3 * seconds / -(-samples // self.config.batch)
        if first and self.ranks.size == 1:
            found["first"] = [float(loss) for loss in first]
        found |= self.after(epoch) if speaks else {}
        so_far = self.rows[-1]["seconds"] if self.rows else 0.0
        timed = {"epoch": epoch, "loss": loss_sum / samples, "step_ms": step_ms}
        return {**timed, **found, "seconds": so_far + time.perf_counter() - start}

    def steps(self) -> Iterator[tuple[Tensor, int]]:
        """Make the steps of one epoch: the loss of each, and the number of its samples that are this rank's."""
        config, x, y = self.config, self.data.x_train, self.data.y_train
        order = torch.randperm(len(x), generator=self.shuffle).to(x.device)
        batches = order.split(config.batch)
        moves = draw_moves(len(x), self.shuffle).to(x.device) if config.augment else None
        for step, batch in enumerate(batches):
            interrupts.check()
            set_rate(self.optimiser, config, (len(self.rows) + step / len(batches)) / config.epochs)
            own, self.place = self.ranks.own(batch)
            inputs = x[own] if moves is None else moved(x, own, moves[own])
            with autocast(config):
                loss = self.step(inputs, y[own])
            yield loss.detach(), len(own)

    def plain_step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimiser.zero_grad()
        loss = self.forward(self.loss, x, y, place=self.place)
        self.optimiser.step()
        return loss

    def before(self, epoch: int) -> Row:
        """The diagnosis of the fresh network, and the accuracy before the last epoch, as the authors measure it."""
        row: Row = {}
        if epoch == 1 and self.config.diagnosed(0):
            row["diagnostics_at_start"] = self.diagnosis(0)
        if epoch == self.config.epochs:
            with autocast(self.config):
                row["train_accuracy_before_last"] = batch_accuracy(self.model, self.data, self.config.batch)
        return row

    def after(self, epoch: int) -> Row:
        """Losses and accuracies, and the diagnosis of the guess."""
        row: Row = {}
        if epoch == self.config.epochs or epoch % self.config.eval_every == 0:
            with autocast(self.config):
                row.update(evaluate(self.model, self.data))
        if self.config.diagnosed(epoch):
            row["diagnostics"] = self.diagnosis(epoch)
        return row

    def diagnosis(self, epoch: int) -> Row:
        return inspect_epoch(self.model, self.guess, self.data, self.config, epoch, self.forward)

    def save(self) -> None:
        if self.directory is None:
            return
        checkpoint.save(self.directory, self.tensors(), {"rows": self.rows, "peak_mb": self.peak_mb})
        log = "".join(
            json.dumps(row) + "\n" for row in self.rows
        )  # for those who look on; the checkpoint alone is read
        write_atomic(self.directory / "metrics.jsonl", log)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, as one flat dictionary."""
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for number, slots in self.optimiser.state_dict()["state"].items():
            tensors.update({f"optimiser/{number}/{name}": value for name, value in slots.items()})
        tensors.update({f"forward/{name}": value for name, value in self.forward.state_dict().items()})
        tensors["generator/shuffle"] = self.shuffle.get_state()
        return tensors

    def resume(self) -> None:
        """Continue from the last checkpoint, if the directory has one."""
        stored = self.ranks.from_first(lambda: checkpoint.load(self.directory) if self.directory else None)
        if stored is None:
            return
        parts, state = checkpoint.by_part(stored[0]), stored[1]
        try:
            slots = {int(number): values for number, values in checkpoint.by_part(parts.get("optimiser", {})).items()}
            self.model.load_state_dict(parts["model"])
            self.optimiser.load_state_dict(self.optimiser.state_dict() | {"state": slots})
            as_weights(self.optimiser)
            self.forward.load_state_dict(parts.get("forward", {}))
            self.shuffle.set_state(parts["generator"]["shuffle"])
        except Exception as error:
            why = f"{error!r:.160}"
            raise GradguessError(f"the checkpoint in {self.directory} does not fit this run: {why}") from error
        self.rows[:], self.peak_mb = state["rows"], state["peak_mb"]


def first_losses(config: TrainConfig) -> list[float]:
    """The losses of the first steps of a run, which is not gone on with."""
    return [loss.item() for loss, _ in itertools.islice(_Run(config, None).steps(), FIRST)]


def result(config: TrainConfig, rows: list[Row], peak_mb: float) -> Row:
    """The record of a finished run: schema 1, which the report reads."""
    history = [{name: row[name] for name in EVALUATED if name in row} for row in rows if "test_loss" in row]
    metrics = {name: value for name, value in history[-1].items() if name not in ("epoch", "seconds")} | {
        "step_ms": statistics.median(row["step_ms"] for row in rows),
        "epochs": len(rows),
        "seconds": rows[-1]["seconds"],
        "peak_memory_mb": peak_mb,
        "train_accuracy_before_last": rows[-1]["train_accuracy_before_last"],
    }
    found = [{"epoch": 0, **rows[0]["diagnostics_at_start"]}] if "diagnostics_at_start" in rows[0] else []
    found += [{"epoch": row["epoch"], **row["diagnostics"]} for row in rows if "diagnostics" in row]
    return {
        "schema": 1,
        "key": config.key,
        "config": config.as_dict(),
        "metrics": metrics,
        "history": history,
        "diagnostics": found,
        "first": rows[0].get("first"),
        "environment": environment.describe(config.device),
    }
