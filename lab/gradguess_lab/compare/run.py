"""A comparison from its runs to its record. Killed at any time, it goes on from there when it is called again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError
from gradguess_lab import environment
from gradguess_lab.compare.contenders import CONTENDERS
from gradguess_lab.compare.measure import Say, cosine, costs
from gradguess_lab.compare.plan import Comparison, Entry, metrics_of, quantity, settings_in
from gradguess_lab.compare.tasks import TASKS
from gradguess_lab.config import TrainConfig
from gradguess_lab.files import read_json, write_json
from gradguess_lab.progress import Progress
from gradguess_lab.reproduce import reproduce
from gradguess_lab.run_many import Backend, is_finished, run_directory
from gradguess_lab.store import find

SCHEMA = 2
DIVERGED = "is NaN or infinite"  # a run that says so says so again
Row = dict[str, Any]


def compare(
    plan: Comparison,
    out: Path,
    jobs: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
    backend: Backend = "processes",
    address: str | None = None,
    seconds: float = 3.0,
    say: Say = lambda words: None,
) -> Row:
    """Make what is missing of the runs and the measurements, and write the record to `compare.json` in `out`.

    Other tasks that were compared there before stay in the record.
    """
    earlier = _earlier(out)  # before all the work: it may be no comparison
    runs = _Runs(out, lambda groups: reproduce(groups, out, jobs, on_progress, backend, address))
    tuning = {entry: plan.tuning(entry) for entry in plan.entries}
    say("choosing learning rates")
    runs.make({"tuning": [config for configs in tuning.values() for config in configs]})
    rates = {entry: rate for entry in plan.entries if (rate := plan.best_rate(out, entry)) is not None}
    reported = {entry: plan.reported(entry, rate) for entry, rate in rates.items()}
    say("running at the chosen rates")
    runs.make({"reported": [config for configs in reported.values() for config in configs]})
    rows = {entry: _row(plan, out, entry, tuning[entry], reported.get(entry, []), runs) for entry in plan.entries}
    for task in dict.fromkeys(task for task, _ in plan.entries):
        _add_measures(plan, out, task, rows, seconds, say)
    record = _record(plan, rows, earlier)
    write_json(out / "compare.json", record)
    return record


class _Runs:
    """The runs of a comparison, and why some of them failed. One that diverged is not tried again."""

    def __init__(self, out: Path, run: Callable[[dict[str, list[TrainConfig]]], Any]) -> None:
        self.out, self.run = out, run
        self.path = out / "failures.json"
        self.failures: dict[str, str] = read_json(self.path, "list of failures") if self.path.exists() else {}
        self.made: dict[str, list[TrainConfig]] = {}

    def make(self, groups: dict[str, list[TrainConfig]]) -> None:
        """Run these; the results of earlier groups stay in the list of results."""
        for name, configs in groups.items():
            left = [config for config in configs if DIVERGED not in self.failures.get(config.key, "")]
            _, failures = self.run({**self.made, name: left})
            ended = {config.key for config in left if is_finished(self.out, config)}
            self.failures = {k: v for k, v in self.failures.items() if k not in ended} | failures
            write_json(self.path, self.failures)
            self.made[name] = [config for config in left if config.key in ended]


def _row(
    plan: Comparison, out: Path, entry: Entry, tuning: list[TrainConfig], reported: list[TrainConfig], runs: _Runs
) -> Row:
    """What the runs of a method on a task gave."""
    task, method = entry
    ended = [config for config in reported if is_finished(out, config)]
    contender = CONTENDERS.get(method)
    whys = [runs.failures[c.key] for c in (*tuning, *reported) if c.key in runs.failures]
    return {
        "method": method,
        "sends": contender.sends if contender else None,
        "control": contender.control if contender else False,
        "lr": reported[0].lr if reported else None,
        "scores": [[rate, score] for rate, score in plan.scores(out, entry).items()],
        "test": [metrics_of(out, config)[quantity(task)] for config in ended],
        "train": [metrics_of(out, config)[quantity(task, "train")] for config in ended],
        "diverged": sum(DIVERGED in runs.failures.get(config.key, "") for config in reported),
        "failed": whys[0] if whys and not ended else "",
    }


def _add_measures(plan: Comparison, out: Path, task: str, rows: dict[Entry, Row], seconds: float, say: Say) -> None:
    """Time, memory and cosine of the methods that ended on a task."""
    ended = [method for name, method in plan.entries if name == task and rows[name, method]["test"]]
    own = {method: settings_in(TASKS[task], method) for method in ended}
    found = costs(task, plan.task(task), own, seconds, out / "bench", say) if ended else {}
    base = found.get("backprop", {}).get("peak_mb")
    for method in ended:
        row, cost = rows[task, method], found[method]
        row.update(cost, memory_ratio=cost["peak_mb"] / base if base else None)
        first = plan.reported((task, method), row["lr"])[0]
        say(f"{task}: cosine of {method}")
        row["cosine"] = cosine(first, TASKS[task].pieces, run_directory(out, first))


def read_record(out: Path) -> Row:
    """The record that `compare` has written to a directory, or that is stored."""
    record = find(out, "compare") or {}
    if record.get("kind") != "comparison" or record.get("schema") != SCHEMA:
        raise GradguessError(
            f"{out}: expected a comparison of schema {SCHEMA} in compare.json. "
            "Make one by `gradguess compare` in another directory."
        )
    return record


def _earlier(out: Path) -> dict[str, Row]:
    """The tasks of a record, if there is one."""
    return {task["name"]: task for task in read_record(out)["tasks"]} if find(out, "compare") else {}


def _record(plan: Comparison, rows: dict[Entry, Row], earlier: dict[str, Row]) -> Row:
    where = environment.describe(plan.device)
    found = {
        task: {
            "name": task,
            "title": TASKS[task].title,
            "pieces": TASKS[task].pieces,
            "grid": list(plan.rates(task)),
            "quantity": quantity(task).removeprefix("test_"),
            "short": plan.short(task),
            "config": plan.task(task).as_dict(),
            "environment": where,
            "rows": [row for (name, _), row in rows.items() if name == task],
        }
        for task, _ in plan.entries
    }
    both = earlier | found
    order = [*(name for name in TASKS if name in both), *(name for name in both if name not in TASKS)]
    return {"schema": SCHEMA, "kind": "comparison", "tasks": [both[name] for name in order]}
