"""The command `gradguess`. Each command is a thin shell around a function of `gradguess.experiments`."""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:
    raise SystemExit(f"gradguess: {error.name} is missing: pip install 'gradguess[cli]'") from None

from gradguess.errors import GradguessError
from gradguess.experiments import interrupts
from gradguess.extras import require

app = typer.Typer(
    help="Train networks without backpropagation, and reproduce the paper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
notes = Console(stderr=True)  # everything but results goes to standard error

Out = Annotated[Path | None, typer.Option(help="Directory of the run; the same command continues it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def main() -> None:
    """Run the command line; an error that we foresaw is one clean message and exit code 2."""
    try:
        with interrupts.listening():
            app()
    except GradguessError as error:
        notes.print("error:", style="bold red", end=" ")
        notes.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # all is said: Python would print a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `config` by one option per field of `TrainConfig`: fields are declared once."""
    from gradguess.experiments import config as module

    fields = {item.name: item for item in module.dataclasses.fields(module.TrainConfig)}

    def wrapped(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in fields}
        command(config=module.TrainConfig(**chosen), **values)

    parameters = [
        item for name, item in inspect.signature(command, eval_str=True).parameters.items() if name != "config"
    ]
    for name, item in fields.items():
        kind: Any = str if name == "k" else type(item.default)
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
    """The result: for a program one JSON object, for a person `lines`."""
    print(json.dumps(record) if as_json else "\n".join(lines), flush=True)


@app.command()
@with_config_options
def train(
    config: Any,
    out: Out = None,
    json: Json = False,
    tensorboard: bool = False,
    wandb: bool = False,
    threads: int = 0,
) -> None:
    """Train one network. With --out the run can be killed at any time and continued by the same command."""
    import torch

    from gradguess.experiments.train import train as run
    from gradguess.experiments.world import launched_rank

    if threads:
        torch.set_num_threads(threads)
    first = launched_rank() == 0
    with (
        _interruptible(),
        _epoch_bar(config, first) as show,
        _logs(config, out, tensorboard and first, wandb and first) as log,
    ):

        def on_epoch(row: dict[str, Any]) -> None:
            show(row)
            log(row)

        record = run(config, out, on_epoch)
    if not first:
        return
    metrics = record["metrics"]
    lines = [f"{name:>15}  {value:.4g}" for name, value in metrics.items()]
    emit({"key": record["key"], **metrics}, json, lines)


@app.command()
def reproduce(
    preset: Annotated[str, typer.Option(help="quick (minutes) or paper (everything).")] = "quick",
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment; may be given again.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per run; default 1 (quick) or 3 (paper).")] = None,
    jobs: Annotated[int, typer.Option(help="Parallel processes.")] = 2,
    backend: Annotated[str, typer.Option(help="processes (this machine), ray or dask.")] = "processes",
    address: Annotated[str | None, typer.Option(help="Of the Ray or Dask cluster; none: a local one.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("runs/reproduce"),
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    solver: Annotated[str | None, typer.Option(help="Another solver for W⊥: svd, subspace or shared.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Only write the configurations to this file.")] = None,
    json: Json = False,
) -> None:
    """Run the experiments of the paper and write the report. Finished runs are never run again."""
    from gradguess.experiments import plan
    from gradguess.experiments.files import write_json
    from gradguess.experiments.reproduce import reproduce as run

    runs = plan.plan(preset, only or (), seeds, solver, device)
    if dump:
        write_json(dump, [config.as_dict() for config in plan.unique(runs)])
        emit({"configs": str(dump)}, json, [str(dump)])
        return
    if preset == "quick" and not only:
        notes.print("quick leaves out W⊥-NS (an hour a run on a CPU): --only newton-schulz or --preset paper.")
    with _interruptible(), _overall_bar() as show:
        records, failures = run(runs, out, jobs, show, backend, address)  # type: ignore[arg-type]
    page = _write_report(out)
    results = {record["key"]: record["metrics"] for record in records}
    emit({"report": str(page), "runs": results}, json, [f"{len(records)} runs", str(page)])
    if failures:
        listed = "; ".join(f"{key}: {message}" for key, message in failures.items())
        raise GradguessError(f"{len(failures)} of {len(records) + len(failures)} runs failed: {listed}")


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="A directory with results.")], json: Json = False) -> None:
    """Write the report of the results in a directory: one HTML page, and CSV, LaTeX, PNG and SVG."""
    if not directory.is_dir():
        raise GradguessError(f"{directory} is not a directory.")
    page = _write_report(directory)
    emit({"report": str(page)}, json, [str(page)])


@app.command()
@with_config_options
def diagnose(
    config: Any,
    run: Annotated[Path | None, typer.Option(help="Diagnose the last checkpoint of this run instead.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for plots.")] = None,
    json: Json = False,
) -> None:
    """Bias, variance, rank and overlap of a guess at each site, for a fresh network or for a run's checkpoint."""
    from gradguess.experiments.config import TrainConfig
    from gradguess.experiments.files import read_json
    from gradguess.experiments.inspection import inspect_run, save_plots

    if run is not None:
        config = TrainConfig.from_dict(read_json(run / "config.json", "configuration"))
    record = inspect_run(config, run)
    plots = save_plots(record, out) if out else []
    if not json:
        Console().print(_site_table(record))
    emit({**record, "plots": [str(path) for path in plots]}, json, [str(path) for path in plots])


@app.command()
def bench(
    width: Annotated[list[int] | None, typer.Option(help="Units per hidden layer; may be given again.")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="Hidden layers; may be given again.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Samples per step; may be given again.")] = None,
    k: Annotated[list[int] | None, typer.Option(help="Dimension of the guess; may be given again.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, float64, bfloat16; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    method: Annotated[list[str] | None, typer.Option(help="Only this method; may be given again.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory over the depth instead of time.")] = False,
    task: Annotated[
        list[str] | None, typer.Option(help="Real networks instead, this one or 'all'; may be given again.")
    ] = None,
    peaks: Annotated[bool, typer.Option(help="With times: peak memory too, in subprocesses.")] = True,
    seconds: Annotated[float, typer.Option(help="Of timing, for each method and setting.")] = 3.0,
    samples: Annotated[int, typer.Option(help="Dense per-sample methods: samples in their one step.")] = 2,
    threads: Annotated[int, typer.Option(help="Threads of PyTorch; 0: its default.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for the results and the plots.")] = Path("results/bench"),
    json: Json = False,
) -> None:
    """Time and memory of a training step of every method against backpropagation."""
    import torch

    from gradguess.experiments.bench import bench_memory, bench_tasks, bench_time
    from gradguess.experiments.bench.rivals import Case, grid
    from gradguess.experiments.environment import check_device

    check_device(device)
    if threads:
        torch.set_num_threads(threads)
    batch, k, dtype = batch or [512], k or [10], dtype or ["float32"]
    with _interruptible(), notes.status("measuring") as status:
        say = lambda words: status.update(words)  # noqa: E731
        if memory:
            case = Case((width or [64])[0], 1, batch[0], k[0], dtype[0], device)
            record = bench_memory(depth or [10, 30, 100], case, method or (), out, say)
        elif task:
            record = bench_tasks(() if task == ["all"] else task, seconds, device, out, say)
        else:
            widths, depths = width or [64, 128, 512], depth or [3]
            cases = grid(width=widths, depth=depths, batch=batch, k=k, dtype=dtype, device=[device])
            record = bench_time(cases, method or (), seconds, samples, peaks, out, say)
    plots = _bench_plots(record, out)
    if not json:
        _print_tables(record)
    emit({**record, "plots": plots}, json, plots)


def _print_tables(record: dict[str, Any]) -> None:
    from rich.table import Table

    from gradguess.experiments.bench.shown import tables

    for shown in tables(record):
        table = Table(*(shown.columns[i] for i in shown.shown), title=shown.title, caption=shown.caption)
        for row in shown.rows:
            table.add_row(*(row[i].text for i in shown.shown))
        Console().print(table)


def _bench_plots(record: dict[str, Any], out: Path) -> list[str]:
    """One PNG for each figure, where matplotlib is there."""
    try:
        from gradguess.experiments.bench.shown import figures
        from gradguess.experiments.files import write_atomic
        from gradguess.report.plot import draw

        drawings = {figure.slug: draw(figure).png for figure in figures(record)}
    except GradguessError as error:
        notes.print(str(error))
        return []
    for slug, png in drawings.items():
        write_atomic(out / f"{slug}.png", png)
    return [str(out / f"{slug}.png") for slug in drawings]


def _site_table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    from gradguess.experiments.inspection import NUMBERS

    table = Table("site", *NUMBERS, title=f"{record['key']}, epoch {record['epoch']}")
    for site, row in record["sites"].items():
        table.add_row(site, *(f"{row[name]:.3g}" if row.get(name) is not None else "–" for name in NUMBERS))
    return table


def _write_report(directory: Path) -> Path:
    from gradguess.report import write_report

    return write_report(directory)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with a word about what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        notes.print("Interrupted. What is in the --out directory is kept: the same command continues from there.")
        raise typer.Exit(interrupts.INTERRUPTED) from None


@contextlib.contextmanager
def _epoch_bar(config: Any, visible: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar over the epochs with loss, accuracy, step time and time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[scores]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, disable=not visible) as bar:
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
def _overall_bar() -> Iterator[Callable[[Any], None]]:
    """One bar for everything: what runs now, how much is done, when it will end."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=notes) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(progress: Any) -> None:
            left = progress.seconds_left
            eta = "…" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}"
            now = ", ".join(f"{key} {done}/{total}" for key, done, total in progress.running)
            counted = f"{progress.finished}/{len(progress.configs)} runs, {eta} left  {now}"
            bar.update(task, completed=progress.fraction, description=counted)

        yield show


@contextlib.contextmanager
def _logs(config: Any, out: Path | None, tensorboard: bool, wandb: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """The loggers that were asked for, each beside the run."""
    if wandb and out is None:
        raise GradguessError("--wandb needs --out DIR: the log is written beside the run, offline.")
    with contextlib.ExitStack() as stack:
        loggers = [stack.enter_context(_scalars(out, tensorboard))]
        if wandb and out is not None:
            from gradguess.integrations.wandb import wandb_log

            loggers.append(stack.enter_context(wandb_log(out, config.key, config.as_dict())))

        def log(row: dict[str, Any]) -> None:
            for write in loggers:
                write(row)

        yield log


@contextlib.contextmanager
def _scalars(out: Path | None, wanted: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """TensorBoard scalars beside the run, where asked for."""
    if not wanted:
        yield lambda row: None
        return
    if out is None:
        raise GradguessError("--tensorboard needs --out DIR: the scalars are written beside the run.")
    tensorboard = require("torch.utils.tensorboard", "track", "--tensorboard")
    with tensorboard.SummaryWriter(str(out / "tensorboard")) as writer:

        def log(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "epoch":
                    writer.add_scalar(name, value, row["epoch"])

        yield log
