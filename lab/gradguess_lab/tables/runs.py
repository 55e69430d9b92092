"""Finished runs as flat rows: settings, metrics and what is known of them; which belong together; what was measured."""

from __future__ import annotations

import reprlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gradguess.errors import GradguessError, InputError
from gradguess_lab import store
from gradguess_lab.bench.run import SCHEMA as BENCH_SCHEMA
from gradguess_lab.config import TrainConfig
from gradguess_lab.methods import METHODS, OPTIONS, method_label, options_of, read_settings
from gradguess_lab.paper_numbers import LAYER_SITES, SETTING
from gradguess_lab.tables.verdicts import Summary

Run = dict[str, Any]
SCHEMA = 1
DEFAULTS = TrainConfig().as_dict()
# Runs that agree in all of these are repetitions of each other. `device` is among them: times and memory depend on it.
IDENTITY = tuple(name for name in DEFAULTS if name not in {"seed", "eval_every", "diagnose"})
EXPERIMENT = tuple(name for name in IDENTITY if name != "device")
# they stand in a column of their own, or `Group.way` has words for them
_NAMED = {"data", "model", "method", "width", "depth", "epochs", "k", "script", "solver", "threshold"}
_NAMING = ("data", "method", "width", "depth", "epochs", "lr", "batch", "seed")  # said in every command
SOLVERS = {
    "svd": "each sample's own subspace, by SVD",
    "subspace": "each sample's own subspace",
    "shared": "shared basis",
}
_THRESHOLDS = {"nearest": "nearest set", "placed": "threshold placed"}


class Group:
    """Repetitions of one experiment: runs that differ in their seed, each seed once."""

    def __init__(self, runs: Iterable[Run]) -> None:
        by_seed: dict[Any, Run] = {}
        for run in runs:
            by_seed.setdefault(run["seed"], run)
        self.runs = [by_seed[seed] for seed in sorted(by_seed)]
        self.first = self.runs[0]

    def __getitem__(self, name: str) -> Any:
        """A setting, which all of the runs share."""
        return self.first[name]

    @property
    def label(self) -> str:
        """The method, with `k` where it has one."""
        named = method_label(self["method"])
        return f"{named}, k = {self['k']}" if "k" in options_of(self["method"]) else named

    @property
    def rank(self) -> int:
        """The place of the method in the registry; one that is not known comes last."""
        return (*METHODS, self["method"]).index(self["method"])

    @cached_property
    def way(self) -> str:
        """How this experiment was computed, where that is a choice: the solver, and what is not as usual."""
        method, read = self["method"], options_of(self["method"])
        words = [SOLVERS.get(self["solver"], self["solver"])] if "solver" in read else []
        if method == "wperp-bottom" and self["solver"] != "svd":
            words = ["closed units"]  # any k of them are a bottom-k subspace
        words += [_THRESHOLDS.get(self["threshold"], self["threshold"])] if method == "wperp-ns" else []
        words += [f"as the scripts: {self['script'].replace(',', ' and ')}"] if self["script"] else []
        for name in IDENTITY:
            if self[name] != DEFAULTS[name] and name not in _NAMED:
                words.append(str(self[name]) if name in {"device", "dtype"} else f"{name} {self[name]}")
        return " · ".join(words)

    @property
    def by_definition(self) -> bool:
        """Whether W⊥ takes each sample's own subspace, and W⊥-NS the nearest set, as the paper has it."""
        if self["method"] == "wperp":
            return self["solver"] in {"svd", "subspace"}
        return self["method"] != "wperp-ns" or self["threshold"] == "nearest"

    @property
    def epochs(self) -> list[int]:
        """Those that were diagnosed."""
        return sorted({row["epoch"] for run in self.runs for row in run["diagnostics"]})

    @property
    def command(self) -> str:
        return command(self.first)

    def by_seed(self, quantity: str, layer: int | None = None, **where: Any) -> dict[int, Any]:
        """The quantity in every run that measured it."""
        found = {run["seed"]: measure(run, quantity, layer, **where) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def summary(self, quantity: str, layer: int | None = None, **where: Any) -> Summary | None:
        return Summary.of(list(self.by_seed(quantity, layer, **where).values()))

    def overlaps(self, layer: int) -> list[Sequence[float]]:
        """How much of the gradient the k leading directions hold, for k = 1, 2, ...; of each diagnosed run."""
        return [found for found in self.by_seed("overlap", layer).values() if found]


def measure(run: Run, quantity: str, layer: int | None = None, epoch: int | None = None, batch: str = "sites") -> Any:
    """A final metric, or with `layer` a diagnostic of that layer, at the last diagnosed epoch if none is given.

    `batch` is "sites" for the first samples of the training data, "last_batch" for the last batch of an epoch.
    """
    if layer is None:
        return run.get(quantity)
    found = {row["epoch"]: row[batch] for row in run["diagnostics"] if batch in row}
    last = max(found, default=None) if epoch is None else epoch
    return found.get(last, {}).get(LAYER_SITES[layer], {}).get(quantity)


def groups(runs: Iterable[Run], any_device: bool = False) -> list[Group]:
    """Runs by experiment; with `any_device`, of those that differ in the device alone the one that has most seeds.

    What the paper defines comes first, then what has most seeds: the first is the main row of every table.
    """
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(run[name] for name in IDENTITY), []).append(run)
    first: dict[tuple[Any, ...], Group] = {}
    for group in sorted(map(Group, found.values()), key=lambda one: (not one.by_definition, -len(one.runs), one.way)):
        first.setdefault(tuple(group[name] for name in (EXPERIMENT if any_device else IDENTITY)), group)
    return list(first.values())


def like(group: Group, among: Iterable[Group], names: Iterable[str], **other: Any) -> Group | None:
    """The first of these that agrees with a group in the named settings, and has `other` ones."""
    wanted = {name: group[name] for name in names} | other
    return next((one for one in among if all(one[name] == value for name, value in wanted.items())), None)


def select(
    runs: Iterable[Run], method: str, width: int, k: int | str | None = None, script: str = "", **settings: object
) -> list[Group]:
    """The runs of one entry of the paper, in its setting; several groups if computed in several ways.

    `script` names what is done as in the authors' scripts, in alphabetical order; `settings` are further ones.
    """
    chosen = (
        run
        for run in runs
        if run["method"] == method
        and run["width"] == width
        and run["script"] == script
        and in_paper_setting(run)
        and (k is None or run["k"] == k or (k == "rank" and isinstance(run["k"], int) and run["k"] >= width))
        and all(run[name] == value for name, value in settings.items())
    )
    return groups(chosen)


def in_paper_setting(run: Run) -> bool:
    """Whether the run is one that the paper's numbers may be held against, as the paper or the scripts have it."""
    return all(run[name] == value for name, value in SETTING.items())


def command(config: Mapping[str, Any]) -> str:
    """The command that repeats a run: what names it, and then whatever is not the default.

    >>> command({"method": "wt", "width": 128, "k": 25, "lr": 1e-4, "seed": 0, "diagnose": 10})
    'gradguess train --method wt --width 128 --lr 0.0001 --seed 0 --diagnose 10'
    """
    read = options_of(str(config.get("method")))
    words = ["gradguess", "train"]
    for name in dict.fromkeys((*_NAMING, *DEFAULTS)):
        value = config.get(name)
        unread = name in OPTIONS and name not in read
        if value is None or unread or (name not in _NAMING and value == DEFAULTS[name]):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


# --- from files ---


def load_runs(directory: Path, may_be_empty: bool = False) -> list[Run]:
    """Every run of a study, or under a directory, by key; a key that is found twice counts once.

    The tables rely on what is checked here, so a damaged file is refused by name and never half read.
    """
    if not directory.is_dir() and not store.files_of(directory)[0].exists():
        raise InputError(f"expected a directory with results, found no directory at {directory}.")
    runs: dict[str, Run] = {}
    for where, record in store.runs(directory):
        _check(record, where)
        runs.setdefault(record["key"], flat(record))
    if not runs and not may_be_empty:
        raise InputError(
            f"no results under {directory}: expected result.json or *.jsonl files of finished runs. "
            "Make some with `gradguess reproduce` or `gradguess train --out DIR`."
        )
    return [runs[key] for key in sorted(runs)]


def flat(record: Mapping[str, Any]) -> Run:
    """A stored row as the tables read it."""
    measured = {name: value for name, value in record["metrics"].items() if value is not None}
    config = read_settings(record["config"])
    script = ",".join(sorted(word.strip() for word in config["script"].split(",") if word.strip()))
    rest = {name: record.get(name) or empty for name, empty in _REST.items()}
    device = config["device"].partition(":")[0]  # cuda:0 and cuda:1 are the same kind
    return measured | config | rest | {"key": record["key"], "script": script, "device": device}


_REST: dict[str, Any] = {
    "experiments": (), "task": "", "variant": "", "history": [], "diagnostics": [], "environment": {}
}  # fmt: skip


def load_benchmarks(directory: Path) -> list[dict[str, Any]]:
    """The records in the `bench/*.json` under `directory`, or else beside it, of the kinds that are shown."""
    folders = sorted({path.parent for path in directory.rglob("bench/*.json")}) or [
        directory.resolve().parent / "bench"
    ]
    every = [(f"{folder}, {key}", row) for folder in folders for key, row in sorted(store.rows(folder).items())]
    found = []
    for where, record in every:
        if record.get("kind") == "fast-paths":  # single switches, which the report leaves out
            continue
        missing = {"kind", "environment", "rows", "growth"} - record.keys()
        if record.get("schema") != BENCH_SCHEMA or missing:
            what = f"no {min(missing)!r}" if missing else f"schema {record.get('schema')!r}"
            raise GradguessError(f"{where}: expected a benchmark of schema {BENCH_SCHEMA}, found {what}.")
        found.append(record)
    return found


def _check(record: Any, where: str) -> None:
    def expect(true: bool, expected: str, found: object) -> None:
        if not true:
            raise GradguessError(f"{where}: expected {expected}, found {reprlib.repr(found)}.")

    def numbers(tree: Any, name: str = "") -> None:
        """All that is in it is a number, or null, which means not measured; a list of numbers is an overlap."""
        for key, value in tree.items() if isinstance(tree, dict) else ((name, one) for one in tree):
            listed = key != "overlap" or isinstance(tree, list) or isinstance(value, list)
            expect(listed, "a list of numbers under 'overlap'", value)
            if isinstance(value, dict | list):
                numbers(value, key)
            else:
                expect(value is None or type(value) in (int, float), f"a number under {key!r}", value)

    expect(isinstance(record, dict), "a JSON object", record)
    expect(record.get("schema") == SCHEMA, f"schema {SCHEMA}", record.get("schema"))
    for name, kind, what in (("key", str, "text"), ("config", dict, "an object"), ("metrics", dict, "an object")):
        expect(isinstance(record.get(name), kind), f"{what} under {name!r}", record.get(name))
    config = record["config"]
    expect(isinstance(config.get("method"), str), "a method in 'config'", config.get("method"))
    for name in ("width", "depth", "epochs", "seed", "batch"):
        expect(type(config.get(name, 0)) is int, f"a whole number under {name!r} in 'config'", config.get(name))
    for name, wanted in (("history", {"epoch": int}), ("diagnostics", {"epoch": int, "sites": dict})):
        for row in record.get(name) or ():
            fine = isinstance(row, dict) and all(isinstance(row.get(part), kind) for part, kind in wanted.items())
            expect(fine, f"rows with {' and '.join(wanted)} in {name!r}", row)
    numbers({name: record.get(name) for name in ("history", "diagnostics", "metrics")})
