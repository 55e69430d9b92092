"""The terminal: options from the fields of a configuration, progress bars and tables. Needs rich and typer."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from gradguess_lab import interrupts
from gradguess_lab.config import TrainConfig

if TYPE_CHECKING:
    from gradguess_lab.jobs import Progress as RunsProgress
    from gradguess_lab.tables.table import Table

notes = Console(stderr=True)  # results alone go to standard output
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Threads = Annotated[int, typer.Option(help="Threads of PyTorch; 0: its own default.")]


def with_config_options(command: Callable[..., None], config: Any = TrainConfig) -> Callable[..., None]:
    """Replace the parameter `config` by one option per field of the configuration: fields are declared once."""
    fields = {item.name: item for item in dataclasses.fields(config)}

    def wrapped(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in fields}
        command(config=config(**chosen), **values)

    parameters = [
        item for name, item in inspect.signature(command, eval_str=True).parameters.items() if name != "config"
    ]
    for name, item in fields.items():
        kind: Any = str if item.type == "int | str" else type(item.default)
        annotation = Annotated[kind, typer.Option(help=item.metadata["help"])]
        default = str(item.default) if kind is str else item.default
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    wrapped.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {item.name: item.annotation for item in keyword_only}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def emit(record: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    """Print the result: one JSON object for a program, `lines` for a person."""
    print(json.dumps(record) if as_json else "\n".join(lines), flush=True)


def say(line: str) -> None:
    """A note to a person, as it is."""
    notes.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def interruptible(*, keeps: bool = True) -> Iterator[None]:
    """Let Ctrl-C end the command, and say what is kept, if it keeps anything."""
    try:
        yield
    except KeyboardInterrupt:
        kept = " What is in the --out directory is kept: the same command continues from there." if keeps else ""
        notes.print(f"Interrupted.{kept}")
        raise typer.Exit(interrupts.INTERRUPTED) from None


@contextlib.contextmanager
def _plain_warnings(visible: bool) -> Iterator[None]:
    """Warnings in one sentence each, without the line of code that they come from."""
    with warnings.catch_warnings():
        if visible:
            warnings.showwarning = lambda message, *where: notes.print(f"warning: {message}", highlight=False)
        else:
            warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def epoch_bar(config: TrainConfig, visible: bool) -> Iterator[Callable[..., None]]:
    """A bar over the epochs with loss, accuracy, step time and time left; the block calls it with each row."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[scores]}"),
        TimeRemainingColumn(),
    )
    with _plain_warnings(visible), Progress(*columns, console=notes, disable=not visible) as bar:
        task = bar.add_task(config.key, total=config.epochs, scores="")
        accuracy = "  …"

        def show(row: dict[str, Any]) -> None:
            nonlocal accuracy
            if "test_accuracy" in row:
                accuracy = f"{row['train_accuracy']:.3f}/{row['test_accuracy']:.3f}"
            scores = f"loss {row['loss']:.3f}  acc {accuracy}  {row['step_ms']:.2f} ms/step"
            bar.update(task, completed=row["epoch"], scores=scores)

        yield show


class _Runs(Progress):
    """One bar over many runs, which are asked twice a second how far they are."""

    runs: RunsProgress | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.runs:
            done, words = self.runs.look()
            self.update(self.task_ids[0], completed=done, description=words)
        return super().get_renderables()


@contextlib.contextmanager
def runs_bar() -> Iterator[Callable[[RunsProgress], None]]:
    """A bar over many runs: what runs now, how much is done, when it will end. The block calls it with each stage."""
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with _Runs(*columns, console=notes, refresh_per_second=2, speed_estimate_period=3600) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(runs: RunsProgress) -> None:
            bar.reset(task, completed=runs.look()[0])  # type: ignore[arg-type]  # what was done before tells no speed
            bar.runs = runs

        yield show


def print_tables(tables: Sequence[Table]) -> None:
    """The columns that are shown of each table."""
    for table in tables:
        shown = RichTable(*table.columns, title=table.title, caption=table.caption)
        for row in table.cells:
            shown.add_row(*(row[name].text for name in table.columns))
        Console().print(shown)


def print_sites(record: dict[str, Any]) -> None:
    """The numbers of a diagnosis, one line for each site."""
    from gradguess_lab.inspection import NUMBERS

    table = RichTable("site", *NUMBERS, title=f"{record['key']}, epoch {record['epoch']}")
    for site, row in record["sites"].items():
        table.add_row(site, *(f"{row[name]:.3g}" if row.get(name) is not None else "–" for name in NUMBERS))
    Console().print(table)
