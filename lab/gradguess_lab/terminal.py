"""The terminal: commands whose options are declared once, progress bars and tables. Needs rich and typer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from gradguess_lab import interrupts

if TYPE_CHECKING:
    from gradguess_lab.config import TrainConfig
    from gradguess_lab.jobs import Look
    from gradguess_lab.tables.table import Table

RANK = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0  # that torchrun gave
notes = Console(stderr=True, quiet=RANK > 0)  # results alone go to standard output
Shown = Iterator[tuple[dict[str, Any], Iterable[Any]]]  # a record for a program, lines and tables for a person


def _use(threads: int) -> int:
    if threads:
        import torch  # help needs none

        torch.set_num_threads(threads)
    return threads


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Threads = Annotated[int, typer.Option(help="Threads of PyTorch; 0: its own default.", callback=_use)]


def command(app: typer.Typer, config: Any = None) -> Callable[[Callable[..., Shown]], Callable[..., Shown]]:
    """Make a command of a generator: with `--json` it prints the records that come, else what a person reads.

    In the place of the parameter `config` stands one option per field of that class: fields are declared once.
    """
    fields = dataclasses.fields(config) if config else ()

    def register(function: Callable[..., Shown]) -> Callable[..., Shown]:
        def run(as_json: bool, **values: Any) -> None:
            try:
                chosen = {item.name: values.pop(item.name) for item in fields}
                for record, lines in function(**values, **({"config": config(**chosen)} if config else {})):
                    if RANK == 0:
                        _show([json.dumps(record)] if as_json else lines)
            except KeyboardInterrupt:
                kept = isinstance(out := values.get("out"), Path) and out.is_dir()
                say(f"Interrupted.{f' What is in {out} is kept: the same command continues from there.' * kept}")
                raise typer.Exit(interrupts.INTERRUPTED) from None

        own = inspect.signature(function, eval_str=True).parameters.values()
        options = {item.name: (item.annotation, item.default) for item in own if item.name != "config"}
        for item in fields:
            kind: Any = str if item.type == "int | str" else type(item.default)
            options[item.name] = Annotated[kind, typer.Option(help=item.metadata["help"])], kind(item.default)
        options["as_json"] = Json, False
        only = inspect.Parameter.KEYWORD_ONLY
        taken = [inspect.Parameter(name, only, annotation=how, default=value) for name, (how, value) in options.items()]
        functools.update_wrapper(run, function)
        run.__annotations__ = {name: how for name, (how, _) in options.items()}
        run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        app.command()(run)
        return function

    return register


def _show(lines: Iterable[Any]) -> None:
    for line in lines:
        print(line, flush=True) if isinstance(line, str) else Console().print(line)


def say(line: str) -> None:
    """A note to a person, as it is."""
    notes.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def epoch_bar(config: TrainConfig) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar over the epochs with loss, accuracy, step time and time left; the block calls it with each row."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[scores]}"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=notes) as bar:
        task = bar.add_task(config.key, total=config.epochs, scores="")
        accuracy = "  …"

        def show(row: dict[str, Any]) -> None:
            nonlocal accuracy
            if "test_accuracy" in row:
                accuracy = f"{row['train_accuracy']:.3f}/{row['test_accuracy']:.3f}"
            scores = f"loss {row['loss']:.3f}  acc {accuracy}  {row['step_ms']:.2f} ms/step"
            bar.update(task, completed=row["epoch"], scores=scores)

        yield show


@contextlib.contextmanager
def runs_bar() -> Iterator[Callable[[Look], None]]:
    """A bar over many runs: what runs now, how much is done, when it will end. The block calls it with each stage.

    The runs of a stage are asked twice a second how far they are.
    """
    columns = (BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.description}"), speed_estimate_period=3600)
    task = bar.add_task("starting", total=1.0)
    stages: list[Look] = []

    def show(look: Look) -> None:
        bar.reset(task, completed=look()[0])  # type: ignore[arg-type]  # what was done before tells no speed
        stages.append(look)

    def looked() -> RenderableType:
        if stages:
            done, words = stages[-1]()
            bar.update(task, completed=done, description=words)
        return bar

    with Live(get_renderable=looked, console=notes, refresh_per_second=2):
        yield show


def shown(table: Table) -> RichTable:
    """The columns that are shown of a table."""
    found = RichTable(*table.columns, title=table.title, caption=table.caption)
    for row in table.cells:
        found.add_row(*(row[name].text for name in table.columns))
    return found


def sites(record: dict[str, Any]) -> RichTable:
    """The numbers of a diagnosis, one line for each site."""
    from gradguess_lab.inspection import NUMBERS

    table = RichTable("site", *NUMBERS, title=f"{record['key']}, epoch {record['epoch']}")
    for site, row in record["sites"].items():
        table.add_row(site, *(f"{row[name]:.3g}" if row.get(name) is not None else "–" for name in NUMBERS))
    return table
