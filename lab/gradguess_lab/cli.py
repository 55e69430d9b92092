"""The command `gradguess`. Each command is a thin shell around a function of `gradguess_lab`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer

    from gradguess_lab.advice import advise
    from gradguess_lab.compare.command import compare_command
    from gradguess_lab.options import Json, Threads, with_config_options
    from gradguess_lab.streams.command import stream
    from gradguess_lab.terminal import (
        emit,
        epoch_bar,
        interruptible,
        notes,
        print_sites,
        print_tables,
        say,
    )
except ModuleNotFoundError as error:
    raise SystemExit(f"gradguess: the package {error.name} is missing: pip install gradguess-lab") from None

from gradguess.errors import GradguessError, check_count
from gradguess_lab import interrupts
from gradguess_lab.config import CHOICES, TrainConfig
from gradguess_lab.methods import METHODS, VARIANTS

app = typer.Typer(
    help="Train networks without backpropagation, and reproduce the paper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path | None, typer.Option(help="Directory of the run; the same command continues it.")]
_METHODS, _DTYPES, RUNS = ", ".join([*METHODS, *VARIANTS]), ", ".join(CHOICES["dtype"]), Path("runs/reproduce")


def main() -> None:
    """Run the command line. An error that we foresaw is one clean message and exit code 2."""
    try:
        with interrupts.listening():
            app()
    except GradguessError as error:
        notes.print("error:", style="bold red", end=" ")
        notes.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Python would print a traceback when it ends
            signal.signal(signal.SIGINT, signal.SIG_DFL)


@app.command()
@with_config_options
def train(
    config: Any,
    out: Out = None,
    json: Json = False,
    tensorboard: Annotated[bool, typer.Option(help="Log every epoch to TensorBoard, beside the run.")] = False,
    wandb: Annotated[bool, typer.Option(help="Log every epoch to Weights & Biases, beside the run.")] = False,
    threads: Threads = 0,
) -> None:
    """Train one network. With --out the run can be killed at any time and continued by the same command."""
    from gradguess_lab.environment import use_threads
    from gradguess_lab.logs import logs
    from gradguess_lab.train import train as run
    from gradguess_lab.world import launched_rank

    use_threads(threads)
    first = launched_rank() == 0
    with (
        interruptible(),
        epoch_bar(config, first) as show,
        logs(config, out, tensorboard and first, wandb and first) as log,
    ):

        def on_epoch(row: dict[str, Any]) -> None:
            show(row)
            log(row)

        record = run(config, out, on_epoch, say if first else lambda line: None)
    if not first:
        return
    metrics = record["metrics"]
    lines = [f"{name:>15}  {value:.4g}" for name, value in metrics.items()]
    emit({"key": record["key"], **metrics}, json, lines)


@app.command()
def reproduce(
    preset: Annotated[str, typer.Option(help="quick (minutes) or paper (everything).")] = "quick",
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment, or streams; may be repeated.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per run; default 1 (quick) or 10 (paper).")] = None,
    jobs: Annotated[int, typer.Option(help="Parallel processes.")] = 2,
    backend: Annotated[str, typer.Option(help="processes (this machine), ray or dask.")] = "processes",
    address: Annotated[str | None, typer.Option(help="Address of a Ray or Dask cluster; none: a local one.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the runs and the report.")] = RUNS,
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    solver: Annotated[str | None, typer.Option(help="Another solver for W⊥: svd, subspace or shared.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Write the configurations to this file, and run nothing.")] = None,
    configs: Annotated[Path | None, typer.Option(help="Run the configurations in this file instead.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Start stored runs again: are they of this code?")] = False,
    sample: Annotated[int | None, typer.Option(help="With --check: so many of the stored runs; none: all.")] = None,
    json: Json = False,
) -> None:
    """Run the experiments of the paper and write the report. Finished runs are never run again."""
    if check:  # the results of the repository, unless others are named
        _check_results(Path("results/paper") if out == RUNS else out, sample, jobs, dump, json)
    if "streams" in (only or ()):
        unread: dict[str, Any] = {"--backend": backend != "processes", "--address": address, "--solver": solver}
        unread |= {"--dump": dump, "--configs": configs, "another --only": only != ["streams"]}
        if given := [name for name, value in unread.items() if value]:
            raise GradguessError(
                "--only streams reads --preset, --seeds, --jobs, --out and --device, "
                f"found {', '.join(given)}: leave it out."
            )
        _reproduce_streams(preset, seeds, jobs, out, device, json)
        return
    from gradguess_lab import plan
    from gradguess_lab.files import write_json
    from gradguess_lab.report import write_report
    from gradguess_lab.reproduce import read_configs
    from gradguess_lab.reproduce import reproduce as run
    from gradguess_lab.tables.beside_stored import said
    from gradguess_lab.terminal import runs_bar

    runs = read_configs(configs) if configs else plan.plan(preset, only or (), seeds, solver, device)
    if dump:
        write_json(dump, [config.as_dict() for config in plan.unique(runs)])
        emit({"configs": str(dump)}, json, [str(dump)])
        return
    if preset == "quick" and not only and not configs:
        notes.print("quick leaves out W⊥-NS (an hour per run on a CPU): add --only newton-schulz or --preset paper.")
    with interruptible(), runs_bar() as show:
        records, failures = run(runs, out, jobs, show, backend, address)  # type: ignore[arg-type]
    page = write_report(out)
    results = {record["key"]: record["metrics"] for record in records}
    emit({"report": str(page), "runs": results}, json, [said(records), str(page)])
    if failures:
        listed = "; ".join(f"{key}: {message}" for key, message in failures.items())
        raise GradguessError(f"{len(failures)} of {len(records) + len(failures)} runs failed: {listed}")


def _reproduce_streams(preset: str, seeds: int | None, jobs: int, out: Path, device: str, json: bool) -> None:
    """Run what is missing of the runs on streams, and write their tables and figures."""
    from gradguess_lab.files import write_atomic
    from gradguess_lab.names import lookup
    from gradguess_lab.report.plot import save_figures
    from gradguess_lab.streams.page import figures, page
    from gradguess_lab.streams.plan import PRESETS, chosen
    from gradguess_lab.streams.sweep import sweep

    if seeds is not None:
        check_count("seeds", seeds)
    groups = chosen(lookup(PRESETS, preset, "preset"), device, seeds or 0)
    out = out / "streams"
    with interruptible():
        failures = sweep(groups.values(), out, jobs, say=lambda words: notes.print(words, markup=False))
    write_atomic(out / "streams.md", page(out, groups))
    save_figures([figure for name, group in groups.items() for figure in figures(out, name, group)], out)
    emit({"page": str(out / "streams.md"), "failures": failures}, json, [str(out / "streams.md")])
    if failures:
        raise GradguessError("; ".join(f"{key}: {message}" for key, message in failures.items()))


def _check_results(directory: Path, size: int | None, jobs: int, dump: Path | None, json: bool) -> None:
    """Exit code 1 if a result is stale. With `dump`, what should be run again is written there for `--configs`."""
    from gradguess_lab.check import check, lines, sample
    from gradguess_lab.files import write_json
    from gradguess_lab.store import runs

    rows = sample([row for _, row in runs(directory)], size)
    found = check(rows, jobs)
    if dump:
        write_json(dump, [row["config"] for row in rows if row["key"] in found["stale"] | found["unknown"]])
    emit(found, json, lines(found))
    raise typer.Exit(1 if found["stale"] else 0)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="A directory with results.")], json: Json = False) -> None:
    """Write the report of the results in a directory: one HTML page, and CSV, LaTeX, PNG and SVG."""
    page = str(_write_page(directory))
    emit({"report": page}, json, [page])


@app.command()
@with_config_options
def diagnose(
    config: Any,
    run: Annotated[Path | None, typer.Option(help="Diagnose the last checkpoint of this run instead.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the plots.")] = None,
    json: Json = False,
) -> None:
    """Measure bias, variance, rank and overlap of a guess at each site of a fresh network or of a run's checkpoint."""
    from gradguess_lab.files import read_json
    from gradguess_lab.inspection import inspect_run, save_plots

    if run is not None:
        config = TrainConfig.from_dict(read_json(run / "config.json", "configuration"))
    record = inspect_run(config, run)
    plots = save_plots(record, out) if out else []
    if not json:
        print_sites(record)
    emit({**record, "plots": [str(path) for path in plots]}, json, [str(path) for path in plots])


@app.command()
def bench(
    width: Annotated[list[int] | None, typer.Option(help="Units per hidden layer; may be repeated.")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="Hidden layers; may be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Samples per step; may be repeated.")] = None,
    k: Annotated[list[int] | None, typer.Option(help="Dimension of the guess; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Number format; may be repeated: {_DTYPES}.")] = None,
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    method: Annotated[list[str] | None, typer.Option(help=f"Only this method; may be repeated: {_METHODS}.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Measure memory over the depth instead of time.")] = False,
    task: Annotated[
        list[str] | None, typer.Option(help="Time this network (cnn-mnist, paper-512) or 'all' real ones instead.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="With --task: also compiled, on a GPU captured.")] = False,
    starts: Annotated[bool, typer.Option("--starts", help="With --task: time the start of compiled runs.")] = False,
    jobs: Annotated[int, typer.Option(help="Tasks that compile at a time; they are timed one by one.")] = 1,
    peaks: Annotated[bool, typer.Option(help="Beside the times, measure peak memory in subprocesses.")] = True,
    seconds: Annotated[float, typer.Option(help="Seconds of timing for each method and setting.")] = 3.0,
    samples: Annotated[int, typer.Option(help="Samples in a step of methods with a matrix per sample.")] = 2,
    threads: Threads = 0,
    out: Annotated[Path, typer.Option(help="Directory for the results and the plots.")] = Path("results/bench"),
    json: Json = False,
) -> None:
    """Measure time and memory of a training step of every method against backpropagation."""
    from gradguess_lab.bench import bench_memory, bench_starts, bench_tasks, bench_time
    from gradguess_lab.bench.cases import Case, grid
    from gradguess_lab.environment import check_device, use_threads
    from gradguess_lab.report.plot import save_figures
    from gradguess_lab.tables.bench import bench_figures, bench_tables

    check_device(device)
    if (compile or starts) and not task:
        raise GradguessError("--compile and --starts need --task: the name of a real network, or all.")
    own = {"--memory": memory, "--width": width, "--depth": depth, "--batch": batch, "--k": k, "--dtype": dtype}
    if task and (given := [name for name, value in own.items() if value]):
        raise GradguessError(
            f"--task names a network with settings of its own: leave out {', '.join(given)}. Its peak memory is "
            "measured beside its times with --compile."
        )
    use_threads(threads)
    batch, k, dtype = batch or [512], k or [10], dtype or ["float32"]
    with interruptible(), notes.status("measuring") as status:
        say = lambda words: status.update(words)  # noqa: E731
        if memory:
            case = Case((width or [64])[0], 1, batch[0], k[0], dtype[0], device)
            record = bench_memory(depth or [10, 30, 100], case, method or (), out, say)
        elif task:
            tasks = () if task == ["all"] else task
            if starts:
                record = bench_starts(tasks, method or (), device, out, say)
            else:
                record = bench_tasks(tasks, method or (), seconds, device, compile, jobs, peaks and compile, out, say)
        else:
            widths, depths = width or [64, 128, 512], depth or [3]
            cases = grid(width=widths, depth=depths, batch=batch, k=k, dtype=dtype, device=[device])
            record = bench_time(cases, method or (), seconds, samples, peaks, out, say)
    plots = [str(path) for path in save_figures(bench_figures([record]), out)]
    if not json:
        print_tables(bench_tables([record]))
    emit({**record, "plots": plots}, json, plots)


app.command()(stream)
app.command()(advise)
app.command()(compare_command(lambda directory: _write_page(directory)))


def _write_page(directory: Path) -> Path:
    """The page of the comparison in a directory, or else the report of its results."""
    from gradguess_lab.report import write_comparison, write_report
    from gradguess_lab.store import find

    return write_comparison(directory) if find(directory, "compare") else write_report(directory)
