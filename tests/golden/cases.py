"""What the golden record holds: named cases, each a function that gives numbers.

Only public names of gradguess are used, and one method of one class inside it (`fed_noise`). Weights, data and noise
come from NumPy's `RandomState`, whose numbers never change; of torch's generators nothing but `randint` is used (and
what the library draws by itself: the start of W⊥-NS's Lanczos iteration, of a sketch, a projection of large outputs,
and the masks of dropout).

A case that the library refuses with `InputError` is not recorded, nor is one that turns with the last bit of the
weights (the sign of a singular vector, a basis of a null space): it could hold nobody to anything.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gradguess as gg
from gradguess.noise import Noise  # the one import from inside: all noise of the library goes through it
from models import Block, Case, cross_entropy, make

Numbers = dict[str, float]
INPUTS, CLASSES = 6, 5
WOBBLE = 0  # record.py sets it: weights change by 1e-15 of their size, in as many ways as there are numbers but 0


# --- noise, weights and data that do not come from torch -----------------------------------------------------


class _Fed:
    """Methods for `Noise`: one whole number of torch's generator seeds each draw, and NumPy makes the numbers."""

    def __init__(self: Any, generator: torch.Generator) -> None:
        self.generator, self.start, self.row = generator, generator.get_state(), 0

    def rewind(self: Any) -> None:
        self.generator.set_state(self.start)

    undo = rewind

    def at(self: Any, row: int) -> Noise:
        part = copy.copy(self)
        part.row = row
        part.rewind()
        return part

    def apart(self: Any, number: int) -> Noise:
        return Noise(self.generator)

    def normal(self: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        seed = int(torch.randint(2**31 - 1, (1,), generator=self.generator, device=self.generator.device))
        return torch.from_numpy(_stream(seed).standard_normal(tuple(shape))).to(device, dtype)

    def batched(self: Any, count: int, batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert count == 1 or self.row == 0, "the numbers of later samples depend on how many there are in all"
        return self.normal((count, self.row + batch, size), dtype, device)[:, self.row :]


@contextmanager
def fed_noise() -> Iterator[None]:
    """The library's noise comes from NumPy, as `_Fed` says."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__init__", "rewind", "undo", "at", "apart", "normal", "batched"):
            patch.setattr(Noise, name, vars(_Fed)[name])
        yield


def _stream(seed: int | str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(seed.encode()) if isinstance(seed, str) else seed)


def fill(model: nn.Module, seed: str) -> nn.Module:
    """Float64; parameters and running statistics in the order of their names."""
    model.double()
    source, wobble = _stream(seed), _stream(f"wobble {WOBBLE}")
    with torch.no_grad():
        for name, p in model.named_parameters():
            z = source.standard_normal(tuple(p.shape))
            if p.dim() > 1:
                z = z / math.sqrt(math.prod(p.shape[1:]))
            elif name.endswith(("weight", "scale", "below")):
                z = 1 + 0.2 * z
            else:
                z = 0.3 * z
            if WOBBLE:
                z = z * (1 + 1e-15 * wobble.standard_normal(z.shape))
            p.copy_(torch.from_numpy(np.asarray(z)))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                z = source.standard_normal(tuple(buffer.shape))
                buffer.copy_(torch.from_numpy(1 + 0.5 * z**2 if name.endswith("var") else 0.2 * z))
    return model


def zoo(name: str, batch: int = 12) -> Case:
    """A case of `models.ZOO` with other numbers, and another number of samples where they come first."""
    case = make(name)
    fill(case.model, name)
    source = _stream(f"data of {name}")

    def anew(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = tuple(leaf.shape) if name == "gru-time-first" else (batch, *leaf.shape[1:])
        if leaf.is_floating_point():
            return torch.from_numpy(source.standard_normal(shape))
        return torch.from_numpy(source.randint(9 if leaf.dim() > 1 else 4, size=shape))

    case.inputs, case.targets = tree_map(anew, case.inputs), tree_map(anew, case.targets)
    return case


# --- models beside the zoo -----------------------------------------------------------------------------------


class Written(nn.Module):
    """The MLP of `_chain`, with functions in the place of modules."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def _chain(
    *sizes: int, gate: type[nn.Module] = nn.ReLU, bias: bool = True, more: Sequence[nn.Module] = ()
) -> nn.Module:
    layers: list[nn.Module] = []
    for below, above in itertools.pairwise(sizes):
        layers += [nn.Linear(below, above, bias=bias), *more, gate()]
    return nn.Sequential(*layers[: -1 - len(more)])


def _residual() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 7), Block(7), Block(7), nn.LayerNorm(7), nn.Linear(7, CLASSES))


SIZES = (INPUTS, 24, 20, 16, CLASSES)  # with few units open, a basis bent into a gate is badly conditioned
OWN: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: _chain(*SIZES),
    "chain-no-bias": lambda: _chain(*SIZES, bias=False),
    "chain-identity": lambda: _chain(*SIZES, more=[nn.Identity()]),
    "chain-tanh": lambda: _chain(*SIZES, gate=nn.Tanh),
    "chain-gelu": lambda: _chain(*SIZES, gate=nn.GELU),
    "chain-linear": lambda: _chain(*SIZES, gate=nn.Identity),
    "written": lambda: Written(*SIZES),
    "rising": lambda: _chain(4, 5, 6, 7),  # every Jacobian has full column rank: "bottom" is well defined
    "rising-tanh": lambda: _chain(4, 5, 6, 7, gate=nn.Tanh),
    "residual": _residual,
    "chain-dropout": lambda: _chain(INPUTS, 24, 20, CLASSES, more=[nn.Dropout(0.3)]),
    "norm-batch": lambda: nn.Sequential(
        nn.Linear(INPUTS, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
    ),
}


def own(name: str, batch: int = 12) -> Case:
    model = fill(OWN[name](), name)
    return Case(model, *_data(model, f"data of {name}", batch), cross_entropy)


def _data(model: nn.Module, seed: str, batch: int) -> tuple[Tensor, Tensor]:
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    source = _stream(seed)
    inputs = source.standard_normal((batch, linear[0].in_features))
    return torch.from_numpy(inputs), torch.from_numpy(source.randint(linear[-1].out_features, size=batch))


def build(model: str, batch: int = 12) -> Case:
    """ "zoo:cnn" or a name of `OWN`."""
    if model.startswith("zoo:"):
        return zoo(model.removeprefix("zoo:"), batch)
    return own(model, batch)


# --- methods -------------------------------------------------------------------------------------------------


def _guesses(k: int = 3, refresh: int = 2) -> dict[str, Any]:
    return {
        "backprop": gg.Backprop(),
        "weight": gg.WeightPerturbation(),
        "activation": gg.ActivationPerturbation(),
        "wt": gg.WTranspose(),
        "shared": gg.WPerp(k=k, refresh=refresh),
        "subspace": gg.WPerp(k=k, solver="subspace", refresh=refresh),
        "svd": gg.WPerp(k=k, solver="svd", refresh=refresh),
        "bottom": gg.WPerp(k=k, end="bottom", refresh=refresh),
        "svd-bottom": gg.WPerp(k=k, solver="svd", end="bottom", refresh=refresh),
        "ns": gg.WPerpNS(k=k, refresh=refresh, threshold="nearest"),
        "ns-placed": gg.WPerpNS(k=k, refresh=refresh),
        "wp": gg.WPreconditioned(),
    }


def _feedback(guess: Any) -> dict[str, Any]:
    return {
        "direct": gg.Feedback(guess, form="direct"),
        "chained": gg.Feedback(guess, form="chained"),
        "corrected": gg.Feedback(guess, form="corrected"),
        "sweeps": gg.Feedback(guess, form="chained", sweeps=2, rate=0.5),
        "boot": gg.Feedback(guess, form="chained", bootstrap=0.3),
        "part": gg.Feedback(guess, form="chained", fraction=0.5, every=2),
        "part-direct": gg.Feedback(guess, form="direct", fraction=0.5, every=2),
    }


GUESSES = _guesses()
FEEDBACK = _feedback(gg.WPerp(k=3, refresh=2))
METHODS = {**GUESSES, **FEEDBACK}
RIVALS = {
    "dfa": gg.baselines.DFA(),
    "fdfa": gg.baselines.FDFA(momentum=0.3),
    "mezo": gg.baselines.MeZO(),
    "local-linear": gg.baselines.LocalLinear(),
    "local-predsim": gg.baselines.PredSim(),
    "checkpointed": gg.baselines.Checkpointed(),
    "frozen": gg.baselines.Frozen(),
}
STUDENTS = {
    "students": gg.Students(),
    "students-chained": gg.Students(form="chained"),
    "students-error": gg.Students(signal="error"),
    "students-tangents": gg.Students(learn=("loss", "tangents")),
    "students-random": gg.Students(learn=()),
    "local-guess": gg.LocalGuess(),
}


# --- what is written down ------------------------------------------------------------------------------------


def describe(out: Numbers, case: str, label: str, value: Tensor) -> None:
    """The norm of a tensor, and its projection onto a fixed unit vector; a number as it is."""
    flat = value.detach().double().flatten().numpy()
    onto = _stream(f"{case}/{label}").standard_normal(flat.size)
    if not value.dim():
        out[label] = float(value)
        return
    out[f"{label} norm"] = float(np.linalg.norm(flat))
    out[f"{label} projection"] = float(flat @ onto / max(np.linalg.norm(onto), 1e-300))


def estimated(case: str, model: str, guess: Any, batch: int = 12, **options: Any) -> Numbers:
    task = build(model, batch)
    torch.manual_seed(zlib.crc32(case.encode()))
    generator = torch.Generator().manual_seed(zlib.crc32(case.encode()))
    est = gg.estimate(task.model, guess, *task.args, generator=generator, **options)
    out: Numbers = {"loss": float(est.loss)}
    if est.jvp.numel():
        describe(out, case, "jvp", est.jvp)
    for kind, values in (("grad", est.grads), ("site", est.site_grads), ("direction", est.directions)):
        for name, value in values.items():
            describe(out, case, f"{kind} {name}", value)
    return out


def descend(model: nn.Module, lr: float = 0.05) -> None:
    """A plain step of SGD, which leaves `.grad` for the record."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= lr * p.grad


def end_of(out: Numbers, case: str, model: nn.Module, forward: gg.ForwardGradient) -> Numbers:
    for name, p in model.named_parameters():
        if p.grad is not None:
            describe(out, case, f"grad {name}", p.grad)
    for name, value in forward.state_dict().items():
        if name not in ("generator", "method"):
            describe(out, case, f"state {name}", value)
    for name, buffer in model.named_buffers():
        describe(out, case, f"buffer {name}", buffer)
    return out


def stepped(case: str, model: str, guess: Any, steps: int = 3, batch: int = 12, **options: Any) -> Numbers:
    """A few steps on one batch."""
    task = build(model, batch)
    torch.manual_seed(zlib.crc32(case.encode()))
    forward = gg.ForwardGradient(task.model, guess, seed=zlib.crc32(case.encode()), **options)
    out: Numbers = {}
    for step in range(steps):
        task.model.zero_grad()
        out[f"loss {step}"] = float(forward(*task.args))
        descend(task.model)
    return end_of(out, case, task.model, forward)


HOOKED = {"residual": ("1.up", "2.down"), "written": ("layers.1", "layers.2")}  # else "2" and "4"


def ran(case: str, model: str, guess: Any, events: bool, steps: int = 120, few: int = 3, **options: Any) -> Numbers:
    """A run on fresh batches.

    `events`: hooks that come and go, batches of unlike size (the smallest has `few` samples), a state that is saved
    and loaded, a model that is switched between training and evaluation.
    """
    net = fill(OWN[model](), model)
    torch.manual_seed(zlib.crc32(case.encode()))
    forward = gg.ForwardGradient(net, guess, seed=zlib.crc32(case.encode()), **options)
    out: Numbers = {}
    handles: list[Any] = []
    after, before = (net.get_submodule(name) for name in HOOKED.get(model, ("2", "4")))
    third = steps // 3
    for step in range(steps):
        if events and step == third:
            handles.append(after.register_forward_hook(lambda module, args, output: output * 1.1))
            handles.append(before.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,)))
        if events and step == 2 * third:
            for handle in handles:
                handle.remove()
        if events and step == steps // 2:
            state = forward.state_dict()
            forward = gg.ForwardGradient(net, guess, seed=99, **options)
            forward.load_state_dict(state)
        if events and step in (steps // 4, steps // 3 + 10):
            net.train(step != steps // 4)
        size = (24, few, 24, 50, 24)[step % 5] if events else 24
        net.zero_grad()
        loss = float(forward(cross_entropy, *_data(net, f"{case}/{step}", size)))
        if step % 10 == 0:
            out[f"loss {step}"] = loss
        descend(net)
    return end_of(out, case, net, forward)


REPORTED = ("bias", "variance", "covariance_norm", "cosine", "mean_cosine", "gradient_norm", "rank")


def diagnosed(case: str, model: str, guess: Any, **options: Any) -> Numbers:
    task = build(model)
    generator = torch.Generator().manual_seed(zlib.crc32(case.encode()))
    report = gg.diagnose(task.model, guess, *task.args, generator=generator, **options)
    out: Numbers = {}
    for name in report:
        for key in REPORTED:
            value = getattr(report[name], key)
            if value is not None:
                out[f"{name} {key}"] = float(value)
        if report[name].overlap is not None:
            out[f"{name} overlap sum"] = float(sum(report[name].overlap))
    return out


# --- two processes -------------------------------------------------------------------------------------------

SHARED = {
    "wperp": (gg.WPerp(k=3, refresh=2), {}),
    "chained": (gg.Feedback(gg.WPerp(k=3, refresh=2), form="chained"), {}),
    "direct-replay": (gg.Feedback(gg.WPerp(k=3, refresh=2), form="direct"), {"memory": "replay"}),
    "weight": (gg.WeightPerturbation(), {}),
    "wperp-chunk": (gg.WPerp(k=3, refresh=2), {"chunk": 4}),
    "wperp-balance": (gg.WPerp(k=3, refresh=2), {"balance": True}),
}


def rank(number: int) -> Numbers:
    """What one of two processes sees, with 14 and 10 samples: run by worker.py."""
    rows = slice(0, 14) if number == 0 else slice(14, 24)
    out: Numbers = {}
    for (name, (guess, options)), model in itertools.product(SHARED.items(), ("chain", "residual")):
        case = f"{name} {model}"
        net = fill(OWN[model](), model)
        forward = gg.ForwardGradient(net, guess, seed=zlib.crc32(case.encode()), **options)
        found: Numbers = {}
        for step in range(6):
            inputs, targets = _data(net, f"{case}/{step}", 24)
            net.zero_grad()
            place = (rows.start, 24) if step > 2 else None
            found[f"loss {step}"] = float(forward(cross_entropy, inputs[rows], targets[rows], place=place))
            descend(net)
        end_of(found, case, net, forward)
        out.update({f"{case}: {label}": value for label, value in found.items()})
    return out


def processes(case: str) -> Numbers:
    """Rank 0 of two processes that share every batch."""
    worker = Path(__file__).with_name("worker.py")
    tests, source = worker.parent.parent, Path(gg.__file__).parent.parent
    support = tests / "support"
    path = os.pathsep.join([str(source), str(tests), str(support), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(worker), str(number), directory, str(WOBBLE)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )
            for number in range(2)
        ]
        if [one.wait(timeout=300) for one in ranks] != [0, 0]:
            raise RuntimeError("a worker failed; see its output")
        with np.load(Path(directory) / "0.npz") as found:
            return dict(zip(found["labels"].tolist(), found["values"].tolist(), strict=True))


# --- the list ------------------------------------------------------------------------------------------------

ZOO_MODELS = (
    *("relu-bias", "relu-no-bias", "gelu-bias", "tanh-no-bias"),
    *("cnn", "residual", "transformer", "branching", "lstm", "gru", "gru-time-first", "tied", "in-place", "dropout"),
    *("batch-norm-eval", "frozen", "bare", "repeats", "two-inputs", "keywords"),
)
PIECES = _feedback(gg.WPerp(k=3, refresh=2)) | {
    "boot-sweeps": gg.Feedback(gg.WPerp(k=3, refresh=2), bootstrap=0.3, sweeps=2),
}
Listed = tuple[str, Callable[[str], Numbers]]


def _zoo() -> Iterator[Listed]:
    for model, (name, guess) in itertools.product(ZOO_MODELS, METHODS.items()):
        if name in ("bottom", "svd-bottom", "part", "part-direct"):
            continue
        yield f"zoo/{model}/{name}", partial(estimated, model=f"zoo:{model}", guess=guess)
    stateful = {name: METHODS[name] for name in ("shared", "direct", "sweeps", "boot", "part")}
    for model, (name, guess) in itertools.product(ZOO_MODELS, stateful.items()):
        if name == "part" and model in ("dropout", "gru-time-first"):
            continue  # the random state after a lesson is not part of the record; the batch must be the first dimension
        yield f"zoo-steps/{model}/{name}", partial(stepped, model=f"zoo:{model}", guess=guess)


def _own() -> Iterator[Listed]:
    models = ("chain", "chain-no-bias", "chain-identity", "chain-tanh", "chain-linear", "written")
    for model, (name, guess) in itertools.product(models, METHODS.items()):
        if name in ("bottom", "svd-bottom"):
            continue
        if model in ("chain", "chain-tanh", "written"):
            yield f"own/{model}/{name}", partial(estimated, model=model, guess=guess)
        yield f"own-steps/{model}/{name}", partial(stepped, model=model, guess=guess)
    for model, name in itertools.product(("rising", "rising-tanh", "chain", "residual"), ("bottom", "svd-bottom")):
        yield f"own/{model}/{name}", partial(estimated, model=model, guess=GUESSES[name])
        yield f"own-steps/{model}/{name}", partial(stepped, model=model, guess=GUESSES[name])


def _options() -> Iterator[Listed]:
    options: dict[str, dict[str, Any]] = {
        "tangents": {"tangents": 3},
        "isolate": {"isolate": True},
        "balance": {"balance": True},
        "tangents-isolate-balance": {"tangents": 2, "isolate": True, "balance": True},
    }
    small, large = _guesses(k=2), _guesses(k=5)
    methods = {"shared": small["shared"], "shared-5": large["shared"], "subspace": small["subspace"]}
    methods |= {"subspace-5": large["subspace"], "svd": small["svd"], "svd-5": large["svd"], "ns": small["ns"]}
    methods |= {name: GUESSES[name] for name in ("activation", "wt", "wp", "weight")}
    methods |= {name: FEEDBACK[name] for name in ("direct", "chained", "corrected", "boot")}
    for model, (name, guess), (label, chosen) in itertools.product(
        ("chain", "residual"), methods.items(), options.items()
    ):
        yield f"{label}/{model}/{name}", partial(estimated, model=model, guess=guess, **chosen)
    for model, name, (label, chosen), memory in itertools.product(
        ("chain", "residual"), ("shared", "direct", "chained", "corrected"), options.items(), ("store", "replay")
    ):
        case = f"{label}-steps/{model}/{name}/{memory}"
        yield case, partial(stepped, model=model, guess=METHODS[name], memory=memory, **chosen)


def _replay() -> Iterator[Listed]:
    models = ("chain", "chain-tanh", "written", "residual", "zoo:cnn", "zoo:branching", "zoo:dropout")
    for model, (name, guess) in itertools.product(models, METHODS.items()):
        if name in ("backprop", "bottom", "svd-bottom") or (model == "zoo:dropout" and name.startswith("part")):
            continue
        yield f"replay/{model}/{name}", partial(stepped, model=model, guess=guess, memory="replay")
    pieces = ("chain", "residual", "zoo:cnn")
    for model, (name, guess), memory in itertools.product(pieces, PIECES.items(), ("store", "replay")):
        yield f"pieces/{model}/{name}/{memory}", partial(stepped, model=model, guess=guess, memory=memory, sites=3)
    yield "replay/rising/bottom", partial(stepped, model="rising", guess=GUESSES["bottom"], memory="replay")
    yield "replay/chain/boot-sweeps", partial(stepped, model="chain", guess=PIECES["boot-sweeps"], memory="replay")


def _chunks() -> Iterator[Listed]:
    for model, chunk, (name, guess) in itertools.product(("chain", "residual"), (20, 16), METHODS.items()):
        if name in ("backprop", "bottom", "svd-bottom", "part-direct"):
            continue
        yield f"chunk/{model}/{chunk}/{name}", partial(stepped, model=model, guess=guess, batch=40, chunk=chunk)
    for chunk, name in itertools.product((20, 16), ("shared", "direct", "chained", "corrected")):
        options = {"memory": "replay", "chunk": chunk}
        case = f"chunk-replay/chain/{chunk}/{name}"
        yield case, partial(stepped, model="chain", guess=METHODS[name], batch=40, **options)
    for chunk in (20, 16):
        case, guess = f"chunk/chain-tanh/{chunk}/subspace", GUESSES["subspace"]
        yield case, partial(stepped, model="chain-tanh", guess=guess, batch=40, chunk=chunk)
    for name in ("shared", "wt"):
        yield f"chunk/zoo:cnn/3/{name}", partial(stepped, model="zoo:cnn", guess=GUESSES[name], batch=8, chunk=3)


def _coupled() -> Iterator[Listed]:
    for model, (name, guess) in itertools.product(("norm-batch", "zoo:batch-norm", "chain"), METHODS.items()):
        if name in ("bottom", "svd-bottom", "part-direct"):
            continue
        yield f"coupling/{model}/{name}", partial(estimated, model=model, guess=guess, coupling="batch")
        if model == "norm-batch":
            yield f"coupling-steps/{model}/{name}", partial(stepped, model=model, guess=guess, coupling="batch")
    for name in ("shared", "direct", "corrected"):
        options = {"coupling": "batch", "memory": "replay"}
        yield f"coupling-replay/{name}", partial(stepped, model="norm-batch", guess=METHODS[name], **options)


def _sites() -> Iterator[Listed]:
    named = {
        "chain": ["0", "4", "6"],
        "written": ["layers.0", "layers.2"],
        "residual": ["0", "1", "2.down", "4"],
        "zoo:transformer": ["embed", "up", "head"],
        "zoo:branching": ["stem", "long", "head"],
        "zoo:cnn": ["0", "5"],
    }
    for model, names in named.items():
        kinds: dict[str, Any] = {"leaf": "leaf", "branch": "branch", "names": names, "2": 2}
        methods = ("wt", "shared", "subspace", "direct", "chained", "sweeps")
        for (kind, sites), name in itertools.product(kinds.items(), methods):
            yield f"sites/{model}/{kind}/{name}", partial(estimated, model=model, guess=METHODS[name], sites=sites)


def _runs() -> Iterator[Listed]:
    shared = gg.WPerp(k=3, refresh=7)
    methods: dict[str, Any] = {
        "shared": shared,
        "subspace": gg.WPerp(k=3, solver="subspace", refresh=7),
        "bottom": gg.WPerp(k=3, end="bottom", refresh=7),
        "ns": gg.WPerpNS(k=3, refresh=7, threshold="nearest"),
        "ns-placed": gg.WPerpNS(k=3, refresh=7),
    }
    for form in ("direct", "chained", "corrected"):
        methods[form] = gg.Feedback(shared, form=form)
        methods[f"{form}-part"] = gg.Feedback(shared, form=form, every=4, fraction=0.25)
    for model, (name, guess), events in itertools.product(("chain", "residual"), methods.items(), (False, True)):
        if name == "bottom" and model == "residual":
            continue
        if name == "subspace":
            model = "chain-tanh" if model == "chain" else "residual"
        few = 3 if model == "chain" else 6
        case = f"run/{model}/{name}/{'events' if events else 'plain'}"
        yield case, partial(ran, model=model, guess=guess, events=events, few=few, steps=120 if events else 40)
    for name, guess in methods.items():
        model, options = "chain-tanh" if name == "subspace" else "chain", {"memory": "replay", "steps": 60}
        yield f"run/{model}/{name}/replay", partial(ran, model=model, guess=guess, events=True, **options)
    for name in ("shared", "direct", "chained"):
        options = {"steps": 60, "events": True}
        yield f"run/chain-dropout/{name}/events", partial(ran, model="chain-dropout", guess=methods[name], **options)
    yield "run/written/shared/events", partial(ran, model="written", guess=shared, events=True, steps=60, few=6)
    yield "run/written/chained/events", partial(ran, model="written", guess=methods["chained"], events=True, steps=60)


def _reports() -> Iterator[Listed]:
    for model, (name, guess) in itertools.product(("chain", "residual"), METHODS.items()):
        if name not in ("bottom", "svd-bottom", "part", "part-direct", "sweeps", "boot"):
            yield f"diagnose/{model}/{name}", partial(diagnosed, model=model, guess=guess)


def _rivals() -> Iterator[Listed]:
    both = {**RIVALS, **STUDENTS}
    for model, (name, method) in itertools.product(("chain", "residual", "norm-batch", "zoo:cnn"), both.items()):
        yield f"rivals/{model}/{name}", partial(stepped, model=model, guess=method, sites=2)


def _all() -> Iterator[Listed]:
    yield "processes", processes
    parts: Iterable[Callable[[], Iterator[Listed]]]
    parts = (_runs, _zoo, _own, _options, _replay, _chunks, _coupled, _sites, _reports, _rivals)
    for part in parts:
        yield from part()


CASES: Mapping[str, Callable[[str], Numbers]] = dict(_all())


def compute(name: str) -> Numbers:
    """The numbers of a case, as the code is now."""
    torch.set_num_threads(1)
    with fed_noise():
        return CASES[name](name)
