"""The registry of methods, which the command line, the benchmarks, the tables, the figures and the tests read.

To add a method, write it in a file of its own and add one line to `_ENTRIES`. `VARIANTS` lists settings of these
methods that have a name of their own in benchmarks and studies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import gradguess as gg
from gradguess_lab.names import lookup, unknown

if TYPE_CHECKING:
    from gradguess_lab.config import TrainConfig


@dataclass(frozen=True)
class MethodEntry:
    """One method: how it is called, how its curves look, and how a configuration becomes the method.

    `options` are the fields of `TrainConfig` that this method reads and that others ignore.
    """

    name: str  # on the command line and in results
    label: str  # in tables and figures
    light: str  # colour of its curves on a light page
    dark: str  # and on a dark one
    marker: str  # matplotlib's name of the marker on its curves
    options: frozenset[str]
    make: Callable[[TrainConfig], Any]


@dataclass(frozen=True)
class MethodVariant:
    """A method with settings that differ from the defaults of `TrainConfig`."""

    label: str
    settings: Mapping[str, Any]
    style: str = ""  # the name of its style in `gradguess_lab.report.palette`; its own method's if empty
    dashed: bool = False


def subspace_size(config: TrainConfig) -> int:
    """`k="rank"` asks for the whole image of the Jacobian. No rank exceeds the width, and guesses clip `k`."""
    return config.width if config.k == "rank" else int(config.k)


def _wperp(config: TrainConfig, end: Literal["top", "bottom"] = "top") -> gg.WPerp:
    return gg.WPerp(k=subspace_size(config), solver=config.solver, refresh=config.refresh, end=end)


def _wperp_ns(config: TrainConfig) -> gg.WPerpNS:
    threshold: Any = config.threshold
    return gg.WPerpNS(k=subspace_size(config), steps=config.steps, refresh=config.refresh, threshold=threshold)


def _feedback(form: str) -> Callable[[TrainConfig], gg.Feedback]:
    def make(config: TrainConfig) -> gg.Feedback:
        from gradguess_lab.studies import studied_feedback

        teacher = METHODS[config.teacher].make(config)
        shared = {name: getattr(config, name) for name in ("rate", "every", "fraction", "sweeps", "bootstrap")}
        return studied_feedback(teacher, learn=config.learn, start=config.start, seed=config.seed, form=form, **shared)

    return make


def _students(**options: Any) -> Callable[[TrainConfig], gg.Students]:
    return lambda config: gg.Students(lr=config.student_lr, **options)


_NONE: frozenset[str] = frozenset()
_STUDENTS = frozenset({"student_lr"})
_BASIS = frozenset({"k", "solver", "refresh"})
_NS = frozenset({"k", "refresh", "steps", "threshold"})
_FEEDBACK = _BASIS | {"rate", "every", "fraction", "sweeps", "learn", "bootstrap", "start", "teacher"}
_ENTRIES = (
    MethodEntry("backprop", "Backpropagation", "#1b1f24", "#e6e8eb", "D", _NONE, lambda c: gg.Backprop()),
    MethodEntry("weight", "Weight perturbation", "#228833", "#5ccb78", "*", _NONE, lambda c: gg.WeightPerturbation()),
    MethodEntry(
        "activation", "Activation perturbation", "#4477aa", "#7fb2e5", "s", _NONE, lambda c: gg.ActivationPerturbation()
    ),
    MethodEntry("wt", "Wᵀ", "#aa3377", "#e58bc0", "o", _NONE, lambda c: gg.WTranspose()),
    MethodEntry("wperp", "W⊥", "#e07b00", "#ffa94d", "^", _BASIS, _wperp),
    MethodEntry("wperp-bottom", "W⊥-bottom", "#00897b", "#45d0be", "v", _BASIS, lambda c: _wperp(c, end="bottom")),
    MethodEntry("wperp-ns", "W⊥-NS", "#cc3311", "#ff7f66", "P", _NS, _wperp_ns),
    MethodEntry(
        "wp", "Wᴾ", "#7a6a53", "#c9b79a", "X", frozenset({"sigma"}), lambda c: gg.WPreconditioned(sigma=c.sigma)
    ),
    MethodEntry("feedback-direct", "Feedback, direct", "#2b93bd", "#6fd0f2", "<", _FEEDBACK, _feedback("direct")),
    MethodEntry("feedback-chained", "Feedback, chained", "#6a3fb5", "#b79cf5", ">", _FEEDBACK, _feedback("chained")),
    MethodEntry(
        "feedback-corrected", "Feedback, corrected", "#7d8000", "#c9cc4a", "h", _FEEDBACK, _feedback("corrected")
    ),
    MethodEntry("dfa", "DFA", "#9c4f96", "#d59ad0", "1", _NONE, lambda c: gg.baselines.DFA(seed=c.seed)),
    MethodEntry("fdfa", "FDFA", "#c2185b", "#ff80ab", "2", _NONE, lambda c: gg.baselines.FDFA()),
    MethodEntry("mezo", "MeZO", "#558b2f", "#aed581", "3", _NONE, lambda c: gg.baselines.MeZO()),
    MethodEntry(
        "local-linear", "Local loss, linear", "#0277bd", "#81d4fa", ".", _NONE, lambda c: gg.baselines.LocalLinear()
    ),
    MethodEntry(
        "local-predsim", "Local loss, predsim", "#283593", "#9fa8da", "_", _NONE, lambda c: gg.baselines.PredSim()
    ),
    MethodEntry(
        "checkpointed",
        "Backpropagation, checkpoints",
        "#455a64",
        "#b0bec5",
        "|",
        _NONE,
        lambda c: gg.baselines.Checkpointed(),
    ),
    MethodEntry("frozen", "Lower part frozen", "#8d6e63", "#bcaaa4", "4", _NONE, lambda c: gg.baselines.Frozen()),
    MethodEntry("students", "Students", "#b3002d", "#ff6b8b", "p", _STUDENTS, _students()),
    MethodEntry(
        "students-chained", "Students, chained", "#9c5a1a", "#d8a35d", "H", _STUDENTS, _students(form="chained")
    ),
    MethodEntry("students-error", "Students, error", "#5e35b1", "#a98be8", "d", _STUDENTS, _students(signal="error")),
    MethodEntry(
        "students-tangents",
        "Students, loss and tangents",
        "#00695c",
        "#4db6ac",
        "+",
        _STUDENTS,
        _students(learn=("loss", "tangents")),
    ),
    MethodEntry(
        "students-random", "Students, never trained", "#5f6b76", "#9fadb9", "x", _NONE, lambda c: gg.Students(learn=())
    ),
    MethodEntry(
        "local-guess", "Local guess", "#006d77", "#5fc9d2", "8", _STUDENTS, lambda c: gg.LocalGuess(lr=c.student_lr)
    ),
)
METHODS: dict[str, MethodEntry] = {entry.name: entry for entry in _ENTRIES}
OPTIONS = frozenset().union(*(entry.options for entry in _ENTRIES))  # the options that only some methods read

_RARE = {"every": 4, "fraction": 0.25}  # tangents on a quarter of the batch at every fourth step
_CHAINED, _PIECES = {"method": "feedback-chained"}, {"method": "feedback-chained", "sites": "3"}
_BOOTSTRAP = {"learn": "never", "bootstrap": 0.3}  # predictions are drawn to the chained estimate, without tangents
VARIANTS: dict[str, MethodVariant] = {
    "backprop-wrapped": MethodVariant("Backpropagation, wrapped", {"method": "backprop"}, "wp"),
    "wperp-exact": MethodVariant("W⊥, exact top", {"method": "wperp", "top": "exact"}, dashed=True),
    "wperp-subspace": MethodVariant("W⊥, subspace solver", {"method": "wperp", "solver": "subspace"}, "wperp-ns"),
    "wperp-svd": MethodVariant("W⊥, dense SVD", {"method": "wperp", "solver": "svd"}, "wperp-bottom"),
    "feedback-direct-rare": MethodVariant(
        "Feedback, direct, rare tangents", {"method": "feedback-direct", **_RARE}, dashed=True
    ),
    "feedback-chained-rare": MethodVariant("Feedback, chained, rare tangents", {**_CHAINED, **_RARE}, dashed=True),
    "feedback-chained-pieces": MethodVariant("Feedback, chained, rare tangents, 3 pieces", {**_PIECES, **_RARE}),
    "feedback-chained-pieces-zero": MethodVariant(
        "Feedback, chained, B = 0, 3 pieces", {**_PIECES, **_RARE, "learn": "never"}
    ),
    "feedback-chained-bootstrap": MethodVariant("Feedback, chained, bootstrap alone", {**_CHAINED, **_BOOTSTRAP}),
    "feedback-chained-pieces-bootstrap": MethodVariant(
        "Feedback, chained, bootstrap alone, 3 pieces", {**_PIECES, **_BOOTSTRAP}
    ),
    "pieces-zero": MethodVariant("Pieces, B = 0", {**_CHAINED, "learn": "never"}, "layer-1"),
    # loops whose memory is compared; the benchmark adds what depends on the depth
    "checkpoint-all": MethodVariant("Backpropagation, every layer recomputed", {"method": "checkpointed"}, "layer-1"),
    "checkpoint-sqrt": MethodVariant("Backpropagation, √depth checkpoints", {"method": "checkpointed"}, "layer-3"),
    "store": MethodVariant("W⊥, store", {"method": "wperp"}),
    "replay": MethodVariant("W⊥, replay", {"method": "wperp", "memory": "replay"}, "feedback-direct"),
    "feedback-replay": MethodVariant(
        "Feedback, direct, replay", {"method": "feedback-direct", "memory": "replay"}, "feedback-chained"
    ),
    "pieces-replay": MethodVariant(
        "Feedback, chained, √depth pieces, replay", {**_CHAINED, **_RARE, "memory": "replay"}, "layer-2"
    ),
}


def guess_for(config: TrainConfig) -> Any:
    """The method that `config` names, with the options that `config` gives it."""
    return lookup(METHODS, config.method, "method").make(config)


def settings_of(name: str) -> dict[str, Any]:
    """The fields of `TrainConfig` that the name of a method or of a variant stands for."""
    if name in METHODS:
        return {"method": name}
    if name not in VARIANTS:
        raise unknown("method", name, [*METHODS, *VARIANTS])
    return dict(VARIANTS[name].settings)


def method_label(name: str) -> str:
    """How tables call a method or a variant; a name that is not known stands for itself."""
    entry = METHODS.get(name) or VARIANTS.get(name)
    return entry.label if entry else name


def style_name(name: str) -> str:
    """The name of the style in which curves of a method or of a variant are drawn."""
    variant = VARIANTS.get(name)
    return (variant.style or str(variant.settings["method"])) if variant else name


def options_of(method: str) -> frozenset[str]:
    """The options that a method reads; none for a method that is not known."""
    return METHODS[method].options if method in METHODS else _NONE


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which every option that its method does not read stands at its default."""
    from gradguess_lab.config import TrainConfig

    unread = OPTIONS - options_of(config.get("method", ""))
    return {name: getattr(TrainConfig, name) if name in unread else value for name, value in config.items()}
