"""The experiments on streams: groups of configurations, one group per table.

Every entry of a group is tuned on the same learning rates, by the worse of two seeds of its own, and then run with the
best of them on the seeds that are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradguess.errors import check_count
from gradguess_lab.jobs import Job, Plan, Row, tuned
from gradguess_lab.streams.config import StreamConfig

GRID = (3e-4, 1e-3, 3e-3)
TUNING_SEEDS = (100, 101)  # one alone chose rates with which most others fail
SEEDS = 5

Entries = list[StreamConfig]


@dataclass(frozen=True)
class Group:
    """Configurations that are compared. `grid` is empty where the learning rates are those of the entries."""

    entries: Entries
    grid: Sequence[float] = GRID
    seeds: int = SEEDS

    def plan(self, experiment: str, entry: StreamConfig) -> Plan:
        """The runs that choose the rate of an entry, then those that are reported."""
        tuning = [{"seed": seed} for seed in TUNING_SEEDS]
        reported = [{"seed": seed} for seed in range(self.seeds)]
        return tuned(job(experiment, entry), self.grid or (entry.lr,), tuning, reported, error_of)


def _rules(base: StreamConfig, truncations: Sequence[int]) -> Entries:
    """The rules that W⊥ is compared with."""
    names = ("rtrl", "snap", "uoro", "rflo", "eprop", "one-step")
    plain = [replace(base, rule=name) for name in names]
    return plain + [replace(base, rule="tbptt", truncation=steps) for steps in truncations]


def _wperp(base: StreamConfig, *ks: int, bases: Sequence[str] = ("lagged",)) -> Entries:
    return [replace(base, rule="wperp", k=k, basis=basis) for basis in bases for k in ks]


def _completed(base: StreamConfig, *ks: int, basis: str = "lagged") -> Entries:
    """W⊥ with SnAp beyond its basis."""
    return [replace(entry, rule="wperp-snap") for entry in _wperp(base, *ks, bases=(basis,))]


def _blocks(base: StreamConfig, k: int, *lengths: int, basis: str = "lagged") -> Entries:
    """W⊥ in blocks of steps."""
    entries = _wperp(base, k, bases=(basis,))
    return [replace(entry, rule="wperp-blocks", refresh=steps) for entry in entries for steps in lengths]


def recall12() -> Group:
    base = StreamConfig(task="recall", delay=12, width=64, steps=5000)
    others = _wperp(base, 16, 8, bases=("krylov", "wperp", "observable", "random"))
    return Group(_wperp(base, 24, 16, 12, 8) + _completed(base, 8) + others + _rules(base, (8, 16)))


def recall40() -> Group:
    """From a critical start and with small rates: a step of Adam moves every weight, and 40 steps back that adds up."""
    base = StreamConfig(task="recall", delay=40, width=128, steps=6000, start="critical", device="cuda")
    on_cpu = replace(base, device="cpu")  # where truncation is faster
    ours = _wperp(base, 48) + _wperp(on_cpu, 48, bases=("krylov",)) + _completed(base, 48, basis="krylov")
    ours += _blocks(on_cpu, 48, 32, basis="krylov")
    others = [replace(base, rule=rule) for rule in ("rtrl", "snap")]
    others += [replace(on_cpu, rule="tbptt", truncation=steps) for steps in (32, 48)]
    return Group(ours + others, grid=(3e-5, 1e-4))


def chaos() -> Group:
    entries: Entries = []
    for task in ("henon", "lorenz"):
        base = StreamConfig(task=task, width=64, streams=8, steps=15_000, start="uniform")
        entries += _wperp(base, 16, 8) + _rules(base, (25,))
    return Group(entries, grid=(1e-3, 3e-3))


def copy40() -> Group:
    base = StreamConfig(task="copy", delay=40, cell="lru", width=64, steps=12_000)
    entries = [replace(base, rule=rule) for rule in ("rtrl", "one-step")]
    return Group([*entries, replace(base, rule="tbptt", truncation=10)], grid=(3e-4, 1e-3))


def tmaze40() -> Group:
    """Many corridors at a time: with 16 or 64 of them the agent forgets the way again and again."""
    base = StreamConfig(task="tmaze", delay=40, cell="lru", width=64, streams=128, steps=60_000)
    return Group([replace(base, rule=rule) for rule in ("rtrl", "one-step")], grid=())


def characters() -> Group:
    base = StreamConfig(task="characters", cell="gru", width=256, streams=16, steps=6000, device="cuda")
    kinds = [replace(base, rule="tbptt", truncation=steps) for steps in (2, 4, 8, 16)]
    kinds += [replace(base, rule=rule) for rule in ("snap", "one-step")]
    return Group(_wperp(base, 8, 16) + _completed(base, 8, 16) + kinds, grid=(1e-3, 3e-3))


def sensor() -> Group:
    base = StreamConfig(task="sensor", width=32, steps=20_000)
    going = [*_wperp(base, 8), *(replace(base, rule=rule) for rule in ("rtrl", "snap", "one-step"))]
    return Group(going + [replace(entry, stop=5000) for entry in going[:2]])


def balancing() -> Group:
    base = StreamConfig(task="balancing", streams=1, steps=5000)
    return Group(_wperp(base, 4, 8) + _rules(base, (10, 100)), grid=(1e-4, 3e-4, 1e-3))


def price() -> Group:
    """Time and memory; nothing is learned in so few steps. Run it with one job at a time."""
    entries: Entries = []
    small = StreamConfig(width=64, steps=300)
    large = StreamConfig(width=512, streams=2, steps=12)  # exact RTRL keeps half a gigabyte for each stream
    for base, k in ((small, 16), (large, 32)):
        for device in ("cpu", "cuda"):
            on = replace(base, device=device)
            entries += [*_wperp(on, k), replace(on, rule="snap"), replace(on, rule="rtrl")]
    entries += [replace(entry, steps=100) for entry in characters().entries]
    return Group(entries, grid=(), seeds=1)


def million() -> Group:
    """10⁶ steps, for the memory at the start and at the end."""
    base = StreamConfig(task="sensor", width=16, steps=1_000_000)
    return Group(_wperp(base, 4), grid=(), seeds=1)


GROUPS: Mapping[str, Callable[[], Group]] = {
    "price": price,
    "recall12": recall12,
    "recall40": recall40,
    "chaos": chaos,
    "sensor": sensor,
    "balancing": balancing,
    "copy40": copy40,
    "tmaze40": tmaze40,
    "characters": characters,
    "million": million,
}


def plans(name: str, device: str | None = None, seeds: int | None = None) -> list[Plan]:
    """A plan for each entry of a group, on another device or with another number of seeds if these are given."""
    if seeds is not None:
        check_count("seeds", seeds)
    group = GROUPS[name]()
    group = replace(group, seeds=seeds or group.seeds)
    return [group.plan(name, replace(entry, device=device) if device else entry) for entry in group.entries]


def reported(out: Path, group: Group, entry: StreamConfig) -> list[Row]:
    """The rows at the rate that was chosen; none while it is not known."""
    plan = group.plan("", entry)
    jobs = next(plan)
    while jobs and jobs[0].role == "tuning":
        rows = {job.key: job.row(out) for job in jobs}
        jobs = [] if None in rows.values() else plan.send(rows)
    return [row for job in jobs if (row := job.row(out)) is not None]


def error_of(row: Row) -> float:
    """What a rate is judged by."""
    return math.inf if row["error"] is None else row["error"]


def job(experiment: str, config: StreamConfig) -> Job:
    """A run on a stream; the variant is the rule with the settings that it reads."""
    read = {"wperp": ("k", "basis"), "wperp-snap": ("k", "basis"), "wperp-blocks": ("k", "basis", "refresh")}
    named = (*read.get(config.rule, ()), *(("truncation",) if config.rule == "tbptt" else ()))
    words = [f"{name}={getattr(config, name)}" for name in (*named, *(("stop",) if config.stop else ()))]
    return Job(experiment, config.task, " ".join([config.rule, *words]), config)
