"""The experiments as lists of jobs: one entry per table or figure of the paper, and what goes beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradguess.errors import InputError
from gradguess_lab.config import Solver, TrainConfig
from gradguess_lab.files import read_json
from gradguess_lab.jobs import Job, Plan, at_once, is_heavy
from gradguess_lab.methods import settings_of, tried_by, variant_of
from gradguess_lab.names import lookup
from gradguess_lab.streams import plan as streams
from gradguess_lab.tasks import RATES, TASKS, used_in

Runs = list[TrainConfig]
DIAGNOSE = "0,1,3,10,30,100,200,300"  # epochs; the same in every preset, so that presets share their runs
PAPER_SETTING = TrainConfig()


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


def _across(widths: Iterable[int], kinds: Iterable[TrainConfig], **more: Any) -> Runs:
    """Every kind at every width."""
    kinds = list(kinds)
    return [replace(kind, width=width, **more) for width in widths for kind in kinds]


def _kinds(*methods: str, **options: Any) -> Runs:
    return [TrainConfig(method=method, **options) for method in methods]


def _perp(preset: Preset, **options: Any) -> Runs:
    """W⊥ by each solver of the preset."""
    return [TrainConfig(**({"method": "wperp", "solver": solver} | options)) for solver in preset.solvers]


# --- the paper -----------------------------------------------------------------------------------------------


def choice_of_k(preset: Preset) -> Runs:
    """W⊥ for several k against Wᵀ."""
    return _across(preset.near(128), _kinds("wt") + [c for k in ("rank", 25, 10, 1) for c in _perp(preset, k=k)])


def overlap(preset: Preset) -> Runs:
    """How much of the true gradient lies in the top-k subspace, layer by layer."""
    return _across(preset.near(128, 512), _perp(preset), diagnose=DIAGNOSE)


def bias_variance(preset: Preset) -> Runs:
    """Bias, variance and covariance norm of Wᵀ, W⊥-bottom and W⊥; backpropagation, to see them on its network too."""
    return _across(preset.near(128), _kinds("wt", "wperp-bottom", "backprop") + _perp(preset), diagnose=DIAGNOSE)


def scaling(preset: Preset) -> Runs:
    """Accuracy of five methods as the width grows; bias and variance of those that differ in them."""
    judged = [replace(kind, diagnose=DIAGNOSE) for kind in [*_kinds("wt"), *_perp(preset)]]
    return _across(preset.widths, _kinds("weight", "activation", "backprop") + judged)


def newton_schulz(preset: Preset) -> Runs:
    """W⊥-NS against W⊥ and Wᵀ: accuracy, time, memory. With the paper's threshold, and with the one that is placed."""
    kinds = [TrainConfig(method="wperp-ns", threshold=threshold) for threshold in ("nearest", "placed")]
    return _across(preset.near(128, 512), [*kinds, *_perp(preset), *_kinds("wt")])


def preconditioning(preset: Preset) -> Runs:
    """Wᴾ, unbiased and noisy, against W⊥ and Wᵀ, at a width that a quick run has not."""
    return _across([256] if 256 in preset.widths else [], _perp(preset) + _kinds("wp", "wt"), diagnose=DIAGNOSE)


def scripts(preset: Preset) -> Runs:
    """What the authors' scripts do and the paper does not say, where our numbers differ (`gradguess_lab.scripts`)."""
    if not preset.heavy:
        return []
    perp = TrainConfig(method="wperp", solver=preset.solvers[0], script="mask")
    bottom = [TrainConfig(method="wperp-bottom", script=script) for script in ("mask", "bottom", "mask,bottom")]
    sharp = [
        TrainConfig(method="wperp-ns", threshold="nearest", script=script) for script in ("mask", "floor", "mask,floor")
    ]
    return [
        *_across(preset.near(128, 256, 512), _kinds("wt", script="mask"), diagnose=DIAGNOSE),
        *_across(preset.widths, [perp], diagnose=DIAGNOSE),
        *_across(preset.near(128), [replace(perp, k=1)]),
        *_across(preset.near(128), bottom, diagnose=DIAGNOSE),
        *_across(preset.near(128, 512), sharp),
    ]


# --- beyond it -----------------------------------------------------------------------------------------------

FEEDBACK = tuple(_kinds("backprop", "feedback-direct", "feedback-chained"))
GUESSED = tuple(_kinds("wperp", "wt", "activation"))
_CHAINED = TrainConfig(method="feedback-chained")


def definition(preset: Preset) -> Runs:
    """W⊥ by the dense SVD of every sample at every step, which defines it: hours on a CPU."""
    return _across(preset.near(128), _kinds("wperp", solver="svd"), diagnose=DIAGNOSE)


def exact_top(preset: Preset) -> Runs:
    """Guesses that take the known derivative of the loss at the output, and draw nothing there."""
    return _across(preset.widths, GUESSED, top="exact")


def feedback_width(preset: Preset) -> Runs:
    """Learned feedback against backpropagation as the width grows; rare tangents; tuned learning rates."""
    rare = _kinds("feedback-direct", "feedback-chained", every=4, fraction=0.25)
    tuned = [replace(kind, schedule="cosine", lr=lr) for lr in (3e-4, 1e-3, 3e-3) for kind in FEEDBACK]
    return [
        *_across(preset.widths, [*FEEDBACK, *_kinds("feedback-corrected"), *rare]),
        *_across(preset.wide, FEEDBACK),
        *_across(preset.near(512), tuned),
    ]


def feedback_depth(preset: Preset) -> Runs:
    """The same as the depth grows, at three learning rates; two sweeps beside one, and four pieces."""
    kinds = [*FEEDBACK, replace(_CHAINED, sweeps=2), replace(_CHAINED, sites="4")]
    return [
        run
        for depth, rates in ((6, (1e-4,)), (12, (1e-4, 3e-4, 1e-3)))
        for lr in rates
        for run in _across(preset.near(512), kinds, depth=depth, lr=lr)
    ]


def feedback_residual(preset: Preset) -> Runs:
    """Residual networks: with `B = 0` at equal sweeps, to show what the one-hop chain rule alone does."""
    swept = [replace(_CHAINED, sweeps=n, learn=learn) for n in (1, 2, 4) for learn in ("weighted", "never")]
    drawn = [replace(_CHAINED, learn=learn, bootstrap=0.3) for learn in ("weighted", "never")]
    return [
        replace(kind, model="residual", width=128, depth=depth, epochs=20, batch=128, lr=3e-4)
        for depth in (12, 24)
        for kind in [*FEEDBACK, *swept[1:], *drawn]
    ]


def feedback_quality(preset: Preset) -> Runs:
    """How good the estimate is over training, with what feedback has learned until then."""
    taught = _kinds("feedback-direct", "feedback-chained", "feedback-corrected", diagnose="25")
    return _across(preset.near(128), taught + _kinds("wperp", "wt", diagnose=DIAGNOSE))


def feedback_ablations(preset: Preset) -> Runs:
    """What a sceptical reader asks for, at width 256."""
    changes: list[dict[str, Any]] = [
        {"start": "random", "learn": "never"},  # direct feedback alignment, and its chained form
        {"learn": "truth"},  # the ceiling of the form
        {"learn": "outputs"},
        {"learn": "loss"},
        {"learn": "momentum", "rate": 0.02},  # FDFA's rule
        {"teacher": "wt"},
        {"teacher": "activation"},
    ]
    both = [replace(form, **change) for form in FEEDBACK[1:] for change in changes]
    alone = [
        replace(_CHAINED, learn="never"),
        replace(_CHAINED, learn="never", bootstrap=0.3),  # synthetic gradients, no tangent
        replace(_CHAINED, bootstrap=0.3),  # the same, anchored by tangents
        *(TrainConfig(method="wperp", **change) for change in ({"balance": True}, {"tangents": 10}, {"isolate": True})),
    ]
    return _across(preset.near(256), both + alone)


def real(preset: Preset) -> list[Job]:
    """Convolutional, residual and attention networks on images and text."""
    return [
        on_task("real", task, variant, lr=lr, samples=preset.samples, **settings_of(variant))
        for task in used_in("real")
        for lr in preset.rates
        for variant in tried_by("real")
    ]


def deep(preset: Preset) -> list[Job]:
    """Students on deep networks, in several numbers of pieces and with several rates of their own."""
    pieces: dict[str, tuple[int, ...]] = {
        "residual24-mnist1d": (6, 12),
        "charformer-shakespeare": (4, 6),
        "resnet18-cifar10": (4, 8),
    }
    pieces |= {"mlp-mnist1d": (4, 6), "vit-cifar10": (4,)}
    cut = [("students", 1e-3), ("students", 1e-2), ("students-chained", 1e-3), ("students-chained", 3e-3)]
    return [
        on_task("deep", task, method=method, sites=sites, student_lr=rate)
        for task, numbers in pieces.items()
        for method, rate, sites in [("backprop", 1e-3, "auto"), *((*one, str(n)) for one in cut for n in numbers)]
    ]


def finite(preset: Preset) -> Runs:
    """Training by differences of plain passes against dual numbers, in two precisions."""
    return [
        TrainConfig(method=method, width=256, epochs=100, lr=1e-3, dtype=dtype, derivative=derivative)
        for method in ("wperp", "feedback-chained")
        for dtype in ("float32", "bfloat16")
        for derivative in ("dual", "finite")
    ]


Experiments = dict[str, Callable[[Preset], Runs | list[Job]]]
PAPER: Experiments = {
    "choice-of-k": choice_of_k,
    "overlap": overlap,
    "bias-variance": bias_variance,
    "scaling": scaling,
    "newton-schulz": newton_schulz,
    "preconditioning": preconditioning,
    "scripts": scripts,
}
BEYOND: Experiments = {
    "definition": definition,
    "exact-top": exact_top,
    "feedback-width": feedback_width,
    "feedback-depth": feedback_depth,
    "feedback-residual": feedback_residual,
    "feedback-quality": feedback_quality,
    "feedback-ablations": feedback_ablations,
    "real": real,
}
APART: Experiments = {"deep": deep, "finite": finite}
EXPERIMENTS = PAPER | BEYOND | APART
GROUPS = {"beyond": tuple(BEYOND)}


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
    groups = GROUPS | {"streams": lookup(PRESETS, preset, "preset").streams}
    asked = [name for item in only for name in groups.get(item, (item,))]
    for name in asked:
        lookup({**EXPERIMENTS, **streams.GROUPS, **groups}, name, "experiment")
    batched = [name for name in asked if name in EXPERIMENTS]
    on_batches = jobs(preset, batched, seeds, solver, device) if batched or not asked else []
    on_streams = [plan for name in asked if name in streams.GROUPS for plan in streams.plans(name, device, seeds)]
    return [at_once(on_batches), *on_streams] if on_batches else on_streams


def jobs(
    preset: str = "quick",
    only: Iterable[str] = (),
    seeds: int | None = None,
    solver: str | None = None,
    device: str | None = None,
) -> list[Job]:
    """The jobs of the experiments on batches; a run that two experiments share is the same in both."""
    chosen, asked = lookup(PRESETS, preset, "preset"), list(only)
    for name in asked:
        lookup(EXPERIMENTS, name, "experiment on batches")
    count = chosen.seeds if seeds is None else seeds
    if count < 1:
        raise InputError(f"seeds must be at least 1, found {count}.")
    changes: dict[str, Any] = {
        name: value for name, value in (("solver", solver), ("device", device)) if value is not None
    }
    runs = {
        name: [
            one.at(seed=seed, **changes)
            for seed in range(count)
            for one in (run if isinstance(run, Job) else on_task(name, run) for run in build(chosen))
            # a quick preset leaves out heavy runs unless their experiment is asked for by name
            if chosen.heavy or name in asked or not is_heavy(one.settings)
        ]
        for name, build in EXPERIMENTS.items()
    }
    if empty := [name for name in asked if not runs[name]]:
        raise InputError(f"{', '.join(empty)}: the preset {preset!r} has no runs of it. Pass --preset paper.")
    # Diagnosing does not change a run, so one that any experiment diagnoses is diagnosed in all, and run once.
    looked_at: dict[str, str] = {}
    for one in (one for jobs in runs.values() for one in jobs):
        plain = one.at(diagnose="").key
        looked_at[plain] = max(looked_at.get(plain, ""), one.settings.diagnose, key=len)
    return [one.at(diagnose=looked_at[one.at(diagnose="").key]) for name in asked or PAPER for one in runs[name]]


def on_task(experiment: str, task: str | TrainConfig, variant: str = "", **settings: Any) -> Job:
    """A run on a task of the registry, or on the paper's network and others like it."""
    base = TASKS[task].config if isinstance(task, str) else PAPER_SETTING
    config = replace(base if isinstance(task, str) else task, **settings)
    name = task if isinstance(task, str) else f"{config.model}-{config.data}"
    return Job(experiment, name, variant or variant_of(config.as_dict(), base.as_dict()), config)


def read_configs(path: Path) -> list[Job]:
    """The runs in a file as `reproduce --dump` writes it: a JSON list of objects with fields of `TrainConfig`.

    What an object leaves out keeps its default. The experiment is called as the file.
    """
    entries = read_json(path, "list of configurations", list)
    for entry in entries:
        if not isinstance(entry, dict):
            raise InputError(f"{path} must hold one JSON object for each run, found {entry!r}.")
    return [on_task(path.stem, TrainConfig.from_dict(entry)) for entry in entries]
