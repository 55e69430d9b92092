"""The command `gradguess`. Each command is a thin shell around a function of `gradguess_lab`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

try:
    import typer

    from gradguess_lab.terminal import RANK, Shown, Threads, command, epoch_bar, notes, runs_bar, say, shown, sites
except ModuleNotFoundError as error:
    raise SystemExit(f"gradguess: the package {error.name} is missing: pip install gradguess-lab") from None

from gradguess.errors import GradguessError, InputError, check_choice
from gradguess_lab import interrupts
from gradguess_lab.config import DTYPES, TrainConfig
from gradguess_lab.methods import METHODS, VARIANTS, tried_by
from gradguess_lab.streams.config import StreamConfig
from gradguess_lab.tasks import TASKS, used_in

app = typer.Typer(
    help="Train networks without backpropagation, and reproduce the paper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RUNS = Path("runs/reproduce")
Out = Annotated[Path | None, typer.Option(help="Directory of the run; the same command continues it.")]
Jobs = Annotated[int, typer.Option(help="Parallel processes.")]
Device = Annotated[str, typer.Option(help="Device of PyTorch.")]
Backend = Annotated[str, typer.Option(help="processes (this machine), ray or dask.")]
Address = Annotated[str | None, typer.Option(help="Address of a Ray or Dask cluster; none: a local one.")]


def main() -> None:
    """Run the command line. An error that we foresaw is one clean message and exit code 2."""
    warnings.showwarning = lambda message, *where, **more: say(f"warning: {message}")
    try:
        with interrupts.listening():
            app()
    except GradguessError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)


@command(app, TrainConfig)
def train(
    config: Any,
    out: Out = None,
    tensorboard: Annotated[bool, typer.Option(help="Log every epoch to TensorBoard, beside the run.")] = False,
    wandb: Annotated[bool, typer.Option(help="Log every epoch to Weights & Biases, beside the run.")] = False,
    threads: Threads = 0,
) -> Shown:
    """Train one network. With --out the run can be killed at any time and continued by the same command."""
    from gradguess_lab.train import train as run

    if out is None and (tensorboard or wandb):
        raise GradguessError(
            f"--{'tensorboard' if tensorboard else 'wandb'} needs --out DIR: its log is beside the run."
        )
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(epoch_bar(config))]
        if out is not None and tensorboard and RANK == 0:
            from gradguess.integrations.tensorboard import tensorboard_log

            logs.append(stack.enter_context(tensorboard_log(out)))
        if out is not None and wandb and RANK == 0:
            from gradguess.integrations.wandb import wandb_log

            logs.append(stack.enter_context(wandb_log(out, config.key, config.as_dict())))

        def on_epoch(row: dict[str, Any]) -> None:
            for log in logs:
                log(row)

        record = run(config, out, on_epoch, say)
    metrics = record["metrics"]
    yield {"key": record["key"], **metrics}, [f"{name:>15}  {value:.4g}" for name, value in metrics.items()]


@command(app)
def reproduce(
    preset: Annotated[str, typer.Option(help="quick (minutes) or paper (everything).")] = "quick",
    only: Annotated[
        list[str] | None, typer.Option(help="Only this experiment, or beyond, or streams; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per run; default 1 (quick) or 10 (paper).")] = None,
    jobs: Jobs = 2,
    backend: Backend = "processes",
    address: Address = None,
    out: Annotated[Path, typer.Option(help="Directory of the runs and the report.")] = RUNS,
    device: Annotated[str | None, typer.Option(help="Device of PyTorch; each experiment's own.")] = None,
    solver: Annotated[str | None, typer.Option(help="Another solver for W⊥: svd, subspace or shared.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Write the configurations to this file, and run nothing.")] = None,
    configs: Annotated[Path | None, typer.Option(help="Run the configurations in this file instead.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Start stored runs again: are they of this code?")] = False,
    sample: Annotated[int | None, typer.Option(help="With --check: so many of the stored runs; none: all.")] = None,
) -> Shown:
    """Run the experiments of the paper and write the report. Finished runs are never run again."""
    from gradguess_lab import plans
    from gradguess_lab.files import write_json
    from gradguess_lab.jobs import at_once, run_plans
    from gradguess_lab.tables.stored import said

    if check:  # the results of the repository, unless others are named
        from gradguess_lab import check as checks
        from gradguess_lab.store import runs

        rows = checks.sample([row for _, row in runs(Path("results/paper") if out == RUNS else out)], sample)
        found = checks.check(rows, jobs)
        if dump:
            write_json(dump, [row["config"] for row in rows if row["key"] in found["stale"] | found["unknown"]])
        yield found, checks.lines(found)
        raise typer.Exit(1 if found["stale"] else 0)
    given = plans.read_configs(configs) if configs else None
    if dump:
        made = given or plans.jobs(preset, only or (), seeds, solver, device)
        write_json(dump, [one.as_dict() for one in {job.key: job.settings for job in made}.values()])
        yield {"configs": str(dump)}, [str(dump)]
        return
    if preset == "quick" and not only and not configs:
        say(
            "quick leaves out W⊥-NS (an hour a run on a CPU; --only newton-schulz runs it) and Wᴾ, which the paper has "
            "at width 256 alone: --preset paper runs all."
        )
    wanted = [at_once(given)] if given else plans.plans(preset, only or (), seeds, solver, device)
    with runs_bar() as show:
        records, failures = run_plans(wanted, out, jobs, show, backend, address)  # type: ignore[arg-type]
    pages = write_pages(out)
    words = said([record for record in records if "metrics" in record])
    results = {record["key"]: record.get("metrics", {"error": record.get("error")}) for record in records}
    yield {"report": pages[0], "runs": results}, [words, *pages]
    if failures:
        listed = "; ".join(f"{key}: {message}" for key, message in failures.items())
        raise GradguessError(f"{len(failures)} of {len(records) + len(failures)} runs failed: {listed}")


@command(app)
def report(directory: Annotated[Path, typer.Argument(help="A directory with results.")]) -> Shown:
    """Write the report of the results in a directory: one HTML page, and CSV, LaTeX, PNG and SVG."""
    pages = write_pages(directory)
    yield {"report": pages[0]}, pages


def write_pages(directory: Path) -> list[str]:
    """Write what there is to say of a directory: the page of a comparison or else the report, and that of streams."""
    from gradguess_lab import store
    from gradguess_lab.files import write_atomic
    from gradguess_lab.report.write import write_comparison, write_report
    from gradguess_lab.streams.page import figures, page
    from gradguess_lab.streams.plan import GROUPS
    from gradguess_lab.tables.figure import save_figures

    rows = store.rows(directory).values()
    names = {name for row in rows for name in row.get("experiments", ())}
    groups = {name: group for name, group in GROUPS.items() if name in names}
    pages = []
    if "compare" in names:
        pages.append(write_comparison(directory))
    elif not groups or any("method" in row.get("config", ()) for row in rows):
        pages.append(write_report(directory))
    if groups:
        write_atomic(directory / "streams.md", page(directory, groups))
        save_figures(
            [figure for name, group in groups.items() for figure in figures(directory, name, group)], directory
        )
        pages.append(directory / "streams.md")
    return [str(path) for path in pages]


@command(app, TrainConfig)
def diagnose(
    config: Any,
    run: Annotated[Path | None, typer.Option(help="Diagnose the last checkpoint of this run instead.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the plots.")] = None,
) -> Shown:
    """Measure bias, variance, rank and overlap of a guess at each site of a fresh network or of a run's checkpoint."""
    from gradguess_lab.files import read_json
    from gradguess_lab.inspection import inspect_run, save_plots

    if run is not None:
        config = TrainConfig.from_dict(read_json(run / "config.json", "configuration"))
    record = inspect_run(config, run)
    plots = [str(path) for path in save_plots(record, out)] if out else []
    yield {**record, "plots": plots}, [sites(record), *plots]


@command(app)
def bench(
    width: Annotated[list[int] | None, typer.Option(help="Units per hidden layer; may be repeated.")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="Hidden layers; may be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Samples per step; may be repeated.")] = None,
    k: Annotated[list[int] | None, typer.Option(help="Dimension of the guess; may be repeated.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Number format; may be repeated: {', '.join(DTYPES)}.")
    ] = None,
    device: Device = "cpu",
    method: Annotated[
        list[str] | None, typer.Option(help=f"Only this method; may be repeated: {', '.join([*METHODS, *VARIANTS])}.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Measure memory over the depth instead of time.")] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"Time this network instead, or 'all' real ones, or 'large' ones: {', '.join(TASKS)}."),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="With --task: also compiled, on a GPU captured.")] = False,
    starts: Annotated[bool, typer.Option("--starts", help="With --task: time the start of compiled runs.")] = False,
    jobs: Annotated[int, typer.Option(help="Tasks that compile at a time; they are timed one by one.")] = 1,
    peaks: Annotated[bool, typer.Option(help="Beside the times, measure peak memory in subprocesses.")] = True,
    seconds: Annotated[float, typer.Option(help="Seconds of timing for each method and setting.")] = 3.0,
    samples: Annotated[int, typer.Option(help="Samples in a step of methods with a matrix per sample.")] = 2,
    threads: Threads = 0,
    out: Annotated[Path, typer.Option(help="Directory for the results and the plots.")] = Path("results/bench"),
) -> Shown:
    """Measure time and memory of a training step of every method against backpropagation."""
    from gradguess_lab.bench.run import bench as run
    from gradguess_lab.bench.run import grid
    from gradguess_lab.environment import check_device
    from gradguess_lab.tables.bench import bench_figures, bench_tables
    from gradguess_lab.tables.figure import save_figures

    check_device(device)
    if (compile or starts) and not task:
        raise GradguessError("--compile and --starts need --task: the name of a real network, or all.")
    own = {"--memory": memory, "--width": width, "--depth": depth, "--batch": batch, "--k": k, "--dtype": dtype}
    if task and (given := [name for name, value in own.items() if value]):
        raise GradguessError(
            f"--task names a network with settings of its own: leave out {', '.join(given)}. Its peak memory is "
            "measured beside its times with --compile."
        )
    if memory:  # over the depth alone
        width, depth = width or [64], depth or [10, 30, 100]
        width, batch, k, dtype = (given and given[:1] for given in (width, batch, k, dtype))  # type: ignore[assignment]
    sizes: dict[str, list[Any]] = {
        "batch": batch or [512],
        "k": k or [10],
        "dtype": dtype or ["float32"],
        "device": [device],
    }
    cases = grid(width=width or [64, 128, 512], depth=depth or [3], **sizes)
    if task:
        sets = {"all": "real", "large": f"large-{device.partition(':')[0]}"}
        names = [name for given in task for name in (used_in(sets[given]) if given in sets else [given])]
        cases = {name: replace(TASKS[check_choice("task", name, TASKS)].config, device=device) for name in names}
    kind = "memory" if memory else "starts" if starts else "compiled" if compile else "tasks" if task else "time"
    measures = memory or (peaks and kind in ("time", "compiled"))
    with notes.status("measuring") as status:
        record = run(kind, cases, method or (), seconds, samples, measures, jobs, out, status.update)
    plots = [str(path) for path in save_figures(bench_figures([record]), out)]
    yield {**record, "plots": plots}, [*map(shown, bench_tables([record])), *plots]


@command(app, StreamConfig)
def stream(
    config: Any,
    out: Annotated[Path | None, typer.Option(help="Write the whole record, with its curves, to this file.")] = None,
    threads: Threads = 0,
) -> Shown:
    """Learn online from an endless stream: the error at the end, the time of a step, and the memory that is kept."""
    from gradguess_lab.files import write_json
    from gradguess_lab.streams.run import run

    with notes.status(config.key) as status:
        record = run(config, lambda point: status.update(f"{config.key}: step {point['step']}, error {point['error']}"))
    if out is not None:
        write_json(out, record)
    found = {name: record[name] for name in ("error", "chance", "step_ms", "memory_mb", "skipped", "failed")}
    lines = [f"{name:>10}  {value:.4g}" for name, value in found.items() if isinstance(value, int | float)]
    yield {"key": record["key"], **found}, lines + [record["failed"]] * bool(record["failed"])


@command(app, TrainConfig)
def advise(
    config: Any,
    seconds: Annotated[float, typer.Option(help="About how long it may take.")] = 30.0,
    memory_mb: Annotated[float, typer.Option(help="What a step may take; 0: anything.")] = 0.0,
    threads: Threads = 0,
) -> Shown:
    """Try the methods on a network for a few steps, and say which one to use. --sites is the number of pieces."""
    import torch

    import gradguess as gg
    from gradguess_lab.data import load
    from gradguess_lab.environment import check_device
    from gradguess_lab.loss import smoothed_loss
    from gradguess_lab.train import autocast, build_model

    check_device(config.device)
    data = load(config.data).first(config.samples or config.batch).to(config.device, getattr(torch, config.dtype))
    batch = data.x_train[: config.batch], data.y_train[: config.batch]
    where: dict[str, Any] = {"pieces": int(config.sites)} if config.sites.isdecimal() else {"sites": config.sites}
    with notes.status("trying"), autocast(config):
        model, loss_fn = build_model(config, data), smoothed_loss(config.smoothing)
        limit = memory_mb or None
        found = gg.advise(model, loss_fn, *batch, seconds=seconds, memory_mb=limit, seed=config.seed, **where)
    yield found.to_dict(), [str(found)]


@command(app)
def compare(
    tasks: Annotated[
        str, typer.Option(help=f"Tasks, with commas between them: {', '.join(used_in('compare'))}. All.")
    ] = "",
    methods: Annotated[str, typer.Option(help=f"Methods, likewise: {', '.join(tried_by('compare'))}. All.")] = "",
    epochs: Annotated[int, typer.Option(help="Epochs of the runs that are reported; 0: each task's own.")] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds at the chosen learning rate.")] = 3,
    grid: Annotated[str, typer.Option(help="Learning rates, with commas between them; each task's own.")] = "",
    width: Annotated[int, typer.Option(help="Another width of the networks.")] = 0,
    samples: Annotated[int, typer.Option(help="Train on this many samples; 0: on all.")] = 0,
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option(help="Runs at a time. Steps are timed one after the other.")] = 2,
    backend: Backend = "processes",
    address: Address = None,
    seconds: Annotated[float, typer.Option(help="Seconds of timing for each method and task.")] = 3.0,
    out: Annotated[Path, typer.Option(help="Directory of the runs and the page.")] = Path("runs/compare"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--list", help="Say what would be run, and run nothing.")
    ] = False,
) -> Shown:
    """Compare methods on tasks at equal epochs, each at the best rate of a grid. No finished run is repeated."""
    from gradguess_lab.compare.run import Comparison
    from gradguess_lab.compare.run import compare as run
    from gradguess_lab.compare.tables import compared
    from gradguess_lab.environment import check_device

    names = [[word.strip() for word in words.split(",") if word.strip()] for words in (tasks, methods, grid)]
    try:
        rates = [float(word) for word in names[2]]
    except ValueError:
        raise InputError(f"--grid: expected learning rates with commas between them, found {grid!r}.") from None
    asked = Comparison(names[0], names[1], epochs, seeds, rates, device, width, samples)
    if dry_run:
        listed = {f"{task}, {method}": asked.listed(task, method) for task, method in asked.entries}
        yield {"runs": listed}, [f"{name}: {words}" for name, words in listed.items()]
        return
    check_device(device)
    with runs_bar() as show:
        record = run(asked, out, seconds, say, workers=jobs, on_progress=show, backend=backend, address=address)
    pages = write_pages(out)
    yield {"page": pages[0], **record}, [*(shown(table) for one in compared(record) for table in one.tables), *pages]
