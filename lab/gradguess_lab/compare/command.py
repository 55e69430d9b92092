"""The command `gradguess compare`. Needs the packages typer and rich."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gradguess.errors import InputError
from gradguess_lab.compare.contenders import CONTENDERS
from gradguess_lab.compare.plan import SEEDS, Comparison
from gradguess_lab.compare.tasks import TASKS
from gradguess_lab.options import Json
from gradguess_lab.terminal import emit, interruptible, notes, print_tables, runs_bar


def compare_command(write_page: Callable[[Path], Path]) -> Callable[..., None]:
    """The command; `write_page` makes the page of the results in a directory."""

    def compare(
        tasks: Annotated[str, typer.Option(help=f"Tasks, with commas between them: {', '.join(TASKS)}. All.")] = "",
        methods: Annotated[str, typer.Option(help=f"Methods, likewise: {', '.join(CONTENDERS)}. All.")] = "",
        epochs: Annotated[int, typer.Option(help="Epochs of the runs that are reported; 0: each task's own.")] = 0,
        seeds: Annotated[int, typer.Option(help="Seeds at the chosen learning rate.")] = SEEDS,
        grid: Annotated[str, typer.Option(help="Learning rates, with commas between them; each task's own.")] = "",
        width: Annotated[int, typer.Option(help="Another width of the networks.")] = 0,
        samples: Annotated[int, typer.Option(help="Train on this many samples; 0: on all.")] = 0,
        device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
        jobs: Annotated[int, typer.Option(help="Runs at a time. Steps are timed one after the other.")] = 2,
        backend: Annotated[str, typer.Option(help="processes (this machine), ray or dask.")] = "processes",
        address: Annotated[str | None, typer.Option(help="Address of a cluster; none: a local one.")] = None,
        seconds: Annotated[float, typer.Option(help="Seconds of timing for each method and task.")] = 3.0,
        out: Annotated[Path, typer.Option(help="Directory of the runs and the page.")] = Path("runs/compare"),
        dry_run: Annotated[
            bool, typer.Option("--dry-run", "--list", help="Say what would be run, and run nothing.")
        ] = False,
        json: Json = False,
    ) -> None:
        """Compare methods on tasks at equal epochs, each at the best rate of a grid. No finished run is repeated."""
        from gradguess_lab.compare.run import compare as run
        from gradguess_lab.compare.tables import compared
        from gradguess_lab.environment import check_device

        plan = Comparison(_names(tasks), _names(methods), epochs, seeds, _rates(grid), device, width, samples)
        if dry_run:
            listed = {f"{task}, {method}": _listed(plan, (task, method)) for task, method in plan.entries}
            emit({"runs": listed}, json, [f"{name}: {words}" for name, words in listed.items()])
            return
        check_device(device)
        say = lambda words: notes.print(words, markup=False, highlight=False)  # noqa: E731
        with interruptible(), runs_bar() as show:
            record = run(plan, out, jobs, show, backend, address, seconds, say)  # type: ignore[arg-type]
        page = str(write_page(out))
        if not json:
            print_tables([one.table for one in compared(record)])
        emit({"page": page, **record}, json, [page])

    return compare


def _listed(plan: Comparison, entry: tuple[str, str]) -> str:
    """The runs of one method on one task, in words."""
    config, short = plan.config(entry), plan.short(entry[0])
    rates = plan.rates(entry[0])
    tuning = f"{len(rates)} runs of {short} epochs, then " if len(rates) > 1 else ""
    return f"{tuning}{plan.seeds} of {config.epochs} epochs, sites {config.sites}, on {config.device}"


def _names(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(",") if word.strip())


def _rates(words: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _names(words))
    except ValueError:
        raise InputError(f"--grid: expected learning rates with commas between them, found {words!r}.") from None
