"""The registry of methods: what a name stands for, how it is drawn, what it sends back, and which experiments try it.

To add a method, write it in a file of its own and add one entry to `METHODS`. `VARIANTS` lists settings of methods that
have a name of their own. The command line, the experiments, the benchmarks, the tables, the figures and the tests read
this file and hold no list of names of their own.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import gradguess as gg
from gradguess.errors import check_choice

if TYPE_CHECKING:
    from gradguess_lab.config import TrainConfig

Sends = Literal["nothing", "one piece", "all"]


@dataclass(frozen=True)
class MethodEntry:
    """A method, or a variant of one.

    Attributes:
        name: on the command line and in results.
        label: in tables and figures.
        light, dark: colour of its curves on a light and on a dark page.
        marker: matplotlib's name of the marker on its curves.
        make: from a configuration to the method.
        options: the fields of `TrainConfig` that this method reads and others ignore.
        tried: the experiments that try it, with spaces between them: `compare`, `real` networks, and the benchmarks
            `time`, `memory`, `compiled` and `starts`.
        sends: through how much of the network a signal travels back from the loss. Numbers for each sample, and an
            output error that matrices or heads take straight to a site, do not travel through the network.
        pieces: a comparison cuts the network as the task says; otherwise the method puts sites where it does by itself.
        control: not a way to train, but what a method must beat.
        slow: devices on which its step works on a matrix for every sample, which is too slow for the whole batch.
        method, changes: of a variant: whose it is, and the fields of `TrainConfig` in which it differs.
        style: of a variant: the name of its style in `gradguess_lab.tables.figure`, if that is not its method's.
        dashed: how its curves are drawn.
    """

    name: str
    label: str
    light: str
    dark: str
    marker: str
    make: Callable[[TrainConfig], Any]
    options: frozenset[str] = frozenset()
    tried: str = ""
    sends: Sends = "nothing"
    pieces: bool = False
    control: bool = False
    slow: tuple[str, ...] = ()
    method: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    style: str = ""
    dashed: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `TrainConfig` that the name stands for."""
        return {"method": self.method or self.name, **self.changes}


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


_STUDENTS, _SIGMA = frozenset({"student_lr"}), frozenset({"sigma"})
_BASIS = frozenset({"k", "solver", "refresh"})
_NS = frozenset({"k", "refresh", "steps", "threshold"})
_FEEDBACK = _BASIS | {"rate", "every", "fraction", "sweeps", "learn", "bootstrap", "start", "teacher"}
_E = MethodEntry
_ENTRIES = (
    _E("backprop", "Backpropagation", "#1b1f24", "#e6e8eb", "D", lambda c: gg.Backprop(),
       tried="compare real memory starts", sends="all"),
    _E("checkpointed", "Backpropagation, checkpoints", "#455a64", "#b0bec5", "|", lambda c: gg.baselines.Checkpointed(),
       tried="compare", sends="all", pieces=True),
    _E("weight", "Weight perturbation", "#228833", "#5ccb78", "*", lambda c: gg.WeightPerturbation(),
       tried="compare time"),
    _E("activation", "Activation perturbation", "#4477aa", "#7fb2e5", "s", lambda c: gg.ActivationPerturbation(),
       tried="compare time"),
    _E("wt", "Wᵀ", "#aa3377", "#e58bc0", "o", lambda c: gg.WTranspose(), tried="time compiled"),
    _E("wperp", "W⊥", "#e07b00", "#ffa94d", "^", _wperp, _BASIS, tried="compare real time compiled starts"),
    _E("wperp-bottom", "W⊥-bottom", "#00897b", "#45d0be", "v", lambda c: _wperp(c, end="bottom"), _BASIS),
    _E("wperp-ns", "W⊥-NS", "#cc3311", "#ff7f66", "P", _wperp_ns, _NS, slow=("cpu",)),
    _E("wp", "Wᴾ", "#7a6a53", "#c9b79a", "X", lambda c: gg.WPreconditioned(sigma=c.sigma), _SIGMA,
       slow=("cpu", "cuda")),
    _E("feedback-direct", "Feedback, direct", "#2b93bd", "#6fd0f2", "<", _feedback("direct"), _FEEDBACK,
       tried="compare real time"),
    _E("feedback-chained", "Feedback, chained", "#6a3fb5", "#b79cf5", ">", _feedback("chained"), _FEEDBACK,
       tried="compare real time", sends="one piece", pieces=True),
    _E("feedback-corrected", "Feedback, corrected", "#7d8000", "#c9cc4a", "h", _feedback("corrected"), _FEEDBACK,
       tried="time"),
    _E("dfa", "DFA", "#9c4f96", "#d59ad0", "1", lambda c: gg.baselines.DFA(seed=c.seed), tried="compare"),
    _E("fdfa", "FDFA", "#c2185b", "#ff80ab", "2", lambda c: gg.baselines.FDFA(), tried="compare"),
    _E("mezo", "MeZO", "#558b2f", "#aed581", "3", lambda c: gg.baselines.MeZO(), tried="compare compiled"),
    _E("local-linear", "Local loss, linear", "#0277bd", "#81d4fa", ".", lambda c: gg.baselines.LocalLinear(),
       tried="compare", pieces=True),
    _E("local-predsim", "Local loss, predsim", "#283593", "#9fa8da", "_", lambda c: gg.baselines.PredSim(),
       tried="compare", pieces=True),
    _E("frozen", "Lower part frozen", "#8d6e63", "#bcaaa4", "4", lambda c: gg.baselines.Frozen(),
       tried="compare", pieces=True, control=True),
    _E("students", "Students", "#b3002d", "#ff6b8b", "p", _students(), _STUDENTS, tried="compare", pieces=True),
    _E("students-chained", "Students, chained", "#9c5a1a", "#d8a35d", "H", _students(form="chained"), _STUDENTS,
       tried="compare", sends="one piece", pieces=True),
    _E("students-error", "Students, error", "#5e35b1", "#a98be8", "d", _students(signal="error"), _STUDENTS,
       tried="compare", pieces=True),
    _E("students-tangents", "Students, loss and tangents", "#00695c", "#4db6ac", "+",
       _students(learn=("loss", "tangents")), _STUDENTS, tried="compare", pieces=True),
    _E("students-random", "Students, never trained", "#5f6b76", "#9fadb9", "x", lambda c: gg.Students(learn=()),
       tried="compare", pieces=True, control=True),
    _E("local-guess", "Local guess", "#006d77", "#5fc9d2", "8", lambda c: gg.LocalGuess(lr=c.student_lr), _STUDENTS,
       tried="compare", pieces=True),
)  # fmt: skip
METHODS: dict[str, MethodEntry] = {entry.name: entry for entry in _ENTRIES}
OPTIONS = frozenset().union(*(entry.options for entry in _ENTRIES))  # the options that only some methods read


def _variant(name: str, label: str, method: str, changes: Mapping[str, Any] | None = None, **more: Any) -> MethodEntry:
    of = METHODS[method]
    look = (of.light, of.dark, of.marker, of.make, of.options)
    return MethodEntry(name, label, *look, method=method, changes=changes or {}, **more)


_V = _variant
_RARE = {"every": 4, "fraction": 0.25}  # tangents on a quarter of the batch at every fourth step
_BOOTSTRAP = {"learn": "never", "bootstrap": 0.3}  # predictions are drawn to the chained estimate, without tangents
_PIECES, _REPLAY = {"sites": "3"}, {"memory": "replay"}
_CHAINED, _SLOW = "feedback-chained", ("cpu", "cuda")
_VARIANTS = (
    _V("wperp-exact", "W⊥, exact top", "wperp", {"top": "exact"}, dashed=True, tried="compare real"),
    _V("wperp-subspace", "W⊥, subspace solver", "wperp", {"solver": "subspace"}, style="wperp-ns", tried="time"),
    _V("wperp-svd", "W⊥, dense SVD", "wperp", {"solver": "svd"}, style="wperp-bottom", tried="time", slow=_SLOW),
    _V("wperp-leaf", "W⊥, every layer", "wperp", {"sites": "leaf"}, style="layer-1"),
    _V("wperp-separable", "W⊥, separable, every layer", "wperp",
       {"solver": "separable", "sites": "leaf", "top": "exact", "k": 12}, style="layer-3"),
    _V("wperp-pieces", "W⊥, 4 pieces", "wperp", {"sites": "4"}, style="layer-2"),
    _V("feedback-direct-rare", "Feedback, direct, rare tangents", "feedback-direct", _RARE, dashed=True, tried="time"),
    _V("feedback-chained-rare", "Feedback, chained, rare tangents", _CHAINED, _RARE, dashed=True,
       tried="real time compiled starts"),
    _V("feedback-chained-pieces", "Feedback, chained, rare tangents, 3 pieces", _CHAINED, _PIECES | _RARE,
       tried="real"),
    _V("feedback-chained-pieces-zero", "Feedback, chained, B = 0, 3 pieces", _CHAINED,
       _PIECES | _RARE | {"learn": "never"}, tried="real", control=True),
    _V("feedback-chained-bootstrap", "Feedback, chained, bootstrap alone", _CHAINED, _BOOTSTRAP, tried="real"),
    _V("feedback-chained-pieces-bootstrap", "Feedback, chained, bootstrap alone, 3 pieces", _CHAINED,
       _PIECES | _BOOTSTRAP, tried="real"),
    _V("pieces-zero", "Pieces, B = 0", _CHAINED, {"learn": "never"}, style="layer-1", tried="compare",
       sends="one piece", pieces=True, control=True),
    # loops whose memory is compared; the benchmark adds what depends on the depth
    _V("checkpoint-all", "Backpropagation, every layer recomputed", "checkpointed", style="layer-1",
       tried="memory compiled"),
    _V("checkpoint-sqrt", "Backpropagation, √depth checkpoints", "checkpointed", style="layer-3", tried="memory"),
    _V("store", "W⊥, store", "wperp", tried="memory"),
    _V("replay", "W⊥, replay", "wperp", _REPLAY, style="feedback-direct", tried="memory"),
    _V("feedback-replay", "Feedback, direct, replay", "feedback-direct", _REPLAY, style=_CHAINED, tried="memory"),
    _V("pieces-replay", "Feedback, chained, √depth pieces, replay", _CHAINED, _RARE | _REPLAY, style="layer-2",
       tried="memory"),
)  # fmt: skip
VARIANTS: dict[str, MethodEntry] = {entry.name: entry for entry in _VARIANTS}
ENTRIES: Mapping[str, MethodEntry] = ChainMap(VARIANTS, METHODS)  # methods come first


def entry_of(name: str) -> MethodEntry:
    """The entry of a method or of a variant."""
    return ENTRIES[check_choice("method", name, ENTRIES)]


def tried_by(experiment: str) -> list[str]:
    """The methods and variants that an experiment tries if it is not told which, controls at the end.

    >>> tried_by("starts")
    ['backprop', 'wperp', 'feedback-chained-rare']
    """
    names = [name for name, entry in ENTRIES.items() if experiment in entry.tried.split()]
    return sorted(names, key=lambda name: ENTRIES[name].control)


def guess_for(config: TrainConfig) -> Any:
    """The method that `config` names, with the options that `config` gives it."""
    return METHODS[config.method].make(config)


def settings_of(name: str) -> dict[str, Any]:
    """The fields of `TrainConfig` that the name of a method or of a variant stands for."""
    return entry_of(name).settings


def variant_of(config: Mapping[str, Any], task: Mapping[str, Any]) -> str:
    """What a run varies on its task: a name of the registry, then each setting that is neither its nor the task's.

    >>> task = {"k": 10, "top": "guess"}
    >>> variant_of({"method": "wperp", "k": 25, "top": "guess"}, task), variant_of({"method": "wt", "k": 25}, task)
    ('wperp k=25', 'wt')
    """
    fitting = [name for name, entry in ENTRIES.items() if entry.settings.items() <= config.items()]
    name = max(fitting, key=lambda name: len(ENTRIES[name].settings))
    known = {"method", *ENTRIES[name].settings}
    read = [n for n in config if n not in known and (n in READ_BY_ALL or n in options_of(config["method"]))]
    values = {n: config[n] for n in read if config[n] != task[n]}
    return " ".join([name, *(f"{n}={v:g}" if isinstance(v, float) else f"{n}={v}" for n, v in values.items())])


# of a method's settings those that every method reads
READ_BY_ALL = ("tangents", "isolate", "memory", "derivative", "sites", "balance", "top", "compile", "script")


def method_label(name: str) -> str:
    """How tables call a method or a variant; a name that is not known stands for itself."""
    return ENTRIES[name].label if name in ENTRIES else name


def style_name(name: str) -> str:
    """The name of the style in which curves of a method or of a variant are drawn."""
    return ENTRIES[name].style or ENTRIES[name].settings["method"] if name in ENTRIES else name


def options_of(method: str) -> frozenset[str]:
    """The options that a method reads; none for a method that is not known."""
    return METHODS[method].options if method in METHODS else frozenset()


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as a run reads it: what the record lacks or the method does not read stands at its default."""
    from gradguess_lab.config import TrainConfig

    if "method" not in config:  # a run on a stream
        return dict(config)
    read = options_of(config["method"])
    return TrainConfig().as_dict() | {n: value for n, value in config.items() if n not in OPTIONS or n in read}
