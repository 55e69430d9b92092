"""The experiments on streams: groups of configurations, one group per table.

Every entry of a group is tuned on the same learning rates, by the worse of two seeds of its own, and then run with the
best of them on the seeds that are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradguess.errors import check_count
from gradguess_lab.jobs import Job, Plan, Row, spread, tuned
from gradguess_lab.streams.config import READ, StreamConfig

TUNING_SEEDS = (100, 101)  # one alone chose rates with which most others fail
BESIDE = ("rtrl", "snap", "uoro", "rflo", "eprop", "one-step")  # the rules that W⊥ is compared with


def grid(*kinds: str | Mapping[str, Any], **axes: Any) -> list[StreamConfig]:
    """`spread` of runs on streams; a text is the name of a rule, and a number the steps of tbptt."""
    runs = spread(*({"rule": kind} if isinstance(kind, str) else kind for kind in kinds), **axes)
    return [StreamConfig(**one) for one in runs]


def _truncated(*steps: int) -> dict[str, Any]:
    return {"rule": "tbptt", "truncation": steps}


def _snap(*ks: int, basis: str = "lagged") -> dict[str, Any]:
    """W⊥ with SnAp beyond its basis."""
    return {"rule": "wperp-snap", "k": ks, "basis": basis}


@dataclass(frozen=True)
class Group:
    """Configurations that are compared. `grid` is empty where the learning rates are those of the entries."""

    entries: Sequence[StreamConfig]
    grid: Sequence[float] = (3e-4, 1e-3, 3e-3)
    seeds: int = 5

    def plan(self, experiment: str, entry: StreamConfig) -> Plan:
        """The runs that choose the rate of an entry, then those that are reported."""
        tuning, reported = ([{"seed": seed} for seed in seeds] for seeds in (TUNING_SEEDS, range(self.seeds)))
        return tuned(job(experiment, entry), self.grid or (entry.lr,), tuning, reported, error_of)


# From a critical start and with small rates: a step of Adam moves every weight, and 40 steps back that adds up.
_RECALL40: dict[str, Any] = {"delay": 40, "width": 128, "steps": 6000, "start": "critical"}
_SENSOR: dict[str, Any] = {"task": "sensor", "width": 32, "steps": 20_000}
_CHARACTERS: dict[str, Any] = {"task": "characters", "cell": "gru", "width": 256, "device": "cuda"}
_READERS = ({"k": (8, 16)}, _snap(8, 16), _truncated(2, 4, 8, 16), "snap", "one-step")  # of characters
_BOTH = ("cpu", "cuda")

GROUPS: Mapping[str, Group] = {
    # Time and memory; nothing is learned in so few steps. Run it with one job at a time. Exact RTRL keeps half a
    # gigabyte for each stream of the large network.
    "price": Group([
        *grid({"k": 16}, "snap", "rtrl", device=_BOTH, width=64, steps=300),
        *grid({"k": 32}, "snap", "rtrl", device=_BOTH, width=512, streams=2, steps=12),
        *grid(*_READERS, **_CHARACTERS, steps=100),
    ], grid=(), seeds=1),
    "recall12": Group(grid(
        {"k": (24, 16, 12, 8)}, _snap(8), {"basis": ("krylov", "wperp", "observable", "random"), "k": (16, 8)},
        *BESIDE, _truncated(8, 16),
    )),
    "recall40": Group([  # truncation is faster on a CPU
        *grid({"k": 48}, **_RECALL40, device="cuda"),
        *grid({"k": 48, "basis": "krylov"}, **_RECALL40),
        *grid(_snap(48, basis="krylov"), **_RECALL40, device="cuda"),
        *grid({"rule": "wperp-blocks", "k": 48, "basis": "krylov", "refresh": 32}, **_RECALL40),
        *grid("rtrl", "snap", **_RECALL40, device="cuda"),
        *grid(_truncated(32, 48), **_RECALL40),
    ], grid=(3e-5, 1e-4)),
    "chaos": Group(grid(
        {"k": (16, 8)}, *BESIDE, _truncated(25), task=("henon", "lorenz"), streams=8, steps=15_000, start="uniform",
    ), grid=(1e-3, 3e-3)),
    "sensor": Group([
        *grid({"k": 8}, "rtrl", "snap", "one-step", **_SENSOR), *grid({"k": 8}, "rtrl", stop=5000, **_SENSOR),
    ]),
    "balancing": Group(
        grid({"k": (4, 8)}, *BESIDE, _truncated(10, 100), task="balancing", streams=1), grid=(1e-4, 3e-4, 1e-3)
    ),
    "copy40": Group(
        grid("rtrl", "one-step", _truncated(10), task="copy", delay=40, cell="lru", steps=12_000), grid=(3e-4, 1e-3)
    ),
    # many corridors at a time: with 16 or 64 of them the agent forgets the way again and again
    "tmaze40": Group(grid("rtrl", "one-step", task="tmaze", delay=40, cell="lru", streams=128, steps=60_000), grid=()),
    "characters": Group(grid(*_READERS, **_CHARACTERS, steps=6000), grid=(1e-3, 3e-3)),
    # for the memory at the start and at the end
    "million": Group(grid(**_SENSOR | {"width": 16, "steps": 1_000_000, "k": 4}), grid=(), seeds=1),
}  # fmt: skip


def plans(name: str, device: str | None = None, seeds: int | None = None) -> list[Plan]:
    """A plan for each entry of a group, on another device or with another number of seeds if these are given."""
    if seeds is not None:
        check_count("seeds", seeds)
    group = replace(GROUPS[name], seeds=seeds or GROUPS[name].seeds)
    return [group.plan(name, replace(entry, device=device or entry.device)) for entry in group.entries]


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
    named = (*READ.get(config.rule, ()), *(("stop",) if config.stop else ()))
    return Job(experiment, config.task, " ".join([config.rule, *(f"{n}={getattr(config, n)}" for n in named)]), config)
