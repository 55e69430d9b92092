"""The experiments as a table of grids: one entry per table or figure of the paper, and what goes beyond it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradguess.errors import InputError, check_choice, check_count
from gradguess_lab.config import Solver, TrainConfig
from gradguess_lab.files import read_json
from gradguess_lab.jobs import Job, Plan, Settings, at_once, is_heavy, spread
from gradguess_lab.methods import settings_of, tried_by, variant_of
from gradguess_lab.streams import plan as streams
from gradguess_lab.tasks import RATES, TASKS, used_in

PAPER_SETTING = TrainConfig()
FEEDBACK = ("backprop", "feedback-direct", "feedback-chained")
GUESSED = ("wperp", "wt", "activation")


@dataclass(frozen=True)
class Preset:
    """How much of each experiment is run."""

    widths: tuple[int, ...]
    seeds: int  # unless another number is asked for
    heavy: bool  # whether runs that take an hour on a CPU belong to it
    wide: tuple[int, ...] = ()  # further widths for the study of learned feedback
    samples: int = 0  # of real data to train on; 0: all
    rates: tuple[float, ...] = RATES  # learning rates of networks on real data
    solvers: tuple[Solver, ...] = ("shared",)  # of W⊥; the paper's is each sample's own subspace
    streams: tuple[str, ...] = ("recall12",)

    def near(self, *wanted: int) -> tuple[int, ...]:
        """The wanted widths that this preset has, or its largest if it has none of them."""
        return tuple(width for width in wanted if width in self.widths) or (max(self.widths),)


PRESETS = {
    "quick": Preset(widths=(64, 128), seeds=1, heavy=False, samples=2000, rates=(1e-3,)),
    "paper": Preset(
        widths=(64, 128, 256, 512), seeds=10, heavy=True, wide=(1024, 2048), solvers=("subspace", "shared"),
        streams=tuple(streams.GROUPS),
    ),
}  # fmt: skip


def grid(*kinds: str | Mapping[str, Any], **axes: Any) -> list[Settings]:
    """`spread` of runs on batches; a method or a variant stands for its settings, alone or as a value of `method`."""
    runs = spread(*({"method": kind} if isinstance(kind, str) else kind for kind in kinds), **axes)
    return [one | settings_of(one["method"]) for one in runs]


def experiments(preset: Preset) -> dict[str, list[Settings]]:
    """What each experiment runs: fields of `TrainConfig` that differ from the paper's setting, or from their `task`'s.

    Runs that decompose a matrix of full size for every sample and step take hours on a CPU.
    """
    near, widths = preset.near, preset.widths
    perp = {"method": "wperp", "solver": preset.solvers}
    paper_perp = {"method": "wperp", "solver": preset.solvers[0]}
    look = {"diagnose": "0,1,3,10,30,100,200,300"}  # epochs; the same in all presets, so that presets share their runs
    chained = {"method": "feedback-chained"}
    rare = ("feedback-direct-rare", "feedback-chained-rare")
    in_pieces = (*FEEDBACK, {"sweeps": 2, **chained}, {"sites": "4", **chained})

    def students(task: str, *sites: str) -> list[Settings]:
        loss = {"method": "students", "student_lr": (1e-3, 1e-2), "sites": sites}
        return grid("backprop", loss, loss | {"method": "students-chained", "student_lr": (1e-3, 3e-3)}, task=task)

    return {
        # --- the paper
        "choice-of-k": grid("wt", {"k": ("rank", 25, 10, 1), **perp}, width=near(128)),
        # how much of the true gradient lies in the top-k subspace, layer by layer
        "overlap": grid(perp, width=near(128, 512), **look),
        # backpropagation, to see them on its network too
        "bias-variance": grid("wt", "wperp-bottom", "backprop", perp, width=near(128), **look),
        "scaling": grid("weight", "activation", "backprop", {"method": "wt", **look}, {**perp, **look}, width=widths),
        # with the paper's threshold, and with the one that is placed
        "newton-schulz": grid(
            {"method": "wperp-ns", "threshold": ("nearest", "placed")}, perp, "wt", width=near(128, 512)
        ),
        # unbiased and noisy, at a width that a quick run has not
        "preconditioning": grid(perp, "wp", "wt", width=tuple(w for w in widths if w == 256), **look),
        # what the authors' scripts do and the paper does not say, where our numbers differ (`gradguess_lab.scripts`)
        "scripts": [
            *grid("wt", script="mask", width=near(128, 256, 512), **look),
            *grid(paper_perp, script="mask", width=widths, **look),
            *grid(paper_perp, script="mask", k=1, width=near(128)),
            *grid("wperp-bottom", width=near(128), script=("mask", "bottom", "mask,bottom"), **look),
            *grid("wperp-ns", width=near(128, 512), threshold="nearest", script=("mask", "floor", "mask,floor")),
        ] if preset.heavy else [],
        # --- beyond it
        # W⊥ by the dense SVD of every sample at every step, which defines it
        "definition": grid("wperp", solver="svd", width=near(128), **look),
        # guesses that take the known derivative of the loss at the output, and draw nothing there
        "exact-top": grid(*GUESSED, width=widths, top="exact"),
        # learned feedback against backpropagation; rare tangents; tuned learning rates
        "feedback-width": [
            *grid(*FEEDBACK, "feedback-corrected", *rare, width=widths),
            *grid(*FEEDBACK, width=preset.wide),
            *grid(*FEEDBACK, schedule="cosine", width=near(512), lr=(3e-4, 1e-3, 3e-3)),
        ],
        "feedback-depth": [
            *grid(*in_pieces, depth=6, lr=1e-4, width=near(512)),
            *grid(*in_pieces, depth=12, lr=(1e-4, 3e-4, 1e-3), width=near(512)),
        ],
        # residual networks: with `B = 0` at equal sweeps, to show what the one-hop chain rule alone does
        "feedback-residual": grid(
            *FEEDBACK, "pieces-zero",
            {"sweeps": (2, 4), "learn": ("weighted", "never"), **chained},
            {"bootstrap": 0.3, "learn": ("weighted", "never"), **chained},
            model="residual", width=128, depth=(12, 24), epochs=20, batch=128, lr=3e-4,
        ),
        # how good the estimate is over training, with what feedback has learned until then
        "feedback-quality": grid(
            {"method": (*FEEDBACK[1:], "feedback-corrected"), "diagnose": "25"}, {"method": ("wperp", "wt"), **look},
            width=near(128),
        ),
        # what a sceptical reader asks for
        "feedback-ablations": [
            *grid(
                {"start": "random", "learn": "never"},  # direct feedback alignment, and its chained form
                {"learn": ("truth", "outputs", "loss")},  # the first is the ceiling of the form
                {"learn": "momentum", "rate": 0.02},  # FDFA's rule
                {"teacher": ("wt", "activation")},
                method=FEEDBACK[1:], width=near(256),
            ),
            # synthetic gradients, no tangent; the same, anchored by tangents
            *grid({"learn": "never", "bootstrap": (0.0, 0.3)}, {"bootstrap": 0.3}, width=near(256), **chained),
            *grid({"balance": True}, {"tangents": 10}, {"isolate": True}, width=near(256), method="wperp"),
        ],
        # convolutional, residual and attention networks on images and text
        "real": grid(
            task=tuple(used_in("real")), lr=preset.rates, method=tuple(tried_by("real")), samples=preset.samples
        ),
        # --- experiments of their own
        # students on deep networks, in several numbers of pieces and with several rates of their own
        "deep": [
            *students("residual24-mnist1d", "6", "12"), *students("charformer-shakespeare", "4", "6"),
            *students("resnet18-cifar10", "4", "8"), *students("mlp-mnist1d", "4", "6"), *students("vit-cifar10", "4"),
        ],
        # differences of plain passes against dual numbers, in two precisions
        "finite": grid(
            method=("wperp", "feedback-chained"), dtype=("float32", "bfloat16"), derivative=("dual", "finite"),
            width=256, epochs=100, lr=1e-3,
        ),
    }  # fmt: skip


EXPERIMENTS = tuple(experiments(PRESETS["quick"]))
PAPER = EXPERIMENTS[: EXPERIMENTS.index("definition")]
GROUPS = {"beyond": EXPERIMENTS[len(PAPER) : EXPERIMENTS.index("deep")]}


def plans(
    preset: str = "quick",
    only: Iterable[str] = (),
    seeds: int | None = None,
    solver: str | None = None,
    device: str | None = None,
) -> list[Plan]:
    """The plans of the experiments that are asked for: those of the paper, if none are.

    `beyond` stands for all that goes beyond the paper on batches, `streams` for the preset's groups of streams.
    """
    groups = GROUPS | {"streams": PRESETS[check_choice("preset", preset, PRESETS)].streams}
    asked = _asked(only, groups, [*EXPERIMENTS, *streams.GROUPS], "experiment")
    batched = [name for name in asked if name in EXPERIMENTS]
    on_batches = jobs(preset, batched, seeds, solver, device) if batched or not asked else []
    on_streams = [plan for name in asked if name in streams.GROUPS for plan in streams.plans(name, device, seeds)]
    return [at_once(on_batches), *on_streams] if on_batches else on_streams


def _asked(only: Iterable[str], groups: Mapping[str, Sequence[str]], known: Sequence[str], kind: str) -> list[str]:
    """The names with those of a group in its place."""
    names = [name for item in only for name in groups.get(item, (item,))]
    return [check_choice(kind, name, [*known, *groups]) for name in names]


def jobs(
    preset: str = "quick",
    only: Iterable[str] = (),
    seeds: int | None = None,
    solver: str | None = None,
    device: str | None = None,
) -> list[Job]:
    """The jobs of the experiments on batches; a run that two experiments share is the same in both."""
    chosen = PRESETS[check_choice("preset", preset, PRESETS)]
    asked = _asked(only, GROUPS, EXPERIMENTS, "experiment on batches")
    count = chosen.seeds if seeds is None else seeds
    check_count("seeds", count)
    changes: Settings = {name: value for name, value in (("solver", solver), ("device", device)) if value is not None}
    runs = {
        name: [
            one.at(seed=seed, **changes)
            for seed in range(count)
            for one in (on_task(name, **settings) for settings in grids)
            # a quick preset leaves out heavy runs unless their experiment is asked for by name
            if chosen.heavy or name in asked or not is_heavy(one.settings)
        ]
        for name, grids in experiments(chosen).items()
    }
    if empty := [name for name in asked if not runs[name]]:
        raise InputError(f"{', '.join(empty)}: the preset {preset!r} has no runs of it. Pass --preset paper.")
    # Diagnosing does not change a run, so one that any experiment diagnoses is diagnosed in all, and run once.
    looked_at: dict[str, str] = {}
    for one in (one for jobs in runs.values() for one in jobs):
        plain = one.at(diagnose="").key
        looked_at[plain] = max(looked_at.get(plain, ""), one.settings.diagnose, key=len)
    return [one.at(diagnose=looked_at[one.at(diagnose="").key]) for name in asked or PAPER for one in runs[name]]


def on_task(experiment: str, task: str = "", **settings: Any) -> Job:
    """A run on a task of the registry, or on the paper's network and others like it."""
    base = TASKS[task].config if task else PAPER_SETTING
    config = dataclasses.replace(base, **settings)
    return Job(
        experiment, task or f"{config.model}-{config.data}", variant_of(config.as_dict(), base.as_dict()), config
    )


def read_configs(path: Path) -> list[Job]:
    """The runs in a file as `reproduce --dump` writes it: a JSON list of objects with fields of `TrainConfig`.

    What an object leaves out keeps its default. The experiment is called as the file.
    """
    entries = read_json(path, "list of configurations", list)
    for entry in entries:
        if not isinstance(entry, dict):
            raise InputError(f"{path} must hold one JSON object for each run, found {entry!r}.")
    return [on_task(path.stem, **TrainConfig.from_dict(entry).as_dict()) for entry in entries]
